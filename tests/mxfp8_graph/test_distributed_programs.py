"""Values that many processes trained come back into the program: by checkpoints, by collect, and after a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from distributed_models import (  # noqa: E402
    Run,
    batches,
    checkpoint_blocks,
    different,
    loss_of,
    one_process,
    own,
    prepared,
    same,
    sharded,
    trained,
)
from process_pool import ProcessPool, in_each_process  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.checkpoint import state_dict  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import distributed  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "samples/13_many_processes/train.py"


def saves(folder: Path, steps: int) -> list[float]:
    """Saves a training after some steps; returns the mean losses of that many steps more."""
    module, _ = sharded()
    run = trained(module, steps)
    state, optimizer = state_dict.get_state_dict(module, run.optimizer)
    dcp.save({"model": state, "optimizer": optimizer}, checkpoint_id=folder)
    return mean_losses(go_on(run, steps))


def resumes(folder: Path, steps: int) -> list[float]:
    """Returns the mean losses of a training that goes on from what `saves` wrote."""
    module, _ = sharded(prepared())
    run = Run(module)
    state, optimizer = state_dict.get_state_dict(module, run.optimizer)
    dcp.load({"model": state, "optimizer": optimizer}, checkpoint_id=folder)
    state_dict.set_state_dict(module, run.optimizer, model_state_dict=state, optim_state_dict=optimizer)
    return mean_losses(go_on(run, steps))


def go_on(run: Run, steps: int) -> Run:
    run.losses.clear()
    for batch in list(batches(2 * steps))[steps:]:
        run.step([own(batch)], lambda loss, _: loss.backward())
    return run


def mean_losses(run: Run) -> list[float]:
    losses = torch.tensor(run.losses)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


@pytest.mark.parametrize(("count", "rounding"), [(1, 1e-6), pytest.param(3, 1e-3, marks=pytest.mark.slow)])
def test_a_training_of_two_processes_goes_on_in_two_and_in_another_number(
    two: ProcessPool, tmp_path: Path, count: int, rounding: float
) -> None:
    wanted = two(saves, tmp_path, 2)[0]
    assert two(resumes, tmp_path, 2)[0] == wanted
    with ProcessPool(count) as others:
        assert others(resumes, tmp_path, 2)[0] == pytest.approx(wanted, abs=rounding)


@in_each_process
def test_trained_values_come_back_by_a_checkpoint_and_by_collect_alike(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    tuned, plain = prepared(), prepared()
    module, _ = sharded(tuned)
    run = trained(module, 1)
    dcp.save({"model": module.state_dict()}, checkpoint_id=folder)
    dcp.load({"model": plain.state_dict}, checkpoint_id=folder)
    parameters = run.parameters
    assert not different({name: plain.state_dict[name] for name in parameters}, parameters)
    for call in (mxfp8_graph.rewrite, lambda ep: mxfp8_graph.save(ep, folder.parent / f"stale{dist.get_rank()}.pt2")):
        with pytest.raises(ContractError, match=r"that the program lacks.* call mxfp8_graph\.distributed\.collect"):
            call(tuned)
    report = distributed.collect(module, tuned, rank0_only=True)
    assert report.here == (dist.get_rank() == 0)
    assert bool(report.tensors) == report.here
    if not report.here:
        with pytest.raises(ContractError, match=r"distributed\.collect"):
            mxfp8_graph.rewrite(tuned)
    report = distributed.collect(module, tuned)
    assert set(report.gathered) == set(parameters)
    assert set(report.tensors) == {*parameters, "scale"}
    packed, _ = mxfp8_graph.rewrite(tuned)
    again, _ = mxfp8_graph.rewrite(plain)
    assert not different(packed.state_dict, again.state_dict)
    trained(module, 1)
    with pytest.raises(ContractError, match=r"distributed\.collect"):
        mxfp8_graph.rewrite(tuned)


@pytest.mark.parametrize("empty", [False, True])
@in_each_process
def test_a_model_may_start_on_meta(empty: bool) -> None:
    wanted = one_process(dist.get_world_size(), 2)
    tuned = prepared(device="meta")
    assert all(tensor.is_meta for tensor in tuned.state_dict.values())
    module, report = sharded(tuned)
    assert len(report.mxfp8) == 12
    if empty:
        module.to_empty(device="cpu")
    values = prepared().state_dict if dist.get_rank() == 0 else {}
    options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dict.set_model_state_dict(module, dict(values), options=options)
    same(trained(module, 2), wanted)
    distributed.collect(module, tuned)
    packed, _ = mxfp8_graph.rewrite(tuned)
    plain = prepared()
    plain.load_state_dict({**plain.state_dict, **wanted.parameters})
    tokens = next(batches(1))[0]
    with torch.no_grad():
        assert torch.equal(packed.module()(tokens), mxfp8_graph.rewrite(plain)[0].module()(tokens))


@in_each_process
def test_data_parallel_training_needs_no_collect() -> None:
    tuned = prepared()
    run = trained(DistributedDataParallel(distributed.module(tuned)), 2)
    wanted = one_process(dist.get_world_size(), 2)
    assert not different({n.removeprefix("module."): p for n, p in run.parameters.items()}, wanted.parameters)
    assert not different({n: tuned.state_dict[n] for n in wanted.parameters}, wanted.parameters)
    mxfp8_graph.rewrite(tuned)
    assert distributed.collect(run.module, tuned).gathered == ()


def torchrun(folder: Path, processes: int, *arguments: str) -> None:
    # Without the last variable, torch 2.13 connects to processes that have ended, and only some restarts succeed.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run([*command, *arguments], check=False, cwd=folder, env=environment, **options)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_training_goes_on_after_a_process_failed(tmp_path: Path) -> None:
    losses = []
    for folder, options, more in (("whole", [], []), ("failed", ["--max-restarts=3"], ["--fail-at", "6"])):
        torchrun(tmp_path, 2, *options, str(SAMPLE), "--folder", folder, *more)
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
    torchrun(tmp_path, 3, "page.py")


class Switched(nn.Sequential):
    """Two submodules with batch normalization and dropout."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(32), nn.Dropout(0.25)) for _ in "ab"))

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = super().forward(F.one_hot(tokens, 64).float())
        return result


@pytest.mark.parametrize("mode", [True, False])
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
        assert not different(got, expected)


def test_the_module_shares_its_parameters_with_the_program() -> None:
    tuned = prepared()
    module = distributed.module(tuned)
    for name, parameter in module.named_parameters():
        assert parameter is tuned.state_dict[name]
    checkpoint_blocks(module)
    mxfp8_graph.rewrite(tuned)  # other names, the same tensors
