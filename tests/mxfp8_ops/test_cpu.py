"""What is particular to the native kernels: gemms within their bound on every instruction set, packing, the library.

What they share with other backends is in test_backends.py and test_bad_calls.py.
"""

from __future__ import annotations

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
from compare import FORMATS, assert_same, assert_within, heavy_tailed
from grids import looped, pairwise

from mxfp8_ops import cpu, numerics, numpy_nodes
from mxfp8_ops.errors import BackendError

DTYPES = tuple(numerics.VALUE_DTYPES.values())

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning")


# --- the gemms: within gemm_error_bound of float64 -------------------------------------------------------------------

SHAPES = [
    *((0, 5, 64), (3, 0, 64), (3, 5, 0), (1, 70, 5), (1, 9, 2048), (3, 33, 2100), (16, 20, 2048), (17, 4, 33)),
    *((64, 65, 2080), (100, 30, 4100), (300, 7, 1000)),
]


def quantized(shape: tuple[int, ...], fmt: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    return numpy_nodes.quantize(heavy_tailed(shape, seed), element_format=fmt)


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
def test_gemm(isa, shape, formats):
    m, n, k = shape
    check_gemm(quantized((m, k), formats[0], 1), quantized((n, k), formats[1], 2), heavy_tailed((n,), 3), formats)


@looped("shape, x_dtype", pairwise(shape=SHAPES, x_dtype=DTYPES))
def test_weight_gemm(isa, shape, x_dtype):
    m, n, k = shape
    check_weight_gemm(heavy_tailed((m, k), 1).astype(x_dtype), quantized((n, k), "e4m3", 2), heavy_tailed((n,), 3))


# Around the limits of the kernels for few rows, and of their tiles and groups of rows.
ROW_COUNTS = (*range(1, 10), 11, 12, 13, 15, 16, 17, 18, 24, 25, 31, 33, 40, 63, 64, 81, 192, 193, 203, 255, 257, 262)


@looped("m", ROW_COUNTS)
def test_gemms_at_every_row_tile(isa, m):
    k = 600 if m < 100 else 70
    a, b = quantized((m, k), "e4m3", 1), quantized((5, k), "e4m3", 2)
    check_gemm(a, b, heavy_tailed((5,), 3), ("e4m3", "e4m3"))
    check_weight_gemm(heavy_tailed((m, k), 4), b)
    check_weight_gemm(heavy_tailed((m, k), 4).astype(ml_dtypes.bfloat16), b)


@looped("n", [1, 2, 15, 16, 17, 33, 48, 63, 65, 130])
def test_gemms_at_every_column_tile(isa, n):
    for m in (1, 7, 17, 40, 200):
        a, b = quantized((m, 130), "e4m3", 1), quantized((n, 130), "e4m3", 2)
        check_gemm(a, b, None, ("e4m3", "e4m3"))
        check_weight_gemm(heavy_tailed((m, 130), 4), b)


@looped("m", [1, 5, 20, 200])
def test_gemms_of_every_small_depth(isa, m):
    for k in range(1, 101):
        a, b = quantized((m, k), "e4m3", k), quantized((3, k), "e4m3", k + 1)
        check_gemm(a, b, None, ("e4m3", "e4m3"))
        check_weight_gemm(heavy_tailed((m, k), k), b)
        check_weight_gemm(heavy_tailed((m, k), k).astype(ml_dtypes.bfloat16), b)


SIZES_OF_A = [(100, 2.0**-20), (20, 2.0**-60), (2, 2.0**-120)]
"""A scale code of quantized values, and a factor of others."""


@looped("m, b_format, sizes", pairwise(m=[1, 6, 7, 16, 20, 200], b_format=FORMATS, sizes=SIZES_OF_A))
def test_gemms_with_every_kind_of_scale_in_one_row(isa, m, b_format, sizes):
    """Scales too small and too large for a shortcut, between ordinary ones; the values of A keep sums finite."""
    codes = [0, 1, 2, 3, 126, 127, 239 if b_format == "e5m2" else 246]
    rng = np.random.default_rng(m)
    b = rng.integers(0, 0x7B, (70, 1600), dtype=np.uint8) | rng.choice([0, 0x80], (70, 1600)).astype(np.uint8)
    b_scales = rng.choice(codes, (70, 50)).astype(np.uint8)
    b_scales[10:] = 120  # ordinary rows
    b_scales[20, 49] = b_scales[40, 0] = 1
    a = rng.integers(0, 0x7B, (m, 1600), dtype=np.uint8), np.full((m, 50), sizes[0], np.uint8)
    check_gemm(a, (b, b_scales), None, ("e4m3", b_format))
    check_weight_gemm(heavy_tailed((m, 1600)) * np.float32(sizes[1]), (b, b_scales), b_format=b_format)


@looped("m", [1, 8, 20])
def test_weight_gemm_of_values_that_span_all_of_float32(isa, m):
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


@looped("m, x_dtype", pairwise(m=[1, 8, 20], x_dtype=DTYPES))
def test_weight_gemm_shows_nan_and_inf_of_x_in_their_rows(isa, m, x_dtype):
    x, b = heavy_tailed((m, 200)).astype(x_dtype), quantized((9, 200), "e4m3", 2)
    x[0, 150], x[m // 2, 7] = np.inf, np.nan
    b[0][4, 150] = 0  # times infinity: NaN
    y, expected = cpu.weight_gemm(x, *b), numpy_nodes.weight_gemm(x, *b)
    assert_same(np.isnan(y), np.isnan(expected), "NaN")
    assert_same(np.isinf(y), np.isinf(expected), "Inf")


@looped("m", [1, 8, 20, 200])
def test_gemms_with_blocks_of_zeros(isa, m):
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


def test_gemm_without_a_bias_and_without_k_is_zero(isa):
    y = cpu.gemm(*quantized((3, 0), "e4m3", 1), *quantized((20, 0), "e4m3", 2))
    assert_same(y, np.zeros((3, 20), np.float32), "K = 0")


def test_the_bound_catches_a_wrong_scale_of_one_block():
    """So the tests above can fail: a scale one too high in one block of 64 is far outside the bound."""
    a, b = quantized((3, 2048), "e4m3", 1), quantized((5, 2048), "e4m3", 2)
    wrong = (b[0], b[1].copy())
    wrong[1][:, 40] += 1
    with pytest.raises(pytest.fail.Exception, match="off by"):
        assert_within(
            cpu.gemm(*a, *wrong),
            numpy_nodes.gemm(*a, *b),
            numpy_nodes.gemm_error_bound(numpy_nodes.dequantize(*a), numpy_nodes.dequantize(*b)),
            "wrong",
        )


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


def test_gemms_of_many_rows_a_few_of_which_need_the_exact_kernel(isa):
    # Rows are packed 256 or 512 at a time: of these strips one cannot be held in bfloat16, and the others can.
    a, b = quantized((1100, 96), "e4m3", 1), quantized((70, 96), "e4m3", 2)
    a[1][300:303] = 1
    check_gemm(a, b, None, ("e4m3", "e4m3"))
    x = heavy_tailed((1100, 96))
    x[300:303] = 2.0**-130
    check_weight_gemm(x, b)
    check_weight_gemm(x.astype(ml_dtypes.bfloat16), b)


@looped("rows, which", pairwise(rows=[20, 200], which=["a", "b"]))
def test_gemm_shows_a_nan_scale_in_its_row_or_column_only(isa, which, rows):
    a, b = quantized((rows, 96), "e4m3", 1), quantized((30, 96), "e4m3", 2)
    clean = cpu.gemm(*a, *b)
    (a if which == "a" else b)[1][7, 1] = 255
    y = cpu.gemm(*a, *b)
    expected = np.zeros(y.shape, bool)
    expected[(7, slice(None)) if which == "a" else (slice(None), 7)] = True
    assert_same(np.isnan(y), expected, "where NaN is")
    assert_same(np.where(expected, 0, y), np.where(expected, 0, clean), "the rest")


@looped("rows, fmt", pairwise(rows=[2, 20, 200], fmt=FORMATS))
def test_gemm_shows_nan_and_inf_elements(isa, fmt, rows):
    a, b = quantized((rows, 64), "e4m3", 1), quantized((20, 64), fmt, 2)
    a[0][1, 9] = 0xFF
    b[0][3, 40], b[0][4, 5], b[0][5, 6] = 0x7F, 0xFF, 0x7C  # 0x7c: infinity in e5m2, a number in e4m3
    expected = numpy_nodes.gemm(*a, *b, b_format=fmt)
    y = cpu.gemm(*a, *b, b_format=fmt)
    assert_same(np.isnan(y), np.isnan(expected), "NaN")
    assert_same(np.isinf(y), np.isinf(expected), "Inf")


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


@looped("a_shape, b_shape, shape", [((2, 1, 5, 64), (3, 7, 64), (2, 3, 5, 7)), ((64,), (7, 64), (7,))])
def test_gemm_broadcasts_leading_dimensions_and_takes_a_vector(isa, a_shape, b_shape, shape):
    a, b = quantized(a_shape, "e4m3", 1), quantized(b_shape, "e4m3", 2)
    check_gemm(a, b, heavy_tailed((7,), 3), ("e4m3", "e4m3"))
    assert cpu.gemm(*a, *b).shape == shape


# --- pack ------------------------------------------------------------------------------------------------------------


@looped("transposed, dtype", pairwise(transposed=[False, True], dtype=DTYPES))
def test_pack_is_quantize_of_n_by_k(isa, dtype, transposed):
    for rows, columns in ((70, 301), (301, 70), (1, 1), (5, 0)):
        w = heavy_tailed((rows, columns + 3)).astype(dtype)[:, :columns]  # rows are strided
        packed = cpu.pack(w, transposed=transposed)
        weight = w.T if transposed else w
        expected = numpy_nodes.quantize(np.ascontiguousarray(weight))
        assert_same(packed.elements, expected[0], "elements")
        assert_same(packed.scales, expected[1], "scales")


@looped("transposed, k, fmt", pairwise(transposed=[False, True], k=[500, 544], fmt=FORMATS))
def test_pack_measures_its_error(isa, transposed, fmt, k):
    w = heavy_tailed((300, 550))[:, :k]  # rows are strided
    packed = cpu.pack(w, transposed=transposed, element_format=fmt)
    back = numpy_nodes.dequantize(packed.elements, packed.scales, element_format=fmt).astype(np.float64)
    error = (w.T if transposed else w) - back
    # Sums of positive doubles in another order: relative error below (number of terms) * 2^-53.
    tolerance = w.size * 2.0**-53
    assert packed.signal == pytest.approx((w.astype(np.float64) ** 2).sum(), rel=tolerance, abs=0)
    assert packed.noise == pytest.approx((error**2).sum(), rel=tolerance, abs=0)
    assert packed.first_nonfinite is None


@looped("transposed", [False, True])
def test_pack_finds_the_first_bad_value_and_leaves_its_block_out_of_the_sums(isa, transposed):
    w = np.ones((192, 320), np.float32)
    w[150, 3], w[17, 250], w[17, 270] = np.nan, np.inf, np.nan
    packed = cpu.pack(w, transposed=transposed)
    assert packed.first_nonfinite == (17, 250)
    assert (packed.scales == 255).sum() == 3
    assert packed.signal == w.size - 3 * 32
    assert packed.noise == 0


def test_results_do_not_depend_on_threads():
    x, ids = heavy_tailed((3000, 300)), np.random.default_rng(0).integers(-3000, 3000, 700)
    table, packed = cpu.quantize(x), {}
    for threads in (1, 5):
        elements, scales = cpu.quantize(x, threads=threads)
        assert_same(elements, table[0], f"elements with {threads} threads")
        assert_same(scales, table[1], f"scales with {threads} threads")
        assert_same(cpu.dequantize(*table, threads=threads), numpy_nodes.dequantize(*table))
        assert_same(cpu.embedding(ids, *table, threads=threads), numpy_nodes.embedding(ids, *table))
        packed[threads] = cpu.pack(x, threads=threads)
    assert (packed[1].signal, packed[1].noise) == (packed[5].signal, packed[5].noise)


# --- the library -----------------------------------------------------------------------------------------------------


def test_subnormals_survive_a_caller_that_flushes_them(isa):
    torch = pytest.importorskip("torch")
    x = np.full((300, 64), 3 * 2.0**-130, np.float32)
    expected = numpy_nodes.quantize(x)
    back = numpy_nodes.dequantize(*expected)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        elements, scales = cpu.quantize(x, threads=1)
        y = cpu.dequantize(elements, scales, threads=1)
        product = cpu.gemm(elements[:1], scales[:1], np.full((4, 64), 0x38, np.uint8), np.full((4, 2), 127, np.uint8))
        still_flushing = bool(torch.tensor([2.0**-130]) * 1 == 0)
    finally:
        torch.set_flush_denormal(False)
    assert_same(elements, expected[0], "elements")
    assert_same(scales, expected[1], "scales")
    assert_same(y, back, "dequantized")
    assert_same(product, np.full((1, 4), 64 * 3 * 2.0**-130, np.float32), "product")
    assert still_flushing, "the caller's mode was not restored"


def test_concurrent_calls_do_not_disturb_each_other():
    a, b = quantized((40, 512), "e4m3", 1), quantized((300, 512), "e4m3", 2)
    expected = cpu.gemm(*a, *b)
    with ThreadPoolExecutor(8) as pool:
        for y in pool.map(lambda _: cpu.gemm(*a, *b, threads=4), range(200)):
            assert_same(y, expected, "y")


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
    code = "from mxfp8_ops import cpu, native; assert native.load.cache_info().currsize == 0; print(cpu.isa())"
    for isa, printed in (("portable", "portable\n"), ("mmx", "BackendError: MXFP8_ISA: 'mmx'; expected one of")):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MXFP8_ISA": isa}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
        assert printed in run.stdout + run.stderr


def test_forcing_an_unknown_instruction_set_fails():
    with pytest.raises(BackendError, match=r"isa: 'neon-x'; expected one of .*portable; name an instruction set"):
        cpu.force_isa("neon-x")


def test_a_missing_library_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("mxfp8_ops.__path__", [str(tmp_path)])
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(BackendError, match=r"no libmxfp8_ops\.\w+ in .*; expected .*; install the project with pip"):
        cpu.library_path()


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
