"""Gradients of gradients: those of fake quantization with a straight-through estimator, or an error at every entry."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensors
from grids import looped

from mxfp8_ops import native
from mxfp8_ops.errors import Mxfp8Error

torch = pytest.importorskip("torch")
pytest.importorskip("mxfp8_ops.torch_ops")

from torch.autograd import forward_ad, functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")

ops = torch.ops.mxfp8
values = functools.partial(tensors.values, spread=0)
Tensor = torch.Tensor
Op = Callable[..., Tensor]

FLIPS = 1e-3
"""How far, relative to the norm, a chain of float32 products may be from one in float64: a sum that differs in its last
bit may round a value at a rounding boundary the other way, which moves one of thousands of values by 6%."""


# --- An independent reference: fake quantization in float64 -----------------------------------------------------------


def fake_quantized(x: Tensor, element_format: str = "e4m3") -> Tensor:
    """Returns what x [..., K] is in MXFP8 with "ceil" scales, by ml_dtypes."""
    kind = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[element_format]
    values = x.detach().double().numpy()
    k = values.shape[-1]
    blocks = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -k % 32)]).reshape(*values.shape[:-1], -1, 32)
    mantissa, exponent = np.frexp(np.abs(blocks).max(-1, keepdims=True) / float(ml_dtypes.finfo(kind).max))
    scale = np.exp2((exponent - (mantissa == 0.5)).astype(np.float64))
    rounded = (blocks / scale).astype(kind).astype(np.float64) * scale
    return torch.from_numpy(rounded.reshape(*values.shape[:-1], -1)[..., :k].copy())


class FakeProduct(torch.autograd.Function):
    """a b^T of fake-quantized operands in float64; gradients pass the rounding unchanged, and are such products too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, *formats: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.formats = formats
        return fake_quantized(a, formats[0]) @ fake_quantized(b, formats[1]).mT

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (a, b), (a_format, b_format, grad_format) = ctx.saved_tensors, ctx.formats
        da = FakeProduct.apply(dy, b.mT, grad_format, b_format, a_format)
        db = FakeProduct.apply(dy.mT, a.mT, grad_format, a_format, b_format)
        return da, db, None, None, None


def fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fp8_format: str = "E4M3") -> Tensor:
    """Returns what linear_train stands for."""
    formats = "e4m3", "e4m3", {"E4M3": "e4m3", "HYBRID": "e5m2"}[fp8_format]
    y: Tensor = FakeProduct.apply(x.double(), weight.double(), *formats)
    return y if bias is None else y + bias


def leaves(*tensors: Tensor, double: bool = False) -> list[Tensor]:
    return [(t.double() if double else t.clone()).requires_grad_() for t in tensors]


def relative(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got.double() - wanted).norm() / wanted.norm())


# --- linear_train -----------------------------------------------------------------------------------------------------


@looped("rows, fp8_format", [*itertools.product(((77,), (7, 11), ()), ("E4M3", "HYBRID"))])
def test_double_backward_is_made_of_products_of_quantized_operands(rows: tuple[int, ...], fp8_format: str) -> None:
    """Of d(dx . u + dw . v) by dy, x and w, with everything that is quantized given: no error but that of the sums."""
    x, w, dy = leaves(values(*rows, 45, spread=1), values(70, 45, seed=1, spread=1), values(*rows, 70, seed=2))
    u, v = values(*rows, 45, seed=3, spread=1), values(70, 45, seed=4, spread=1)
    dx, dw = torch.autograd.grad(ops.linear_train(x, w, None, fp8_format), (x, w), dy, create_graph=True)
    got = torch.autograd.grad((dx * u).sum() + (dw * v).sum(), (dy, x, w))

    x, w, dy, u = (t.detach().double().reshape(-1, t.shape[-1]) if t is not v else t for t in (x, w, dy, u))
    grad_format = "e5m2" if fp8_format == "HYBRID" else "e4m3"
    columns = fake_quantized(x.mT).mT  # what is saved of x
    sums = {
        0: [(u, w, "e4m3", "e4m3"), (columns, v.double(), "e4m3", "e4m3")],
        1: [(dy, v.double().mT, grad_format, "e4m3")],
        2: [(dy.mT, u.mT, grad_format, "e4m3")],
    }
    for i, products in sums.items():
        pairs = [(fake_quantized(a, f), fake_quantized(b, g)) for a, b, f, g in products]
        wanted = sum(a @ b.mT for a, b in pairs)
        bound = sum((a.shape[-1] + 2) * 2.0**-23 * (a.abs() @ b.abs().mT) for a, b in pairs)
        error = (got[i].double().reshape(wanted.shape) - wanted).abs()
        assert (error <= bound).all(), f"{i}: off by {float((error / bound).max()):.2f} of the bound"


def first_derivatives(fp8_format: str) -> list[tuple[torch.Tensor, ...]]:
    """Returns those of linear_train, without and with a graph of them."""
    operands = values(77, 45, spread=1), values(70, 45, seed=1, spread=1), values(70, seed=2)
    dy = values(77, 70, seed=3, spread=1)
    return [
        torch.autograd.grad(ops.linear_train(*(args := leaves(*operands)), fp8_format), args, dy, create_graph=create)
        for create in (False, True)
    ]


@looped("fp8_format", ["E4M3", "HYBRID"])
def test_the_first_derivatives_are_the_same_bits(fp8_format: str) -> None:
    """Where a product depends on the operands' values alone."""
    with native.forced_isa("portable"):
        plain, again = first_derivatives(fp8_format)
    assert [torch.equal(a, b) for a, b in zip(plain, again, strict=True)] == [True] * 3


@looped("fp8_format", ["E4M3", "HYBRID"])
def test_the_first_derivatives_are_the_same_within_the_bound(fp8_format: str) -> None:
    """x, rounded again, may have other codes and scales for the same values; gemm_int16 adds up by the codes."""
    (dx, dw, db), (dx2, dw2, db2) = first_derivatives(fp8_format)
    x, w, dy = values(77, 45, spread=1), values(70, 45, seed=1, spread=1), values(77, 70, seed=3, spread=1)
    assert torch.equal(db, db2)
    for got, wanted, a, b in ((dx2, dx, dy, w.mT), (dw2, dw, dy.mT, x.mT)):
        bound = (a.shape[-1] + 2) * 2.0**-22 * (a.abs() @ b.abs().mT)
        assert ((got - wanted).abs() <= bound).all(), f"off by {float(((got - wanted).abs() / bound).max()):.2f} bounds"


class Net(torch.nn.Module):
    """Linear-Tanh-Linear-LayerNorm."""

    def __init__(self, op: Op, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = op
        self.first, self.second = torch.nn.Linear(33, 64), torch.nn.Linear(64, 40)
        self.norm = torch.nn.LayerNorm(40)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.op(x, self.first.weight, self.first.bias))
        return self.norm(self.op(x, self.second.weight, self.second.bias))


def penalized(op: Op, factor: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns the gradients by all parameters of a loss with a penalty on the gradient by the input."""
    net, x, weights = Net(op, dtype), values(50, 33).to(dtype).requires_grad_(), values(50, 40, seed=1).to(dtype)
    y = net(x)
    (dx,) = torch.autograd.grad((y * weights).sum(), x, create_graph=True)
    return list(torch.autograd.grad(y.square().mean() + factor * dx.square().sum(), list(net.parameters())))


def test_a_gradient_penalty() -> None:
    got, unpenalized = penalized(ops.linear_train, 10), penalized(ops.linear_train, 0)
    wanted, exact = (penalized(op, 10, torch.float64) for op in (fake_linear, torch.nn.functional.linear))
    for i, (gradient, reference, full, plain) in enumerate(zip(got, wanted, exact, unpenalized, strict=True)):
        if i == len(got) - 1:  # dy/dx does not depend on the norm's bias
            assert torch.equal(gradient, plain)
            continue
        assert relative(gradient, reference) < FLIPS, i
        assert relative(gradient, full) < 0.2, f"{i}: not that of the model in high precision, within MXFP8's error"
        assert relative(plain, reference) > 0.5, f"{i}: the penalty has no part in it"


W, V, X = values(9, 33) / 6, values(9, 33, seed=1), values(6, 33, seed=2)


def loss(w: Tensor) -> Tensor:
    return torch.tanh(ops.linear_train(X, w)).pow(3).sum()


def fake_loss(w: Tensor) -> Tensor:
    return torch.tanh(fake_linear(X, w)).pow(3).sum()


def outputs(w: Tensor) -> Tensor:
    return torch.tanh(ops.linear_train(X, w))


def backward_twice() -> Tensor:
    (w,) = leaves(W)
    loss(w).backward(create_graph=True)
    dw, w.grad = w.grad, None
    dw.square().sum().backward()
    return w.grad


def penalty_of(function: Op, *, double: bool = False) -> Tensor:
    (w,) = leaves(W, double=double)
    (dw,) = torch.autograd.grad(function(w), w, create_graph=True)
    return torch.autograd.grad(dw.square().sum(), w)[0]


def squared_grad(w: Tensor) -> Tensor:
    return torch.func.grad(loss)(w).square().sum()


EXPECTED: dict[str, Callable[[], Tensor]] = {
    "penalty": lambda: penalty_of(fake_loss, double=True),
    "hvp": lambda: functional.hvp(fake_loss, W.double(), V.double())[1],
    "vhp": lambda: functional.vhp(fake_loss, W.double(), V.double())[1],
    "hessian": lambda: functional.hessian(fake_loss, W.double()),
    "jvp": lambda: functional.jvp(lambda w: torch.tanh(fake_linear(X, w)), W.double(), V.double())[1],
}
RIGHT: dict[str, tuple[Callable[[], Any], str]] = {
    "autograd.grad": (lambda: penalty_of(loss), "penalty"),
    "backward": (backward_twice, "penalty"),
    "checkpoint": (lambda: penalty_of(lambda w: checkpoint(loss, w, use_reentrant=False)), "penalty"),
    "functional.hvp": (lambda: functional.hvp(loss, W, V)[1], "hvp"),
    "functional.vhp": (lambda: functional.vhp(loss, W, V)[1], "vhp"),
    "functional.hessian": (lambda: functional.hessian(loss, W), "hessian"),
    "functional.hessian vectorized": (lambda: functional.hessian(loss, W, vectorize=True), "hessian"),
    "functional.jacobian": (
        lambda: functional.jacobian(lambda w: functional.jacobian(loss, w, create_graph=True), W),
        "hessian",
    ),
    "functional.jvp": (lambda: functional.jvp(outputs, W, V)[1], "jvp"),
    "func.grad of func.grad": (lambda: torch.func.grad(squared_grad)(W), "penalty"),
    "backward of func.grad": (lambda: torch.autograd.grad(squared_grad(*(w := leaves(W))), w)[0], "penalty"),
    "func.vjp of func.grad": (lambda: torch.func.vjp(torch.func.grad(loss), W)[1](V)[0], "vhp"),
    "func.jacrev of func.grad": (lambda: torch.func.jacrev(torch.func.grad(loss))(W), "hessian"),
    "func.jacrev of func.jacrev": (lambda: torch.func.jacrev(torch.func.jacrev(loss))(W), "hessian"),
}


@looped("entry", RIGHT)
def test_entries_that_give_second_derivatives(entry: str) -> None:
    second, expected = RIGHT[entry]
    assert relative(second(), EXPECTED[expected]()) < FLIPS


@pytest.mark.slow
def test_a_compiled_second_derivative() -> None:
    compiled = torch.compile(torch.func.grad(squared_grad), backend="aot_eager", fullgraph=True)
    assert relative(compiled(W), EXPECTED["penalty"]()) < FLIPS


def dual_gradient() -> Any:
    (w,) = leaves(W)
    y = ops.linear_train(X, w)
    with forward_ad.dual_level():
        return torch.autograd.grad(y, w, forward_ad.make_dual(y.detach(), y.detach()))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "func.jvp": (lambda: torch.func.jvp(loss, (W,), (V,)), Mxfp8Error, "linear_train: an operand carries a tangent"),
    "func.jvp of func.grad": (
        lambda: torch.func.jvp(torch.func.grad(loss), (W,), (V,)),
        Mxfp8Error,
        r"linear_train: an operand carries a tangent.*torch\.func\.jacrev \(of itself for a Hessian\)",
    ),
    "func.jacfwd": (lambda: torch.func.jacfwd(loss)(W), Mxfp8Error, "an operand carries a tangent"),
    "func.hessian": (lambda: torch.func.hessian(loss)(W), Mxfp8Error, "an operand carries a tangent"),
    "func.linearize": (lambda: torch.func.linearize(loss, W), Mxfp8Error, "an operand carries a tangent"),
    "functional.hessian forward": (
        lambda: functional.hessian(loss, W, vectorize=True, outer_jacobian_strategy="forward-mode"),
        Mxfp8Error,
        "an operand carries a tangent",
    ),
    "forward_ad of backward": (dual_gradient, Mxfp8Error, "linear_train: an operand carries a tangent"),
    "compile": (
        lambda: penalty_of(lambda w: torch.compile(outputs, backend="aot_eager")(w).pow(3).sum()),
        RuntimeError,
        "does not currently support double backward",
    ),
    "reentrant checkpoint": (
        lambda: penalty_of(lambda w: checkpoint(loss, w, use_reentrant=True)),
        RuntimeError,
        "set use_reentrant=False",
    ),
}


@pytest.mark.parametrize(("entry", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_entries_that_are_refused(entry: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        entry()


def test_a_third_derivative() -> None:
    def third(function: Op, *tensors: Tensor) -> Tensor:
        x, w = tensors
        (first,) = torch.autograd.grad(function(x, w).pow(3).sum(), w, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(second.pow(2).sum(), w)[0]

    got, wanted = third(ops.linear_train, *leaves(X, W)), third(fake_linear, *leaves(X, W, double=True))
    assert relative(got, wanted) < FLIPS


def test_a_stack_of_weights_and_low_precision() -> None:
    def penalty(function: Op, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, w = tensors
        gradients = torch.autograd.grad(torch.tanh(function(x, w)).sum(), (x, w), create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in gradients), (x, w))

    stack = values(3, 20, 33), values(3, 9, 33, seed=1) / 6
    for got, wanted in zip(
        penalty(ops.linear_train, *leaves(*stack)), penalty(fake_linear, *leaves(*stack, double=True)), strict=True
    ):
        assert relative(got, wanted) < FLIPS
    low = [t.bfloat16() for t in (X, W)]
    for got, wanted in zip(
        penalty(ops.linear_train, *leaves(*low)), penalty(fake_linear, *leaves(*low, double=True)), strict=True
    ):
        assert got.dtype == torch.bfloat16
        assert relative(got, wanted) < 0.05  # each of some ten operations rounds to 2^-9


def test_what_a_second_derivative_needs_costs_plain_training_no_memory() -> None:
    x, w = values(64, 96).requires_grad_(), values(32, 96).requires_grad_()
    hidden = x * 1
    y = ops.linear_train(hidden, w)
    gone = weakref.ref(hidden)
    del hidden
    assert gone() is None, "x is kept alive"
    assert y.grad_fn.x_ghost.untyped_storage().nbytes() == 4
    assert not hasattr(ops.linear_train(x.detach(), w).grad_fn.x_ghost, "grad_fn"), "nothing reaches x"


# --- The other ops ----------------------------------------------------------------------------------------------------

PACKED = ops.quantize(W)
DENSE = ops.dequantize(*PACKED)
OTHERS: dict[str, tuple[Op, Op]] = {
    "weight_gemm": (lambda x: ops.weight_gemm(x, *PACKED), lambda x: x.double() @ DENSE.double().mT),
    "linear_packed": (lambda x: ops.linear_packed(x, *PACKED), lambda x: fake_linear(x, DENSE)),
    "product": (lambda x: ops.product(x, W * x.mean()), lambda x: fake_linear(x, W * x.mean())),
}


@looped("op", OTHERS)
def test_second_derivatives_of_the_others(op: str) -> None:
    function, reference = OTHERS[op]

    def cube(x: Tensor) -> Tensor:
        return function(x).pow(3).sum()

    wanted = functional.hessian(lambda x: reference(x).pow(3).sum(), X.double())
    assert relative(functional.hessian(cube, X), wanted) < FLIPS
    assert relative(torch.func.jacrev(torch.func.grad(cube))(X), wanted) < FLIPS
    for entry in (torch.func.jacfwd(cube), torch.func.hessian(cube)):
        with pytest.raises(Mxfp8Error, match="an operand carries a tangent"):
            entry(X)
