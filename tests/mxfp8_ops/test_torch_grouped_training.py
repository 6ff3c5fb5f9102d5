"""`mxfp8::grouped_linear_train` against a loop of linear_train, and what torch does to a graph of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from grids import looped, pairwise
from tensors import assert_is_mxfp8_product, values

torch = pytest.importorskip("torch")

from mxfp8_ops import torch_ops  # noqa: E402, F401 - registers torch.ops.mxfp8
from mxfp8_ops.errors import ContractError, Mxfp8Error, ShapeError  # noqa: E402

ops = torch.ops.mxfp8
grouped = ops.grouped_linear_train
SIZES = {"blocks": (32, 64, 96), "partial": (3, 0, 77, 1), "none": (0, 0), "one": (40,), "no experts": ()}
"""Rows of each expert; three rows more belong to none."""


def ends(sizes: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(dtype)


def operands(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns x [S, 45], weight [E, 70, 45] and dy [S, 70]."""
    rows = sum(sizes) + 3
    x, w = values(rows, 45, dtype=dtype), values(max(len(sizes), 1), 70, 45, seed=1)[: len(sizes)]
    return x.requires_grad_(), w.requires_grad_(), values(rows, 70, seed=2, dtype=dtype)


def assert_equal(got: Any, wanted: Any) -> None:
    for name, a, b in zip(("y", "dx", "dw"), got, wanted, strict=True):
        assert torch.equal(a, b), f"{name}: differs by {float((a.double() - b.double()).abs().max())}"


def step(function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Any:
    y = function(x, w)
    return y, *torch.autograd.grad(y, (x, w), dy)


@looped(
    "sizes, fp8_format, scale_rounding, dtype, index",
    pairwise(
        sizes=SIZES,
        fp8_format=["E4M3", "HYBRID"],
        scale_rounding=["ceil", "floor", "even"],
        dtype=[torch.float32, torch.bfloat16],
        index=[torch.int32, torch.int64],
    ),
)
def test_it_is_linear_train_of_each_group(
    sizes: str, fp8_format: str, scale_rounding: str, dtype: torch.dtype, index: torch.dtype
) -> None:
    x, w, dy = operands(SIZES[sizes], dtype)
    offs = ends(SIZES[sizes], index)

    def loop(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        each = zip(x.split([*SIZES[sizes], 3]), w, strict=False)
        parts = [ops.linear_train(rows, weight, None, fp8_format, scale_rounding) for rows, weight in each]
        return torch.cat([*parts, (x[-3:] @ x.new_zeros(45, 70)) + 0 * w.sum().to(dtype)])

    got = step(lambda x, w: grouped(x, w, offs, fp8_format, scale_rounding), x, w, dy)
    assert_equal(got, step(loop, x, w, dy))


@looped("fp8_format", ["E4M3", "HYBRID"])
def test_every_product_is_the_reference_s(fp8_format: str) -> None:
    sizes = (33, 2080, 7)
    x, w, dy = operands(sizes)
    y, dx, dw = step(lambda x, w: grouped(x, w, ends(sizes), fp8_format), x, w, dy)
    gradient = "e5m2" if fp8_format == "HYBRID" else "e4m3"
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *ends(sizes).tolist()])):
        rows, weight, grad = x.detach()[start:stop], w.detach()[expert], dy[start:stop]
        assert_is_mxfp8_product(y[start:stop], rows, weight)
        assert_is_mxfp8_product(dx[start:stop], grad, weight.t(), a_format=gradient)
        assert_is_mxfp8_product(dw[expert], grad.t(), rows.t(), a_format=gradient)


def test_a_bad_value_stays_in_its_group() -> None:
    x, w, dy = operands((40, 5))
    with torch.no_grad():
        x[3, 4] = float("nan")
    y, dx, dw = step(lambda x, w: grouped(x, w, ends((40, 5))), x, w, dy)
    assert y[3].isnan().all()
    assert y[4:].isfinite().all()
    assert dx.isfinite().all()
    assert dw[0, :, 4].isnan().all()
    assert dw[1].isfinite().all()


@looped("needed", [(1, 0), (0, 1), (0, 0)])
def test_only_the_gradients_that_are_needed(needed: tuple[int, int]) -> None:
    x, w, _ = operands((5, 7))
    for tensor, need in zip((x, w), needed, strict=True):
        tensor.requires_grad_(bool(need))
    y = grouped(x, w, ends((5, 7)))
    assert y.requires_grad == any(needed)
    if any(needed):
        y.sum().backward()
    assert [t.grad is not None for t in (x, w)] == [bool(need) for need in needed]


def test_a_columnwise_copy_is_saved_instead_of_x() -> None:
    saved: list[torch.Tensor] = []
    x, w, _ = operands((61, 0))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        grouped(x, w, ends((61, 0)))
    assert [(tuple(t.shape), t.dtype) for t in saved] == [
        ((45, 64), torch.uint8),
        ((45, 64 // 32 + 2), torch.uint8),
        ((2, 70, 45), torch.float32),
        ((2,), torch.int32),
    ]


def test_torch_func_gives_first_derivatives() -> None:
    x, w, dy = (t.detach() for t in operands((40, 7)))
    loss = lambda x, w: (grouped(x, w, ends((40, 7))) * dy).sum()  # noqa: E731
    wanted = step(lambda x, w: grouped(x, w, ends((40, 7))), x.clone().requires_grad_(), w.clone().requires_grad_(), dy)
    assert_equal((wanted[0], *torch.func.grad(loss, (0, 1))(x, w)), wanted)
    with pytest.raises(Mxfp8Error, match="is to be differentiated again"):
        torch.func.grad(lambda x: torch.func.grad(loss, 1)(x, w).square().sum())(x)


def test_opcheck() -> None:
    x, w, dy = operands((5, 0, 30))
    for args in ((x, w), (x, w.detach()), (x.detach().bfloat16(), w)):
        torch.library.opcheck(grouped.default, (*args, ends((5, 0, 30))))
    pairs = [ops.quantize_groups(t.detach(), ends((5, 0, 30))) for t in (dy, x)]
    torch.library.opcheck(ops.quantize_groups.default, (dy, ends((5, 0, 30)), "e5m2", "floor"))
    torch.library.opcheck(ops.grouped_wgrad.default, (*pairs[0], *pairs[1], ends((5, 0, 30))))


class Experts(torch.nn.Module):
    """Two grouped layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(values(3, 70, 45, seed=1))
        self.down = torch.nn.Parameter(values(3, 45, 70, seed=2))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return grouped(torch.relu(grouped(x, self.up, offs, "HYBRID")), self.down, offs)


def gradients_of(module: Any, net: torch.nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    y = module(*inputs)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters())]


def test_it_exports_and_compiles_whole() -> None:
    net, x, offs = Experts(), values(80, 45), ends((40, 0, 37))
    expected = gradients_of(net, net, x, offs)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_equal(gradients_of(compiled, net, x, offs), expected)
    program = torch.export.export(net, (x, offs), dynamic_shapes=({0: torch.export.Dim("rows")}, None))
    for candidate in (program, program.run_decompositions({})):
        module = candidate.module()
        assert [n.target for n in candidate.graph.nodes].count(grouped.default) == 2
        assert_equal(gradients_of(module, module, x, offs), expected)
        assert module(x[:7], ends((3, 0, 4))).shape == (7, 45)


def test_autocast_casts_activations_and_keeps_the_master_weight() -> None:
    x, w, dy = operands((33, 7))
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped(x, w, ends((33, 7)))
    dx, dw = torch.autograd.grad(y, (x, w), dy.bfloat16())
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    cast = x.detach().bfloat16().requires_grad_()
    wanted = step(lambda x, w: grouped(x, w, ends((33, 7))), cast, w, dy.bfloat16())
    assert_equal((y, dx.bfloat16(), dw), wanted)


X, W, _ = (t.detach() for t in operands((5, 7)))
OFFS = ends((5, 7))
CODES = *ops.quantize_groups(X, OFFS), *ops.quantize_groups(X, OFFS)
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "dtype": (lambda: grouped(X.double(), W, OFFS), ShapeError, "grouped_linear_train: dtype float64"),
    "packed weight": (lambda: grouped(X, ops.quantize(W)[0], OFFS), ShapeError, "the weight is packed (uint8 codes)"),
    "one weight": (lambda: grouped(X, W[0], OFFS), ShapeError, "(15, 45) and weight (70, 45); expected [S, K] and [E"),
    "K": (lambda: grouped(X, W.mT, OFFS), ShapeError, "with the same K; store each expert's weight with K last"),
    "too few ends": (lambda: grouped(X, W, OFFS[:1]), ShapeError, "offs is int32 (1,); expected int32 or int64 (2,)"),
    "float ends": (lambda: grouped(X, W, OFFS.float()), ShapeError, "offs is float32 (2,); expected int32 or int64"),
    "descending": (lambda: grouped(X, W, OFFS.flip(0)), ShapeError, "offs [12, 5]; expected ascending ends of groups"),
    "beyond": (lambda: grouped(X, W, OFFS + 4), ShapeError, "offs [9, 16]; expected ascending ends of groups within"),
    "format": (lambda: grouped(X, W, OFFS, "E5M2"), ContractError, "fp8_format: 'E5M2'; expected one of E4M3, HYBRID"),
    "rounding": (lambda: grouped(X, W, OFFS, "E4M3", "up"), ContractError, "scale_rounding: 'up'; expected one of"),
    "vmap": (
        lambda: torch.vmap(grouped, in_dims=(0, None, None))(X[None], W, OFFS),
        ShapeError,
        "grouped_linear_train: called under torch.vmap",
    ),
    "tangent": (
        lambda: torch.func.jvp(lambda w: grouped(X, w, OFFS), (W,), (W,)),
        Mxfp8Error,
        "an operand carries a tangent",
    ),
    "groups of a vector": (lambda: ops.quantize_groups(X[0], OFFS), ShapeError, "quantize_groups: x has shape (45,)"),
    "groups that require a gradient": (
        lambda: ops.quantize_groups(X.clone().requires_grad_(), OFFS),
        Mxfp8Error,
        "quantized values pass no derivative on",
    ),
    "wgrad of other groups": (
        lambda: ops.grouped_wgrad(*CODES, OFFS[:1]),
        ShapeError,
        "grouped_wgrad: elements (45, 15) and scales (45, 2) for (1,) groups; expected uint8 [N, S] and [N, S // 32",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_say_what_is_and_what_is_expected(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
