"""Training with attention products in MXFP8: forward and backward are those of an independent fake quantization."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from grids import looped

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from torch_programs import Apply, count, decision, export, reasons, relative_l2, rewrite, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import Recipe, Rule  # noqa: E402
from mxfp8_ops.errors import RecipeError  # noqa: E402

HEADS, KEYS, WIDTH = 4, 70, 40
"""Neither is a multiple of 32, so that every product has partial blocks."""
DPA: Final = Recipe(name="dpa", fp8_dpa=True)
FLIPPED: Final = 1e-3
"""Relative L2 that rounding the other way may cost. Float32 values before a rounding are off by 2^-20 of themselves at
most (sums of 70, then exp), so of elements that lie 2^-3 to 2^-4 apart one in 2^16 flips: sqrt(2^-16) * 2^-3 of its
operand, 5e-4, and two such operands at a time count. Wrong blocks or formats are a hundred times as far off."""
FORMATS: Final = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}


def rounded(x: Tensor, axis: int, element_format: str) -> Tensor:
    """Returns float64 `x` as MXFP8 has it, in blocks of 32 along `axis`, by frexp and ml_dtypes."""
    dtype = FORMATS[element_format]
    rows = x.detach().to(torch.float32).movedim(axis, -1).numpy().astype(np.float64)
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % 32)])
    blocks = padded.reshape(*padded.shape[:-1], -1, 32)
    most, most_exponent = np.frexp(float(ml_dtypes.finfo(dtype).max))
    fraction, exponent = np.frexp(np.abs(blocks).max(-1, keepdims=True))
    scale = np.exp2(exponent - most_exponent + (fraction > most))
    quantized = (blocks / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale
    result: Tensor = torch.from_numpy(quantized.reshape(padded.shape)[..., : rows.shape[-1]]).movedim(-1, axis)
    return result


class Product(torch.autograd.Function):
    """x [..., M, K] @ w [..., N, K]^T in float64, operands of each of the three products rounded along what it sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, gradients: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.gradients = gradients
        return rounded(x, -1, "E4M3") @ rounded(w, -1, "E4M3").mT

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        dx = rounded(dy, -1, ctx.gradients) @ rounded(w, -2, "E4M3")
        dw = rounded(dy, -2, ctx.gradients).mT @ rounded(x, -2, "E4M3")
        return dx, dw, None


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gradients: str | None) -> Tensor:
    """Returns attention in float64, its products rounded (gradients to that format) or, with None, exact."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    product = (lambda x, w: Product.apply(x, w, gradients)) if gradients else (lambda x, w: x @ w.mT)
    scores = product(q, k) / math.sqrt(q.shape[-1])
    # A row from which the mask hides all keys is 0.
    return product(torch.ops.aten._safe_softmax(scores if mask is None else scores + mask, -1), v.mT)


def hidden(allowed: Tensor) -> Tensor:
    """Returns a boolean mask as one to add."""
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -math.inf)


CAUSAL: Final = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
SOME: Final = values(2, 1, KEYS, KEYS, seed=7) > -1
NONE_AT_3: Final = SOME & (torch.arange(KEYS) != 3)[:, None]
ADDED: Final = values(1, HEADS, KEYS, KEYS, seed=8)
CASES: Final[dict[str, tuple[dict[str, Any], int, Tensor | None]]] = {
    "plain": ({}, HEADS, None),
    "causal": ({"is_causal": True}, HEADS, hidden(CAUSAL)),
    "additive mask": ({"attn_mask": ADDED}, HEADS, ADDED.double()),
    "boolean mask": ({"attn_mask": SOME}, HEADS, hidden(SOME)),
    "a row sees no key": ({"attn_mask": NONE_AT_3}, HEADS, hidden(NONE_AT_3)),
    "a row sees no key, additive mask": ({"attn_mask": hidden(NONE_AT_3).float()}, HEADS, hidden(NONE_AT_3)),
    "grouped heads, causal": ({"enable_gqa": True, "is_causal": True}, 2, hidden(CAUSAL)),
}


def operands(kv_heads: int = HEADS) -> list[Tensor]:
    """Returns q, k and v, leaves."""
    heads = (HEADS, kv_heads, kv_heads)
    return [values(2, n, KEYS, WIDTH, seed=i).requires_grad_() for i, n in enumerate(heads)]


def program_of(settings: dict[str, Any], recipe: Recipe, leaves: list[Tensor], training: bool = True) -> Any:
    """Returns the rewritten program of one attention, and the report."""
    return rewrite(
        lambda m, *qkv: scaled_dot_product_attention(*qkv, **settings), {}, *leaves, recipe=recipe, training=training
    )


def distances(got: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((a.double() - b).detach().norm() / b.detach().norm()) for a, b in zip(got, wanted, strict=True)]


@looped("case, fp8_format", zip(CASES, itertools.cycle(["E4M3", "HYBRID"]), strict=False))
def test_every_product_is_rounded_along_what_it_sums(case: str, fp8_format: Any) -> None:
    settings, kv_heads, mask = CASES[case]
    leaves = operands(kv_heads)
    rewritten, _ = program_of(settings, Recipe(fp8_dpa=True, fp8_format=fp8_format), leaves)
    assert count(rewritten, "mxfp8.linear_train") == 2
    result, dy = rewritten.module()(*leaves), values(2, HEADS, KEYS, WIDTH, seed=5)
    got = [result, *torch.autograd.grad(result, leaves, dy)]

    def reference(gradients: str | None) -> list[Tensor]:
        wide = [t.detach().double().requires_grad_() for t in leaves]
        y = attention(*wide, mask, gradients)
        return [y, *torch.autograd.grad(y, wide, dy.double())]

    wanted, other = ("E5M2", "E4M3") if fp8_format == "HYBRID" else ("E4M3", "E5M2")
    assert max(distances(got, reference(wanted))) <= FLIPPED
    assert min(distances(got, reference(None))) > 50 * FLIPPED, "too coarse a test: it takes exact products for rounded"
    assert min(distances(got[1:], reference(other)[1:])) > 50 * FLIPPED, "or one format of gradients for the other"


@looped("is_bool", [True, False])
def test_a_row_that_sees_no_key_is_0_in_a_packed_program_too(is_bool: bool) -> None:
    settings = {"attn_mask": NONE_AT_3 if is_bool else hidden(NONE_AT_3).float()}
    leaves = [t.detach() for t in operands()]
    result = program_of(settings, DPA, leaves, training=False)[0].module()(*leaves)
    assert result[:, :, 3].abs().max() == 0, f"the row is {result[0, 0, 3].tolist()[:3]} ..."


@looped("product, training", itertools.product(["attention_scores", "attention_values"], [True, False]))
def test_one_product_alone(product: str, training: bool) -> None:
    leaves = [t.requires_grad_(training) for t in operands()]
    rewritten, report = program_of({}, Recipe(**{product: True}), leaves, training)
    assert count(rewritten, "mxfp8.linear_train" if training else "mxfp8.gemm") == count(rewritten, "aten.matmul") == 1
    assert [s.decision.site.role for s in report.rewritten] == [product]


def test_dropout_drops_what_torch_drops() -> None:
    leaves = operands()
    rewritten, _ = program_of({"dropout_p": 0.25}, DPA, leaves)
    torch.manual_seed(3)
    got = rewritten.module()(*leaves)
    torch.manual_seed(3)
    weights = torch.softmax(Product.apply(*(t.double() for t in leaves[:2]), "E4M3") / math.sqrt(WIDTH), -1)
    weights = weights * torch.dropout(torch.ones(weights.shape), 0.25, train=True)
    assert relative_l2(got, Product.apply(weights, leaves[2].double().mT, "E4M3")) <= FLIPPED
    assert not torch.equal(got, rewritten.module()(*leaves)), "nothing was dropped"


def written(m: Any, q: Tensor, kv: Tensor) -> Tensor:
    """Attention written out, with heads that share keys by broadcasting, and a projection behind it."""
    weights = torch.softmax(q @ kv.unsqueeze(1).mT / 8, -1)  # [B, H, M, K] with [B, 1, K, N]
    return torch.tanh(nn.functional.linear(torch.dropout(weights, 0.0, train=True) @ kv.unsqueeze(1), m.w))


def test_attention_that_is_written_out_trains_with_any_batch_and_is_packed(tmp_path: Path) -> None:
    q, kv = values(3, 4, 33, 64), values(3, 50, 64, seed=1)
    batch = torch.export.Dim("batch", min=2)
    torch.manual_seed(0)
    ep = export(Apply(written, {"w": nn.Linear(64, 64).weight.detach()}), q, kv, dynamic=(({0: batch}, {0: batch}),))
    rewritten, report = mxfp8_graph.rewrite(ep, DPA, training=True)
    assert [s.decision.site.role for s in report.rewritten] == ["attention_scores", "attention_values", "linear"]
    loaded = mxfp8_graph.load(mxfp8_graph.save(rewritten, tmp_path / "training.pt2"))
    steps = []
    for candidate in (rewritten, loaded, rewritten.run_decompositions({})):
        module, leaves = candidate.module(), [t[:2].clone().requires_grad_() for t in (q, kv)]
        steps.append(torch.autograd.grad(module(*leaves).square().sum(), [*leaves, *module.parameters()]))
    assert all(torch.equal(a, b) for step in steps[1:] for a, b in zip(step, steps[0], strict=True))
    expected = rewritten.module()(q, kv)
    packed, _ = mxfp8_graph.rewrite(loaded, DPA)
    assert (count(packed, "mxfp8.gemm"), count(packed, "mxfp8.linear_train")) == (3, 0)
    assert torch.allclose(packed.module()(q, kv), expected, rtol=1e-4, atol=1e-5), "the same products"
    with pytest.warns(UserWarning, match="Recipe type changed from dpa to mxfp8"):
        linears, _ = mxfp8_graph.rewrite(loaded, "mxfp8")
    ops = ("mxfp8.gemm", "aten.matmul", "mxfp8.linear_train")
    assert [count(linears, op) for op in ops] == [1, 2, 0]
    assert relative_l2(linears.module()(q, kv), expected) < 0.15


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(128, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(128)

    def forward(self, x: Tensor, mask: Tensor, need_weights: bool) -> Tensor:
        return self.norm(x + self.attention(x, x, x, attn_mask=mask, need_weights=need_weights)[0])


@looped("need_weights", [False, True])
def test_torch_s_own_multihead_attention_in_training_mode(need_weights: bool) -> None:
    torch.manual_seed(0)
    inputs, dy = (torch.randn(2, 40, 128), torch.randn(40, 40), need_weights), torch.randn(2, 40, 128)
    ep = torch.export.export(Layer().train(), inputs)
    rewritten, report = mxfp8_graph.rewrite(ep, DPA, training=True)
    assert count(rewritten, "mxfp8.linear_train") == len(report.rewritten) == 4
    results = []
    for program in (ep, rewritten):
        torch.manual_seed(1)
        module = program.module()
        weights = [p for n, p in module.named_parameters() if "weight" in n]
        result = module(*inputs)
        results.append([result, *torch.autograd.grad(result, weights, dy)])
    assert relative_l2(results[1], results[0]) < 0.15  # at most six products lie behind a gradient


# --- Other forms --------------------------------------------------------------------------------------------------

X, ROWS, B = values(40, 64), values(2, 40, 64, seed=1), values(96, seed=2)


@looped(
    "function, weight, inputs",
    [
        (lambda m, x: x @ m.w, values(3, 64, 96), [X]),
        (lambda m, x, i: torch.bmm(x, m.w[i]), values(3, 64, 96), [ROWS, torch.tensor([2, 0])]),
        (lambda m, x: m.w @ x, values(96, 64), [ROWS.mT.contiguous()]),
        (lambda m, x: torch.addmm(m.b, x, m.w, beta=3, alpha=0.75), values(64, 96), [X]),
        (lambda m, x, c: torch.addmm(c, x, m.w), values(64, 96), [X, values(40, 96)]),
        (lambda m, x: torch.baddbmm(m.b, x, m.w), values(2, 64, 96), [ROWS]),
        (lambda m, x: x @ m.w, values(1, 64, 96), [ROWS]),
        (lambda m, x: torch.bmm(x, m.w.mT), values(2, 96, 64), [ROWS]),
    ],
)
def test_every_form_trains(function: Any, weight: Tensor, inputs: list[Tensor]) -> None:
    parameters = {"w": weight, "b": B}
    ep = export(Apply(lambda m, *x: torch.tanh(function(m, *x) / 30), parameters), *inputs)
    rewritten, report = mxfp8_graph.rewrite(ep, training=True)
    assert count(rewritten, "mxfp8.linear_train") == len(report.rewritten) == 1
    steps = []
    for program in (ep, rewritten):
        module = program.module()
        result = module(*inputs)
        gradients = torch.autograd.grad(result.square().sum(), [*module.parameters()], allow_unused=True)
        steps.append([result, *(each for each in gradients if each is not None)])
    assert relative_l2(steps[1], steps[0]) < 0.1
    packed, _ = mxfp8_graph.rewrite(rewritten)
    assert torch.allclose(packed.module()(*inputs), rewritten.module()(*inputs), rtol=1e-3, atol=1e-4)


# --- Autocast -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A linear, attention and a linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(64, 3 * 64), nn.Linear(64, 64)
        self.linear: Any = nn.functional.linear

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.linear(x, self.qkv.weight, self.qkv.bias).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        heads = scaled_dot_product_attention(*qkv, is_causal=True)
        return torch.tanh(self.linear(heads.transpose(1, 2).flatten(-2), self.out.weight, self.out.bias))


class Region(Net):
    """The same in a region under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def step(module: Any, x: Tensor) -> list[Tensor]:
    """Returns the result and the gradients of the parameters."""
    result = module(x)
    return [result, *torch.autograd.grad(result.float().square().sum(), [*module.parameters()])]


@looped("decomposed", [False, True])
def test_a_region_under_autocast_trains_as_linear_train_does_there(decomposed: bool) -> None:
    model, x = Region(), values(2, 40, 64)
    ep = export(model, x)
    rewritten, report = mxfp8_graph.rewrite(ep.run_decompositions({}) if decomposed else ep, training=True)
    assert count(rewritten, "mxfp8.linear_train") == len(report.rewritten) == 2
    module = rewritten.module()
    got = step(module, x)
    assert [t.dtype for t in got] == [torch.bfloat16, *[torch.float32] * 4]
    model.linear = torch.ops.mxfp8.linear_train
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in model.named_parameters()]
    # A region becomes the casts it makes, also of the weights, which are quantized after that.
    assert relative_l2(got[1:], step(model, x)[1:]) < 0.1


def test_a_program_exported_under_autocast_trains() -> None:
    model, x = Net(), values(2, 40, 64)
    with torch.autocast("cpu", torch.bfloat16):
        ep = export(model, x)
    rewritten, report = mxfp8_graph.rewrite(ep, DPA, training=True)
    assert count(rewritten, "mxfp8.linear_train") == len(report.rewritten) == 4
    got, exact = step(rewritten.module(), x), step(ep.module(), x)
    assert got[0].dtype == torch.bfloat16
    assert relative_l2(got, exact) < 0.2


# --- What training cannot do --------------------------------------------------------------------------------------


def test_attention_that_cannot_be_taken_apart_is_an_error() -> None:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    module = Apply(lambda m, q, k, v: torch.tanh(fused(q, k, v)[0] @ m.w), {"w": values(40, 64)})
    ep = export(module, *(t.detach() for t in operands()))
    with pytest.raises(RecipeError, match=r"recipe 'dpa': it asks for attention scores .*is one fused kernel; export"):
        mxfp8_graph.rewrite(ep, DPA, training=True)
    rule = Recipe(name="rule", rules=(Rule(op="_scaled_dot_product_flash_attention_for_cpu"),))
    with pytest.raises(RecipeError, match="recipe 'rule': it asks for attention scores"):
        mxfp8_graph.rewrite(ep, rule, training=True)
    _, report = mxfp8_graph.rewrite(ep, training=True)
    assert len(report.rewritten) == 1


def test_what_training_keeps_although_the_recipe_asks_for_it_is_a_warning() -> None:
    module = Apply(
        lambda m, x: torch.tanh(torch.relu(m.up @ x) @ m.stack), {"up": values(64, 64), "stack": values(3, 64, 96)}
    )
    with pytest.warns(UserWarning, match="does not support a vector times a stack of matrices") as caught:
        _, report = mxfp8_graph.rewrite(export(module, values(64)), training=True)
    assert str(caught[0].message) in report.notes
    assert len(report.rewritten) == 1
    assert decision(report, "matmul").reason in reasons(report)
