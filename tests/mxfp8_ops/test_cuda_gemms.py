"""The CUDA gemms with their launch code, on an emulation of CUDA threads, against `numpy_nodes`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from compare import assert_within, heavy_tailed
from cuda_emulation import FORMATS, aligned, device, edges, placed, plan_gemm, products, queue, sampled, source_of
from grids import looped

from mxfp8_ops import numerics, numpy_nodes
from mxfp8_ops.cuda import dispatch, execution, planner
from mxfp8_ops.cuda.planner import CODES

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning"),
]

DTYPES = tuple(numerics.VALUE_DTYPES)


def check_gemm(m, n, k, x_kind, fmt, dtype, *, bias=True, change=None, wide=False, rounds=False):  # noqa: PLR0917
    """Checks one product with heavy-tailed operands; returns the names of the launched kernels.

    `change(x, x_scales or None, b, b_scales)` may write codes at the edges. With `rounds` the values of x are rounded
    to bfloat16 first, with `wide` the weight is kept in bfloat16.
    """
    on, quantized = device(), x_kind in FORMATS
    b, b_scales = numpy_nodes.quantize(heavy_tailed((n, k), seed=2), element_format=fmt)
    x, x_scales = heavy_tailed((m, k), seed=1), None
    if quantized:
        x, x_scales = numpy_nodes.quantize(x, element_format=x_kind)
    else:
        x = x.astype(numerics.value_dtype(x_kind))
    if change is not None:
        change(x, x_scales, b, b_scales)
    bias = heavy_tailed((n,), seed=3) if bias else None
    values = numpy_nodes.dequantize(x, x_scales, element_format=x_kind) if quantized else x
    if rounds:
        values = x.astype(numerics.value_dtype("bfloat16"))
    expected = numpy_nodes.weight_gemm(values, b, b_scales, bias, b_format=fmt)
    bound = numpy_nodes.gemm_error_bound(values, numpy_nodes.dequantize(b, b_scales, element_format=fmt), dtype, bias)
    held = [None if array is None else placed(array) for array in (x, x_scales, b, b_scales, bias)]
    at = [0 if array is None else array.ctypes.data for array in held]
    y, to = aligned(m * n * numerics.value_dtype(dtype).itemsize), queue(on)
    kept = execution.wide_weight(to, fmt, at[2:4], (n, k)) if wide else (0, 0)
    on.launched.clear()
    kinds = (CODES[x_kind], CODES[fmt], CODES[dtype])
    activations = CODES["bfloat16" if rounds else "float32"]
    product = planner.Gemm(*kinds, *at, y.ctypes.data, m, n, k, *kept[:2], activation_dtype=activations)
    execution.run(planner.gemm(dispatch.place(on, planner.BFLOAT16_PRODUCTS), product), to)
    actual = y.view(numerics.value_dtype(dtype)).reshape(m, n)
    assert_within(actual, expected, bound, f"{m}x{n}x{k} {x_kind} {fmt} {dtype} {on.launched}")
    return [name.partition("<")[0] for name in on.launched]


X_KINDS = ("bfloat16", *FORMATS)
WIDE = ("float32", "float16")
EVERY_KIND = (*WIDE, *X_KINDS)
KINDS = sampled(
    "x_kind, fmt",
    [("bfloat16", "e5m2"), ("e4m3", "e4m3"), ("int8", "int8")],
    products(X_KINDS),
)
WIDE_KINDS = sampled("x_kind, fmt", [("float32", "e4m3"), ("float16", "e5m2")], products(WIDE))
EVERY_KINDS = sampled(
    "x_kind, fmt",
    [("bfloat16", "e4m3"), ("float32", "e5m2"), ("e5m2", "e4m3"), ("float32", "int8"), ("int8", "int8")],
    products(EVERY_KIND),
)


def most(m, x_kind):
    """As many rows of x, of which float32 and float16 have fewer, as the instances of gemm_skinny for m rows take."""
    return m // {"float32": 3, "float16": 2}.get(x_kind, 1) or 1


@EVERY_KINDS
def test_skinny_gemm(x_kind, fmt):
    for (rows, n, k), dtype in zip(
        ((1, 33, 2080), (8, 16, 1024), (9, 20, 160), (30, 1, 32), (64, 17, 352)), itertools.cycle(DTYPES)
    ):
        m = most(rows, x_kind)
        assert check_gemm(m, n, k, x_kind, fmt, dtype, bias=n != 16) == ["gemm_skinny"]


@sampled("x_kind, fmt", [("float32", "e5m2"), ("e4m3", "e4m3")], products(EVERY_KIND))
def test_skinny_gemm_with_every_split_of_its_warps(monkeypatch, x_kind, fmt):
    """More multiprocessors than the device has: fewer warps of a block share x."""
    for (rows, k), dtype in zip(((3, 1056), (16, 544), (25, 288), (64, 352)), itertools.cycle(DTYPES)):
        m, used = most(rows, x_kind), set()
        for processors in (1, 2, 5):
            monkeypatch.setattr(device(), "processors", processors)
            assert check_gemm(m, 150, k, x_kind, fmt, dtype) == ["gemm_skinny"]
            used.update(device().launched)
        assert len(used) == 2


@EVERY_KINDS
def test_skinny_gemm_with_k_in_splits(x_kind, fmt):
    """Splits of several steps, of one, of a part of one, and one that has nothing to do; edge codes in the last."""

    def edge(x, x_scales, b, b_scales):
        b_scales[3, -1], b_scales[5, 0], b[2, -3] = 0, 200, 0x7F
        if x_scales is not None:
            x_scales[1, -2] = 1

    for splits in (2, 3, 7):
        for (rows, n, k), dtype in zip(
            ((1, 33, 3104), (8, 16, 2048), (9, 20, 160), (30, 1, 32), (64, 40, 1056)), itertools.cycle(DTYPES)
        ):
            m = most(rows, x_kind)
            change = edge if n > 5 and m > 1 else None  # values that no float16 holds
            with dispatch.fixed_cut(splits=splits):
                names = check_gemm(m, n, k, x_kind, fmt, "float32" if change else dtype, bias=n != 16, change=change)
            assert names == ["gemm_skinny", "finish"]


def test_k_is_split_only_where_n_leaves_multiprocessors_idle_and_k_is_long():
    def splits(m, n, k, kind="e4m3"):
        return plan_gemm((kind, "e4m3", "float32"), (m, n, k)).steps()[0].arguments[-1]

    assert splits(1, 1024, 8192) == splits(64, 1024, 8192) == splits(64, 1024, 4096) == 4
    assert splits(1, 1024, 4096) == splits(16, 1024, 2048) == 1  # a second launch takes longer than it saves
    assert splits(1, 4096, 8192) == splits(64, 4096, 28672) == splits(1, 8192, 8192) == 1
    assert splits(1, 2048, 16384) == 2
    assert splits(1, 16, 16384) == 8  # a block reads 32 KiB ahead
    assert splits(1, 16, 32) == 1


@KINDS
def test_skinny_gemm_leaves_tensor_cores_only_where_it_must(x_kind, fmt):
    """n = 16 and k = 2048: two steps of eight warps, each with 8 mma; one scale or element takes one warp off them.

    Of INT8 no element does, and of the scales NaN and the two below it.
    """
    integers = fmt == "int8"

    def one_scale(x, x_scales, b, b_scales):
        b_scales[3, 20] = 255 if integers else 0

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

    for change, expected in ((None, 128), (one_scale, 120), (one_element, 128 if integers else 120), (zeros, 128)):
        check_gemm(8, 16, 2048, x_kind, fmt, "float32", change=change)
        assert device().mmas() == expected


@KINDS
def test_skinny_gemm_with_codes_at_the_edges(x_kind, fmt):
    def scales(x, x_scales, b, b_scales):
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

    def not_finite(x, x_scales, b, b_scales):
        b[2, 40] = 0x7F
        b[5, 900] = 0xFC if fmt == "e5m2" else 0xFF
        if x_scales is None:
            x[1, 7], x[2, 8] = np.inf, np.nan
        else:
            x[1, 7] = 0x7C if x_kind == "e5m2" else 0x7F

    for change in (scales, tiny, not_finite):
        assert check_gemm(5, 18, 1056, x_kind, fmt, "float32", change=change) == ["gemm_skinny"]


@looped("fmt", FORMATS)
def test_skinny_gemm_at_the_ends_of_the_fast_range(fmt):
    """One nonzero element a row, the smallest or one of the largest, under the scales where the exact path begins."""
    codes = {"e4m3": (2, 3, 134, 135), "e5m2": (9, 10, 142, 143), "int8": (0, 1, 252, 253)}[fmt]
    largest = {"e4m3": (0x7E, 0xFE), "e5m2": (0x7B, 0xFB), "int8": (0x7F, 0x80)}[fmt]

    for code in codes:

        def change(x, x_scales, b, b_scales, code=code):
            b[:], x[:], b_scales[:] = 0, 2.0 ** (30 if code < 200 else -30), code
            b[::2, 7], b[1::4, 7], b[3::4, 7] = 1, *largest

        assert check_gemm(2, 8, 32, "bfloat16", fmt, "float32", bias=False, change=change) == ["gemm_skinny"]
        assert (device().mmas() == 64) == (code in codes[0 if fmt == "int8" else 1 : 3])


@EVERY_KINDS
def test_float32_gemm(x_kind, fmt):
    for (m, n, k), dtype in zip(((3, 70, 50), (66, 5, 33), (130, 65, 16)), DTYPES, strict=True):
        with dispatch.forced_route("float32"):
            assert check_gemm(m, n, k, x_kind, fmt, dtype) == ["gemm_float32"]


@KINDS
def test_large_gemm(x_kind, fmt):
    for dtype, bias, wide in itertools.product(DTYPES, (False, True), (False, True)):
        names = check_gemm(70, 40, 96, x_kind, fmt, dtype, bias=bias, wide=wide)
        direct = not bias and dtype != "float16"
        # One word says for both operands what bfloat16 cannot hold, unless the weight has a word of its own.
        repairs = ["gemm_float32"] * (1 + (wide and x_kind in FORMATS))
        copies = ["dequantize"] * ((not wide) + (x_kind in FORMATS))
        product = f"matmul_bf16 {dtype if direct else 'float32'}"
        assert names == [*copies, product, *([] if direct else ["finish"]), *repairs]


@KINDS
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

    for change in (tiny_weight, tiny_x):
        check_gemm(70, 20, 64, x_kind, fmt, "float32", change=change)


@WIDE_KINDS
def test_gemm_by_parts(x_kind, fmt):
    """By gemm_skinny alone, by bfloat16_parts and cuBLASLt, and where K is no multiple of 32."""
    sizes = ((21, 20, 160), (33, 40, 96), (70, 40, 96), (3, 7, 37))
    for (m, n, k), dtype in zip(sizes, itertools.cycle(DTYPES)):
        names = check_gemm(m, n, k, x_kind, fmt, dtype, bias=n != 40)
        count = 3 if x_kind == "float32" else 2
        if k % 32 == 0 and count * m <= 64:
            assert names == ["gemm_skinny"]
            continue
        inner = ["dequantize", "matmul_bf16 float32", "gemm_float32"]
        assert names == ["bfloat16_parts", *inner, "finish", "gemm_float32"]


@WIDE_KINDS
def test_gemm_by_parts_with_every_value(x_kind, fmt):
    """Huge, subnormal, Inf and NaN values of x; weights that are Inf, NaN, or too small for bfloat16."""

    def values(x, x_scales, b, b_scales):
        x[:], b_scales[:] = edges(x.shape, x_kind, 7), b_scales - 30  # sums must not overflow on the way

    def finite(x, x_scales, b, b_scales):
        values(x, x_scales, b, b_scales)
        x[~np.isfinite(x)] = np.finfo(x.dtype).max

    def infinite_weights(x, x_scales, b, b_scales):
        b[2, 40], b_scales[4, 1] = 0x7C if fmt == "e5m2" else 0x7E, 254
        x[:, 34:] = 1  # one part, the others are zero: zero times Inf is NaN
        if fmt == "int8":  # the one infinite weight; what is finite would overflow on the way
            b[4, 32:64], b[4, 40] = 0, 0x80

    def tiny_weights(x, x_scales, b, b_scales):
        b_scales[:], x[:] = np.minimum(b_scales, 2), x.astype(np.float64) * (2.0**100 if x_kind == "float32" else 1)

    for change, m in itertools.product((values, finite, infinite_weights, tiny_weights), (5, 70)):
        check_gemm(m, 18, 96, x_kind, fmt, "float32", change=change)
        with dispatch.fixed_cut(splits=2):
            check_gemm(5, 18, 1056, x_kind, fmt, "float32", change=change)


def test_gemm_by_parts_in_slices():
    with dispatch.fixed_cut(parts_bytes=1):
        names = check_gemm(150, 40, 96, "float32", "e4m3", "bfloat16")
    assert (names.count("bfloat16_parts"), names.count("finish"), names[-1]) == (3, 3, "gemm_float32")


@looped("x_kind", WIDE)
def test_gemm_of_values_rounded_to_bfloat16(x_kind):
    """The product of bfloat16 values, by the same kernels: one part, and nothing to add up."""
    for (m, n, k), dtype in zip(((64, 20, 160), (70, 40, 96), (3, 7, 37)), itertools.cycle(DTYPES)):
        plain = check_gemm(m, n, k, "bfloat16", "e4m3", dtype)
        assert check_gemm(m, n, k, x_kind, "e4m3", dtype, rounds=True) == ["bfloat16_rounded", *plain]


@looped("k, kernel", [(160, "gemm_skinny"), (0, "gemm_float32")])
def test_bfloat16_values_are_not_rounded_again_and_a_gemm_without_k_gives_the_bias(k, kernel):
    for rounds, x_kind in ((True, "bfloat16"), (False, "bfloat16"), *([] if k else [(True, "float32")])):
        assert check_gemm(3, 5, k, x_kind, "e4m3", "float32", rounds=rounds) == [kernel]


@pytest.mark.slow
def test_every_kernel_ran(request):
    """Each instance of the package is launched by some shape above; this names the one that is not."""
    selected = [item for item in request.session.items if item.path == request.path]
    if all(item.get_closest_marker("slow") for item in selected):
        pytest.skip("needs the quick tests above in the same process")
    here = {name for name in planner.kernels() if source_of(name) in {"gemm_skinny", "gemm_float32"}}
    assert not here - device().ever_launched
