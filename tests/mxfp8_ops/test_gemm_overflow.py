"""Gemms whose sums overflow: infinite or NaN only as an order of float32 sums of the products is.

A product that float32 does not hold is an infinity, whatever a sum was before it: a multiply-add that adds the exact
product to -Inf loses it, and relu then makes 0 of what should be +Inf.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from grids import looped, pairwise

from mxfp8_ops import cpu, numpy_nodes

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning")

FORMATS = ("e4m3", "int8", "e5m2")
ONE = {"e4m3": 0x38, "e5m2": 0x3C, "int8": 64}
LARGEST = float(np.finfo(np.float32).max)
ROWS = (1, 2, 5, 7, 9, 16, 17, 200, 300)
"""For every kernel: of one row and few, of a tile, of many tiles, of two strips."""
Operand = tuple[np.ndarray, np.ndarray]


@pytest.fixture(params=cpu.available_isas())
def isa(request: pytest.FixtureRequest):
    """Every set: the fault was in those that multiply and add at once."""
    with cpu.forced_isa(request.param):
        yield request.param


def ones(rows: int, k: int, fmt: str, scales: tuple[int, ...], seed: int) -> Operand:
    """Returns codes of 1 and -1, one sign for each block, with scale codes out of `scales`; the first is frequent."""
    rng = np.random.default_rng(seed)
    blocks = -(-k // 32)
    weights = [0.7] + [0.3 / (len(scales) - 1)] * (len(scales) - 1)
    codes = rng.choice(scales, (rows, blocks), p=weights).astype(np.uint8)
    negative = (-ONE[fmt] & 0xFF) if fmt == "int8" else ONE[fmt] | 0x80
    elements = rng.choice([ONE[fmt], negative], (rows, blocks)).astype(np.uint8)
    return np.repeat(elements, 32, 1)[:, :k].copy(), codes


def operands(m: int, n: int, k: int, fmt: str, seed: int) -> tuple[Operand, Operand]:
    """Rows and columns of which some are ordinary, and products from 2^-70 to 2^174."""
    a, b = ones(m, k, fmt, (127, 254, 60), seed), ones(n, k, fmt, (127, 126, 174, 60), seed + 1)
    a[1][::3] = 127
    return a, b


def check(y: np.ndarray, x: np.ndarray, w: np.ndarray, then: Callable[[np.ndarray], np.ndarray] = np.array) -> None:
    """Fails where no order gives y = then(x @ w.T), with the products' sums."""
    products = x[:, None].astype(np.float32) * w  # [M, N, K]; infinite where float32 does not hold one
    above, below = np.where(products > 0, products, 0), np.where(products < 0, products, 0)
    above, below = above.sum(-1, dtype=np.float64), below.sum(-1, dtype=np.float64)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    finite = np.abs(then(exact) - y) <= numpy_nodes.gemm_error_bound(x, w)
    finite &= np.isfinite(y) & ~(np.isinf(above) ^ np.isinf(below))
    can_be_inf, can_be_minus_inf = above > LARGEST, below < -LARGEST
    infinite = (y == then(np.float64(np.inf))) & can_be_inf & ~np.isneginf(below)
    infinite |= (y == then(np.float64(-np.inf))) & can_be_minus_inf & ~np.isposinf(above)
    wrong = np.argwhere(~(finite | infinite | (np.isnan(y) & can_be_inf & can_be_minus_inf)))
    if len(wrong):
        at = tuple(map(int, wrong[0]))
        sums = f"positive products add up to {above[at]:.3g}, negative ones to {below[at]:.3g}, all to {exact[at]:.3g}"
        pytest.fail(f"{len(wrong)} of {y.size} results; at {at} got {y[at]!r}, but {sums}")


def values(operand: Operand, fmt: str) -> np.ndarray:
    return numpy_nodes.dequantize(*operand, element_format=fmt)


@looped("m, n", [(1, 1), (16, 15)])
def test_a_product_that_overflows_is_not_lost_to_an_infinite_sum(isa, m, n):
    """-2^126 thirty-two times, then 2^174: +Inf or, added in another order, NaN."""
    for fmt in FORMATS:
        a, b = np.full((m, 64), ONE[fmt], np.uint8), np.full((n, 64), ONE[fmt], np.uint8)
        a[:, :32] = (-ONE[fmt] & 0xFF) if fmt == "int8" else ONE[fmt] | 0x80
        a_scales, b_scales = np.full((m, 2), 254, np.uint8), np.tile(np.array([[126, 174]], np.uint8), (n, 1))
        y = cpu.gemm(a, a_scales, b, b_scales, a_format=fmt, b_format=fmt)
        check(y, values((a, a_scales), fmt), values((b, b_scales), fmt))


@looped("m, k, fmt", pairwise(m=ROWS, k=(64, 70, 1100), fmt=FORMATS))
def test_sums_overflow_as_an_order_of_the_products_does(isa, m, k, fmt):
    a, b = operands(m, 33, k, fmt, m)
    check(cpu.gemm(*a, *b, a_format=fmt, b_format=fmt), values(a, fmt), values(b, fmt))


@looped("m, dtype, fmt", pairwise(m=ROWS, dtype=[np.float32, ml_dtypes.bfloat16], fmt=FORMATS))
def test_sums_of_values_overflow_alike(isa, m, dtype, fmt):
    a, b = operands(m, 17, 96, fmt, m)
    x = values(a, fmt).astype(dtype)
    check(cpu.weight_gemm(x, *b, b_format=fmt), x, values(b, fmt))


@looped("m, fmt", itertools.product(ROWS, FORMATS))
def test_fused_and_grouped_gemms_see_the_corrected_sums(isa, m, fmt):
    """Each stores its sums in its own way."""
    a, b = operands(m, 40, 96, fmt, m)
    options = {"a_format": fmt, "b_format": fmt}
    x, w = values(a, fmt), values(b, fmt)
    y = cpu.fused_gemm(*a, *b, epilogue="relu", **options)
    check(y, x, w, lambda sums: np.maximum(sums, 0))
    check(cpu.grouped_gemm(*a, b[0][None], b[1][None], np.zeros((), np.int64), **options), x, w)


def test_float16_results_overflow_only_where_float16_does(isa):
    a, b = operands(20, 33, 96, "e4m3", 0)
    wide, narrow = (cpu.gemm(*a, *b, dtype=dtype) for dtype in ("float32", "float16"))
    assert narrow.tobytes() == wide.astype(np.float16).tobytes()
