"""Every CUDA kernel and its launch code, on an emulation of CUDA threads, against `numerics`. No GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from cuda_emulation import aligned, device, queue

from mxfp8_ops import cuda_dispatch, cuda_instances, cuda_kernels, cuda_skinny, folding, numerics
from mxfp8_ops.cuda_kernels import Operand, Product
from mxfp8_ops.errors import BackendError
from mxfp8_ops.numerics import scale_count

FORMATS = ("e4m3", "e5m2")
ROUNDINGS = ("ceil", "floor", "even")
DTYPES = tuple(numerics.VALUE_DTYPES)

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning")


def heavy_tailed(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(2, shape).astype(np.float32)


def edges(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Random bit patterns: every exponent, subnormals, NaN and Inf, and blocks of zeros and of tiny values."""
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 2**32, shape, dtype=np.uint32)
    kind = generator.integers(0, 4, (*shape[:-1], 1))
    raw = np.where((raw >> 23 & 255 == 255) & (kind > 0), raw & 0x80FFFFFF, raw)
    raw = np.where(kind == 1, raw & 0x81FFFFFF, raw)  # tiny: scale codes near 0
    raw = np.where(kind == 2, raw & 0x80000000, raw)
    return raw.view(np.float32).astype(numerics.value_dtype(dtype))


def placed(array: np.ndarray, offset: int = 0) -> np.ndarray:
    """Returns a copy that starts `offset` bytes past a multiple of 16."""
    memory = aligned(array.nbytes, offset)
    memory[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memory


def assert_same(what: str, actual: np.ndarray, expected: np.ndarray) -> None:
    """Fails with the first coordinate that differs and both values as stored; any NaN is as good as another."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    bits = np.dtype(f"u{actual.itemsize}")
    wrong = actual.view(bits) != expected.view(bits)
    if actual.dtype != np.uint8:
        wrong &= ~(np.isnan(actual.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
    if wrong.any():
        at = tuple(map(int, np.argwhere(wrong)[0]))
        got, want = actual.view(bits)[at], expected.view(bits)[at]
        pytest.fail(f"{what}: {wrong.sum()} of {actual.size} differ; at {at} got {got:#x}, expected {want:#x}")


def assert_within(what: str, actual: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    """Fails with the coordinate that exceeds its bound most; NaN and Inf must be where they are expected."""
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    same = np.where(finite, np.isfinite(actual), (actual == expected) | (np.isnan(actual) & np.isnan(expected)))
    if not same.all():
        at = tuple(map(int, np.argwhere(~same)[0]))
        pytest.fail(f"{what}: at {at} got {actual[at]}, expected {expected[at]}")
    with np.errstate(invalid="ignore"):
        excess = np.where(finite, np.abs(actual - expected) - bound, -1)
    if excess.size and excess.max() > 0:
        at = np.unravel_index(excess.argmax(), excess.shape)
        pytest.fail(f"{what}: at {at} got {actual[at]}, expected {expected[at]} +- {bound[at]:.3g}")


def swizzle(scales: np.ndarray) -> np.ndarray:
    """The 128x4 layout of scales [M, blocks], from its definition."""
    m, blocks = scales.shape
    padded = np.zeros((-(-m // 128) * 128, -(-blocks // 4) * 4), np.uint8)
    padded[:m, :blocks] = scales
    return padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4).reshape(-1)


# --- quantize --------------------------------------------------------------------------------------------------------


def check_quantize(x, fmt, rounding, *, axis=-1, swizzled=False, transposed=False, offset=0):
    axis %= x.ndim
    outer, k, inner = int(np.prod(x.shape[:axis])), x.shape[axis], int(np.prod(x.shape[axis + 1 :]))
    expected, expected_scales = numerics.quantize(x, axis=axis, element_format=fmt, scale_rounding=rounding)
    if swizzled:
        matrix = expected_scales.reshape(outer, -1) if inner == 1 else expected_scales.reshape(-1, inner).T
        expected_scales = swizzle(matrix)
    if transposed:
        expected, expected_scales = expected.T, expected_scales.T
    source, elements, scales = placed(x, offset), aligned(x.size), aligned(expected_scales.size)
    if swizzled:
        scales[:] = 0
    operand = Operand(x.dtype.name, source.ctypes.data)
    out = (elements.ctypes.data, scales.ctypes.data)
    cuda_kernels.quantize(
        queue(), operand, (outer, k, inner), out, element_format=fmt, scale_rounding=rounding, swizzled=swizzled,
        transposed=transposed,
    )  # fmt: skip
    what = f"{x.shape} {x.dtype} axis {axis}, {fmt}, {rounding}, {swizzled=}, {transposed=}, {offset=}"
    assert_same(f"scales, {what}", scales.reshape(expected_scales.shape), expected_scales)
    assert_same(f"elements, {what}", elements.reshape(expected.shape), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_quantize_rows_every_upper_16_bit_pattern(dtype, fmt):
    patterns = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        patterns = np.arange(65536, dtype=np.uint16).view(np.float16)
    for rounding in ROUNDINGS:
        check_quantize(patterns.astype(numerics.value_dtype(dtype)).reshape(-1, 64), fmt, rounding)


@pytest.mark.parametrize(("dtype", "fmt", "rounding"), [*itertools.product(DTYPES, FORMATS, ROUNDINGS)])
def test_quantize_edges_on_both_axes(dtype, fmt, rounding):
    for shape in ((40, 96), (37, 50), (3, 16), (1, 1), (65, 544)):
        x = edges(shape, dtype, seed=sum(shape))
        check_quantize(x, fmt, rounding)
        check_quantize(x, fmt, rounding, axis=0)
    check_quantize(edges((3, 40, 48), dtype), fmt, rounding, axis=1)
    check_quantize(edges((2, 33, 5), dtype), fmt, rounding, axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_quantize_swizzled_scales(dtype, fmt):
    for shape in ((1, 32), (130, 160), (257, 96), (70, 37)):
        for axis in (0, 1):
            if shape[1] > 1:
                check_quantize(
                    heavy_tailed(shape).astype(numerics.value_dtype(dtype)), fmt, "ceil", axis=axis, swizzled=True
                )


@pytest.mark.parametrize(("dtype", "fmt"), [*itertools.product(DTYPES, FORMATS)])
def test_quantize_columns_transposed(dtype, fmt):
    for shape in ((32, 16), (96, 528), (64, 1040), (37, 50), (33, 544), (160, 5), (1, 2)):
        check_quantize(edges(shape, dtype, seed=sum(shape)), fmt, "ceil", axis=0, transposed=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_from_unaligned_memory(dtype):
    x = edges((9, 64), dtype)
    for axis in (0, 1):
        check_quantize(x, "e4m3", "ceil", axis=axis, offset=x.itemsize)


@pytest.mark.parametrize("layout", ["plain", "swizzled", "transposed"])
@pytest.mark.parametrize(("dtype", "fmt"), [*itertools.product(DTYPES, FORMATS)])
def test_quantize_both_axes_in_one_pass(dtype, fmt, layout):
    swizzled, transposed = layout == "swizzled", layout == "transposed"
    for shape in ((40, 96), (37, 50), (33, 544), (1, 1), (130, 48), (64, 96), (96, 544)):
        x = edges(shape, dtype, seed=sum(shape))
        source = placed(x)
        expected = [*numerics.quantize(x, element_format=fmt), *numerics.quantize(x, axis=0, element_format=fmt)]
        if swizzled:
            expected[1], expected[3] = swizzle(expected[1]), swizzle(expected[3].T)
        if transposed:
            expected[2:] = expected[2].T, expected[3].T
        got = [aligned(array.size) for array in expected]
        if swizzled:
            got[1][:] = got[3][:] = 0
        addresses = [array.ctypes.data for array in got]
        operand = Operand(dtype, source.ctypes.data)
        cuda_kernels.quantize_both(
            queue(),
            operand,
            shape,
            addresses[:2],
            addresses[2:],
            element_format=fmt,
            scale_rounding="ceil",
            swizzled=swizzled,
            transposed=transposed,
        )
        for name, actual, wanted in zip(("rows", "row scales", "columns", "column scales"), got, expected, strict=True):
            assert_same(f"{name}, {shape} {dtype}", actual.reshape(wanted.shape), wanted)


# --- dequantize ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "fmt"), [*itertools.product(DTYPES, FORMATS)])
def test_dequantize_every_element_under_every_scale(dtype, fmt):
    elements = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, 1)
    check_dequantize(elements, scales, fmt, dtype, 1)
    check_dequantize(elements.T, scales.T, fmt, dtype, 0)


@pytest.mark.parametrize(("dtype", "fmt"), [*itertools.product(DTYPES, FORMATS)])
def test_dequantize_tails(dtype, fmt):
    generator = np.random.default_rng(0)
    for shape, axis in (((3, 50), 1), ((50, 3), 0), ((5, 16), 1), ((2, 40, 7), 1), ((2, 40, 48), 1), ((1, 1), 1)):
        elements = generator.integers(0, 256, shape, dtype=np.uint8)
        scale_shape = [*shape]
        scale_shape[axis] = scale_count(shape[axis])
        check_dequantize(elements, generator.integers(0, 256, scale_shape, dtype=np.uint8), fmt, dtype, axis)


def check_dequantize(elements, scales, fmt, dtype, axis):
    expected = numerics.dequantize(elements, scales, axis=axis, element_format=fmt, dtype=dtype)
    codes, codes_of_scales, flag = placed(elements), placed(scales), aligned(16)
    flag[:] = 0
    y = aligned(expected.nbytes)
    shape = int(np.prod(elements.shape[:axis])), elements.shape[axis], int(np.prod(elements.shape[axis + 1 :]))
    operand = Operand(fmt, codes.ctypes.data, codes_of_scales.ctypes.data)
    cuda_kernels.dequantize(queue(), operand, shape, y.ctypes.data, dtype=dtype, inexact=flag.ctypes.data)
    assert_same(f"{elements.shape} {fmt} {dtype}", y.view(expected.dtype).reshape(expected.shape), expected)
    exact = numerics.dequantize(elements, scales, axis=axis, element_format=fmt)
    lost = (exact != expected.astype(np.float32)) & ~np.isnan(exact)
    assert flag.view(np.uint32)[0] == (dtype == "bfloat16" and lost.any())


@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_of_zeros_are_no_reason_to_repair_a_product(fmt):
    """Their scale is 0, under which bfloat16 does not hold every element. But it holds 0, and there is much padding."""
    elements, scales = np.zeros((4, 64), np.uint8), np.full((4, 2), 120, np.uint8)
    elements[:, :32], scales[2] = 0x38, 0
    elements[2] = 0x80
    check_dequantize(elements, scales, fmt, "bfloat16", 1)
    elements[2, 5] = 1
    check_dequantize(elements, scales, fmt, "bfloat16", 1)


def test_bfloat16_holds_every_element_from_the_code_the_kernels_assume():
    for fmt, first_exact in (("e4m3", 3), ("e5m2", 10)):
        codes = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 256)).T
        scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, 1)
        wide = numerics.dequantize(codes, scales, element_format=fmt)
        same = (wide.astype(ml_dtypes.bfloat16).astype(np.float32) == wide) | np.isnan(wide)
        assert np.flatnonzero(~same.all(1)).tolist() == [*range(first_exact)]


# --- one scale per row, scales for Blackwell, the end of a product ---------------------------------------------------


@pytest.mark.parametrize("k", [32, 96, 1024, 8224])
def test_fold(k):
    elements, scales = numerics.quantize(edges((5, k), "float32", seed=k))
    spread = np.random.default_rng(k).integers(0, 12, scales.shape, dtype=np.uint8)
    scales = np.where(scales == 255, 255, 100 + spread).astype(np.uint8)
    scales[3] = 255  # a row with nothing but NaN
    scales[4, : scales.shape[1] // 2] = 0  # what is far below the rest vanishes, its signs aside
    expected, codes = folding.fold(elements, scales)
    held = [placed(elements), placed(scales)]
    operand = Operand("e4m3", *(array.ctypes.data for array in held))
    folded = cuda_kernels.fold(queue(), operand, 5, k)
    assert_same(f"elements, K = {k}", folded.memory[0].reshape(5, k), expected)
    assert_same("row scales", folded.memory[1].view(np.float32), numerics.decode_scale(codes))


@pytest.mark.parametrize("shape", [(1, 1), (130, 5), (257, 12), (70, 256), (128, 4)])
def test_swizzle_scales(shape):
    scales = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    held = placed(scales)
    memory, address = cuda_kernels.swizzle_scales(
        queue(), Operand("e4m3", 0, held.ctypes.data), shape[0], 32 * shape[1]
    )
    assert address == memory.ctypes.data
    assert_same("layout", memory, swizzle(scales))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [40, 37])
def test_finish(n, dtype):
    sums, bias = heavy_tailed((5, n)), heavy_tailed((n,), 1)
    scales = [np.exp2(np.arange(count) % 7 - 3).astype(np.float32) for count in (5, n)]
    held = [placed(array) for array in (sums, bias, *scales)]
    for with_bias, scaled in itertools.product((False, True), (False, True)):
        y = aligned(5 * n * numerics.value_dtype(dtype).itemsize)
        nothing = Operand("e4m3", 0)
        product = Product(nothing, nothing, held[1].ctypes.data * with_bias, y.ctypes.data, dtype, 5, n, 1)
        factors = (held[2].ctypes.data, held[3].ctypes.data) if scaled else (0, 0)
        cuda_kernels.finish(queue(), product, held[0].ctypes.data, factors)
        expected = sums * (scales[0][:, None] * scales[1] if scaled else 1) + (bias if with_bias else np.float32(-0.0))
        expected = expected.astype(numerics.value_dtype(dtype))
        assert_same(f"{with_bias} {scaled}", y.view(expected.dtype).reshape(5, n), expected)


@pytest.mark.parametrize("n", [40, 37])
def test_finish_with_scales_whose_product_no_float32_holds(n):
    codes = np.array([0, 1, 60, 127, 200, 253, 254], np.uint8)
    scales = [numerics.decode_scale(codes[np.arange(count) % 7]) for count in (7, n)]
    for exponent in (-130, -20, 0, 20, 126):
        sums = np.ldexp(np.random.default_rng(0).uniform(-2, 2, (7, n)), exponent).astype(np.float32)
        held = [placed(array) for array in (sums, *scales)]
        y, nothing = aligned(sums.nbytes), Operand("e4m3", 0)
        product = Product(nothing, nothing, 0, y.ctypes.data, "float32", 7, n, 1)
        cuda_kernels.finish(queue(), product, held[0].ctypes.data, (held[1].ctypes.data, held[2].ctypes.data))
        expected = sums.astype(np.float64) * scales[0][:, None] * scales[1].astype(np.float64)
        assert_same(f"sums near 2^{exponent}", y.view(np.float32).reshape(7, n), expected.astype(np.float32))


# --- float32 and float16 in bfloat16 parts ---------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "offset"), [(4096, 0), (1000, 0), (64, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parts_add_up_to_every_finite_value(dtype, total, offset):
    count = 3 if dtype == "float32" else 2
    for seed in range(20):
        x = edges((total,), dtype, seed)
        x[:8] = [0, -0.0, np.finfo(dtype).max, -np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal, 1, np.inf, 3]
        source, parts = placed(x, offset), aligned(2 * count * total)
        kernel = f"bfloat16_parts<{cuda_kernels.KINDS[dtype]}, {'true' if offset or total % 16 else 'false'}>"
        arguments = (source.ctypes.data, parts.ctypes.data, total)
        device().launch(cuda_kernels.Launch("bfloat16_parts", kernel, 1, arguments), 0)
        got = parts.view(ml_dtypes.bfloat16).reshape(count, total).astype(np.float64)
        total_of_parts = sum(got[i] * 2.0 ** (-8 * i) for i in range(count))
        finite = np.isfinite(x)
        np.testing.assert_array_equal(total_of_parts[finite], x[finite].astype(np.float64))
        assert np.isnan(total_of_parts[~finite]).all()
        assert (got[:, finite] * np.sign(x[finite].astype(np.float64)) >= 0).all()  # so their magnitudes add up


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("n", [40, 37])
def test_finish_says_whether_a_sum_is_not_finite(n, parts):
    for value in (1.0, np.inf, np.nan):
        sums = heavy_tailed((parts, 5, n))
        sums[-1, 3, 20] = value
        held, y, flag = placed(sums), aligned(5 * n * 4), aligned(16)
        flag[:] = 0
        nothing = Operand("e4m3", 0)
        product = Product(nothing, nothing, 0, y.ctypes.data, "float32", 5, n, 1)
        cuda_kernels.finish(queue(), product, held.ctypes.data, parts=(parts, 8), inexact=flag.ctypes.data)
        assert flag.view(np.uint32)[0] == (not np.isfinite(value))
        expected = sums[parts - 1]
        for i in range(parts - 2, -1, -1):
            expected = expected * np.float32(2.0**-8) + sums[i]
        assert_same("sums", y.view(np.float32).reshape(5, n), expected)


# --- gemm ------------------------------------------------------------------------------------------------------------


def check_gemm(m, n, k, x_kind, fmt, dtype, *, bias=True, change=None, on=None, wide=False):  # noqa: PLR0917
    """One product with heavy-tailed operands; `change(x_scales or None, b, b_scales)` may put edge codes in."""
    on = on or device()
    x, w = heavy_tailed((m, k), seed=1), heavy_tailed((n, k), seed=2)
    b, b_scales = numerics.quantize(w, element_format=fmt)
    x_scales = None
    if x_kind in FORMATS:
        x, x_scales = numerics.quantize(x, element_format=x_kind)
    else:
        x = x.astype(numerics.value_dtype(x_kind))
    if change is not None:
        change(x, x_scales, b, b_scales)
    bias = heavy_tailed((n,), seed=3) if bias else None
    if x_scales is None:
        expected, values = numerics.weight_gemm(x, b, b_scales, bias, b_format=fmt), x
    else:
        expected = numerics.gemm(x, x_scales, b, b_scales, bias, a_format=x_kind, b_format=fmt)
        values = numerics.dequantize(x, x_scales, element_format=x_kind)
    bound = numerics.gemm_error_bound(values, numerics.dequantize(b, b_scales, element_format=fmt), dtype, bias)
    held = [placed(array) for array in (x, b)] + [placed(s) for s in (x_scales, b_scales, bias) if s is not None]
    y = aligned(m * n * numerics.value_dtype(dtype).itemsize)
    addresses = [array.ctypes.data for array in held]
    x_scale_address = addresses[2] if x_scales is not None else 0
    rest = addresses[2 + (x_scales is not None) :]
    operand, weight = Operand(x_kind, addresses[0], x_scale_address), Operand(fmt, addresses[1], rest[0])
    to = queue(on)
    kept = cuda_kernels.wide_weight(to, weight, n, k) if wide else None
    on.launched.clear()
    product = Product(operand, weight, rest[1] if bias is not None else 0, y.ctypes.data, dtype, m, n, k)
    cuda_kernels.gemm(to, product, kept)
    actual = y.view(numerics.value_dtype(dtype)).reshape(m, n)
    assert_within(f"{m}x{n}x{k} {x_kind} {fmt} {dtype} {on.launched}", actual, expected, bound)
    return [name.partition("<")[0] for name in on.launched]


X_KINDS = ("bfloat16", "e4m3", "e5m2")
EVERY_KIND = ("float32", "float16", *X_KINDS)


def most(m, x_kind):
    """As many rows of x, of which float32 and float16 have fewer, as the instances of gemm_skinny for m rows take."""
    return m // cuda_skinny.PARTS.get(x_kind, 1) or 1


@pytest.mark.parametrize(("x_kind", "fmt"), [*itertools.product(EVERY_KIND, FORMATS)])
def test_skinny_gemm(x_kind, fmt):
    for (rows, n, k), dtype in zip(
        ((1, 33, 2080), (8, 16, 1024), (9, 20, 160), (30, 1, 32), (64, 17, 352)), itertools.cycle(DTYPES)
    ):
        m = most(rows, x_kind)
        assert check_gemm(m, n, k, x_kind, fmt, dtype, bias=n != 16) == ["gemm_skinny"]


@pytest.mark.parametrize(("x_kind", "fmt"), [*itertools.product(EVERY_KIND, FORMATS)])
def test_skinny_gemm_with_every_split_of_its_warps(monkeypatch, x_kind, fmt):
    """More multiprocessors than the device has: fewer warps of a block share x."""
    for (rows, k), dtype in zip(((3, 1056), (16, 544), (25, 288), (64, 352)), itertools.cycle(DTYPES)):
        m, used = most(rows, x_kind), set()
        for processors in (1, 2, 5):
            monkeypatch.setattr(device(), "processors", processors)
            assert check_gemm(m, 150, k, x_kind, fmt, dtype) == ["gemm_skinny"]
            used.update(device().launched)
        assert len(used) == 2


@pytest.mark.parametrize(("x_kind", "fmt"), [*itertools.product(EVERY_KIND, FORMATS)])
def test_skinny_gemm_with_k_in_splits(monkeypatch, x_kind, fmt):
    """Splits of several steps, of one, of a part of one, and one that has nothing to do; edge codes in the last."""

    def edge(x, x_scales, b, b_scales):
        b_scales[3, -1], b_scales[5, 0], b[2, -3] = 0, 200, 0x7F
        if x_scales is not None:
            x_scales[1, -2] = 1

    rule = cuda_skinny.cut
    for splits in (2, 3, 7):
        monkeypatch.setattr(cuda_skinny, "cut", lambda *given, splits=splits: replace(rule(*given), splits=splits))
        for (rows, n, k), dtype in zip(
            ((1, 33, 3104), (8, 16, 2048), (9, 20, 160), (30, 1, 32), (64, 40, 1056)), itertools.cycle(DTYPES)
        ):
            m = most(rows, x_kind)
            change = edge if n > 5 and m > 1 else None  # values that no float16 holds
            names = check_gemm(m, n, k, x_kind, fmt, "float32" if change else dtype, bias=n != 16, change=change)
            assert names == ["gemm_skinny", "finish"]


def test_k_is_split_only_where_n_leaves_multiprocessors_idle_and_k_is_long():
    def splits(m, n, k, kind="e4m3"):
        return cuda_skinny.cut((m, n, k), kind, 132).splits

    assert splits(1, 1024, 8192) == splits(64, 1024, 8192) == splits(64, 1024, 4096) == 4
    assert splits(1, 1024, 4096) == splits(16, 1024, 2048) == 1  # a second launch takes longer than it saves
    assert splits(1, 4096, 8192) == splits(64, 4096, 28672) == splits(1, 8192, 8192) == 1
    assert splits(1, 2048, 16384) == 2
    assert splits(1, 16, 16384) == 8  # a block reads 32 KiB ahead
    assert splits(1, 16, 32) == 1


@pytest.mark.parametrize("x_kind", EVERY_KIND)
def test_skinny_gemm_splits_k_by_that_rule(x_kind):
    assert check_gemm(2, 16, 8192, x_kind, "e4m3", "bfloat16") == ["gemm_skinny", "finish"]


@pytest.mark.parametrize(("x_kind", "fmt"), [*itertools.product(X_KINDS, FORMATS)])
def test_skinny_gemm_leaves_tensor_cores_only_where_it_must(x_kind, fmt):
    """n = 16 and k = 2048: two steps of eight warps, each with 8 mma; one scale or element takes one warp off them."""

    def one_scale(x, x_scales, b, b_scales):
        b_scales[3, 20] = 0

    def one_element(x, x_scales, b, b_scales):
        if x_scales is None:
            b[9, 1000] = 0x7F
        else:
            x[2, 1000] = 0x7F

    def zeros(x, x_scales, b, b_scales):
        """Blocks of zeros have code 0, which other elements could not have."""
        b[3], b_scales[3] = 0x80, 0
        if x_scales is not None:
            x[2], x_scales[2], x[4, :32], x_scales[4, 0] = 0, 0, 0x80, 2

    for change, expected in ((None, 128), (one_scale, 120), (one_element, 120), (zeros, 128)):
        check_gemm(8, 16, 2048, x_kind, fmt, "float32", change=change)
        assert device().mmas() == expected


def test_skinny_gemm_with_more_blocks_than_it_needs():
    """Those past the end of n do nothing: who does not know the tiles may launch ceil(n / 16)."""
    x, w = heavy_tailed((10, 64)), heavy_tailed((40, 64), 1)
    codes = [*numerics.quantize(x), *numerics.quantize(w)]
    held, y = [placed(array) for array in codes], aligned(10 * 40 * 4)
    arguments = (*(array.ctypes.data for array in held), 0, y.ctypes.data, 10, 40, 64, 1, 1)
    device().launch(cuda_kernels.Launch("gemm_skinny", "gemm_skinny<E4M3, E4M3, 2>", 3, arguments), 0)
    bound = numerics.gemm_error_bound(numerics.dequantize(*codes[:2]), numerics.dequantize(*codes[2:]))
    assert_within("y", y.view(np.float32).reshape(10, 40), numerics.gemm(*codes), bound)


@pytest.mark.parametrize(("x_kind", "fmt"), [*itertools.product(X_KINDS, FORMATS)])
def test_skinny_gemm_with_scales_outside_the_fast_range(x_kind, fmt):
    def change(x, x_scales, b, b_scales):
        b_scales[3, :5] = [0, 1, 2, 9, 255]
        b_scales[4, 6:9] = [143, 200, 0]
        if x_scales is not None:
            x_scales[1, 10:13] = [0, 1, 150]

    def tiny(x, x_scales, b, b_scales):
        b_scales[:] = np.minimum(b_scales, 2)
        if x_scales is None:
            x[:] = (x.astype(np.float32) * 2.0**100).astype(x.dtype)
        else:
            x_scales[:] = 230

    for edit in (change, tiny):
        assert check_gemm(5, 18, 1056, x_kind, fmt, "float32", change=edit) == ["gemm_skinny"]


@pytest.mark.parametrize(("x_kind", "fmt"), [*itertools.product(X_KINDS, FORMATS)])
def test_skinny_gemm_with_nan_and_inf_elements(x_kind, fmt):
    def change(x, x_scales, b, b_scales):
        b[2, 40] = 0x7F
        b[5, 900] = 0xFC if fmt == "e5m2" else 0xFF
        if x_scales is not None:
            x[1, 7] = 0x7C if x_kind == "e5m2" else 0x7F
        else:
            x[1, 7] = np.inf
            x[2, 8] = np.nan

    assert check_gemm(5, 18, 1024, x_kind, fmt, "float32", change=change) == ["gemm_skinny"]


@pytest.mark.parametrize("fmt", FORMATS)
def test_skinny_gemm_at_the_ends_of_the_fast_range(fmt):
    """One nonzero element a row, the smallest or the largest, under the scales where the exact path begins."""
    first, last = {"e4m3": (3, 134), "e5m2": (10, 142)}[fmt]
    largest = {"e4m3": 0x7E, "e5m2": 0x7B}[fmt]

    for code in (first - 1, first, last, last + 1):

        def change(x, x_scales, b, b_scales, code=code):
            b[:], x[:], b_scales[:] = 0, 2.0**30, code
            b[::2, 7], b[1::2, 7] = 1, largest

        assert check_gemm(2, 8, 32, "bfloat16", fmt, "float32", bias=False, change=change) == ["gemm_skinny"]


def test_the_repair_of_a_large_gemm_writes_only_if_it_is_asked_to():
    b, b_scales = (placed(codes) for codes in numerics.quantize(heavy_tailed((5, 32))))
    x, flag, y = placed(heavy_tailed((3, 32))), aligned(16), aligned(3 * 5 * 4)
    product = Product(
        Operand("float32", x.ctypes.data), Operand("e4m3", b.ctypes.data, b_scales.ctypes.data), 0, y.ctypes.data,
        "float32", 3, 5, 32,
    )  # fmt: skip
    flag[:] = 0
    cuda_kernels._float32(queue(), product, only_if=flag.ctypes.data)
    assert (y == 0xAA).all()
    flag[0] = 1
    cuda_kernels._float32(queue(), product, only_if=flag.ctypes.data)
    assert (y != 0xAA).any()


@pytest.mark.parametrize(("x_kind", "fmt"), [*itertools.product((*DTYPES, *FORMATS), FORMATS)])
def test_float32_gemm(x_kind, fmt):
    for (m, n, k), dtype in zip(((3, 70, 50), (66, 5, 33), (130, 65, 16)), DTYPES, strict=True):
        with cuda_dispatch.forced_route("float32"):
            assert check_gemm(m, n, k, x_kind, fmt, dtype) == ["gemm_float32"]


@pytest.mark.parametrize(("x_kind", "fmt"), [*itertools.product(X_KINDS, FORMATS)])
def test_large_gemm(x_kind, fmt):
    for dtype, bias, wide in itertools.product(DTYPES, (False, True), (False, True)):
        names = check_gemm(70, 40, 96, x_kind, fmt, dtype, bias=bias, wide=wide)
        direct = not bias and dtype != "float16"
        repairs = ["gemm_float32"] * (1 + (x_kind in FORMATS))
        copies = ["dequantize"] * ((not wide) + (x_kind in FORMATS))
        product = f"matmul_bf16 {dtype if direct else 'float32'}"
        assert names == [*copies, product, *([] if direct else ["finish"]), *repairs]


@pytest.mark.parametrize(("x_kind", "fmt"), [*itertools.product(X_KINDS, FORMATS)])
def test_large_gemm_repairs_what_bfloat16_cannot_hold(x_kind, fmt):
    def tiny_weight(x, x_scales, b, b_scales):
        b_scales[:] = 0
        if x_scales is None:
            x[:] = (x.astype(np.float32) * 2.0**100).astype(x.dtype)
        else:
            x_scales[:] = 230

    def tiny_x(x, x_scales, b, b_scales):
        if x_scales is not None:
            x_scales[:], b_scales[:] = 0, 230

    check_gemm(70, 20, 64, x_kind, fmt, "float32", change=tiny_weight)
    check_gemm(70, 20, 64, x_kind, fmt, "float32", change=tiny_x)


@pytest.mark.parametrize(("x_kind", "fmt"), [*itertools.product(("float32", "float16"), FORMATS)])
def test_gemm_by_parts(x_kind, fmt):
    """By gemm_skinny alone, by bfloat16_parts and cuBLAS, and where K is no multiple of 32."""
    sizes = ((21, 20, 160), (33, 40, 96), (70, 40, 96), (3, 7, 37))
    for (m, n, k), dtype in zip(sizes, itertools.cycle(DTYPES)):
        names = check_gemm(m, n, k, x_kind, fmt, dtype, bias=n != 40)
        count = 3 if x_kind == "float32" else 2
        if k % 32 == 0 and count * m <= 64:
            assert names == ["gemm_skinny"]
            continue
        inner = ["dequantize", "matmul_bf16 float32", "gemm_float32"]
        assert names == ["bfloat16_parts", *inner, "finish", "gemm_float32"]


def test_gemm_by_parts_of_few_rows_when_it_must():
    """gemm_skinny wants x aligned, and takes the parts, which are."""
    with cuda_dispatch.forced_route("parts"):
        for m, k in ((5, 96), (2, 8192)):
            names = check_gemm(m, 16, k, "float32", "e4m3", "float32")
            splits = ["finish"] if k == 8192 else []
            assert names == ["bfloat16_parts", "gemm_skinny", *splits, "finish", "gemm_float32"]


@pytest.mark.parametrize(("x_kind", "fmt"), [*itertools.product(("float32", "float16"), FORMATS)])
def test_gemm_by_parts_with_every_value(monkeypatch, x_kind, fmt):
    """Huge, subnormal, Inf and NaN values of x; weights that are Inf, NaN, or too small for bfloat16."""

    def values(x, x_scales, b, b_scales):
        x[:], b_scales[:] = edges(x.shape, x_kind, 7), b_scales - 30  # sums must not overflow on the way

    def finite(x, x_scales, b, b_scales):
        values(x, x_scales, b, b_scales)
        x[~np.isfinite(x)] = np.finfo(x.dtype).max

    def infinite_weights(x, x_scales, b, b_scales):
        b[2, 40], b_scales[4, 1] = 0x7C if fmt == "e5m2" else 0x7E, 254
        x[:, 34:] = 1  # one part, the others are zero: zero times Inf is NaN

    def tiny_weights(x, x_scales, b, b_scales):
        b_scales[:], x[:] = np.minimum(b_scales, 2), x.astype(np.float64) * (2.0**100 if x_kind == "float32" else 1)

    rule = cuda_skinny.cut
    for change, m in itertools.product((values, finite, infinite_weights, tiny_weights), (5, 70)):
        check_gemm(m, 18, 96, x_kind, fmt, "float32", change=change)
        monkeypatch.setattr(cuda_skinny, "cut", lambda *given: replace(rule(*given), splits=2))
        check_gemm(5, 18, 1056, x_kind, fmt, "float32", change=change)
        monkeypatch.setattr(cuda_skinny, "cut", rule)


def test_gemm_by_parts_in_slices(monkeypatch):
    monkeypatch.setattr(cuda_kernels, "_PARTS_BYTES", 1)
    names = check_gemm(150, 40, 96, "float32", "e4m3", "bfloat16")
    assert names.count("bfloat16_parts") == names.count("finish") == 3
    assert names[-1] == "gemm_float32"


def test_gemm_without_k_gives_the_bias():
    assert check_gemm(3, 5, 0, "bfloat16", "e4m3", "float32") == ["gemm_float32"]


def test_every_kernel_ran():
    """Each instance of the package is launched by some shape above; this names the one that is not."""
    if len(device().ever_launched) < 10:
        pytest.skip("needs the tests above in the same process")
    here = {launch.kernel for launch in cuda_instances.instances() if launch.source not in {"tile", "gemm_fused"}}
    assert not here - device().ever_launched


# --- dispatch --------------------------------------------------------------------------------------------------------


def chosen(capability=(9, 0), kind="bfloat16", m=1, k=64, address=0, **options):
    return cuda_dispatch.route(capability, kind, m, k, (address,), **options)


def test_routes():
    assert chosen() == chosen(m=64) == chosen(kind="e4m3") == "skinny"
    assert chosen(m=65) == chosen(k=40) == chosen(address=8) == "large"
    assert chosen(kind="float16", m=32) == chosen(kind="float32", m=21) == "skinny"
    assert chosen(kind="float16", m=33) == chosen(kind="float32", m=22) == chosen(kind="float32", k=40) == "parts"
    with cuda_dispatch.forced_route("float32"):
        assert chosen() == "float32"
        assert chosen(forced=False) == "skinny"
    with pytest.raises(BackendError, match=r"compute capability 7\.5; expected compute capability 8\.0"):
        chosen((7, 5))


def test_library_routes_are_taken_only_by_those_who_bring_the_library():
    both = {"kind": "e4m3", "m": 100, "n": 64, "libraries": ("block_scaled", "fold")}
    assert chosen((10, 0), **both) == chosen((12, 0), **both | {"kind": "e5m2"}) == "block_scaled"
    assert chosen((9, 0), **both) == "large"
    for other in ({"libraries": ()}, {"n": 40}, {"b_kind": "e5m2"}, {"kind": "bfloat16"}, {"k": 40}, {"address": 8}):
        assert chosen((10, 0), **both | other) == "large"
    assert chosen((10, 0), **both | {"m": 64}) == "skinny"


def test_folding_is_never_chosen_unasked():
    both = {"kind": "e4m3", "m": 100, "n": 64, "libraries": ("block_scaled", "fold")}
    with cuda_dispatch.allowed("fold"):
        assert chosen((8, 9), **both) == chosen((9, 0), **both) == "fold"
        assert chosen((10, 0), **both) == "block_scaled"  # which is exact
        assert chosen((8, 0), **both) == "large"
        assert chosen(**both | {"m": 64}) == "skinny"  # as fast, and exact
        for other in ({"libraries": ()}, {"n": 40}, {"b_kind": "e5m2"}, {"kind": "e5m2"}, {"k": 40}, {"address": 8}):
            assert chosen(**both | other) == "large"
    assert chosen(**both) == "large"
    with pytest.raises(BackendError, match="expected one of skinny, "), cuda_dispatch.allowed("fast"):
        pass


def test_a_forced_route_is_used_or_refused():
    with cuda_dispatch.forced_route("large"):
        assert cuda_dispatch.route((9, 0), "bfloat16", 1, 64) == "large"
        with pytest.raises(BackendError, match="forced route 'large'"):
            cuda_dispatch.route((9, 0), "float32", 1, 64)
    with cuda_dispatch.forced_route("fold"):
        assert chosen(kind="e4m3", n=16, libraries=("fold",)) == "fold"
        with pytest.raises(BackendError, match="forced route 'fold'"):
            chosen(kind="e4m3", n=16)
    with (
        pytest.raises(BackendError, match="expected one of skinny, block_scaled, fold, fused, large, parts, float32"),
        cuda_dispatch.forced_route("fast"),
    ):
        pass
