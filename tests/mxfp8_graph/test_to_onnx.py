"""to_onnx: the file holds the nodes and bytes that the ONNX pass would have written, and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from fused_models import kinds_fused
from grids import looped, pairwise
from onnx_exports import Linear, attributes, data, expected, exported, ours, packed, program, run
from oracle import check_well_formed, expect, normal
from torch.nn.functional import scaled_dot_product_attention
from torch_programs import Apply

import mxfp8_graph
from mxfp8_graph.onnx_export import to_onnx
from mxfp8_graph.onnx_export.to_onnx import plain_to_onnx
from mxfp8_graph.policy.recipe import Recipe, Rule
from mxfp8_graph.running.sessions import Session
from mxfp8_ops import contract, numerics
from mxfp8_ops.contract import FLOAT8E5M2
from mxfp8_ops.errors import ContractError, RecipeError


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


def test_the_recipe_is_recorded_so_that_rewriting_again_is_noticed(tmp_path: Path) -> None:
    path = mxfp8_graph.to_onnx(packed(Linear(), torch.randn(2, 64)), tmp_path / "a.onnx")
    assert mxfp8_graph.rewrite(path, "mxfp8", output=tmp_path / "b.onnx")[1].already_rewritten
    with pytest.raises(
        RecipeError, match=r"Recipe mismatch for 'x_mxfp8_quantize': .* scale_rounding ceil, asked for floor"
    ):
        mxfp8_graph.rewrite(path, "ocp", output=tmp_path / "b.onnx")


# --- What it computes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "recipe", "formats", "opset"),
    [
        pytest.param(64, "mxfp8", ("e4m3", "e4m3"), 21, id="opset 21"),
        pytest.param(80, "mxfp8", ("e4m3", "e4m3"), 25, id="opset 25 and a partial block"),
        pytest.param(1, Recipe(min_dim=1), ("e4m3", "e4m3"), 21, id="K = 1"),
        pytest.param(64, Recipe(activations="e5m2"), ("e5m2", "e4m3"), 21, id="activations in E5M2"),
        pytest.param(64, "mxfp8-bf16", ("bfloat16", "e4m3"), 21, id="activations in bfloat16"),
    ],
)
def test_it_runs_in_onnx_runtime_within_the_accumulation_bound(
    k: int, recipe: Any, formats: tuple[str, str], opset: int, tmp_path: Path
) -> None:
    module, x = Linear(k), normal(3, k)
    path = mxfp8_graph.to_onnx(packed(module, torch.from_numpy(x), recipe=recipe), tmp_path / "a.onnx", opset=opset)
    model = onnx.load(path)
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": opset, contract.DOMAIN: 1}
    check_well_formed(model)
    for kernels in (False, True):
        expected(module.linear, x, formats=formats).check(run(path, x, kernels=kernels))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_programs(name: str, tmp_path: Path) -> None:
    # No relu behind it: ONNX Runtime's CPU has none of bfloat16.
    dtype = getattr(torch, name)
    module, x = torch.nn.Linear(64, 96, dtype=dtype), normal(3, 64).astype(numerics.value_dtype(name))
    example = torch.from_numpy(x.astype(np.float32)).to(dtype)
    path = mxfp8_graph.to_onnx(packed(module, example, recipe=Recipe(output_projections=True)), tmp_path / "a.onnx")
    weight, bias = (tensor.detach().float().numpy() for tensor in (module.weight, module.bias))
    y = run(path, x, kernels=True)
    assert y.dtype == x.dtype
    expect(x, weight, bias, dtype=name).check(y)


def test_float16_between_ops_that_onnx_runtime_has_in_float32_only(tmp_path: Path) -> None:
    """It runs such a node in float32 too, whatever its output_dtype says."""
    w, x = torch.randn(96, 64).half(), normal(3, 64).astype(np.float16)
    module = Apply(lambda m, x: -torch.nn.functional.linear(torch.abs(x), m.w), {"w": w})
    ep = packed(module, torch.from_numpy(x), recipe="mxfp8-weight-only", batch=False)
    path = mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx")
    wanted = expect(np.abs(x), -w.numpy(), weight_only=True, dtype="float16")
    wanted.check(run(path, x, kernels=True))


def test_kernels_give_the_bytes_of_the_program_where_only_gemms_round(tmp_path: Path) -> None:
    ep, x = packed(Linear(), torch.randn(3, 64)), torch.from_numpy(normal(3, 64))
    path = mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx")
    np.testing.assert_array_equal(run(path, x.numpy(), kernels=True), ep.module()(x).detach().numpy())


# --- Ops that no output needs --------------------------------------------------------------------------------------


class Unused(torch.nn.Module):
    """relu of linear a, and a function of the module whose result nothing uses."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(64, 64) for _ in range(3))
        self.table, self.function = torch.nn.Embedding(40, 64), function

    def forward(self, x: Any, ids: Any) -> Any:
        self.function(self, x, ids)
        return torch.relu(self.a(x))


LINEAR = {"a.bias", "a.weight_mxfp8", "a.weight_mxfp8_scales"}
OUTPUTS_TOO = Recipe(output_projections=True, embeddings=True)


@looped(
    "unused",
    {
        "a chain": lambda m, x, ids: m.c(torch.relu(m.b(x))),
        "a table": lambda m, x, ids: m.b(m.table(ids)),
        "a weight that another linear uses": lambda m, x, ids: m.a(torch.tanh(x)),
        "a product of activations": lambda m, x, ids: m.b(x) @ m.c(x).T,
        "a check of torch": lambda m, x, ids: torch._check((m.b(x) > 0).sum().item() >= 0),
    }.values(),
)
def test_ops_that_no_output_needs_are_left_out(unused: Any, tmp_path: Path) -> None:
    x, ids = torch.from_numpy(normal(3, 64)), torch.tensor([1, 2])
    module = Unused(unused)
    program = packed(module, x, ids, recipe=OUTPUTS_TOO, batch=False)
    path = mxfp8_graph.to_onnx(program, tmp_path / "a.onnx", overwrite=True)
    assert data(onnx.load(path)).keys() == LINEAR
    y = next(iter(Session(path, kernels=True).run({"x": x.numpy(), "ids": ids.numpy()}).values()))
    np.testing.assert_allclose(y, program.module()(x, ids).detach().numpy(), rtol=1e-6, atol=1e-6)


def test_a_program_whose_packed_linears_are_all_unused(tmp_path: Path) -> None:
    module = Apply(lambda m, x: (torch.relu(x @ m.w.T), x.cos())[1], {"w": torch.ones(64, 64)})
    with pytest.raises(ContractError, match="to_onnx: no output needs an mxfp8 op of the program"):
        mxfp8_graph.to_onnx(packed(module, torch.ones(2, 64), batch=False), tmp_path / "a.onnx")


def test_an_error_of_our_code_is_not_called_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_onnx._Plain, "lift", lambda *_: {}["linear.weight"])
    with pytest.raises(KeyError, match=r"linear\.weight"):
        mxfp8_graph.to_onnx(packed(Linear(), torch.randn(2, 64)), tmp_path / "a.onnx")


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


# --- Attention ---------------------------------------------------------------------------------------------------

EXACT = "mxfp8-weight-only"
"""A recipe with which the attention that is fused rounds nothing."""

pytestmark = pytest.mark.usefixtures("own_folder")


class Attention(torch.nn.Module):
    """Attention of x to y between its projections; 4 heads of 16 read `heads` heads of keys and values."""

    def __init__(self, *, heads: int = 4, is_causal: bool = False, dtype: Any = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.o = (torch.nn.Linear(64, 64, dtype=dtype) for _ in range(2))
        self.k, self.v = (torch.nn.Linear(64, 16 * heads, dtype=dtype) for _ in range(2))
        self.norm = torch.nn.LayerNorm(64, dtype=dtype)
        self.is_causal, self.enable_gqa = is_causal, heads != 4

    def forward(self, x: Any, y: Any, mask: Any = None) -> Any:
        q, k, v = (linear(z).unflatten(-1, (-1, 16)).transpose(1, 2) for linear, z in
                   ((self.q, x), (self.k, y), (self.v, y)))  # fmt: skip
        options = {"attn_mask": mask, "is_causal": self.is_causal, "enable_gqa": self.enable_gqa}
        return self.norm(self.o(scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)))


def inputs(keys: int = 5, dtype: Any = torch.float32) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(2, size, 64, generator=generator) for size in (7, keys))
    return x.to(dtype), y.to(dtype)


def mask_of(kind: str, dtype: Any = torch.float32) -> Any:
    """Returns a mask that hides all keys from row 0 of sample 0, and two of five keys from sample 1."""
    seen = torch.ones(2, 1, 7, 5, dtype=torch.bool)
    seen[0, 0, 0], seen[1, ..., 3:] = False, False
    if kind == "bool":
        return seen
    hidden = -torch.inf if kind == "-inf" else torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)


def errors(path: Path, program: Any, arguments: tuple[Any, ...], *, kernels: bool) -> np.ndarray:
    """Returns the relative L2 error of each row [2, rows] of an ONNX file against a program."""
    want = program.module()(*arguments).detach().double().numpy()
    session = Session(path, kernels=kernels)
    feeds = dict(zip(("x", "y", "mask"), (argument.numpy() for argument in arguments), strict=False))
    result = next(iter(session.run(feeds).values()))
    return np.linalg.norm(result.astype(np.float64) - want, axis=-1) / np.linalg.norm(want, axis=-1)


def check_rows(
    module: Any, arguments: tuple[Any, ...], *, kernels: bool = True, bound: float = 1e-5, **options: int
) -> None:
    """Fails unless each row of the file is near the program's; options of `to_onnx`."""
    program = packed(module, *arguments, recipe=EXACT, batch=False)
    path = mxfp8_graph.to_onnx(program, "m.onnx", overwrite=True, **options)
    found = errors(path, program, arguments, kernels=kernels)
    assert found.max() < bound, found.round(4)


@looped(
    "kind, opset, heads, kernels",
    pairwise(kind=("bool", "-inf", "lowest"), opset=({}, {"opset": 23}), heads=(4, 2), kernels=(False, True)),
)
def test_a_row_that_sees_no_key_is_that_of_the_program(
    kind: str, opset: dict[str, int], heads: int, kernels: bool
) -> None:
    """0 behind a boolean mask and one of -Inf; one of the lowest float is added like any number."""
    check_rows(Attention(heads=heads), (*inputs(), mask_of(kind)), kernels=kernels, **opset)


@looped("keys, opset, heads", pairwise(keys=(4, 9), opset=(21, 23), heads=(4, 2)))
def test_causal_rows_see_the_first_keys(keys: int, opset: int, heads: int) -> None:
    """Row i sees keys 0 to i, whatever the number of keys."""
    check_rows(Attention(heads=heads, is_causal=True), inputs(keys=keys), opset=opset)


@looped("kind", ["bool", "-inf"])
def test_hidden_rows_in_float16(kind: str) -> None:
    arguments = (*inputs(dtype=torch.float16), mask_of(kind, torch.float16))
    check_rows(Attention(dtype=torch.float16), arguments, bound=4 * 2**-11)  # other ops round than in torch


@looped("kind", ["bool", "-inf", "lowest"])
def test_a_nan_stays_one_behind_a_mask(kind: str) -> None:
    x, y = inputs()
    arguments = (x, y, mask_of(kind))
    program = packed(Attention(), *arguments, recipe=EXACT, batch=False)
    path = mxfp8_graph.to_onnx(program, "m.onnx", overwrite=True)
    x[1, 2] = torch.nan
    rows = np.isnan(errors(path, program, (x, y, arguments[2]), kernels=True))
    assert np.argwhere(rows).tolist() == [[1, 2]]


@looped("kind", ["bool", "-inf", "lowest"])
def test_the_onnx_pass_fuses_what_to_onnx_writes(kind: str) -> None:
    """The guard of hidden rows is a part of the attention; `from_hf` fuses such graphs."""
    arguments = (*inputs(), mask_of(kind))
    program = torch.export.export(Attention().eval(), arguments)
    Path("plain.onnx").unlink(missing_ok=True)
    path, report = mxfp8_graph.rewrite(plain_to_onnx(program, Path("plain.onnx")), EXACT, overwrite=True)
    assert kinds_fused(report) == ["attention"]
    found = errors(path, mxfp8_graph.rewrite(program, EXACT)[0], arguments, kernels=True)
    assert found.max() < 1e-5, found.round(3)
