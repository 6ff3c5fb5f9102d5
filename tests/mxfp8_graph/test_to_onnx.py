"""to_onnx: the file holds the nodes and bytes that the ONNX pass would have written, and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx_exports import Linear, Packed, attributes, data, expected, exported, ours, packed, program, run
from oracle import Expected, check_well_formed, expect, normal

import mxfp8_graph
from mxfp8_graph.policy.recipe import Recipe, Rule
from mxfp8_ops import contract, numerics, torch_ops  # noqa: F401 - registers torch.ops.mxfp8
from mxfp8_ops.contract import FLOAT, FLOAT8E5M2, FLOAT16
from mxfp8_ops.errors import RecipeError


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# --- The same file as the ONNX pass ------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Two linears on one activation, a residual, a linear in float16's place: what a block has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-bf16", "mxfp8-weight-only"])
def test_it_writes_the_nodes_and_bytes_of_the_onnx_pass(recipe: str, tmp_path: Path) -> None:
    block, x = Block(), torch.randn(2, 5, 64)
    ours_first = exported(packed(block, x, recipe=recipe), tmp_path / "a.onnx")
    plain = torch.onnx.export(program(block, x), dynamo=True, opset_version=21, verbose=False).model_proto
    theirs, report = mxfp8_graph.rewrite(plain, recipe)
    assert report.fusions

    def described(model: onnx.ModelProto) -> list[tuple[Any, ...]]:
        stored = data(model)
        return sorted(
            (node.op_type, sorted(attributes(node).items()), [stored[i] for i in node.input if i in stored])
            for node in ours(model)
        )

    assert described(ours_first) == described(theirs)
    assert [f.name for f in ours_first.functions] == [f.name for f in theirs.functions]
    assert ours_first.ir_version == theirs.ir_version
    assert {p.key: p.value for p in ours_first.metadata_props} == {p.key: p.value for p in theirs.metadata_props}


class Products(torch.nn.Module):
    """Linears and a product of two activations, of which the recipe treats each in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (torch.nn.Linear(64, 64) for _ in "abcd")

    def forward(self, x: Any) -> Any:
        a, b, c = torch.tanh(self.a(x)), torch.tanh(self.b(x)), torch.tanh(self.c(x))
        return torch.tanh(self.d(x)) + (a @ b.transpose(1, 2)) @ c


def test_each_product_has_the_settings_of_the_program(tmp_path: Path) -> None:
    """By rules with names that only the program has: an exporter gives nodes others."""
    rules = (
        Rule(name="^linear$", activations="bfloat16"),
        Rule(name="^linear_1$", activations="e5m2", scale_rounding="floor"),
        Rule(name="^linear_3$", activations="int8", weight_format="int8"),
        Rule(name="^matmul$", scale_rounding="even"),
    )
    x = torch.randn(2, 32, 64)
    recipe = Recipe(rules=rules, exclude=("^linear_2$",), fuse=False)
    program = packed(Products(), x, recipe=recipe, batch=False)
    path = mxfp8_graph.to_onnx(program, tmp_path / "m.onnx")
    model = onnx.load(path)
    assert sorted(node.op_type for node in ours(model)) == [
        *["MXFP8Gemm"] * 3,
        *["MXFP8Quantize"] * 4,
        "MXFP8WeightGemm",
    ]
    settings = [attributes(node) for node in ours(model) if node.op_type == "MXFP8Quantize"]
    assert sorted((each["output_dtype"], each["scale_rounding"]) for each in settings) == [
        (onnx.TensorProto.INT8, b"ceil"),
        (contract.FLOAT8E4M3FN, b"even"),
        (contract.FLOAT8E4M3FN, b"even"),
        (FLOAT8E5M2, b"floor"),
    ]
    np.testing.assert_allclose(run(path, x.numpy(), kernels=True), program.module()(x).numpy(), rtol=1e-5, atol=1e-4)


def test_every_attribute_is_written_and_none_is_left_over(tmp_path: Path) -> None:
    for node in ours(exported(packed(Block(), torch.randn(2, 5, 64)), tmp_path / "a.onnx")):
        assert set(attributes(node)) == set(contract.OPS[node.op_type].attributes)


def test_the_recipe_is_recorded_so_that_rewriting_again_is_noticed(tmp_path: Path) -> None:
    path = mxfp8_graph.to_onnx(packed(Linear(), torch.randn(2, 64)), tmp_path / "a.onnx")
    assert mxfp8_graph.rewrite(path, "mxfp8", output=tmp_path / "b.onnx")[1].already_rewritten
    with pytest.raises(
        RecipeError, match=r"Recipe mismatch for 'x_mxfp8_quantize': .* scale_rounding ceil, asked for floor"
    ):
        mxfp8_graph.rewrite(path, "ocp", output=tmp_path / "b.onnx")


# --- What it computes --------------------------------------------------------------------------------------------


def check_both_ways(path: Path, x: np.ndarray, result: Expected) -> None:
    """Fails unless the file gives `result` in stock ONNX Runtime and with our kernels."""
    for kernels in (False, True):
        result.check(run(path, x, kernels=kernels))


@pytest.mark.parametrize("opset", [21, 25])
def test_it_runs_in_onnx_runtime_within_the_accumulation_bound(opset: int, tmp_path: Path) -> None:
    module, x = Linear(), normal(3, 64)
    path = mxfp8_graph.to_onnx(packed(module, torch.from_numpy(x)), tmp_path / "a.onnx", opset=opset)
    model = onnx.load(path)
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": opset, contract.DOMAIN: 1}
    check_well_formed(model)
    check_both_ways(path, x, expected(module.linear, x))


@pytest.mark.parametrize("k", [80, 1])
def test_any_k(k: int, tmp_path: Path) -> None:
    module, x = Linear(k), normal(3, k)
    path = mxfp8_graph.to_onnx(packed(module, torch.from_numpy(x), recipe=Recipe(min_dim=1)), tmp_path / "a.onnx")
    check_both_ways(path, x, expected(module.linear, x))


def test_e5m2(tmp_path: Path) -> None:
    module, x = Linear(), normal(3, 64)
    recipe = Recipe(activations="e5m2", weight_format="e4m3")
    path = mxfp8_graph.to_onnx(packed(module, torch.from_numpy(x), recipe=recipe), tmp_path / "a.onnx")
    quantize = next(node for node in ours(onnx.load(path)) if node.op_type == "MXFP8Quantize")
    assert attributes(quantize)["output_dtype"] == FLOAT8E5M2
    check_both_ways(path, x, expected(module.linear, x, formats=("e5m2", "e4m3")))


def test_activations_rounded_to_bfloat16(tmp_path: Path) -> None:
    module, x = Linear(), normal(3, 64)
    path = mxfp8_graph.to_onnx(packed(module, torch.from_numpy(x), recipe="mxfp8-bf16"), tmp_path / "a.onnx")
    check_both_ways(path, x, expected(module.linear, x, formats=("bfloat16", "e4m3")))


@pytest.mark.parametrize(("name", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_16_bit_programs(name: str, dtype: Any, tmp_path: Path) -> None:
    class Bare(torch.nn.Module):  # ONNX Runtime's CPU has no bfloat16 Relu
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 96, dtype=dtype)

        def forward(self, x: Any) -> Any:
            return self.linear(x)

    module, x = Bare(), normal(3, 64).astype(numerics.value_dtype(name))
    example = torch.from_numpy(x.astype(np.float32)).to(dtype)
    recipe = Recipe(output_projections=True)
    path = mxfp8_graph.to_onnx(packed(module, example, recipe=recipe), tmp_path / "a.onnx")
    weight, bias = (tensor.detach().float().numpy() for tensor in (module.linear.weight, module.linear.bias))
    y = run(path, x, kernels=True)
    assert y.dtype == x.dtype
    expect(x, weight, bias, dtype=name).check(y)


def test_float16_between_ops_that_onnx_runtime_has_in_float32_only(tmp_path: Path) -> None:
    """It runs such a node in float32 too, whatever its output_dtype says."""

    class Between(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 96, bias=False, dtype=torch.float16)

        def forward(self, x: Any) -> Any:
            return -self.linear(torch.abs(x))

    module, x = Between(), normal(3, 64).astype(np.float16)
    path = mxfp8_graph.to_onnx(packed(module, torch.from_numpy(x), recipe="mxfp8-weight-only"), tmp_path / "a.onnx")
    expect(np.abs(x), -module.linear.weight.detach().numpy(), weight_only=True, dtype="float16").check(
        run(path, x, kernels=True)
    )


def test_a_dtype_left_open_is_the_ops_default(tmp_path: Path) -> None:
    class Open(Packed):
        def forward(self, x: Any) -> Any:
            weight = self.w0_mxfp8, self.w0_mxfp8_scales
            gemm = torch.ops.mxfp8.gemm(*torch.ops.mxfp8.quantize(x), *weight, dtype=None)
            return gemm, torch.ops.mxfp8.weight_gemm(x, *weight)

    ep = program(Open(torch.randn(8, 32)), torch.randn(2, 32, dtype=torch.float16))
    outputs = exported(ep, tmp_path / "a.onnx").graph.output
    assert [output.type.tensor_type.elem_type for output in outputs] == [FLOAT, FLOAT16]


def test_kernels_give_the_bytes_of_the_program_where_only_gemms_round(tmp_path: Path) -> None:
    ep, x = packed(Linear(), torch.randn(3, 64)), torch.from_numpy(normal(3, 64))
    path = mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx")
    np.testing.assert_array_equal(run(path, x.numpy(), kernels=True), ep.module()(x).detach().numpy())


# --- A program in bfloat16 ---------------------------------------------------------------------------------------

NO_KERNEL = "computes in bfloat16, for which ONNX Runtime's CPU provider lacks most kernels"


def in_bfloat16(recipe: Recipe) -> Any:
    return packed(Linear(dtype=torch.bfloat16), torch.zeros(2, 64, dtype=torch.bfloat16), recipe=recipe)


def test_a_file_that_a_cpu_does_not_load_is_written_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=NO_KERNEL):
        mxfp8_graph.to_onnx(in_bfloat16(Recipe(fuse=False)), tmp_path / "m.onnx")


def test_runs_on_cpu_writes_one_that_it_loads(tmp_path: Path) -> None:
    program = in_bfloat16(Recipe(runs_on="cpu"))
    path = mxfp8_graph.to_onnx(program, tmp_path / "m.onnx")
    x = torch.randn(2, 64).to(torch.bfloat16)
    found = mxfp8_graph.verify(program, path, inputs={"x": x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)})
    assert found.passed, found.failures
    assert found.outputs[0].rewritten.relative_l2 < 2**-8, "the output is rounded once more in torch, to bfloat16"
