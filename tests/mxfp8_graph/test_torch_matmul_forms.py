"""Every way aten spells a matmul gives what NumPy predicts, and has the role that its neighbours tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from grids import looped
from oracle import Expected

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch_programs import (  # noqa: E402
    DYNAMIC,
    OUTPUTS_TOO,
    Apply,
    as_numpy,
    count,
    export,
    predict,
    relative_l2,
    rewrite,
    site,
    values,
)

import mxfp8_graph  # noqa: E402
from mxfp8_graph import Recipe, Rule  # noqa: E402

W, B = values(96, 70, seed=1), values(96, seed=2)
"""[N, K] with a partial block, [N]."""
X = values(5, 70, seed=3)
STACK = values(3, 96, 70, seed=4)
BATCH = values(3, 5, 70, seed=5)
X16 = X.bfloat16()
linear = torch.nn.functional.linear


@dataclass
class Case:
    """A function of (module, x), and x, weight and bias of the matmul it is, as the gemm sees them."""

    function: Callable[..., Tensor]
    op: str
    x: Tensor = field(default_factory=lambda: X)
    weight: Tensor = field(default_factory=lambda: W)
    bias: Tensor | None = None
    seen: Tensor | None = None
    """x as [..., M, K], where that is not x itself."""
    after: Callable[[Any], Any] = lambda y: y
    """From the gemm's result to the function's, in NumPy."""
    settings: dict[str, str] = field(default_factory=dict)


CASES = {
    "linear": Case(lambda m, x: linear(x, m.w, m.b), "linear", bias=B),
    "linear without bias": Case(lambda m, x: linear(x, m.w), "linear"),
    "linear on three dimensions": Case(lambda m, x: linear(x, m.w, m.b), "linear", BATCH, bias=B),
    "linear on a vector": Case(lambda m, x: linear(x, m.w, m.b), "linear", X[0], bias=B),
    "linear, strided": Case(lambda m, x: linear(x.t(), m.w), "linear", X.t().contiguous(), seen=X),
    "matmul with a view of the weight": Case(lambda m, x: x @ m.w.t(), "matmul"),
    "matmul with a stored [K, N]": Case(lambda m, x: x @ m.wt, "matmul"),
    "matmul and add": Case(lambda m, x: x @ m.wt + m.b, "matmul", bias=B),
    "add and matmul": Case(lambda m, x: m.b + x @ m.wt, "matmul", bias=B),
    "mm": Case(lambda m, x: torch.mm(x, m.wt), "mm"),
    "addmm": Case(lambda m, x: torch.addmm(m.b, x, m.wt), "addmm", bias=B),
    "addmm, alpha and beta": Case(
        lambda m, x: torch.addmm(m.b, x, m.wt, beta=0.5, alpha=3.0), "addmm", weight=W * 3.0, bias=B * 0.5
    ),
    "addmm, beta 0": Case(lambda m, x: torch.addmm(m.b, x, m.wt, beta=0), "addmm"),
    "addmm, beta 0 and NaN": Case(lambda m, x: torch.addmm(m.b * math.nan, x, m.wt, beta=0), "addmm"),
    "baddbmm with a bias per column": Case(
        lambda m, x: torch.baddbmm(m.b, x, m.stack.mT), "baddbmm", BATCH, STACK, bias=B
    ),
    "bmm": Case(lambda m, x: torch.bmm(x, m.stack.transpose(1, 2)), "bmm", BATCH, STACK),
    "matmul with a stack": Case(lambda m, x: x @ m.stack.mT, "matmul", BATCH, STACK),
    "matmul that broadcasts a stack": Case(lambda m, x: x @ m.stack.mT, "matmul", X, STACK),
    "static left operand": Case(
        lambda m, x: m.w @ x, "matmul", BATCH.transpose(1, 2).contiguous(), seen=BATCH, after=lambda y: y.swapaxes(1, 2)
    ),
    "static left operand, transposed activation": Case(
        lambda m, x: m.w @ x.transpose(1, 2), "matmul", BATCH, after=lambda y: y.swapaxes(1, 2)
    ),
    "static left operand, viewed": Case(
        lambda m, x: (m.w @ x.mT).view(-1, 5), "matmul", BATCH, after=lambda y: y.swapaxes(1, 2).reshape(-1, 5)
    ),
    "static left operand times a vector": Case(lambda m, x: m.w @ x, "matmul", X[0]),
    "mv": Case(lambda m, x: torch.mv(m.w, x), "mv", X[0]),
    "einsum": Case(lambda m, x: torch.einsum("bsk,nk->bsn", x, m.w), "einsum", BATCH),
    "einsum of a stack": Case(lambda m, x: torch.einsum("bsk,bnk->bsn", x, m.stack), "einsum", BATCH, STACK),
    "slice of a weight": Case(lambda m, x: linear(x, m.w[32:64]), "linear", weight=W[32:64]),
    "chunk of a weight": Case(lambda m, x: linear(x, m.w.chunk(2)[1]), "linear", weight=W[48:]),
    "cast of a weight": Case(lambda m, x: torch.matmul(x, m.narrow.float().t()), "matmul", weight=W.half().float()),
    "buffer": Case(lambda m, x: x @ m.buffer, "matmul"),
    "float16": Case(lambda m, x: linear(x, m.narrow), "linear", X.half(), W.half()),
    "bfloat16": Case(lambda m, x: linear(x, m.brain, m.brain_b), "linear", X16, W.bfloat16(), B.bfloat16()),
    "bfloat16 and a computed bias": Case(
        lambda m, x: linear(x, m.brain, m.brain_b * x.amax()), "linear", X16, W.bfloat16(), B.bfloat16() * X16.amax()
    ),
    "floor": Case(lambda m, x: linear(x, m.w, m.b), "linear", bias=B, settings={"scale_rounding": "floor"}),
    "E5M2": Case(
        lambda m, x: linear(x, m.w), "linear", settings={"activations": "e5m2", "weight_format": "e5m2"}
    ),
}  # fmt: skip


def module(case: Case) -> Apply:
    parameters = {"w": W, "wt": W.t().contiguous(), "b": B, "stack": STACK, "narrow": W.half()}
    parameters |= {"brain": W.bfloat16(), "brain_b": B.bfloat16()}
    return Apply(case.function, parameters, {"buffer": W.t().contiguous()})


WEIGHT_ONLY = (
    ("linear", "bfloat16"),
    ("addmm, alpha and beta", "bfloat16"),
    ("matmul with a stack", "bfloat16"),
    ("linear, strided", "unchanged"),
    ("matmul and add", "unchanged"),
    ("matmul that broadcasts a stack", "unchanged"),
    ("static left operand", "unchanged"),
    ("mv", "unchanged"),
    ("einsum", "unchanged"),
)


@looped("name, activations", [*((name, "e4m3") for name in CASES), *WEIGHT_ONLY])
def test_form(name: str, activations: str) -> None:
    case = CASES[name]
    settings = {"activations": activations, **case.settings}
    weight_only, dtype = activations != "e4m3", str(case.x.dtype).removeprefix("torch.")
    rewritten, report = mxfp8_graph.rewrite(export(module(case), case.x), OUTPUTS_TOO.model_copy(update=settings))
    (only,) = (site.decision.site for site in report.rewritten)
    assert (only.op, only.has_bias, only.dtype) == (case.op, case.bias is not None, dtype)
    assert (only.n, only.k) == case.weight.shape[-2:]
    assert count(rewritten, "mxfp8.weight_gemm" if weight_only else "mxfp8.gemm") == 1
    assert count(rewritten, "mxfp8.quantize") == (0 if weight_only else 1)
    assert not any(count(rewritten, op) for op in ("aten.linear", "aten.matmul", "aten.mm", "aten.addmm", "aten.bmm"))
    seen, result = case.x if case.seen is None else case.seen, rewritten.module()(case.x)
    predict(seen, case.weight, case.bias, dtype=dtype, **settings).then(case.after).check(as_numpy(result))
    assert result.dtype == case.x.dtype


def test_a_computed_addend_is_added_after_the_gemm() -> None:
    c = values(5, 96, seed=9)
    rewritten, report = rewrite(lambda m, x, c: torch.addmm(c, x, m.w.t(), beta=2.0), {"w": W}, X, c)
    product = predict(X, W)
    Expected(product.y + 2.0 * c.numpy(), product.bound).check(as_numpy(rewritten.module()(X, c)), roundings=1)
    assert not report.sites[0].decision.site.has_bias


def test_products_of_two_activations() -> None:
    keys = values(3, 40, 70, seed=7)
    recipe = Recipe(name="products", rules=({"name": "matmul", "quantize": True},))
    rewritten, report = rewrite(lambda m, q, k: q @ k.transpose(1, 2), {}, BATCH, keys, recipe=recipe)
    predict(BATCH, keys).check(as_numpy(rewritten.module()(BATCH, keys)))
    assert count(rewritten, "mxfp8.quantize") == 2
    assert count(rewritten, "aten.transpose") == 0, "gemm takes the keys as they are: [N, K]"
    assert site(report, "matmul").packed is None


def test_alpha_of_a_product_of_two_activations_leaves_the_bias_alone() -> None:
    x, w, b = values(40, 64), values(64, 96, seed=1), 20 * values(96, seed=2)
    ep = export(Apply(lambda m, x, w: torch.tanh(torch.addmm(m.b, x, w, alpha=3) / 60), {"b": b}), x, w)
    rewritten, _ = mxfp8_graph.rewrite(ep, Recipe(rules=(Rule(op="addmm"),)))
    assert count(rewritten, "mxfp8.gemm") == 1
    assert relative_l2(rewritten.module()(x, w), ep.module()(x, w)) < 0.05


def test_activation_in_place_between_two_matmuls_is_quantized_twice() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = x * 2.0
        first = linear(y, m.w)
        y.mul_(3.0)
        return first, linear(y, m.w)

    rewritten, _ = rewrite(function, {"w": W}, X)
    first, second = rewritten.module()(X)
    predict(X * 2.0, W).check(as_numpy(first))
    predict(X * 6.0, W).check(as_numpy(second))


def test_attention_can_be_viewed_as_before() -> None:
    def attention(m: Any, x: Tensor) -> Tensor:
        heads = x.view(2, 6, 2, 32).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).view(2, 6, 64)

    x = values(2, 6, 64) / 4
    rewritten, report = rewrite(attention, {}, x, recipe=Recipe(fp8_dpa=True, min_dim=1))
    assert len(report.rewritten) == 2
    assert relative_l2(rewritten.module()(x), attention(None, x)) < 0.12, "two products, each off by about 3.7%"


def test_constants_and_buffers_that_are_not_saved() -> None:
    module = Apply(lambda m, x: torch.relu(x @ m.constant) + torch.relu(x @ m.transient), {})
    module.constant = W.t().contiguous()
    module.register_buffer("transient", W.t().contiguous() * 2, persistent=False)
    program = export(module, X)
    rewritten, report = mxfp8_graph.rewrite(program)
    assert len(report.rewritten) == 2
    assert set(program.constants) == {"constant", "transient"}
    assert not rewritten.constants
    assert relative_l2(rewritten.module()(X), module(X)) < 0.12


def test_dynamic_shapes_and_no_rows() -> None:
    layer = torch.nn.Linear(70, 96)
    rewritten, report = mxfp8_graph.rewrite(export(layer, BATCH, dynamic=({0: DYNAMIC, 1: DYNAMIC},)), OUTPUTS_TOO)
    assert isinstance(report.sites[0].decision.site.m, str)
    for shape in ((3, 5, 70), (1, 1, 70), (7, 2, 70), (2, 0, 70)):
        x = values(*shape, seed=8)
        result = rewritten.module()(x)
        assert result.shape == (*shape[:-1], 96)
        if x.numel():
            predict(x, layer.weight, layer.bias).check(as_numpy(result))


def test_dynamic_contraction_of_a_product() -> None:
    program = export(Apply(lambda m, p, v: torch.softmax(p, -1) @ v, {}), values(2, 40, 50), values(2, 50, 40, seed=1),
                     dynamic={"args": ({2: DYNAMIC}, {1: DYNAMIC})})  # fmt: skip
    rewritten, report = mxfp8_graph.rewrite(program, Recipe(name="values", attention_values=True))
    assert report.sites[0].decision.site.role == "attention_values"
    for k in (50, 33, 64):
        p, v = values(2, 40, k), values(2, k, 40, seed=1)
        predict(torch.softmax(p, -1), v.transpose(1, 2)).check(as_numpy(rewritten.module()(p, v)))


# --- Roles -------------------------------------------------------------------------------------------------------

ANY = Recipe(name="any", min_dim=0, rules=(Rule(name="."),))


def router(module: Any, x: Any) -> Any:
    best = torch.sigmoid(linear(x, module.w)).topk(1).indices[:, 0]
    return torch.relu(torch.bmm(x.unsqueeze(1), module.experts[best]))


def keys_of_a_cache(module: Any, x: Any) -> Any:
    keys = linear(x, module.v)
    return torch.relu(x @ keys.t()), keys


@looped(
    "role, function",
    [
        ("output_projection", lambda m, x: linear(x, m.w) * 2.0),
        ("output_projection", lambda m, x: 2.0 * torch.tanh(linear(x, m.w) / 2.0)),
        ("linear", lambda m, x: linear(x, m.w).square()),
        ("linear", lambda m, x: (h := linear(x, m.w)) * h),
        ("output_projection", lambda m, x: (h := linear(x, m.w)) + h),
        ("linear", lambda m, x: torch.tanh(linear(x, m.w))),
        ("linear", lambda m, x: torch.tanh(linear(x, m.w)).square()),
        ("linear", lambda m, x: (h := torch.tanh(linear(x, m.w))) * h),
        ("output_projection", lambda m, x: (linear(x, m.w) + m.b).view(-1)),
        ("output_projection", lambda m, x: torch.softmax(linear(x, m.w).transpose(0, 1) * 3.0, -1)),
        ("output_projection", lambda m, x: linear(x, m.w).argmax(-1)),
        ("output_projection", lambda m, x: torch.softmax(linear(x, m.w), -1).topk(5)),
        ("router", router),
        ("linear", keys_of_a_cache),
    ],
)
def test_what_follows_a_linear_tells_its_role(role: str, function: Callable[..., Any]) -> None:
    weights = {"w": values(96, 64), "v": values(64, 64), "b": values(96), "experts": values(96, 64, 64)}
    _, report = rewrite(function, weights, values(3, 64), recipe=ANY, dry_run=True)
    assert report.sites[0].decision.site.role == role


def test_a_router_is_kept_with_the_reason() -> None:
    _, report = rewrite(router, {"w": values(96, 64), "experts": values(96, 64, 64)}, values(3, 64), recipe="mxfp8")
    assert [s.decision.reason for s in report.kept] == [
        "router: a TopK or ArgMax chooses by its result; set routers: true to quantize it"
    ]
