"""`mxfp8::grouped_gemm` against one gemm per group: what a mixture of experts computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from grids import looped
from tensors import values

torch = pytest.importorskip("torch")

from mxfp8_ops import numerics, numpy_nodes, torch_ops  # noqa: E402, F401 - registers torch.ops.mxfp8
from mxfp8_ops.errors import ContractError, ShapeError  # noqa: E402

ops = torch.ops.mxfp8
SIZES = (3, 0, 5, 2)
"""Rows of each of four experts; one has none."""


def offsets(dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(SIZES).cumsum(0).to(dtype)


X, W = values(sum(SIZES), 70), ops.quantize(values(len(SIZES), 24, 70, seed=1))
A = ops.quantize(X)


@looped(
    "index, dtype, weight_only",
    [*itertools.product((torch.int32, torch.int64), (torch.float32, torch.bfloat16), (False, True))],
)
def test_each_group_meets_its_own_weight(index: torch.dtype, dtype: torch.dtype, *, weight_only: bool) -> None:
    x = X.to(dtype)
    rows = (x, None) if weight_only else ops.quantize(x)
    got = ops.grouped_gemm(*rows, *W, offsets(index), dtype=dtype)
    assert got.dtype == dtype
    seen = x.float().numpy() if weight_only else numpy_nodes.dequantize(*(t.numpy() for t in rows))
    name = str(dtype).removeprefix("torch.")
    start = 0
    for expert, size in enumerate(SIZES):
        weight = numpy_nodes.dequantize(*(t[expert].numpy() for t in W))
        part = seen[start : start + size]
        exact = part.astype("float64") @ weight.astype("float64").T
        error = abs(got[start : start + size].double().numpy() - exact)
        assert (error <= numpy_nodes.gemm_error_bound(part, weight, name)).all(), expert
        start += size


def test_rows_behind_the_last_group_are_zero() -> None:
    ends = torch.tensor([1, 2, 4, 4], dtype=torch.int32)
    got = ops.grouped_gemm(*A, *W, ends)
    assert got[3].any()
    assert not got[4:].any()


def test_no_experts_and_no_rows() -> None:
    assert ops.grouped_gemm(*ops.quantize(X[:0]), *W, torch.zeros(4, dtype=torch.int32)).shape == (0, 24)
    none = W[0][:0], W[1][:0]
    assert not ops.grouped_gemm(*A, *none, torch.zeros(0, dtype=torch.int32)).any()


def test_values_get_the_gradients_of_their_own_experts() -> None:
    x, dy = X.clone().requires_grad_(), values(len(X), 24, seed=2)
    (got,) = torch.autograd.grad(ops.grouped_gemm(x, None, *W, offsets()), x, dy)
    experts = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    wanted = torch.einsum("sn,snk->sk", dy.double(), ops.dequantize(*W)[experts].double())
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=24 * 2.0**-24 * float(wanted.abs().max()))


def test_opcheck() -> None:
    for args in ((*A, *W, offsets()), (X, None, *W, offsets()), (X.half(), None, *W, offsets(), "e4m3", "e4m3")):
        torch.library.opcheck(ops.grouped_gemm.default, args)


def test_it_exports_and_compiles_whole() -> None:
    class Experts(torch.nn.Module):
        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return ops.grouped_gemm(*ops.quantize(x), *W, ends)

    expected = Experts()(X, offsets())
    compiled = torch.compile(Experts(), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(X, offsets()), expected)
    program = torch.export.export(Experts(), (X, offsets()))
    assert torch.equal(program.module()(X, offsets()), expected)


REFUSED: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "descending": ((*A, *W, torch.tensor([3, 2, 8, 10])), ShapeError, r"offs \[3, 2, 8, 10\]; expected ascending"),
    "beyond the rows": ((*A, *W, torch.tensor([3, 3, 8, 11])), ShapeError, r"within 0\.\.10, the number of rows; pass"),
    "negative": ((*A, *W, torch.tensor([-1, 3, 8, 10])), ShapeError, "expected ascending ends of groups within"),
    "too few ends": ((*A, *W, torch.tensor([3, 3])), ShapeError, r"offs is int64 \(2,\); expected int32 or int64 \(4,"),
    "float ends": ((*A, *W, torch.ones(4)), ShapeError, r"offs is float32 \(4,\); expected int32"),
    "K": ((*ops.quantize(X[:, :32]), *W, offsets()), ShapeError, r"operands \(10, 32\) and \(4, 24, 70\); expected"),
    "one weight": ((*A, W[0][0], W[1][0], offsets()), ShapeError, r"expected \[S, K\] and \[E, N, K\]"),
    "scales": (
        (*A, W[0], W[1][..., :1], offsets()),
        ShapeError,
        r"scales have shape \(4, 24, 1\); expected \(4,",
    ),
    "dtype": ((X.double(), None, *W, offsets()), ShapeError, "grouped_gemm: dtype float64; expected one of"),
    "format": ((*A, *W, offsets(), "e3m4"), ContractError, "element_format: 'e3m4'; expected one of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case: str) -> None:
    args, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        ops.grouped_gemm(*args)
