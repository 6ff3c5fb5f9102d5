"""`grouped_gemm` and `grouped_linear_train` against a product per expert, and what torch does to a graph of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from grids import looped, pairwise
from tensors import array, assert_equal, assert_is_mxfp8_product, name, saved_by, step, values

torch = pytest.importorskip("torch")

from compare import assert_within  # noqa: E402

from mxfp8_ops import numpy_nodes, torch_ops  # noqa: E402, F401 - registers torch.ops.mxfp8
from mxfp8_ops.errors import ContractError, Mxfp8Error, ShapeError  # noqa: E402

ops = torch.ops.mxfp8
train = ops.grouped_linear_train
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ends(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Returns the end of each expert's rows."""
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(dtype)


# --- inference ---------------------------------------------------------------------------------------------------

SIZES = (3, 0, 5, 2)
"""Rows of each of four experts; one has none."""
ENDS = ends(*SIZES)
X, W = values(sum(SIZES), 70), ops.quantize(values(len(SIZES), 24, 70, seed=1))
A = ops.quantize(X)


@looped(
    "index, dtype, weight_only",
    pairwise(index=[torch.int32, torch.int64], dtype=[torch.float32, torch.bfloat16], weight_only=[False, True]),
)
def test_each_group_meets_its_own_weight(index: torch.dtype, dtype: torch.dtype, *, weight_only: bool) -> None:
    x = X.to(dtype)
    rows = (x, None) if weight_only else ops.quantize(x)
    got = ops.grouped_gemm(*rows, *W, ENDS.to(index), dtype=dtype)
    seen = x.float().numpy() if weight_only else numpy_nodes.dequantize(*map(array, rows))
    assert got.dtype == dtype
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *ENDS.tolist()])):
        weight, part = numpy_nodes.dequantize(*(t[expert].numpy() for t in W)), seen[start:stop]
        exact = part.astype("float64") @ weight.astype("float64").T
        bound = numpy_nodes.gemm_error_bound(part, weight, name(dtype))
        assert_within(array(got[start:stop]), exact, bound, f"expert {expert}")


def test_rows_of_no_expert_are_zero_and_there_may_be_no_rows_or_experts() -> None:
    got = ops.grouped_gemm(*A, *W, torch.tensor([1, 2, 4, 4], dtype=torch.int32))
    assert got[3].any()
    assert not got[4:].any()
    assert ops.grouped_gemm(*ops.quantize(X[:0]), *W, ends(0, 0, 0, 0)).shape == (0, 24)
    assert not ops.grouped_gemm(*A, W[0][:0], W[1][:0], ends()).any()


def test_values_get_the_gradients_of_their_own_experts() -> None:
    x, dy = X.clone().requires_grad_(), values(len(X), 24, seed=2)
    (got,) = torch.autograd.grad(ops.grouped_gemm(x, None, *W, ENDS), x, dy)
    experts = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    wanted = torch.einsum("sn,snk->sk", dy.double(), ops.dequantize(*W)[experts].double())
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=24 * 2.0**-24 * float(wanted.abs().max()))


# --- training ----------------------------------------------------------------------------------------------------

GROUPS = {"blocks": (32, 64, 96), "partial": (3, 0, 77, 1), "none": (0, 0), "one": (40,), "no experts": ()}
"""Rows of each expert; three rows more belong to none."""


def operands(*sizes: int, dtype: torch.dtype = torch.float32) -> Operands:
    """Returns x [S, 45], weight [E, 70, 45] and dy [S, 70]."""
    rows = sum(sizes) + 3
    x, w = values(rows, 45, dtype=dtype), values(max(len(sizes), 1), 70, 45, seed=1)[: len(sizes)]
    return x.requires_grad_(), w.requires_grad_(), values(rows, 70, seed=2, dtype=dtype)


def trained(function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Operands:
    """Returns y, dx and dw."""
    y = function(x, w)
    return y, *torch.autograd.grad(y, (x, w), dy)


@looped(
    "sizes, fp8_format, scale_rounding, dtype, index",
    pairwise(
        sizes=GROUPS,
        fp8_format=["E4M3", "HYBRID"],
        scale_rounding=["ceil", "floor", "even"],
        dtype=[torch.float32, torch.bfloat16],
        index=[torch.int32, torch.int64],
    ),
)
def test_training_is_linear_train_of_each_group(
    sizes: str, fp8_format: str, scale_rounding: str, dtype: torch.dtype, index: torch.dtype
) -> None:
    each = GROUPS[sizes]
    x, w, dy = operands(*each, dtype=dtype)

    def loop(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        groups = zip(x.split([*each, 3]), w, strict=False)
        parts = [ops.linear_train(rows, weight, None, fp8_format, scale_rounding) for rows, weight in groups]
        return torch.cat([*parts, (x[-3:] @ x.new_zeros(45, 70)) + 0 * w.sum().to(dtype)])

    got = trained(lambda x, w: train(x, w, ends(*each, dtype=index), fp8_format, scale_rounding), x, w, dy)
    assert_equal(got, trained(loop, x, w, dy))


@looped("fp8_format", ["E4M3", "HYBRID"])
def test_every_product_is_the_reference_s(fp8_format: str) -> None:
    offs = ends(33, 2080, 7)
    x, w, dy = operands(33, 2080, 7)
    y, dx, dw = trained(lambda x, w: train(x, w, offs, fp8_format), x, w, dy)
    gradient = "e5m2" if fp8_format == "HYBRID" else "e4m3"
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        rows, weight, grad = x.detach()[start:stop], w.detach()[expert], dy[start:stop]
        assert_is_mxfp8_product(y[start:stop], rows, weight)
        assert_is_mxfp8_product(dx[start:stop], grad, weight.t(), a_format=gradient)
        assert_is_mxfp8_product(dw[expert], grad.t(), rows.t(), a_format=gradient)


def test_a_bad_value_stays_in_its_group() -> None:
    x, w, dy = operands(40, 5)
    with torch.no_grad():
        x[3, 4] = float("nan")
    y, dx, dw = trained(lambda x, w: train(x, w, ends(40, 5)), x, w, dy)
    assert y[3].isnan().all()
    assert dw[0, :, 4].isnan().all()
    assert all(t.isfinite().all() for t in (y[4:], dx, dw[1]))


@looped("needed", [(1, 0), (0, 1), (0, 0)])
def test_only_the_gradients_that_are_needed(needed: tuple[int, int]) -> None:
    x, w, _ = operands(5, 7)
    for tensor, need in zip((x, w), needed, strict=True):
        tensor.requires_grad_(bool(need))
    y = train(x, w, ends(5, 7))
    assert y.requires_grad == any(needed)
    if any(needed):
        y.sum().backward()
    assert [t.grad is not None for t in (x, w)] == [bool(need) for need in needed]


def test_a_columnwise_copy_is_saved_instead_of_x() -> None:
    x, w, _ = operands(61, 0)
    saved = saved_by(lambda: train(x, w, ends(61, 0)))
    shapes = [(45, 64), (45, 64 // 32 + 2), (2, 70, 45), (2,)]
    dtypes = [torch.uint8, torch.uint8, torch.float32, torch.int32]
    assert [(tuple(t.shape), t.dtype) for t in saved] == [*zip(shapes, dtypes, strict=True)]


def test_torch_func_gives_first_derivatives() -> None:
    x, w, dy = operands(40, 7)
    wanted = trained(lambda x, w: train(x, w, ends(40, 7)), x, w, dy)
    x, w = x.detach(), w.detach()
    loss = lambda x, w: (train(x, w, ends(40, 7)) * dy).sum()  # noqa: E731
    assert_equal(torch.func.grad(loss, (0, 1))(x, w), wanted[1:])
    with pytest.raises(Mxfp8Error, match="is to be differentiated again"):
        torch.func.grad(lambda x: torch.func.grad(loss, 1)(x, w).square().sum())(x)


def test_autocast_casts_activations_and_keeps_the_master_weight() -> None:
    x, w, dy = operands(33, 7)
    with torch.autocast("cpu", torch.bfloat16):
        y = train(x, w, ends(33, 7))
    dx, dw = torch.autograd.grad(y, (x, w), dy.bfloat16())
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    cast = x.detach().bfloat16().requires_grad_()
    assert_equal((y, dx.bfloat16(), dw), trained(lambda x, w: train(x, w, ends(33, 7)), cast, w, dy.bfloat16()))


# --- What torch asks of an op ----------------------------------------------------------------------------------------


def test_opcheck() -> None:
    for args in ((*A, *W, ENDS), (X.half(), None, *W, ENDS, "e4m3", "e4m3")):
        torch.library.opcheck(ops.grouped_gemm.default, args)
    (x, w, dy), offs = operands(5, 0, 30), ends(5, 0, 30)
    for args in ((x, w), (x, w.detach()), (x.detach().bfloat16(), w)):
        torch.library.opcheck(train.default, (*args, offs))
    pairs = [ops.quantize_groups(t.detach(), offs) for t in (dy, x)]
    torch.library.opcheck(ops.quantize_groups.default, (dy, offs, "e5m2", "floor"))
    torch.library.opcheck(ops.grouped_wgrad.default, (*pairs[0], *pairs[1], offs))


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(values(3, 70, 45, seed=1))
        self.down = torch.nn.Parameter(values(3, 45, 70, seed=2))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return train(torch.relu(train(x, self.up, offs, "HYBRID")), self.down, offs)


class Packed(torch.nn.Module):
    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return ops.grouped_gemm(*ops.quantize(x), *W, offs)


def test_training_exports_and_compiles_whole() -> None:
    net, x, offs = Experts(), values(80, 45), ends(40, 0, 37)
    expected = step(net, net, x, offs)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_equal(step(compiled, net, x, offs), expected)
    program = torch.export.export(net, (x, offs), dynamic_shapes=({0: torch.export.Dim("rows")}, None))
    for candidate in (program, program.run_decompositions({})):
        module = candidate.module()
        assert [n.target for n in candidate.graph.nodes].count(train.default) == 2
        assert_equal(step(module, module, x, offs), expected)
        assert module(x[:7], ends(3, 0, 4)).shape == (7, 45)


def test_inference_exports_and_compiles_whole() -> None:
    expected = Packed()(X, ENDS)
    assert torch.equal(torch.compile(Packed(), backend="aot_eager", fullgraph=True)(X, ENDS), expected)
    assert torch.equal(torch.export.export(Packed(), (X, ENDS)).module()(X, ENDS), expected)


# --- What is refused -------------------------------------------------------------------------------------------------

TX, TW, _ = (t.detach() for t in operands(5, 7))
OFFS = ends(5, 7)
CODES = *ops.quantize_groups(TX, OFFS), *ops.quantize_groups(TX, OFFS)
gemm = ops.grouped_gemm
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "K": (lambda: gemm(*ops.quantize(X[:, :32]), *W, ENDS), ShapeError, "operands (10, 32) and (4, 24, 70); expected"),
    "one weight": (lambda: gemm(*A, W[0][0], W[1][0], ENDS), ShapeError, "expected [S, K] and [E, N, K]"),
    "scales": (lambda: gemm(*A, W[0], W[1][..., :1], ENDS), ShapeError, "scales have shape (4, 24, 1); expected (4,"),
    "dtype": (lambda: gemm(X.double(), None, *W, ENDS), ShapeError, "grouped_gemm: dtype float64; expected one of"),
    "format": (lambda: gemm(*A, *W, ENDS, "e3m4"), ContractError, "element_format: 'e3m4'; expected one of"),
    "descending ends": (lambda: gemm(*A, *W, ENDS.flip(0)), ShapeError, "offs [10, 8, 3, 3]; expected ascending ends"),
    "ends beyond the rows": (lambda: gemm(*A, *W, ENDS + 1), ShapeError, "within 0..10, the number of rows; pass"),
    "negative ends": (lambda: gemm(*A, *W, ENDS - 4), ShapeError, "expected ascending ends of groups within"),
    "too few ends": (lambda: gemm(*A, *W, ENDS[:2]), ShapeError, "offs is int32 (2,); expected int32 or int64 (4,"),
    "float ends": (lambda: gemm(*A, *W, ENDS.float()), ShapeError, "offs is float32 (4,); expected int32"),
    "training: dtype": (lambda: train(TX.double(), TW, OFFS), ShapeError, "grouped_linear_train: dtype float64"),
    "training: packed weight": (lambda: train(TX, ops.quantize(TW)[0], OFFS), ShapeError, "the weight is packed (uint"),
    "training: one weight": (lambda: train(TX, TW[0], OFFS), ShapeError, "(15, 45) and weight (70, 45); expected [S,"),
    "training: K": (lambda: train(TX, TW.mT, OFFS), ShapeError, "the same K; store each expert's weight with K last"),
    "training: too few ends": (lambda: train(TX, TW, OFFS[:1]), ShapeError, "offs is int32 (1,); expected int32 or"),
    "training: descending ends": (lambda: train(TX, TW, OFFS.flip(0)), ShapeError, "offs [12, 5]; expected ascending"),
    "training: format": (lambda: train(TX, TW, OFFS, "E5M2"), ContractError, "fp8_format: 'E5M2'; expected one of E4"),
    "training: rounding": (lambda: train(TX, TW, OFFS, "E4M3", "up"), ContractError, "scale_rounding: 'up'; expected"),
    "training: vmap": (
        lambda: torch.vmap(train, in_dims=(0, None, None))(TX[None], TW, OFFS),
        ShapeError,
        "grouped_linear_train: called under torch.vmap",
    ),
    "training: tangent": (
        lambda: torch.func.jvp(lambda w: train(TX, w, OFFS), (TW,), (TW,)),
        Mxfp8Error,
        "an operand carries a tangent",
    ),
    "groups of a vector": (lambda: ops.quantize_groups(TX[0], OFFS), ShapeError, "quantize_groups: x has shape (45,)"),
    "groups that require a gradient": (
        lambda: ops.quantize_groups(TX.clone().requires_grad_(), OFFS),
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
