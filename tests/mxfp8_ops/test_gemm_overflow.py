"""Gemms whose sums overflow: infinite or NaN only as an order of float32 sums of the products is.

A product that float32 does not hold is an infinity, whatever a sum was before it: a multiply-add that adds the exact
product to -Inf loses it, and relu then makes 0 of what should be +Inf.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

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


class Sums(NamedTuple):
    """Exact sums [M, N] of the products of x and w, of those above and below 0 alone, and the bound."""

    above: np.ndarray
    below: np.ndarray
    exact: np.ndarray
    bound: np.ndarray


def sums_of(x: np.ndarray, w: np.ndarray) -> Sums:
    products = x[:, None].astype(np.float32) * w  # [M, N, K]; infinite where float32 does not hold one
    above, below = (np.where(side, products, 0).sum(-1, dtype=np.float64) for side in (products > 0, products < 0))
    return Sums(above, below, x.astype(np.float64) @ w.T.astype(np.float64), numpy_nodes.gemm_error_bound(x, w))


def values(operand: Operand, fmt: str) -> np.ndarray:
    return numpy_nodes.dequantize(*operand, element_format=fmt)


@functools.cache
def case(m: int, n: int, k: int, fmt: str, dtype: type = np.float32) -> tuple[Operand, Operand, np.ndarray, Sums]:
    """Returns A and B, some rows and columns of which are ordinary, A's values, and sums of 2^-70 to 2^174."""
    a, b = ones(m, k, fmt, (127, 254, 60), m), ones(n, k, fmt, (127, 126, 174, 60), m + 1)
    a[1][::3] = 127
    x = values(a, fmt).astype(dtype)
    return a, b, x, sums_of(x, values(b, fmt))


def check(y: np.ndarray, sums: Sums, then: Callable[[np.ndarray], np.ndarray] = np.array) -> None:
    """Fails where no order of the products gives y = then(their sum)."""
    above, below, exact, bound = sums
    finite = (np.abs(then(exact) - y) <= bound) & np.isfinite(y) & ~(np.isinf(above) ^ np.isinf(below))
    can_be_inf, can_be_minus_inf = above > LARGEST, below < -LARGEST
    infinite = (y == then(np.float64(np.inf))) & can_be_inf & ~np.isneginf(below)
    infinite |= (y == then(np.float64(-np.inf))) & can_be_minus_inf & ~np.isposinf(above)
    wrong = np.argwhere(~(finite | infinite | (np.isnan(y) & can_be_inf & can_be_minus_inf)))
    if len(wrong):
        at = tuple(map(int, wrong[0]))
        text = f"positive products add up to {above[at]:.3g}, negative ones to {below[at]:.3g}, all to {exact[at]:.3g}"
        pytest.fail(f"{len(wrong)} of {y.size} results; at {at} got {y[at]!r}, but {text}")


@looped("m, n", [(1, 1), (16, 15)])
def test_a_product_that_overflows_is_not_lost_to_an_infinite_sum(isa, m, n):
    """-2^126 thirty-two times, then 2^174: +Inf or, added in another order, NaN."""
    for fmt in FORMATS:
        a, b = np.full((m, 64), ONE[fmt], np.uint8), np.full((n, 64), ONE[fmt], np.uint8)
        a[:, :32] = (-ONE[fmt] & 0xFF) if fmt == "int8" else ONE[fmt] | 0x80
        a_scales, b_scales = np.full((m, 2), 254, np.uint8), np.tile(np.array([[126, 174]], np.uint8), (n, 1))
        y = cpu.gemm(a, a_scales, b, b_scales, a_format=fmt, b_format=fmt)
        check(y, sums_of(values((a, a_scales), fmt), values((b, b_scales), fmt)))


@looped("m, k, fmt", pairwise(m=ROWS, k=(64, 70, 1100), fmt=FORMATS))
def test_sums_overflow_as_an_order_of_the_products_does(isa, m, k, fmt):
    a, b, _, sums = case(m, 33, k, fmt)
    check(cpu.gemm(*a, *b, a_format=fmt, b_format=fmt), sums)


@looped("m, dtype, fmt", pairwise(m=ROWS, dtype=[np.float32, ml_dtypes.bfloat16], fmt=FORMATS))
def test_sums_of_values_overflow_alike(isa, m, dtype, fmt):
    _, b, x, sums = case(m, 17, 96, fmt, dtype)
    check(cpu.weight_gemm(x, *b, b_format=fmt), sums)


@looped("m, fmt", itertools.product(ROWS, FORMATS))
def test_fused_and_grouped_gemms_see_the_corrected_sums(isa, m, fmt):
    """Each stores its sums in its own way."""
    a, b, _, sums = case(m, 40, 96, fmt)
    options = {"a_format": fmt, "b_format": fmt}
    check(cpu.fused_gemm(*a, *b, epilogue="relu", **options), sums, lambda y: np.maximum(y, 0))
    check(cpu.grouped_gemm(*a, b[0][None], b[1][None], np.zeros((), np.int64), **options), sums)


def test_float16_results_overflow_only_where_float16_does(isa):
    a, b, _, _ = case(20, 33, 96, "e4m3")
    wide, narrow = (cpu.gemm(*a, *b, dtype=dtype) for dtype in ("float32", "float16"))
    assert narrow.tobytes() == wide.astype(np.float16).tobytes()
