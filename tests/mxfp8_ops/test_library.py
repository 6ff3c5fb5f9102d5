"""The native library: packing of weights, subnormals, threads, and the choice of an instruction set."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compare import FORMATS, ROUNDINGS, assert_same, heavy_tailed
from grids import looped, pairwise
from scale_definition import boundary_values

from mxfp8_ops import cpu, numerics, numpy_nodes
from mxfp8_ops.errors import BackendError
from mxfp8_ops.formats import ELEMENT_FORMATS

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning")

# --- pack ------------------------------------------------------------------------------------------------------------


@looped(
    "transposed, dtype, fmt, rounding",
    pairwise(transposed=[False, True], dtype=numerics.VALUE_DTYPES.values(), fmt=ELEMENT_FORMATS, rounding=ROUNDINGS),
)
def test_pack_is_quantize_of_n_by_k(isa, transposed, dtype, fmt, rounding):
    steps = boundary_values()[np.isfinite(boundary_values())]  # of every scale code
    steps = steps[: len(steps) // 64 * 64].reshape(-1, 64).astype(dtype)
    steps[~np.isfinite(steps)] = 0
    options = {"element_format": fmt, "scale_rounding": rounding}
    for whole in (steps, *(heavy_tailed((n, k)).astype(dtype) for n, k in ((70, 304), (301, 73), (1, 4), (5, 3)))):
        w = whole[:, 3:]  # rows are strided
        packed = cpu.pack(w, transposed=transposed, **options)
        elements, scales = numpy_nodes.quantize(np.ascontiguousarray(w.T if transposed else w), **options)
        assert_same(packed.elements, elements, "elements")
        assert_same(packed.scales, scales, "scales")


@looped("transposed, k, fmt", pairwise(transposed=[False, True], k=[500, 544], fmt=FORMATS))
def test_pack_measures_the_error_of_its_rounding(isa, transposed, fmt, k):
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


def test_the_environment_chooses_the_instruction_set():
    code = "from mxfp8_ops import cpu, native; assert native.load.cache_info().currsize == 0; print(cpu.isa())"
    for isa, printed in (("portable", "portable\n"), ("mmx", "BackendError: MXFP8_ISA: 'mmx'; expected one of")):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MXFP8_ISA": isa}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
        assert printed in run.stdout + run.stderr


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
