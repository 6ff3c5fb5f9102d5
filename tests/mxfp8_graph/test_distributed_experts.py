"""Experts in several processes compute what one process computes, and their rows travel in MXFP8."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import expert_checks as checks  # noqa: E402
from grids import looped  # noqa: E402
from process_pool import ProcessPool  # noqa: E402
from test_torch_experts_training import TOKENS, mixtral  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.distributed import ExpertReport  # noqa: E402

pytestmark = pytest.mark.processes


@looped("fp8_format", ["E4M3", "HYBRID"])
def test_all_is_bitwise_what_one_process_computes_if_no_value_is_subnormal_in_its_block(
    two: ProcessPool, fp8_format: str
) -> None:
    two(checks.same_as_one_process, (fp8_format, "ceil"), True, fp8_format == "E4M3")


@looped("fp8_format, scale_rounding", itertools.product(["E4M3", "HYBRID"], ["ceil", "floor", "even"]))
def test_gradients_of_weights_alone_see_rows_that_were_rounded_twice(
    two: ProcessPool, fp8_format: str, scale_rounding: str
) -> None:
    two(checks.same_as_one_process, (fp8_format, scale_rounding), False, fp8_format == "E4M3")


def test_a_rewritten_program_trains_as_in_one_process(two: ProcessPool) -> None:
    for here in two(checks.a_rewritten_program_trains, 3):
        for distributed, alone in zip(here[::2], here[1::2], strict=True):
            assert distributed == pytest.approx(alone, rel=2**-8), "gradients are rounded to bfloat16"


def test_a_mixtral_trains_as_in_one_process(two: ProcessPool, tmp_path: Path) -> None:
    tuned, _ = mxfp8_graph.rewrite(mixtral(dynamic=True), training=True)
    path = mxfp8_graph.save(tuned, tmp_path / "mixtral.pt2")
    tokens = torch.randint(0, TOKENS, (2, 4, 25), generator=torch.Generator().manual_seed(5))
    two(checks.fsdp2_shards_the_rest_and_checkpoints_hold_all, path, tokens, tmp_path / "checkpoint")
    for here in two(checks.a_language_model_trains, path, tokens, 3):
        for distributed, alone in zip(here[::2], here[1::2], strict=True):
            assert distributed == pytest.approx(alone, rel=1e-3), "a token near the border between experts may change"
        assert here[-1] < here[1]


def test_rows_take_33_bytes_for_32_values_and_results_their_own_dtype(two: ProcessPool) -> None:
    for process, (sent, received) in enumerate(two(checks.bytes_on_the_wire)):
        own = sum(checks.SIZES[process])
        counts = 4 * 8  # rows of four experts, int64 after `diff`, or int32
        assert sent["forward"][0] <= counts
        assert sent["forward"][1:] == [own * 66, received * 64 * 4]
        assert sent["backward"] == [own * 66, received * 64 * 4]


def test_weights_of_experts_are_quantized_once_per_step(two: ProcessPool) -> None:
    two(checks.weights_are_quantized_once_per_step)


def test_what_cannot_be_cut_is_refused_and_nothing_is_changed(two: ProcessPool) -> None:
    two(checks.what_cannot_be_cut_is_refused)


def test_four_processes_with_rows_for_some_of_them() -> None:
    with ProcessPool(4) as four:
        four(checks.same_as_one_process, ("E4M3", "ceil"), True, False)


def test_the_report_has_a_line_for_each_stack() -> None:
    assert str(ExpertReport({"up": range(2, 4), "down": range(1)})) == "up: experts 2 to 3\ndown: experts 0 to 0"
