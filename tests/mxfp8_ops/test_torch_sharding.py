"""The ops on DTensors: any shards give the result of one process, and only activations move, as codes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from grids import looped

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

import sharding_checks as checks  # noqa: E402
from process_pool import ProcessPool  # noqa: E402

from mxfp8_ops.torch_ops import OPS, sharding  # noqa: E402

pytestmark = pytest.mark.processes

NAMES = [op.name for op in OPS]


def test_every_op_has_a_rule() -> None:
    assert sorted([*sharding.EQUATIONS, *sharding.MADE_OF_OTHERS]) == sorted(NAMES)


@looped("name", list(sharding.EQUATIONS))
def test_a_rule_has_the_operands_and_results_of_its_op(name: str) -> None:
    schema = getattr(torch.ops.mxfp8, name).default._schema
    inputs, _, outputs = sharding.EQUATIONS[name].partition("->")
    assert inputs.count(",") + 1 == sum("Tensor" in str(argument.type) for argument in schema.arguments)
    assert outputs.count(",") + 1 == len(schema.returns)


@looped("name", NAMES)
def test_any_placement_gives_the_result_of_one_process(two: ProcessPool, name: str) -> None:
    two(checks.any_placement_gives_the_result_of_one_process, name)


def test_partial_sums_of_bfloat16_products_are_float32(two: ProcessPool) -> None:
    two(checks.sums_of_bfloat16_are_float32)


def test_a_float32_sum_is_reduced_where_it_is_needed(two: ProcessPool) -> None:
    two(checks.float32_sums_are_reduced_where_they_are_needed)


@looped("dtype", [torch.float32, torch.bfloat16])
@looped("way", checks.TRAINED)
def test_gradients_are_those_of_one_process(two: ProcessPool, way: str, dtype: torch.dtype) -> None:
    two(checks.gradients_are_those_of_one_process, way, dtype)


def test_a_packed_weight_passes_gradients_on(two: ProcessPool) -> None:
    two(checks.packed_weights_pass_gradients_on)


@looped("way", ["sequence, column", "sequence, row"])
def test_a_sequence_is_gathered_as_codes(two: ProcessPool, way: str) -> None:
    two(checks.sequences_are_gathered_as_codes, way)


@looped("axis", [0, 1])
def test_a_weight_stays_and_the_activations_move(two: ProcessPool, axis: int) -> None:
    two(checks.weights_stay, axis)


def test_plain_tensors_are_refused_unless_torch_is_told_that_they_are_replicated(two: ProcessPool) -> None:
    two(checks.other_tensors_are_refused_unless_they_are_replicated)


def test_a_compiled_function_takes_shards(two: ProcessPool) -> None:
    two(checks.compiles)


@pytest.mark.slow
def test_a_mesh_of_two_dimensions_shards_two_axes() -> None:
    with ProcessPool(4) as pool:
        pool(checks.meshes_of_two_dimensions_shard_two_axes)


def test_the_ops_alone_do_not_import_dtensor() -> None:
    code = "import sys, mxfp8_ops.torch_ops; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
