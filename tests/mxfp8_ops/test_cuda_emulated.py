"""The CUDA kernels but the gemms, with their launch code, on an emulation of CUDA threads, against `numpy_nodes`."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same, assert_within, heavy_tailed
from cuda_emulation import FORMATS, aligned, device, edges, launch, placed, products, queue, swizzle
from grids import looped, pairwise
from grouped_request import Grouped
from scale_definition import boundary_values

from mxfp8_ops import contract, formats, numerics, numpy_nodes
from mxfp8_ops.checks import scale_count, split_at
from mxfp8_ops.cuda import execution, planner
from mxfp8_ops.cuda.planner import CODES

ROUNDINGS = ("ceil", "floor", "even")
DTYPES = tuple(numerics.VALUE_DTYPES)
KINDS = looped("dtype, fmt", [*itertools.product(DTYPES, FORMATS)])

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning"),
]


def quantize(x, fmt, rounding, layout, shape, out):  # noqa: PLR0917
    """Queues `x` [outer, K, inner] into `out`: addresses of elements, scales and, if there are four, those of rows."""
    increment = formats.scale_increment(formats.element_format(fmt), rounding)
    request = planner.Quantize(CODES[x[0]], CODES[fmt], increment, layout, x[1], *shape, *out)
    execution.run(planner.plan(request), queue())


# --- quantize --------------------------------------------------------------------------------------------------------


def check_quantize(x, fmt, rounding, *, axis=-1, transposed=False, offset=0):
    axis %= x.ndim
    expected, expected_scales = numpy_nodes.quantize(x, axis=axis, element_format=fmt, scale_rounding=rounding)
    if transposed:
        expected, expected_scales = expected.T, expected_scales.T
    source, elements, scales = placed(x, offset), aligned(x.size), aligned(expected_scales.size)
    layout = planner.TRANSPOSED if transposed else planner.PLAIN
    out = (elements.ctypes.data, scales.ctypes.data)
    quantize((x.dtype.name, source.ctypes.data), fmt, rounding, layout, split_at(x.shape, axis), out)
    what = f"{x.shape} {x.dtype} axis {axis}, {fmt}, {rounding}, {transposed=}, {offset=}"
    assert_same(scales.reshape(expected_scales.shape), expected_scales, f"scales, {what}")
    assert_same(elements.reshape(expected.shape), expected, f"elements, {what}")


@KINDS
def test_quantize_rows_every_upper_16_bit_pattern(dtype, fmt):
    patterns = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        patterns = np.arange(65536, dtype=np.uint16).view(np.float16)
    for rounding in ROUNDINGS:
        check_quantize(patterns.astype(numerics.value_dtype(dtype)).reshape(-1, 64), fmt, rounding)


@looped("fmt, rounding", [*itertools.product(FORMATS, ROUNDINGS)])
def test_quantize_where_scale_codes_step(fmt, rounding):
    """float32 and bfloat16 alone in their blocks, by rows and by columns; see test_backends.py."""
    bfloat16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    for x in (boundary_values(), bfloat16):
        check_quantize(x[:, None], fmt, rounding)
        check_quantize(x[None, :], fmt, rounding, axis=0)
    check_quantize(bfloat16[:256].reshape(-1, 64), fmt, rounding)


@looped("dtype, fmt, rounding", [*itertools.product(DTYPES, FORMATS, ROUNDINGS)])
def test_quantize_edges_on_both_axes(dtype, fmt, rounding):
    for shape in ((40, 96), (37, 50), (3, 16), (1, 1), (65, 544)):
        x = edges(shape, dtype, seed=sum(shape))
        check_quantize(x, fmt, rounding)
        check_quantize(x, fmt, rounding, axis=0)
    check_quantize(edges((3, 40, 48), dtype), fmt, rounding, axis=1)
    check_quantize(edges((2, 33, 5), dtype), fmt, rounding, axis=1)
    x = edges((9, 64), dtype)
    for axis in (0, 1):
        check_quantize(x, fmt, rounding, axis=axis, offset=x.itemsize)  # not aligned to 16 bytes


@KINDS
def test_quantize_columns_transposed(dtype, fmt):
    for shape in ((32, 16), (96, 528), (64, 1040), (37, 50), (33, 544), (160, 5), (1, 2)):
        check_quantize(edges(shape, dtype, seed=sum(shape)), fmt, "ceil", axis=0, transposed=True)


@KINDS
def test_quantize_both_axes_in_one_pass(dtype, fmt):
    for shape in ((40, 96), (37, 50), (33, 544), (1, 1), (130, 48), (64, 96), (96, 544), (288, 160), (128, 256)):
        x = edges(shape, dtype, seed=sum(shape))
        source = placed(x)
        expected = [*numpy_nodes.quantize(x, element_format=fmt), *numpy_nodes.quantize(x.T, element_format=fmt)]
        got = [aligned(array.size) for array in expected]
        rows, row_scales, columns, column_scales = (array.ctypes.data for array in got)
        out = (columns, column_scales, rows, row_scales)
        quantize((dtype, source.ctypes.data), fmt, "ceil", planner.TRANSPOSED, (1, *shape), out)
        for name, actual, wanted in zip(("rows", "row scales", "columns", "column scales"), got, expected, strict=True):
            assert_same(actual.reshape(wanted.shape), wanted, f"{name}, {shape} {dtype}")


# --- dequantize ------------------------------------------------------------------------------------------------------


@KINDS
def test_dequantize_every_element_under_every_scale(dtype, fmt):
    elements = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, 1)
    check_dequantize(elements, scales, fmt, dtype, 1)
    check_dequantize(elements.T, scales.T, fmt, dtype, 0)


@KINDS
def test_dequantize_tails(dtype, fmt):
    generator = np.random.default_rng(0)
    for shape, axis in (((3, 50), 1), ((50, 3), 0), ((5, 16), 1), ((2, 40, 7), 1), ((2, 40, 48), 1), ((1, 1), 1)):
        elements = generator.integers(0, 256, shape, dtype=np.uint8)
        scale_shape = [*shape]
        scale_shape[axis] = scale_count(shape[axis])
        check_dequantize(elements, generator.integers(0, 256, scale_shape, dtype=np.uint8), fmt, dtype, axis)


def check_dequantize(elements, scales, fmt, dtype, axis):
    expected = numpy_nodes.dequantize(elements, scales, axis=axis, element_format=fmt, dtype=dtype)
    codes, codes_of_scales, flag = placed(elements), placed(scales), aligned(16)
    y = aligned(expected.nbytes)
    shape = int(np.prod(elements.shape[:axis])), elements.shape[axis], int(np.prod(elements.shape[axis + 1 :]))
    at = (codes.ctypes.data, codes_of_scales.ctypes.data)
    request = planner.Dequantize(CODES[fmt], CODES[dtype], *at, *shape, y.ctypes.data, flag.ctypes.data)
    execution.run(planner.plan(request), queue())
    assert_same(y.view(expected.dtype).reshape(expected.shape), expected, f"{elements.shape} {fmt} {dtype}")
    exact = numpy_nodes.dequantize(elements, scales, axis=axis, element_format=fmt)
    lost = (exact != expected.astype(np.float32)) & ~np.isnan(exact)
    assert flag.view(np.uint32)[0] == (dtype == "bfloat16" and lost.any())


@looped("fmt", FORMATS)
def test_blocks_of_zeros_are_no_reason_to_repair_a_product(fmt):
    """Their scale is 0, under which bfloat16 does not hold every element. But it holds 0, and there is much padding."""
    elements, scales = np.zeros((4, 64), np.uint8), np.full((4, 2), 120, np.uint8)
    elements[:, :32], scales[2] = 0x38, 0
    elements[2] = 0x80
    check_dequantize(elements, scales, fmt, "bfloat16", 1)
    elements[2, 5] = 1
    check_dequantize(elements, scales, fmt, "bfloat16", 1)


# --- rows of tables, scales for Blackwell, the end of a product ---------------------------------------------------


@looped("fmt, dtype", pairwise(fmt=FORMATS, dtype=DTYPES))
def test_embedding(fmt, dtype):
    """A negative index counts from the end. One that names no row gives NaN, as every index of an empty table does."""
    for (v, d), index_dtype, offset in (((7, 96), np.int64, 0), ((300, 37), np.int32, 0), ((5, 48), np.int32, 8)):
        table = numpy_nodes.quantize(heavy_tailed((v, d)), element_format=fmt)
        indices = np.array([0, v - 1, -1, -v, 2, v, -v - 1, 2**31 - 1], index_dtype)
        expected = numpy_nodes.embedding(indices[:5], *table, b_format=fmt, dtype=dtype)
        held = [placed(array, shift) for array, shift in zip((indices, *table), (0, offset, 0), strict=True)]
        code = contract.INT32 if index_dtype is np.int32 else contract.INT64
        kinds, at = (code, CODES[fmt], CODES[dtype]), [array.ctypes.data for array in held]
        for rows in (v, 0):
            y = aligned(len(indices) * d * expected.dtype.itemsize, offset)
            plan = planner.plan(planner.Embedding(*kinds, *at, count=len(indices), v=rows, d=d, y=y.ctypes.data))
            execution.run(plan, queue())
            got, known = y.view(expected.dtype).reshape(-1, d), 5 if rows else 0
            assert_same(got[:known], expected[:known], f"{v}x{d} {index_dtype}")
            assert np.isnan(got[known:].astype(np.float32)).all()


@looped("kind, fmt, tiles", [(*kinds, tiles) for kinds in products((*DTYPES, *FORMATS)) for tiles in (1, 2, 4, 8)])
def test_grouped_products(kind, fmt, tiles):
    """A slot is full of one expert's rows, another has few; see test_ort_cuda.py for every other case."""
    parts = {"float32": 3, "float16": 2}.get(kind, 1)
    rows, count, n, k = 8 * tiles // parts, 2, 20, 96
    x, b = heavy_tailed((rows, k), 1) / 64, numpy_nodes.quantize(heavy_tailed((count, n, k), 2), element_format=fmt)
    quantized = kind in FORMATS
    a = numpy_nodes.quantize(x, element_format=kind) if quantized else (x.astype(numerics.value_dtype(kind)),)
    values = numpy_nodes.dequantize(*a, element_format=kind) if quantized else a[0]
    experts = np.arange(rows) % 3 // 2
    held = [placed(array) for array in (*a, *b, experts)]
    at = dict(zip((*(("x", "x_scales") if quantized else ("x",)), "b", "b_scales", "experts"), held, strict=True))
    y = np.zeros((rows, n), np.float32)
    fields = {name: array.ctypes.data for name, array in at.items()}
    fields |= {"x_kind": CODES[kind], "b_kind": CODES[fmt], "y_dtype": 1, "activation_dtype": 1, "y": y.ctypes.data}
    fields |= {"x_rows": rows, "indices": rows, "count": count, "n": n, "k": k}
    fields |= {"outer": 1, "middle": 1, "inner": rows, "x_inner": 1, "e_inner": 1}
    execution.run(planner.plan(Grouped(**fields)), queue())
    weight = numpy_nodes.dequantize(*b, element_format=fmt)
    for expert in range(count):
        mine = experts == expert
        expected = numpy_nodes.weight_gemm(values[mine], b[0][expert], b[1][expert], b_format=fmt)
        bound = numpy_nodes.gemm_error_bound(values[mine], weight[expert], "float32")
        assert_within(y[mine], expected, bound, f"expert {expert}")


@looped("shape", [(1, 1), (130, 5), (257, 12), (70, 256), (128, 4)])
def test_swizzle_scales(shape):
    scales = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    held, memory = placed(scales), aligned(planner.swizzled_bytes(shape[0], 32 * shape[1]))
    launch("swizzle_scales", -(-memory.size // 4096), held.ctypes.data, memory.ctypes.data, *shape)
    assert_same(memory, swizzle(scales), "layout")


def finish(sums, y, dtype, *, parts=(1, 0), bias=0, inexact=0):
    """Launches what adds up sums [parts, M, N] at an address, into y [M, N]."""
    m, n = y.shape
    ragged = "true" if n % 8 else "false"
    grid = -(-m * n // 2048)
    launch(f"finish<{ragged}>", grid, sums, *parts, bias, y.ctypes.data, m * n, n, CODES[dtype], inexact)


@looped("n, dtype", [*itertools.product((40, 37), DTYPES)])
def test_finish_adds_the_bias_and_rounds(n, dtype):
    sums, bias = heavy_tailed((5, n)), heavy_tailed((n,), 1)
    held = [placed(array) for array in (sums, bias)]
    for with_bias in (False, True):
        y = aligned(5 * n * numerics.value_dtype(dtype).itemsize).view(numerics.value_dtype(dtype)).reshape(5, n)
        finish(held[0].ctypes.data, y, dtype, bias=held[1].ctypes.data * with_bias)
        expected = (sums + (bias if with_bias else np.float32(-0.0))).astype(numerics.value_dtype(dtype))
        assert_same(y, expected, f"{with_bias=}")


@looped("n, parts", [*itertools.product((40, 37), (1, 3))])
def test_finish_adds_parts_and_says_whether_a_sum_is_not_finite(n, parts):
    for value in (1.0, np.inf, np.nan):
        sums = heavy_tailed((parts, 5, n))
        sums[-1, 3, 20] = value
        held, y, flag = placed(sums), aligned(5 * n * 4).view(np.float32).reshape(5, n), aligned(16)
        flag[:] = 0
        finish(held.ctypes.data, y, "float32", parts=(parts, 8), inexact=flag.ctypes.data)
        assert flag.view(np.uint32)[0] == (not np.isfinite(value))
        expected = sums[parts - 1]
        for i in range(parts - 2, -1, -1):
            expected = expected * np.float32(2.0**-8) + sums[i]
        assert_same(y, expected, "sums")


# --- float32 and float16 in bfloat16 parts ---------------------------------------------------------------------------


@looped("dtype, total, offset", [(dtype, *row) for dtype in DTYPES[:2] for row in ((4096, 0), (1000, 0), (64, 4))])
def test_values_in_bfloat16_add_up_as_parts_or_are_rounded_to_nearest_even(dtype, total, offset):
    count, kind = {"float32": (3, "F32"), "float16": (2, "F16")}[dtype]
    instance = f"<{kind}, {'true' if offset or total % 16 else 'false'}>"
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x80018000], np.uint32).view(np.float32)
    for seed in range(20):
        x = edges((total,), dtype, seed)
        x[:8] = [0, -0.0, np.finfo(dtype).max, -np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal, 1, np.inf, 3]
        x[8:13] = ties if dtype == "float32" else 1
        source, rounded, parts = placed(x, offset), aligned(2 * total), aligned(2 * count * total)
        for kernel, y in (("bfloat16_rounded", rounded), ("bfloat16_parts", parts)):
            launch(kernel + instance, 1, source.ctypes.data, y.ctypes.data, total)
        with np.errstate(over="ignore"):
            assert_same(rounded.view(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16), "rounded")
        got, finite = parts.view(ml_dtypes.bfloat16).reshape(count, total).astype(np.float64), np.isfinite(x)
        sums = sum(got[i] * 2.0 ** (-8 * i) for i in range(count))
        np.testing.assert_array_equal(sums[finite], x[finite].astype(np.float64))
        assert np.isnan(sums[~finite]).all()
        assert (got[:, finite] * np.sign(x[finite].astype(np.float64)) >= 0).all()  # so their magnitudes add up


def test_every_kernel_ran():
    """Each instance of the package is launched by some shape above; this names the one that is not."""
    if len(device().ever_launched) < 10:
        pytest.skip("needs the tests above in the same process")
    here = {name for name in planner.kernels() if "gemm" not in name}
    assert not here - device().ever_launched
