"""linear_train: three products in MXFP8, each the reference's; what torch does to a graph changes none of them."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grids import looped, pairwise
from tensors import assert_equal, assert_is_mxfp8_product, saved_by, step, values

from mxfp8_ops.errors import ContractError, Mxfp8Error, ShapeError

torch = pytest.importorskip("torch")
pytest.importorskip("mxfp8_ops.torch_ops")

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")

ops = torch.ops.mxfp8
linear_train = ops.linear_train
FP8_FORMATS = ("E4M3", "HYBRID")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# --- The three products -------------------------------------------------------------------------------------------


def test_quantize_both_is_two_quantizations() -> None:
    x = values(37, 50)
    got = ops.quantize_both(x, "e5m2", "floor")
    assert_equal(got, (*ops.quantize(x, -1, "e5m2", "floor"), *ops.quantize(x.t(), -1, "e5m2", "floor")))
    torch.library.opcheck(ops.quantize_both.default, (x, "e4m3", "ceil"))
    with pytest.raises(ShapeError, match=r"quantize_both: x has shape \(2, 3, 32\); expected a matrix"):
        ops.quantize_both(values(2, 3, 32))


@looped(
    "fp8_format, scale_rounding, m",
    pairwise(fp8_format=FP8_FORMATS, scale_rounding=["ceil", "floor", "even"], m=[1, 32, 77, 2080]),
)
def test_every_product_is_the_reference_s(fp8_format: str, scale_rounding: str, m: int) -> None:
    x, w, bias = (values(*s, seed=i).requires_grad_() for i, s in enumerate([(m, 45), (70, 45), (70,)]))
    dy = values(m, 70, seed=3)
    y = linear_train(x, w, bias, fp8_format, scale_rounding)
    y.backward(dy)
    gradients = {"a_format": "e5m2" if fp8_format == "HYBRID" else "e4m3", "scale_rounding": scale_rounding}
    assert_is_mxfp8_product(y, x, w, bias=bias, scale_rounding=scale_rounding)
    assert_is_mxfp8_product(x.grad, dy, w.t(), **gradients)
    assert_is_mxfp8_product(w.grad, dy.t(), x.t(), **gradients)
    exact = dy.double().sum(0)
    assert float((bias.grad - exact).abs().max()) <= m * 2.0**-24 * float(dy.abs().sum(0).max())


@looped("fp8_format, lead", pairwise(fp8_format=FP8_FORMATS, lead=[(3,), (2, 3), (2, 1, 2)]))
def test_a_stack_is_so_many_linears(fp8_format: str, lead: tuple[int, ...]) -> None:
    shapes = [(*lead, 40, 45), (*lead, 70, 45), (70,)]
    x, w, bias = (values(*s, seed=i).requires_grad_() for i, s in enumerate(shapes))
    dy = values(*lead, 40, 70, seed=3)
    y = linear_train(x, w, bias, fp8_format)
    pairs = zip(x.flatten(0, -3), w.flatten(0, -3), strict=True)
    apart = torch.stack([linear_train(*pair, bias, fp8_format) for pair in pairs]).unflatten(0, lead)
    got, wanted = (torch.autograd.grad(result, (x, w), dy) for result in (y, apart))
    assert_equal((y, *got), (apart, *wanted))


@looped("x_dtype, w_dtype", [*itertools.product(DTYPES, DTYPES)])
def test_gradients_have_the_dtypes_of_their_tensors(x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x = values(40, 45, dtype=x_dtype).requires_grad_()
    w, bias = (values(*s, seed=1, dtype=w_dtype).requires_grad_() for s in ((70, 45), (70,)))
    dy = values(40, 70, seed=2, dtype=x_dtype)
    y = linear_train(x, w, bias)
    y.backward(dy)
    assert (y.dtype, x.grad.dtype, w.grad.dtype, bias.grad.dtype) == (x_dtype, x_dtype, w_dtype, w_dtype)
    assert_is_mxfp8_product(y, x, w, bias=bias)
    assert_is_mxfp8_product(x.grad, dy, w.t())
    assert_is_mxfp8_product(w.grad, dy.t(), x.t())


INPUTS = {
    **{f"of shape {shape}": values(*shape) for shape in ((45,), (0, 45), (2, 0, 45), (2, 2, 3, 45))},
    "transposed": values(45, 40).t(),
    "expanded": values(1, 45).expand(40, 45),
    "permuted": values(4, 10, 45).transpose(0, 1),
}


@looped("name, ones", [*itertools.product(INPUTS, (False, True))])
def test_every_rank_and_layout_is_a_matrix_of_rows(name: str, *, ones: bool) -> None:
    x = INPUTS[name].detach().requires_grad_()
    w, bias = values(70, 45).t().contiguous().t().requires_grad_(), values(70).requires_grad_()
    y = linear_train(x, w, bias)
    dy = torch.ones(1).expand(y.shape) if ones else values(*y.shape, seed=1)  # the gradient of a sum is such a scalar
    y.backward(dy)
    rows, rows_dy = x.detach().reshape(x.numel() // 45, 45), dy.reshape(dy.numel() // 70, 70)
    assert (y.shape, x.grad.shape) == ((*x.shape[:-1], 70), x.shape)
    assert_is_mxfp8_product(y.reshape(rows_dy.shape), rows, w, bias=bias)
    assert_is_mxfp8_product(x.grad.reshape(rows.shape), rows_dy, w.t())
    assert_is_mxfp8_product(w.grad, rows_dy.t(), rows.t())
    assert torch.equal(bias.grad, rows_dy.sum(0))


@looped("needed", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 0, 0)])
def test_only_the_gradients_that_are_needed(needed: tuple[int, ...]) -> None:
    tensors = [values(*s).requires_grad_(bool(n)) for s, n in zip(((40, 45), (70, 45), (70,)), needed, strict=True)]
    y = linear_train(*tensors)
    assert y.requires_grad == any(needed)
    if any(needed):
        y.sum().backward()
    assert [t.grad is not None for t in tensors] == [bool(n) for n in needed]


def test_a_columnwise_copy_is_saved_instead_of_x_and_of_a_stack_of_weights() -> None:
    x, w = values(64, 96).requires_grad_(), values(32, 96).requires_grad_()
    saved = saved_by(lambda: linear_train(x, w))
    codes = {(96, 64): torch.uint8, (96, 2): torch.uint8}
    assert {tuple(t.shape): t.dtype for t in saved} == codes | {(32, 96): torch.float32}
    x, w = values(2, 3, 64, 96).requires_grad_(), values(2, 3, 32, 96).mT.contiguous().mT.requires_grad_()
    saved = saved_by(lambda: linear_train(x, w))
    assert [tuple(t.shape[2:]) for t in saved] == [(96, 64), (96, 2), (96, 32), (96, 1)]
    assert {t.dtype for t in saved} == {torch.uint8}


def test_a_weight_changed_between_forward_and_backward_is_an_error() -> None:
    x, w = values(4, 45).requires_grad_(), values(7, 45).requires_grad_()
    y = linear_train(x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nonfinite_values_surface_in_the_gradients() -> None:
    x, w = values(64, 45).requires_grad_(), values(70, 45).requires_grad_()
    dy = values(64, 70)
    dy[3, 5] = float("nan")
    linear_train(x, w).backward(dy)
    assert x.grad[3].isnan().all()
    assert x.grad[4:].isfinite().all()
    assert w.grad[5].isnan().all()
    assert w.grad[6:].isfinite().all()


def test_func_grad_gives_the_gradients_of_backward() -> None:
    def loss(*operands: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = linear_train(*operands).square().sum()
        return result

    operands = values(5, 45), values(8, 45, seed=1), values(8, seed=2)
    leaves = [t.clone().requires_grad_() for t in operands]
    assert_equal(torch.func.grad(loss, (0, 1, 2))(*operands), torch.autograd.grad(loss(*leaves), leaves))


@pytest.mark.parametrize("of", [0, 1])
@pytest.mark.parametrize("by", [0, 1])
def test_second_derivatives_are_refused_rather_than_lost(of: int, by: int) -> None:
    """Also where the gradient that comes in is a constant, and the second derivative is by an operand alone."""
    operands = values(5, 45), values(8, 45, seed=1)
    leaves = [t.clone().requires_grad_() for t in operands]
    first = torch.autograd.grad(linear_train(*leaves).sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with @once_differentiable"):
        (linear_train(*leaves).sum() + first[of].square().sum()).backward()

    def penalty(changed: torch.Tensor) -> torch.Tensor:
        pair = [changed if by == at else t for at, t in enumerate(operands)]
        loss = lambda x, w: linear_train(x, w).square().sum()  # noqa: E731
        result: torch.Tensor = torch.func.grad(loss, of)(*pair).square().sum()
        return result

    with pytest.raises(Mxfp8Error, match="is to be differentiated again"):
        torch.func.grad(penalty)(operands[by])


X, W = values(4, 45), values(7, 45)
STACK = "expected a weight [N, K], or [..., N, K] for x [..., M, K] with the same leading sizes; store it"
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "dtype": (lambda: linear_train(X.double(), W), ShapeError, "linear_train: dtype float64"),
    "weight": (lambda: linear_train(X, values(2, 7, 45)), ShapeError, "(4, 45) and weight (2, 7, 45); expected"),
    "packed weight": (lambda: linear_train(X, ops.quantize(W)[0]), ShapeError, "the weight is packed (uint8 codes)"),
    "stack": (lambda: linear_train(values(2, 3, 4, 45), values(2, 1, 7, 45)), ShapeError, STACK),
    "K": (lambda: linear_train(X, values(7, 44)), ShapeError, "linear_train: operands (4, 45) and (7, 44)"),
    "bias": (lambda: linear_train(X, W, values(6)), ShapeError, "bias has shape (6,)"),
    "format": (lambda: linear_train(X, W, None, "E5M2"), ContractError, "'E5M2'; expected one of E4M3, HYBRID"),
    "vmap": (lambda: torch.vmap(linear_train, (0, None))(X[None], W), ShapeError, "called under torch.vmap"),
    "tangent": (
        lambda: torch.func.jvp(lambda w: linear_train(X, w), (W,), (W,)),
        Mxfp8Error,
        "linear_train: an operand carries a tangent",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_say_what_is_and_what_is_expected(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


# --- What torch does to a graph -----------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Two layers, the second of which is used twice."""

    def __init__(self, autocast: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.autocast = torch.nn.Linear(45, 64), torch.nn.Linear(64, 64), autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.autocast:
            return self.products(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.products(x)

    def products(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(linear_train(x, self.first.weight, self.first.bias, "HYBRID"))
        x = torch.relu(linear_train(x, self.second.weight, self.second.bias))
        return linear_train(x, self.second.weight)


def test_opcheck() -> None:
    x, w, bias = values(6, 45).requires_grad_(), values(8, 45).requires_grad_(), values(8).requires_grad_()
    for args in ((x, w, bias), (x, w.detach()), (x.detach().bfloat16(), w, bias, "HYBRID", "floor"), (x[:0], w)):
        torch.library.opcheck(linear_train.default, args)


@pytest.mark.parametrize("autocast", [False, True])
def test_export_save_load_and_decompose_keep_the_op_and_its_gradients(tmp_path: Path, *, autocast: bool) -> None:
    net, x = Net(autocast), values(5, 7, 45)
    expected = step(net, net, x)
    assert expected[0].dtype == (torch.bfloat16 if autocast else torch.float32)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, tmp_path / "net.pt2")
    for candidate in (program, torch.export.load(tmp_path / "net.pt2"), program.run_decompositions({})):
        module = candidate.module()
        if not autocast:  # an autocast region is a graph of its own
            targets = [node.target for node in candidate.graph.nodes]
            assert targets.count(linear_train.default) == 3
            assert not any("quantize" in str(target) for target in targets)
            assert_equal(step(module, module, x), expected)
        assert torch.equal(module(x), expected[0])
        assert module(values(2, 7, 45)).shape == (2, 7, 64)


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, NEEDS_COMPILER])


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_compile_fullgraph_trains_the_same(backend: str) -> None:
    net, x = Net(), values(40, 45)
    expected = step(net, net, x)
    got = step(torch.compile(net, fullgraph=True, backend=backend), net, x)
    for i, (t, reference) in enumerate(zip(got, expected, strict=True)):
        # Sums of torch's own (bias gradients) may be taken in another order: of at most 2560 values.
        scale = float(reference.abs().max())
        torch.testing.assert_close(t, reference, rtol=0, atol=2560 * 2.0**-24 * scale, msg=lambda m, i=i: f"{i}: {m}")


@looped("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(*, reentrant: bool) -> None:
    net, x = Net(), values(40, 45)
    module = lambda t: torch.utils.checkpoint.checkpoint(net, t, use_reentrant=reentrant)  # noqa: E731
    assert_equal(step(module, net, x), step(net, net, x))


def test_autocast_casts_activations_and_keeps_the_master_weight() -> None:
    x, w = values(40, 45).requires_grad_(), values(70, 45).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = linear_train(x, w)
    dy = values(40, 70, seed=1, dtype=torch.bfloat16)
    y.backward(dy)
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert_is_mxfp8_product(y, x.bfloat16(), w)
    assert_is_mxfp8_product(w.grad, dy.t(), x.bfloat16().t())


def test_inference_mode_and_no_grad_save_nothing() -> None:
    net, x = Net(), values(40, 45)
    expected = net(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = net(x)
        assert not y.requires_grad
        assert torch.equal(y, expected)


# --- Gradients that add up -------------------------------------------------------------------------------------------


def test_two_uses_of_one_weight_add_their_gradients() -> None:
    x, w = values(40, 64), values(64, 64).requires_grad_()
    (got,) = torch.autograd.grad((linear_train(x, w) + linear_train(2 * x, w)).sum(), w)
    (one,) = torch.autograd.grad(linear_train(x, w).sum(), w)
    torch.testing.assert_close(got, 3 * one, rtol=2.0**-22, atol=0)  # doubling is exact in MXFP8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_several_batches_add_up_in_the_dtype_of_the_weight(dtype: torch.dtype) -> None:
    w = values(64, 64, seed=9).to(dtype).requires_grad_()
    total = torch.zeros_like(w)
    for x in (values(40, 64, seed=seed) for seed in range(4)):
        total += torch.autograd.grad(linear_train(x, w).square().sum(), w)[0]
        linear_train(x, w).square().sum().backward()
    assert w.grad.dtype == dtype
    assert torch.equal(w.grad, total)


def test_gradients_of_a_bfloat16_weight_add_up_in_float32_if_its_grad_dtype_says_so() -> None:
    low, stack = (values(*s, seed=9).bfloat16().requires_grad_() for s in ((64, 45), (1, 64, 45)))
    high, ends = low.detach().float().requires_grad_(), torch.tensor([40])
    low.grad_dtype = stack.grad_dtype = torch.float32
    for x in (values(40, 45, seed=seed).bfloat16() for seed in range(4)):
        for y in (linear_train(x, low), linear_train(x, high), ops.grouped_linear_train(x, stack, ends)):
            y.float().square().sum().backward()
        assert low.grad.dtype == torch.float32
    assert torch.equal(low.grad, high.grad)
    assert stack.grad.shape == (1, 64, 45)
