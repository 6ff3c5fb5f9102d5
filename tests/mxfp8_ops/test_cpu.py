"""The native gemms, within their bound on every instruction set.

What other backends do alike is in test_backends.py and test_bad_calls.py; packing is in test_library.py.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from compare import FORMATS, assert_same, assert_within, heavy_tailed
from grids import looped, pairwise

from mxfp8_ops import cpu, numerics, numpy_nodes

DTYPES = tuple(numerics.VALUE_DTYPES.values())
BF16 = np.dtype(ml_dtypes.bfloat16)

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning")


# --- the gemms: within gemm_error_bound of float64 -------------------------------------------------------------------

SHAPES = [
    *((0, 5, 64), (3, 0, 64), (3, 5, 0), (1, 70, 5), (1, 9, 2048), (3, 33, 2100), (16, 20, 2048), (17, 4, 33)),
    *((64, 65, 2080), (100, 30, 4100), (300, 7, 1000)),
]


@functools.cache
def codes_of(shape: tuple[int, ...], fmt: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    return numpy_nodes.quantize(heavy_tailed(shape, seed), element_format=fmt)


def quantized(shape: tuple[int, ...], fmt: str, seed: int) -> tuple[np.ndarray, ...]:
    """Returns codes that a test may change: every instruction set begins with the same."""
    return tuple(codes.copy() for codes in codes_of(shape, fmt, seed))


def check_gemm(a, b, bias, formats: tuple[str, str], dtype: str = "float32") -> None:
    a_format, b_format = formats
    options = {"a_format": a_format, "b_format": b_format}
    x, weight = numpy_nodes.dequantize(*a, element_format=a_format), numpy_nodes.dequantize(*b, element_format=b_format)
    assert_within(
        cpu.gemm(*a, *b, bias, **options, dtype=dtype),
        numpy_nodes.gemm(*a, *b, bias, **options),
        numpy_nodes.gemm_error_bound(x, weight, dtype, bias),
        f"{options} -> {dtype}",
    )


def check_weight_gemm(x, b, bias=None, b_format: str = "e4m3") -> None:
    assert_within(
        cpu.weight_gemm(x, *b, bias, b_format=b_format),
        numpy_nodes.weight_gemm(x, *b, bias, b_format=b_format),
        numpy_nodes.gemm_error_bound(x, numpy_nodes.dequantize(*b, element_format=b_format), bias=bias),
        f"{x.dtype} x {b_format}",
    )


@looped("shape, formats", pairwise(shape=SHAPES, formats=[("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")]))
def test_gemm_of_every_shape_is_within_the_bound(isa, shape, formats):
    m, n, k = shape
    check_gemm(quantized((m, k), formats[0], 1), quantized((n, k), formats[1], 2), heavy_tailed((n,), 3), formats)


@looped("shape, x_dtype", pairwise(shape=SHAPES, x_dtype=DTYPES))
def test_weight_gemm_of_every_shape_is_within_the_bound(isa, shape, x_dtype):
    m, n, k = shape
    check_weight_gemm(heavy_tailed((m, k), 1).astype(x_dtype), quantized((n, k), "e4m3", 2), heavy_tailed((n,), 3))


# Around the limits of the kernels for few rows, and of their tiles and groups of rows.
ROW_COUNTS = (*range(1, 10), 11, 12, 13, 15, 16, 17, 18, 24, 25, 31, 33, 40, 63, 64, 81, 192, 193, 203, 255, 257, 262)


@looped("m", ROW_COUNTS)
def test_gemms_are_within_the_bound_at_every_row_tile(isa, m):
    k = 600 if m < 100 else 70
    a, b = quantized((m, k), "e4m3", 1), quantized((5, k), "e4m3", 2)
    check_gemm(a, b, heavy_tailed((5,), 3), ("e4m3", "e4m3"))
    check_weight_gemm(heavy_tailed((m, k), 4), b)
    check_weight_gemm(heavy_tailed((m, k), 4).astype(ml_dtypes.bfloat16), b)


@looped("n", [1, 2, 15, 16, 17, 33, 48, 63, 65, 130])
def test_gemms_are_within_the_bound_at_every_column_tile(isa, n):
    for m in (1, 7, 17, 40, 200):
        a, b = quantized((m, 130), "e4m3", 1), quantized((n, 130), "e4m3", 2)
        check_gemm(a, b, None, ("e4m3", "e4m3"))
        check_weight_gemm(heavy_tailed((m, 130), 4), b)


@looped("m", [1, 5, 20, 200])
def test_gemms_are_within_the_bound_at_every_small_depth(isa, m):
    for k in range(1, 101):
        a, b = quantized((m, k), "e4m3", k), quantized((3, k), "e4m3", k + 1)
        check_gemm(a, b, None, ("e4m3", "e4m3"))
        check_weight_gemm(heavy_tailed((m, k), k), b)
        check_weight_gemm(heavy_tailed((m, k), k).astype(ml_dtypes.bfloat16), b)


SIZES_OF_A = [(100, 2.0**-20), (20, 2.0**-60), (2, 2.0**-120)]
"""A scale code of quantized values, and a factor of others."""


@looped("m, b_format, sizes", pairwise(m=[1, 6, 7, 200], b_format=FORMATS, sizes=SIZES_OF_A))
def test_gemms_take_every_kind_of_scale_in_one_row(isa, m, b_format, sizes):
    """Scales too small and too large for a shortcut, between ordinary ones; the values of A keep sums finite."""
    codes = [0, 1, 2, 3, 126, 127, 239 if b_format == "e5m2" else 246]
    rng = np.random.default_rng(m)
    b = rng.integers(0, 0x7B, (70, 1120), dtype=np.uint8) | rng.choice([0, 0x80], (70, 1120)).astype(np.uint8)
    b_scales = rng.choice(codes, (70, 35)).astype(np.uint8)
    b_scales[10:] = 120  # ordinary rows
    b_scales[20, 34] = b_scales[40, 0] = 1
    a = rng.integers(0, 0x7B, (m, 1120), dtype=np.uint8), np.full((m, 35), sizes[0], np.uint8)
    check_gemm(a, (b, b_scales), None, ("e4m3", b_format))
    check_weight_gemm(heavy_tailed((m, 1120)) * np.float32(sizes[1]), (b, b_scales), b_format=b_format)


@looped("m", [1, 8, 20])
def test_weight_gemm_takes_values_that_span_all_of_float32(isa, m):
    """No power of two brings these into the range where small products stay normal."""
    x = np.ldexp(heavy_tailed((m, 200)), np.random.default_rng(1).integers(-120, 90, (m, 200))).astype(np.float32)
    check_weight_gemm(x, quantized((9, 200), "e4m3", 2))
    check_weight_gemm(x.astype(ml_dtypes.bfloat16), quantized((9, 200), "e4m3", 2))
    check_weight_gemm(np.zeros((m, 200), np.float32), quantized((9, 200), "e4m3", 2))


@looped("m, codes", pairwise(m=[1, 8, 20, 200], codes=[(254,), (255,), (0, 255)]))
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
        assert_same(y[:, others], expected[:, others], "the other columns")


def assert_as_bad(y: np.ndarray, expected: np.ndarray) -> None:
    """Fails unless NaN and infinities are where they are expected."""
    assert_same(np.isnan(y), np.isnan(expected), "NaN")
    assert_same(np.isinf(y), np.isinf(expected), "Inf")


@looped("m, x_dtype", pairwise(m=[1, 8, 20], x_dtype=DTYPES))
def test_weight_gemm_shows_nan_and_inf_of_x_in_their_rows(isa, m, x_dtype):
    x, b = heavy_tailed((m, 200)).astype(x_dtype), quantized((9, 200), "e4m3", 2)
    x[0, 150], x[m // 2, 7] = np.inf, np.nan
    b[0][4, 150] = 0  # times infinity: NaN
    assert_as_bad(cpu.weight_gemm(x, *b), numpy_nodes.weight_gemm(x, *b))


@looped("rows, fmt", pairwise(rows=[2, 20, 200], fmt=FORMATS))
def test_gemm_shows_nan_and_inf_of_elements_and_scales(isa, fmt, rows):
    a, b = quantized((rows, 64), "e4m3", 1), quantized((20, 64), fmt, 2)
    a[0][1, 9], a[1][rows - 1, 1] = 0xFF, 255
    b[0][3, 40], b[0][4, 5], b[0][5, 6] = 0x7F, 0xFF, 0x7C  # 0x7c: infinity in e5m2, a number in e4m3
    assert_as_bad(cpu.gemm(*a, *b, b_format=fmt), numpy_nodes.gemm(*a, *b, b_format=fmt))


@looped("m", [1, 8, 20, 200])
def test_blocks_of_zeros_add_nothing(isa, m):
    """Padding: scale code 0, all elements zero, in A, in B, in both; and the result is zero, not nearly."""
    x, w = heavy_tailed((m, 640), 1), heavy_tailed((70, 640), 2)
    x[:, 64:160], w[:, 128:256], w[5], w[33, :32] = 0, 0, 0, 0
    a, b = numpy_nodes.quantize(x), numpy_nodes.quantize(w)
    check_gemm(a, b, None, ("e4m3", "e4m3"))
    check_weight_gemm(x, b)
    assert (cpu.gemm(*a, *b)[:, 5] == 0).all()


@looped("dtype", ["float16", "bfloat16"])
def test_gemm_rounds_its_result_once(isa, dtype):
    check_gemm(quantized((5, 200), "e4m3", 1), quantized((40, 200), "e5m2", 2), heavy_tailed((40,), 3), FORMATS, dtype)


@looped("rows, b_format, a_format", pairwise(rows=[1, 20, 200], b_format=FORMATS, a_format=FORMATS))
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


def test_a_few_of_many_rows_may_need_the_exact_kernel(isa):
    # Rows are packed 256 or 512 at a time: of these strips one cannot be held in bfloat16, and the others can.
    a, b = quantized((1100, 96), "e4m3", 1), quantized((70, 96), "e4m3", 2)
    a[1][300:303] = 1
    check_gemm(a, b, None, ("e4m3", "e4m3"))
    x = heavy_tailed((1100, 96))
    x[300:303] = 2.0**-130
    check_weight_gemm(x, b)
    check_weight_gemm(x.astype(ml_dtypes.bfloat16), b)


def test_weight_gemm_bfloat16_subnormals_are_not_flushed(isa):
    x = np.full((1, 64), 2.0**-130, ml_dtypes.bfloat16)
    elements, scales = np.full((4, 64), 0x38, np.uint8), np.full((4, 2), 127 + 20, np.uint8)  # 1.0 * 2^20
    assert_same(cpu.weight_gemm(x, elements, scales), np.full((1, 4), 64 * 2.0**-110, np.float32), "y")


@looped("m, b_format", pairwise(m=[1, 9, 12, 40], b_format=FORMATS))
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
    assert_same(np.delete(y, bad + finite, axis=1), np.delete(ordinary, bad + finite, axis=1), "the others")
    weight = numpy_nodes.dequantize(b[finite], b_scales[finite], element_format=b_format)
    assert_within(
        y[:, finite],
        numpy_nodes.gemm(*a, b[finite], b_scales[finite], b_format=b_format),
        numpy_nodes.gemm_error_bound(numpy_nodes.dequantize(*a), weight),
        "unusual numbers",
    )


@looped("a_shape, b_shape", [((2, 1, 5, 64), (3, 7, 64)), ((64,), (7, 64))])
def test_gemm_broadcasts_leading_dimensions_and_takes_a_vector(isa, a_shape, b_shape):
    check_gemm(quantized(a_shape, "e4m3", 1), quantized(b_shape, "e4m3", 2), heavy_tailed((7,), 3), ("e4m3", "e4m3"))


@looped("element_format, m", pairwise(element_format=["e4m3", "e5m2"], m=[1, 2, 5, 16]))
def test_products_with_subnormal_elements_are_exact(isa, element_format, m):
    """One subnormal element, at every place of a step and of a group, among zeros: nothing rounds."""
    k = 600
    codes = np.zeros((k, k), np.uint8)
    np.fill_diagonal(codes, [1 + i % 3 + 0x80 * (i % 2) for i in range(k)])
    scales, x = np.full((k, -(-k // 32)), 120, np.uint8), np.full((m, k), 3, np.float32)
    expected = 3 * numpy_nodes.dequantize(codes, scales, element_format=element_format).diagonal()
    y = cpu.weight_gemm(x, codes, scales, b_format=element_format)
    np.testing.assert_array_equal(y, np.tile(expected, (m, 1)))


# --- activations rounded to bfloat16: the product is of the rounded values, bit by bit --------------------------------

ROUNDED = [(1, 7, 64), (3, 130, 4096), (16, 65, 1000), (17, 40, 33), (150, 64, 2100), (200, 70, 1025), (300, 48, 31)]


def check_rounded(x: np.ndarray, *b: np.ndarray, **options: str) -> None:
    expected = cpu.weight_gemm(x.astype(BF16), *b, **options)
    assert_same(cpu.weight_gemm(x, *b, **options, activation_dtype="bfloat16"), expected)


@looped("shape, dtype, b_format", pairwise(shape=ROUNDED, dtype=["float32", "float16", BF16], b_format=FORMATS))
def test_weight_gemm_multiplies_rounded_activations(isa, shape, dtype, b_format):
    m, n, k = shape
    x = heavy_tailed((m, k)).astype(dtype)
    x[0, :5] = [0.0, -0.0, 1e-6, -65504.0, 2.0**-24]
    check_rounded(x, *quantized((n, k), b_format, 1), heavy_tailed((n,), 2), b_format=b_format)


@looped("m, values", pairwise(m=[1, 20, 200], values=[(1e-40, 1.0), (3e38, 3.4e38, 1.0), (np.inf, 1.0), (np.nan, 1.0)]))
def test_activations_that_the_dot_product_cannot_take_are_rounded_too(isa, m, values):
    x = np.resize(np.array(values, np.float32), (m, 70)) * heavy_tailed((m, 70)).clip(0.5, 1)
    check_rounded(x, *quantized((48, 70), "e4m3", 1))
