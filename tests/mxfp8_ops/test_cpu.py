"""The native kernels against `numerics`, on every instruction set this machine has."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mxfp8_ops import cpu, native, numerics
from mxfp8_ops.errors import BackendError, ContractError, ShapeError

FORMATS = ("e4m3", "e5m2")
ROUNDINGS = ("ceil", "floor", "even")
DTYPES = tuple(numerics.VALUE_DTYPES.values())

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning")


@pytest.fixture(params=cpu.available_isas())
def isa(request: pytest.FixtureRequest):
    with cpu.forced_isa(request.param):
        yield request.param


def heavy_tailed(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Student's t with two degrees of freedom: outliers in every block, as in real weights and activations."""
    return np.random.default_rng(seed).standard_t(2, shape).astype(np.float32)


def assert_same(what: str, actual: np.ndarray, expected: np.ndarray, source: np.ndarray | None = None) -> None:
    """Fails with the first coordinate that differs, both values as stored, and the source value if shapes agree."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    both_nan = np.isnan(actual.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    bits = np.dtype(f"u{actual.itemsize}")
    wrong = np.argwhere((actual.view(bits) != expected.view(bits)) & ~both_nan)
    if len(wrong):
        at = tuple(map(int, wrong[0]))
        value = f", source {source[at]!r}" if source is not None and source.shape == actual.shape else ""
        got, want = actual.view(bits)[at], expected.view(bits)[at]
        pytest.fail(f"{what}: {len(wrong)} of {actual.size} differ; at {at} got {got:#x}, expected {want:#x}{value}")


def assert_within(what: str, actual: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    """Fails with the coordinate that exceeds its bound most."""
    error = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    excess = np.where(np.isnan(error), np.inf, error - bound)
    if error.size and excess.max() > 0:
        at = np.unravel_index(excess.argmax(), error.shape)
        pytest.fail(
            f"{what}: at {at} got {actual[at]}, expected {expected[at]} +- {bound[at]:.3g}, off by {error[at]:.3g}"
        )


def check_quantize(x: np.ndarray, formats=FORMATS, roundings=ROUNDINGS, axis: int = -1) -> None:
    for fmt, rounding in itertools.product(formats, roundings):
        options = {"axis": axis, "element_format": fmt, "scale_rounding": rounding}
        elements, scales = cpu.quantize(x, **options)
        expected_elements, expected_scales = numerics.quantize(x, **options)
        assert_same(f"scales, {x.dtype} {options}", scales, expected_scales)
        assert_same(f"elements, {x.dtype} {options}", elements, expected_elements, x)


# --- quantize: the bytes of numerics.quantize ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_every_upper_16_bit_pattern(isa, dtype):
    patterns = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32).astype(dtype)
    check_quantize(patterns.reshape(-1, 32))
    check_quantize(np.random.default_rng(0).permutation(patterns).reshape(-1, 32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_every_value_of_an_alone_standing_block(isa, dtype):
    """Every 16-bit pattern as the only value of its block: each meets the scale that it alone decides."""
    patterns = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32).astype(dtype)
    check_quantize(patterns[:, None])


def test_quantize_random_bits(isa):
    bits = np.random.default_rng(1).integers(0, 2**32, (256, 224), dtype=np.uint32)
    check_quantize(bits.view(np.float32))


def test_quantize_subnormals(isa):
    """float32 values below 2^-126, and blocks whose scale is 2^-127, itself subnormal."""
    bits = np.random.default_rng(2).integers(0, 2**24, (64, 64), dtype=np.uint32)
    signs = np.random.default_rng(3).integers(0, 2, bits.shape, dtype=np.uint32) << 31
    check_quantize((bits | signs).view(np.float32))


def test_quantize_ties_go_to_even(isa):
    """Values halfway between elements, at every binade an element has."""
    steps = np.arange(1, 64, dtype=np.float32) / 16
    ties = np.ldexp(np.float32(1) + steps[None, :] / 4, np.arange(-18, 10)[:, None]).astype(np.float32)
    x = np.concatenate([np.full((len(ties), 1), 256, np.float32), ties, -ties], 1)
    check_quantize(x)


def test_quantize_saturates_when_the_scale_is_rounded_down(isa):
    x = np.float32([[1.85, -1.8, 0.3, 0.1] + [0] * 28])
    elements, scales = cpu.quantize(x, scale_rounding="floor")
    assert scales[0, 0] == 119
    assert elements[0, :4].tobytes().hex(" ") == "7e fe 6a 5d"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantize_shows_a_bad_value_in_its_whole_block_and_nowhere_else(isa, bad):
    x = np.ones((2, 100), np.float32)
    x[1, 70] = bad
    elements, scales = cpu.quantize(x)
    assert scales.tolist() == [[119] * 4, [119, 119, 255, 119]]
    assert (elements[1, 64:96] == 0x7F).all()
    assert (np.delete(elements[1], range(64, 96)) == elements[0, 0]).all()


def test_quantize_keeps_the_sign_of_zero(isa):
    elements, scales = cpu.quantize(np.float32([[0.0, -0.0] * 16]))
    assert scales.tolist() == [[0]]
    assert elements.tolist() == [[0x00, 0x80] * 16]


@pytest.mark.parametrize("k", [1, 31, 32, 33, 95, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_partial_blocks_along_every_axis(isa, dtype, k):
    for axis, shape in enumerate([(k, 3, 70), (2, k, 70), (2, 3, k)]):
        x = heavy_tailed(shape).astype(dtype)
        x.flat[5] = np.nan
        check_quantize(x, roundings=("ceil",), axis=axis)
        check_quantize(x, formats=("e4m3",), roundings=("even",), axis=axis - 3)


@pytest.mark.parametrize("k", [7, 33, 200, 1607])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_many_rows_that_end_in_a_partial_block(isa, dtype, k):
    x = heavy_tailed((50, k)).astype(dtype)
    check_quantize(x)
    x[30, -1], x[31, 0] = np.inf, np.nan
    check_quantize(x, roundings=("ceil",))


@pytest.mark.parametrize("shape", [(0,), (0, 32), (3, 0), (2, 0, 5), (0, 0)])
def test_quantize_and_dequantize_empty(shape):
    for axis in range(len(shape)):
        x = np.empty(shape, np.float32)
        elements, scales = cpu.quantize(x, axis=axis)
        expected_elements, expected_scales = numerics.quantize(x, axis=axis)
        assert (elements.shape, scales.shape) == (expected_elements.shape, expected_scales.shape)
        assert cpu.dequantize(elements, scales, axis=axis).shape == shape


def test_quantize_result_does_not_depend_on_threads():
    x = heavy_tailed((3000, 300))
    one, many = cpu.quantize(x, threads=1), cpu.quantize(x, threads=5)
    assert_same("elements", many[0], one[0])
    assert_same("scales", many[1], one[1])


# --- dequantize ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", numerics.VALUE_DTYPES)
def test_dequantize_every_code_at_every_kind_of_scale(isa, fmt, dtype):
    codes = np.array([0, 1, 2, 3, 9, 10, 16, 17, 126, 127, 128, 238, 239, 246, 247, 253, 254, 255], np.uint8)
    elements = np.tile(np.arange(256, dtype=np.uint8), (len(codes), 1))
    scales = np.repeat(codes[:, None], 8, 1)
    for axis, turn in ((-1, elements), (0, elements.T)):
        actual = cpu.dequantize(turn, scales if axis else scales.T, axis=axis, element_format=fmt, dtype=dtype)
        expected = numerics.dequantize(turn, scales if axis else scales.T, axis=axis, element_format=fmt, dtype=dtype)
        assert_same(f"{fmt} -> {dtype}, axis {axis}", actual, np.ascontiguousarray(expected))


# --- embedding: the bytes of numerics.embedding ----------------------------------------------------------------------


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", numerics.VALUE_DTYPES)
def test_embedding_of_every_code_at_every_scale(isa, dtype, fmt, index):
    """All codes in whole blocks, in an order of each row's own, and a partial block behind them."""
    codes = np.random.default_rng(0).permuted(np.tile(np.arange(256, dtype=np.uint8), (256, 1)), axis=1)
    codes = np.concatenate([codes, codes[:, :13]], 1)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 9, 1)
    ids = np.random.default_rng(1).permutation(np.arange(-256, 256)).astype(index)
    options = {"b_format": fmt, "dtype": dtype}
    expected = numerics.embedding(ids, codes, scales, **options)
    assert_same(f"{options}", cpu.embedding(ids, codes, scales, **options), expected)


@pytest.mark.parametrize("v", [1, 7])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3), (600,)], ids=str)
@pytest.mark.parametrize("d", [0, 1, 31, 32, 33, 96, 700])
def test_embedding_of_any_shape(isa, d, shape, v):
    b = numerics.quantize(heavy_tailed((v, d)))
    ids = np.random.default_rng(0).integers(-v, v, shape)
    for threads in (1, 3):
        assert_same(f"{threads} threads", cpu.embedding(ids, *b, threads=threads), numerics.embedding(ids, *b))


def test_embedding_of_strided_operands():
    elements, scales = numerics.quantize(heavy_tailed((14, 70)))
    ids = np.array([[3, 0, -1], [6, -7, 3]]).T
    for table in ((elements[::2], scales[::2]), (np.asfortranarray(elements[:7]), np.asfortranarray(scales[:7]))):
        assert_same("strided", cpu.embedding(ids, *table), numerics.embedding(ids, *table))


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(("v", "wrong"), [(7, 7), (7, -8), (1, 1), (0, 0), (7, -(2**31)), (7, 2**31 - 1)])
@pytest.mark.parametrize("shape", [(2, 3), (1,), ()])
def test_embedding_names_an_index_without_a_row_as_the_reference_does(shape, v, wrong, index):
    b, ids = numerics.quantize(heavy_tailed((v, 70))), np.full(shape, -1 if v else 0, index)
    ids[(-1,) * ids.ndim] = wrong
    with pytest.raises(ShapeError) as expected:
        numerics.embedding(ids, *b)
    with pytest.raises(ShapeError) as found:
        cpu.embedding(ids, *b)
    assert str(found.value) == str(expected.value)


# --- the gemms: within gemm_error_bound of float64 -------------------------------------------------------------------

SHAPES = [
    (0, 5, 64),
    (3, 0, 64),
    (3, 5, 0),
    (1, 70, 5),
    (1, 9, 2048),
    (3, 33, 2100),
    (16, 20, 2048),
    (17, 4, 33),
    (64, 65, 2080),
    (100, 30, 4100),
    (300, 7, 1000),
]


def quantized(shape: tuple[int, ...], fmt: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    return numerics.quantize(heavy_tailed(shape, seed), element_format=fmt)


def check_gemm(a, b, bias, formats: tuple[str, str], dtype: str = "float32") -> None:
    a_format, b_format = formats
    options = {"a_format": a_format, "b_format": b_format}
    x, weight = numerics.dequantize(*a, element_format=a_format), numerics.dequantize(*b, element_format=b_format)
    assert_within(
        f"{options} -> {dtype}",
        cpu.gemm(*a, *b, bias, **options, dtype=dtype),
        numerics.gemm(*a, *b, bias, **options),
        numerics.gemm_error_bound(x, weight, dtype, bias),
    )


def check_weight_gemm(x, b, b_format: str = "e4m3") -> None:
    assert_within(
        f"{x.dtype} x {b_format}",
        cpu.weight_gemm(x, *b, b_format=b_format),
        numerics.weight_gemm(x, *b, b_format=b_format),
        numerics.gemm_error_bound(x, numerics.dequantize(*b, element_format=b_format)),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemm(isa, shape):
    m, n, k = shape
    for a_format, b_format in (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")):
        a, b = quantized((m, k), a_format, 1), quantized((n, k), b_format, 2)
        check_gemm(a, b, heavy_tailed((n,), 3), (a_format, b_format))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_weight_gemm(isa, shape, x_dtype):
    m, n, k = shape
    x, b, bias = heavy_tailed((m, k), 1).astype(x_dtype), quantized((n, k), "e4m3", 2), heavy_tailed((n,), 3)
    actual, expected = cpu.weight_gemm(x, *b, bias), numerics.weight_gemm(x, *b, bias)
    assert_within(str(x_dtype), actual, expected, numerics.gemm_error_bound(x, numerics.dequantize(*b), bias=bias))


# Around the limits of the kernels for few rows, and of their tiles and groups of rows.
ROW_COUNTS = (*range(1, 10), 11, 12, 13, 15, 16, 17, 18, 24, 25, 31, 33, 40, 63, 64, 81, 192, 193, 203, 255, 257, 262)


@pytest.mark.parametrize("m", ROW_COUNTS)
def test_gemms_at_every_row_tile(isa, m):
    k = 600 if m < 100 else 70
    a, b = quantized((m, k), "e4m3", 1), quantized((5, k), "e4m3", 2)
    check_gemm(a, b, heavy_tailed((5,), 3), ("e4m3", "e4m3"))
    check_weight_gemm(heavy_tailed((m, k), 4), b)
    check_weight_gemm(heavy_tailed((m, k), 4).astype(ml_dtypes.bfloat16), b)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 33, 48, 63, 65, 130])
def test_gemms_at_every_column_tile(isa, n):
    for m in (1, 7, 17, 40, 200):
        a, b = quantized((m, 130), "e4m3", 1), quantized((n, 130), "e4m3", 2)
        check_gemm(a, b, None, ("e4m3", "e4m3"))
        check_weight_gemm(heavy_tailed((m, 130), 4), b)


@pytest.mark.parametrize("m", [1, 5, 20, 200])
def test_gemms_of_every_small_depth(isa, m):
    for k in range(1, 101):
        a, b = quantized((m, k), "e4m3", k), quantized((3, k), "e4m3", k + 1)
        check_gemm(a, b, None, ("e4m3", "e4m3"))
        check_weight_gemm(heavy_tailed((m, k), k), b)
        check_weight_gemm(heavy_tailed((m, k), k).astype(ml_dtypes.bfloat16), b)


@pytest.mark.parametrize("m", [1, 6, 7, 16, 20, 200])
@pytest.mark.parametrize("b_format", FORMATS)
def test_gemms_with_every_kind_of_scale_in_one_row(isa, m, b_format):
    """Scales too small and too large for a shortcut, between ordinary ones; the values of A keep sums finite."""
    codes = [0, 1, 2, 3, 126, 127, 239 if b_format == "e5m2" else 246]
    rng = np.random.default_rng(m)
    b = rng.integers(0, 0x7B, (70, 1600), dtype=np.uint8) | rng.choice([0, 0x80], (70, 1600)).astype(np.uint8)
    b_scales = rng.choice(codes, (70, 50)).astype(np.uint8)
    b_scales[10:] = 120  # ordinary rows
    b_scales[20, 49] = b_scales[40, 0] = 1
    for a_scale in (100, 20, 2):
        a = rng.integers(0, 0x7B, (m, 1600), dtype=np.uint8), np.full((m, 50), a_scale, np.uint8)
        check_gemm(a, (b, b_scales), None, ("e4m3", b_format))
    for scale in (2.0**-20, 2.0**-60, 2.0**-120):
        check_weight_gemm(heavy_tailed((m, 1600)) * np.float32(scale), (b, b_scales), b_format)


@pytest.mark.parametrize("m", [1, 8, 20])
def test_weight_gemm_of_values_that_span_all_of_float32(isa, m):
    """No power of two brings these into the range where small products stay normal."""
    x = np.ldexp(heavy_tailed((m, 200)), np.random.default_rng(1).integers(-120, 90, (m, 200))).astype(np.float32)
    check_weight_gemm(x, quantized((9, 200), "e4m3", 2))
    check_weight_gemm(x.astype(ml_dtypes.bfloat16), quantized((9, 200), "e4m3", 2))
    check_weight_gemm(np.zeros((m, 200), np.float32), quantized((9, 200), "e4m3", 2))


@pytest.mark.parametrize("m", [1, 8, 20, 200])
@pytest.mark.parametrize("codes", [(254,), (255,), (0, 255)])
def test_gemms_show_overflow_and_nan_scales_in_their_columns_only(isa, m, codes):
    a, b = quantized((m, 640), "e4m3", 1), quantized((70, 640), "e4m3", 2)
    x = heavy_tailed((m, 640), 3)
    clean, weight_clean = cpu.gemm(*a, *b), cpu.weight_gemm(x, *b)
    for i, code in enumerate(codes):
        b[1][33, i], b[1][69, 19 - i] = code, code
    columns = [33, 69]
    others = [j for j in range(70) if j not in columns]
    for y, expected in ((cpu.gemm(*a, *b), clean), (cpu.weight_gemm(x, *b), weight_clean)):
        assert not np.isfinite(y[:, columns]).any()
        assert_same("the other columns", y[:, others], expected[:, others])


@pytest.mark.parametrize("m", [1, 8, 20])
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_weight_gemm_shows_nan_and_inf_of_x_in_their_rows(isa, m, x_dtype):
    x, b = heavy_tailed((m, 200)).astype(x_dtype), quantized((9, 200), "e4m3", 2)
    x[0, 150], x[m // 2, 7] = np.inf, np.nan
    b[0][4, 150] = 0  # times infinity: NaN
    y, expected = cpu.weight_gemm(x, *b), numerics.weight_gemm(x, *b)
    assert_same("NaN", np.isnan(y), np.isnan(expected))
    assert_same("Inf", np.isinf(y), np.isinf(expected))


@pytest.mark.parametrize("m", [1, 8, 20, 200])
def test_gemms_with_blocks_of_zeros(isa, m):
    """Padding: scale code 0, all elements zero, in A, in B, in both; and the result is zero, not nearly."""
    x, w = heavy_tailed((m, 640), 1), heavy_tailed((70, 640), 2)
    x[:, 64:160], w[:, 128:256], w[5], w[33, :32] = 0, 0, 0, 0
    a, b = numerics.quantize(x), numerics.quantize(w)
    check_gemm(a, b, None, ("e4m3", "e4m3"))
    check_weight_gemm(x, b)
    assert (cpu.gemm(*a, *b)[:, 5] == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gemm_rounds_its_result_once(isa, dtype):
    check_gemm(quantized((5, 200), "e4m3", 1), quantized((40, 200), "e5m2", 2), heavy_tailed((40,), 3), FORMATS, dtype)


def test_gemm_without_a_bias_and_without_k_is_zero(isa):
    y = cpu.gemm(*quantized((3, 0), "e4m3", 1), *quantized((20, 0), "e4m3", 2))
    assert_same("K = 0", y, np.zeros((3, 20), np.float32))


def test_the_bound_catches_a_wrong_scale_of_one_block():
    """So the tests above can fail: a scale one too high in one block of 64 is far outside the bound."""
    a, b = quantized((3, 2048), "e4m3", 1), quantized((5, 2048), "e4m3", 2)
    wrong = (b[0], b[1].copy())
    wrong[1][:, 40] += 1
    with pytest.raises(pytest.fail.Exception, match="off by"):
        assert_within(
            "wrong",
            cpu.gemm(*a, *wrong),
            numerics.gemm(*a, *b),
            numerics.gemm_error_bound(numerics.dequantize(*a), numerics.dequantize(*b)),
        )


@pytest.mark.parametrize("rows", [1, 20, 200])
@pytest.mark.parametrize("b_format", FORMATS)
@pytest.mark.parametrize("a_format", FORMATS)
def test_gemm_is_exact_at_the_ends_of_the_scale_range(isa, a_format, b_format, rows):
    """Tiny times huge, tiny times tiny, huge times tiny: what a flushing or overflowing shortcut would lose."""
    rng = np.random.default_rng(4)
    highest = {"e4m3": 246, "e5m2": 239}  # above, the largest element is infinite in float32, the reference's too
    low_and_high = [(0, highest[b_format]), (highest[a_format], 0), (1, 235), (3, 200), (9, 150), (60, 60), (127, 10)]
    for a_scale, b_scale in low_and_high:
        a, b = rng.integers(0, 0x7B, (rows, 96), dtype=np.uint8), rng.integers(0x80, 0xFB, (9, 96), dtype=np.uint8)
        a_scales, b_scales = np.full((rows, 3), a_scale, np.uint8), np.full((9, 3), b_scale, np.uint8)
        if a_scale <= 127:
            b_scales[4] = 127  # one ordinary row among the extreme ones
        check_gemm((a, a_scales), (b, b_scales), None, (a_format, b_format))


def test_gemms_of_many_rows_a_few_of_which_need_the_exact_kernel(isa):
    # Rows are packed 256 or 512 at a time: of these strips one cannot be held in bfloat16, and the others can.
    a, b = quantized((1100, 96), "e4m3", 1), quantized((70, 96), "e4m3", 2)
    a[1][300:303] = 1
    check_gemm(a, b, None, ("e4m3", "e4m3"))
    x = heavy_tailed((1100, 96))
    x[300:303] = 2.0**-130
    check_weight_gemm(x, b)
    check_weight_gemm(x.astype(ml_dtypes.bfloat16), b)


@pytest.mark.parametrize("rows", [20, 200])
@pytest.mark.parametrize("which", ["a", "b"])
def test_gemm_shows_a_nan_scale_in_its_row_or_column_only(isa, which, rows):
    a, b = quantized((rows, 96), "e4m3", 1), quantized((30, 96), "e4m3", 2)
    clean = cpu.gemm(*a, *b)
    (a if which == "a" else b)[1][7, 1] = 255
    y = cpu.gemm(*a, *b)
    expected = np.zeros(y.shape, bool)
    expected[(7, slice(None)) if which == "a" else (slice(None), 7)] = True
    assert_same("where NaN is", np.isnan(y), expected)
    assert_same("the rest", np.where(expected, 0, y), np.where(expected, 0, clean))


@pytest.mark.parametrize("rows", [2, 20, 200])
@pytest.mark.parametrize("fmt", FORMATS)
def test_gemm_shows_nan_and_inf_elements(isa, fmt, rows):
    a, b = quantized((rows, 64), "e4m3", 1), quantized((20, 64), fmt, 2)
    a[0][1, 9] = 0xFF
    b[0][3, 40], b[0][4, 5], b[0][5, 6] = 0x7F, 0xFF, 0x7C  # 0x7c: infinity in e5m2, a number in e4m3
    expected = numerics.gemm(*a, *b, b_format=fmt)
    y = cpu.gemm(*a, *b, b_format=fmt)
    assert_same("NaN", np.isnan(y), np.isnan(expected))
    assert_same("Inf", np.isinf(y), np.isinf(expected))


def test_weight_gemm_bfloat16_subnormals_are_not_flushed(isa):
    x = np.full((1, 64), 2.0**-130, ml_dtypes.bfloat16)
    elements, scales = np.full((4, 64), 0x38, np.uint8), np.full((4, 2), 127 + 20, np.uint8)  # 1.0 * 2^20
    assert_same("y", cpu.weight_gemm(x, elements, scales), np.full((1, 4), 64 * 2.0**-110, np.float32))


@pytest.mark.parametrize("m", [1, 9, 12, 40])
@pytest.mark.parametrize("b_format", FORMATS)
def test_a_column_does_not_depend_on_its_neighbours(isa, m, b_format):
    """Kernels decode many columns at once: what is unusual in some must not change the bits of the others."""
    a, (b, b_scales) = quantized((m, 300), "e4m3", 1), quantized((70, 300), b_format, 2)
    ordinary = cpu.gemm(*a, b, b_scales, b_format=b_format)
    b[3, 7] = b[40, 299] = 0x7F  # NaN
    b[20] = 0x01  # subnormal
    b[33] = 0
    b_scales[50, 1], b_scales[60, 9], b_scales[65, 4] = 255, 200, 0
    bad, finite = [3, 40, 50], [20, 33, 60, 65]
    y = cpu.gemm(*a, b, b_scales, b_format=b_format)
    assert np.isnan(y[:, bad]).all()
    assert_same("the others", np.delete(y, bad + finite, axis=1), np.delete(ordinary, bad + finite, axis=1))
    weight = numerics.dequantize(b[finite], b_scales[finite], element_format=b_format)
    assert_within(
        "unusual numbers",
        y[:, finite],
        numerics.gemm(*a, b[finite], b_scales[finite], b_format=b_format),
        numerics.gemm_error_bound(numerics.dequantize(*a), weight),
    )


def test_gemm_broadcasts_leading_dimensions(isa):
    a, b = quantized((2, 1, 5, 64), "e4m3", 1), quantized((3, 7, 64), "e4m3", 2)
    check_gemm(a, b, heavy_tailed((7,), 3), ("e4m3", "e4m3"))
    assert cpu.gemm(*a, *b).shape == (2, 3, 5, 7)


def test_gemm_of_a_vector(isa):
    a, b = quantized((64,), "e4m3", 1), quantized((7, 64), "e4m3", 2)
    assert cpu.gemm(*a, *b).shape == (7,)
    check_gemm(a, b, None, ("e4m3", "e4m3"))


# --- pack ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_is_quantize_of_n_by_k(isa, dtype, transposed):
    for rows, columns in ((70, 301), (301, 70), (1, 1), (5, 0)):
        w = heavy_tailed((rows, columns + 3)).astype(dtype)[:, :columns]  # rows are strided
        packed = cpu.pack(w, transposed=transposed)
        weight = w.T if transposed else w
        expected = numerics.quantize(np.ascontiguousarray(weight))
        assert_same("elements", packed.elements, expected[0])
        assert_same("scales", packed.scales, expected[1])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("k", [500, 544])
@pytest.mark.parametrize("fmt", FORMATS)
def test_pack_measures_its_error(isa, transposed, fmt, k):
    w = heavy_tailed((300, 550))[:, :k]  # rows are strided
    packed = cpu.pack(w, transposed=transposed, element_format=fmt)
    back = numerics.dequantize(packed.elements, packed.scales, element_format=fmt).astype(np.float64)
    error = (w.T if transposed else w) - back
    # Sums of positive doubles in another order: relative error below (number of terms) * 2^-53.
    tolerance = w.size * 2.0**-53
    assert packed.signal == pytest.approx((w.astype(np.float64) ** 2).sum(), rel=tolerance, abs=0)
    assert packed.noise == pytest.approx((error**2).sum(), rel=tolerance, abs=0)
    assert packed.first_nonfinite is None


@pytest.mark.parametrize("transposed", [False, True])
def test_pack_finds_the_first_bad_value_and_leaves_its_block_out_of_the_sums(isa, transposed):
    w = np.ones((192, 320), np.float32)
    w[150, 3], w[17, 250], w[17, 270] = np.nan, np.inf, np.nan
    packed = cpu.pack(w, transposed=transposed)
    assert packed.first_nonfinite == (17, 250)
    assert (packed.scales == 255).sum() == 3
    assert packed.signal == w.size - 3 * 32
    assert packed.noise == 0


def test_pack_sums_do_not_depend_on_threads():
    w = heavy_tailed((3000, 400))
    one, many = cpu.pack(w, threads=1), cpu.pack(w, threads=5)
    assert (one.signal, one.noise) == (many.signal, many.noise)


# --- the library -----------------------------------------------------------------------------------------------------


def test_subnormals_survive_a_caller_that_flushes_them(isa):
    torch = pytest.importorskip("torch")
    x = np.full((300, 64), 3 * 2.0**-130, np.float32)
    expected = numerics.quantize(x)
    back = numerics.dequantize(*expected)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        elements, scales = cpu.quantize(x, threads=1)
        y = cpu.dequantize(elements, scales, threads=1)
        product = cpu.gemm(elements[:1], scales[:1], np.full((4, 64), 0x38, np.uint8), np.full((4, 2), 127, np.uint8))
        still_flushing = bool(torch.tensor([2.0**-130]) * 1 == 0)
    finally:
        torch.set_flush_denormal(False)
    assert_same("elements", elements, expected[0])
    assert_same("scales", scales, expected[1])
    assert_same("dequantized", y, back)
    assert_same("product", product, np.full((1, 4), 64 * 3 * 2.0**-130, np.float32))
    assert still_flushing, "the caller's mode was not restored"


def test_concurrent_calls_do_not_disturb_each_other():
    a, b = quantized((40, 512), "e4m3", 1), quantized((300, 512), "e4m3", 2)
    expected = cpu.gemm(*a, *b)
    with ThreadPoolExecutor(8) as pool:
        for y in pool.map(lambda _: cpu.gemm(*a, *b, threads=4), range(200)):
            assert_same("y", y, expected)


def _quantize_in_child(queue) -> None:
    queue.put(cpu.quantize(np.ones((4000, 320), np.float32), threads=4)[1].min())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_threads_work_after_fork():
    cpu.quantize(np.ones((4000, 320), np.float32), threads=4)  # the parent's threads run
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_quantize_in_child, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=20) == 119
    finally:
        child.kill()
        child.join()


def test_the_environment_chooses_the_instruction_set():
    code = "from mxfp8_ops import cpu; print(cpu.isa())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"MXFP8_ISA": "portable"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "portable"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"MXFP8_ISA": "mmx"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "BackendError: MXFP8_ISA: 'mmx'; expected one of" in run.stderr


def test_importing_loads_no_native_code():
    code = "from mxfp8_ops import cpu, native; assert native.load.cache_info().currsize == 0"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_forcing_an_unknown_instruction_set_fails():
    with pytest.raises(BackendError, match=r"isa: 'neon-x'; expected one of .*portable; name one"):
        cpu.force_isa("neon-x")


def test_a_missing_library_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("mxfp8_ops.__path__", [str(tmp_path)])
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(BackendError, match=r"no libmxfp8_ops\.\w+ in .*; expected .*; install the project with pip"):
        cpu.library_path()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, e, s: cpu.quantize(x.astype(np.float64)), ShapeError, "quantize: dtype float64; expected one of"),
        (lambda x, e, s: cpu.quantize(x, axis=2), ShapeError, "quantize: axis 2 of a 2-D tensor"),
        (lambda x, e, s: cpu.quantize(x, element_format="e3m4"), ContractError, "element_format: 'e3m4'"),
        (lambda x, e, s: cpu.quantize(x, scale_rounding="up"), ContractError, "scale_rounding: 'up'"),
        (lambda x, e, s: cpu.dequantize(e, s[:, :1]), ShapeError, r"dequantize: scales have shape \(4, 1\)"),
        (lambda x, e, s: cpu.dequantize(e.view(np.int8), s), ShapeError, "elements have dtype int8; expected uint8"),
        (lambda x, e, s: cpu.gemm(e, s, e[:, :32], s[:, :1]), ShapeError, r"gemm: operands \(4, 64\) and \(4, 32\)"),
        (lambda x, e, s: cpu.gemm(e, s, e, s, np.zeros(3, np.float32)), ShapeError, r"bias has shape \(3,\)"),
        (lambda x, e, s: cpu.weight_gemm(x, e, s[:, :1]), ShapeError, r"scales have shape \(4, 1\)"),
        (lambda x, e, s: cpu.pack(x[0]), ShapeError, r"pack: weight has shape \(64,\); expected a matrix"),
    ],
)
def test_bad_arguments_are_refused_before_they_reach_native_code(call, error, message):
    x = np.ones((4, 64), np.float32)
    with pytest.raises(error, match=message):
        call(x, *numerics.quantize(x))


FLOAT32, E4M3, MATRIX = 1, 17, (1, 32)
UNKNOWN = [0, 2, 18, 99, -1]
"""Codes of no dtype, of uint8, of another float8, of nothing."""


def abi_arguments(entry: str) -> dict[str, object]:
    """Returns valid arguments of an entry point of the C ABI, in order; the codes are those the tests replace."""
    x, y, codes, scales = (np.zeros(32, t).ctypes.data_as(ctypes.c_void_p) for t in ("f4", "f4", "u1", "u1"))
    threads = {"threads": 1}
    quantized = {"element_format": E4M3, "scale_rounding": 0, "elements": codes, "scales": scales}
    product = {"b": codes, "b_scales": scales, "bias": None, "m": 1, "n": 1, "k": 32}
    result = {"y_dtype": FLOAT32, "y": y, "y_stride": 1, **threads}
    arguments: dict[str, dict[str, object]] = {
        "mxfp8_quantize": {"value_dtype": FLOAT32, "x": x, "outer": 1, "k": 32, "inner": 1, **quantized, **threads},
        "mxfp8_dequantize": {
            "element_format": E4M3, "elements": codes, "scales": scales, "outer": 1, "k": 32, "inner": 1,
            "value_dtype": FLOAT32, "y": y, **threads,
        },
        "mxfp8_gemm": {"a_format": E4M3, "a": codes, "a_scales": scales, "b_format": E4M3, **product, **result},
        "mxfp8_weight_gemm": {
            "x_dtype": FLOAT32, "x": x, "x_stride": 32, "activation_dtype": FLOAT32, "b_format": E4M3, **product,
            **result,
        },
        "mxfp8_pack": {
            "value_dtype": FLOAT32, "w": x, "w_stride": 32, "transposed": 0, "n": 1, "k": 32, **quantized,
            "stats": ctypes.byref(native.PackStats()), **threads,
        },
    }  # fmt: skip
    return arguments[entry]


@pytest.mark.parametrize(
    ("entry", "codes"),
    [
        ("mxfp8_quantize", ("value_dtype", "element_format", "scale_rounding")),
        ("mxfp8_dequantize", ("value_dtype", "element_format")),
        ("mxfp8_gemm", ("a_format", "b_format", "y_dtype")),
        ("mxfp8_weight_gemm", ("x_dtype", "activation_dtype", "b_format", "y_dtype")),
        ("mxfp8_pack", ("value_dtype", "element_format", "scale_rounding")),
    ],
)
def test_every_entry_point_refuses_codes_it_does_not_know(entry, codes):
    function, valid = getattr(native.load(), entry), abi_arguments(entry)
    assert function(*valid.values()) == 0
    known = {"element_format": (17, 19), "a_format": (17, 19), "b_format": (17, 19), "scale_rounding": (0, 1, 2)}
    known["activation_dtype"] = (1, 16)
    for name in codes:
        others = [*UNKNOWN, 1, 10, 16, 17, 19, 3]
        for code in {*others} - {*known.get(name, (1, 10, 16))}:
            assert function(*{**valid, name: code}.values()) == -1, f"{name} {code}"
            with pytest.raises(ShapeError, match=f"{entry}: {name} is {code}; expected .*; "):
                native.check(entry, -1)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists() or platform.machine() != "x86_64", reason="asks Linux on x86-64")
def test_the_instruction_sets_are_those_that_linux_names() -> None:
    # Linux leaves out a flag whose registers it does not save, as the library does by asking XGETBV.
    flags = set(re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)[1].split())
    needed = {"portable": set(), "avx2": {"avx2", "fma", "f16c"}}
    needed["avx2_vnni"] = needed["avx2"] | {"avx_vnni"}
    needed["avx512"] = needed["avx2"] | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    needed["avx512_vnni"] = needed["avx512"] | {"avx512vbmi", "avx512_vnni"}
    needed["avx512_bf16"] = needed["avx512"] | {"avx512vbmi", "avx512_bf16"}
    needed["amx_bf16"] = needed["avx512_bf16"] | {"amx_tile", "amx_bf16"}
    assert set(cpu.available_isas()) == {isa for isa, wanted in needed.items() if wanted <= flags}
