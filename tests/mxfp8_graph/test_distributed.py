"""Training in many processes computes what one process computes, and its values come back into the program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from grids import looped

torch = pytest.importorskip("torch")

import distributed_checks as checks  # noqa: E402
from distributed_models import batches, loss_of, prepared  # noqa: E402
from process_pool import ProcessPool  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import mxfp8_graph  # noqa: E402
from mxfp8_graph import distributed  # noqa: E402

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "samples/13_many_processes/train.py"


RECIPES: list[dict[str, Any]] = [{"fp8_format": "E4M3"}, {"fp8_format": "HYBRID"}]
ROUNDINGS: list[dict[str, Any]] = [{"scale_rounding": "floor"}, {"scale_rounding": "even", "fp8_format": "HYBRID"}]


@looped("recipe", RECIPES)
def test_two_processes_train_bitwise_as_one(two: ProcessPool, recipe: dict[str, Any]) -> None:
    two(checks.trains_as_one_process, 5, recipe, True)


@looped("recipe", ROUNDINGS)
def test_all_scale_roundings_are_gathered(two: ProcessPool, recipe: dict[str, Any]) -> None:
    two(checks.trains_as_one_process, 1, recipe, False)


def test_gradients_are_those_of_the_whole_batch(two: ProcessPool) -> None:
    two(checks.the_whole_batch_gives_the_same_gradients)


BYTES = {
    "rows, then columns": (False, {}, 2.35),
    "both at once": (False, {"reshard_after_forward": False}, 2.2),
    "rows, then columns, then rows again for the checkpointed forward pass": (True, {}, 3.4),
    "high precision": (False, {"gather": "high_precision"}, 8.01),
}
"""Bytes for each parameter of the blocks: 1.03 for a copy of a weight, 4 for a norm or a bias."""


@looped("way", BYTES)
def test_bytes_that_a_step_gathers(two: ProcessPool, way: str) -> None:
    wrapped, options, most = BYTES[way]
    for count in two(checks.bytes_on_the_wire, wrapped, options):
        assert most - 0.35 < count <= most


def test_checkpointing_of_blocks_and_of_the_whole_module_changes_nothing(two: ProcessPool) -> None:
    two(checks.checkpointing_changes_nothing)


@looped("keep", [True, False])
def test_gradients_of_micro_batches_are_added_up(two: ProcessPool, keep: bool) -> None:
    two(checks.micro_batches_are_added_up, keep)


def test_mixed_precision_quantizes_the_master_weights(two: ProcessPool) -> None:
    two(checks.mixed_precision_quantizes_the_master_weights)


def test_autocast_computes_as_in_one_process(two: ProcessPool) -> None:
    two(checks.autocast_computes_as_in_one_process)


def test_evaluation_computes_as_in_one_process(two: ProcessPool) -> None:
    two(checks.evaluation_gathers_rows_alone)


@looped("empty", [False, True])
def test_a_model_that_starts_on_meta(two: ProcessPool, empty: bool) -> None:
    two(checks.starts_on_meta, empty)


def test_trained_values_come_back_or_are_an_error(two: ProcessPool, tmp_path: Path) -> None:
    two(checks.collects, tmp_path / "checkpoint")


def test_data_parallel_training_needs_no_collect(two: ProcessPool) -> None:
    two(checks.data_parallel_needs_no_collect)


def test_the_report_says_why_weights_are_in_high_precision(two: ProcessPool) -> None:
    two(checks.reports_why_weights_are_in_high_precision)


def test_refusals(two: ProcessPool) -> None:
    two(checks.refuses)


def test_a_training_of_two_processes_goes_on_in_one_and_in_two(two: ProcessPool, tmp_path: Path) -> None:
    wanted = two(checks.saves, tmp_path, 2)[0]
    assert two(checks.resumes, tmp_path, 2)[0] == wanted
    with ProcessPool(1) as one:
        assert one(checks.resumes, tmp_path, 2)[0] == pytest.approx(wanted, abs=1e-6)


def test_sums_of_gradients_have_the_codes_of_one_process() -> None:
    with ProcessPool(3) as three:
        for wrap in ("ddp", "fsdp"):
            for summed, mean in three(checks.sums_have_the_codes_of_one_process, wrap):
                assert summed < checks.FLIPPED, wrap
                assert mean > 1e-2, "without the helper the error is as large"


@pytest.mark.slow
@looped("recipe", RECIPES)
def test_fifty_steps_are_bitwise_those_of_one_process(two: ProcessPool, recipe: dict[str, Any]) -> None:
    two(checks.trains_as_one_process, 50, recipe, True)


@pytest.mark.slow
def test_four_processes_train_as_one(four: ProcessPool) -> None:
    four(checks.trains_close_to_one_process, 5)


@pytest.mark.slow
def test_shards_of_which_there_are_two_copies(four: ProcessPool) -> None:
    four(checks.replicated_and_sharded)


@pytest.mark.slow
@looped("count", [3, 4])
def test_a_training_of_two_processes_goes_on_in_more(two: ProcessPool, tmp_path: Path, count: int) -> None:
    wanted = two(checks.saves, tmp_path / str(count), 2)[0]
    with ProcessPool(count) as more:
        assert more(checks.resumes, tmp_path / str(count), 2)[0] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.slow
def test_a_training_goes_on_after_a_process_failed(tmp_path: Path) -> None:
    losses = []
    # Without the variable, torch 2.13 connects to processes that have ended, and only some restarts succeed.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    for folder, fails in (("whole", []), ("failed", ["--max-restarts=3"])):
        script = [str(SAMPLE), "--folder", folder, *(["--fail-at", "6"] if fails else [])]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *fails, *script]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stderr
        losses.append((tmp_path / folder / "losses.txt").read_text().splitlines())
    whole, failed = losses
    assert failed == whole[:6] + whole[4:], "steps 4 and 5 were trained again from the checkpoint"


def test_the_pipeline_of_the_page_has_a_stage_without_a_block(tmp_path: Path) -> None:
    """With 3 processes the first stage is the embedding alone, which has nothing to quantize."""
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    prepare, *others = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    pipeline = next(block for block in others if "PipelineStage" in block)
    end = "assert all(parameter.grad is not None for parameter in part.parameters()), rank\n"
    (tmp_path / "page.py").write_text("\n".join((prepare, pipeline, end)), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "page.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr


class Switched(nn.Module):
    """Dropout and batch normalization in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SwitchedBlock(), SwitchedBlock()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.one_hot(tokens, 64).float()
        for block in self.blocks:
            x = block(x)
        return x


class SwitchedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.statistics, self.dropout = nn.Linear(64, 64), nn.BatchNorm1d(32), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.statistics(self.linear(x)))


@looped("mode", [True, False])
def test_the_module_computes_what_that_of_the_program_does(mode: bool) -> None:
    flat, module = (make(prepared(Switched)).train(mode) for make in (lambda ep: ep.module(), distributed.module))
    (batch,) = batches(1)
    results = []
    for each in (flat, module):
        torch.manual_seed(3)
        loss = loss_of(each, batch)
        loss.backward()
        results.append((loss, {n: p.grad for n, p in each.named_parameters()}, dict(each.named_buffers())))
    (wanted, loss), *named = zip(*results, strict=True)
    assert torch.equal(loss, wanted)
    for expected, got in named:
        assert not checks.different(got, expected)


def test_the_module_shares_its_parameters_with_the_program() -> None:
    tuned = prepared()
    module = distributed.module(tuned)
    for name, parameter in module.named_parameters():
        assert parameter is tuned.state_dict[name]
    checks.checkpoint_blocks(module)
    mxfp8_graph.rewrite(tuned)  # other names, the same tensors
