"""The CUDA kernels compile for every architecture, with no spills and 16-byte accesses; and the cache of cubins."""

from __future__ import annotations

import collections
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import compiled
import pytest
from cuda_emulation import source_of
from grids import looped

from mxfp8_ops import native
from mxfp8_ops.cuda import build, planner, system
from mxfp8_ops.cuda import device as cuda_device
from mxfp8_ops.errors import BackendError

pytestmark = pytest.mark.cuda

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOAD, STORE, LOAD_LOCAL, STORE_LOCAL = 0x981, 0x986, 0x983, 0x387
"""Opcodes of LDG, STG, LDL and STL: the low 12 bits of a machine instruction, the same from sm_80 to sm_120."""

SIXTEEN_BYTES = 6
"""Bits 73..75 of a memory instruction: 0, 1 one byte; 2, 3 two; 4 four; 5 eight; 6 sixteen."""

OLD_NVRTC = "13.0.88"
"""The oldest NVRTC 13 that PyTorch brings: PyTorch 2.11 is built with CUDA 13.0. Its libnvrtc.so.13 has no RPATH."""


@pytest.fixture(scope="module", autouse=True)
def nvrtc():
    try:
        version = build.nvrtc_version()
    except BackendError as error:
        pytest.skip(str(error))
    if version < (12, 8):
        pytest.skip(f"NVRTC {version[0]}.{version[1]} does not know sm_100a and sm_120a")


# --- What the machine code is ----------------------------------------------------------------------------------------


def memory_instructions(code: bytes) -> collections.Counter[tuple[int, int]]:
    """Returns how often each (opcode, width) occurs in the one kernel of a cubin. An instruction has 16 bytes."""
    text = build.sections(code)[f".text.{build.entry(code)}"]
    return collections.Counter((low & 0xFFF, high >> 9 & 7) for low, high in struct.iter_unpack("<QQ", text))


def check(kernel: str, arch: str) -> None:
    """Checks what ptxas reports, and which memory instructions the machine code really has."""
    source, what = source_of(kernel), f"{kernel}, {arch}"
    cubin = compiled.cubin(source, kernel, arch, ("--ptxas-options=-v",))
    assert int(re.search(r"Used (\d+) registers", cubin.log)[1]) <= 255, what
    assert re.search("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", cubin.log), what + cubin.log
    counts = memory_instructions(cubin.code)
    assert not {op for op, _ in counts} & {LOAD_LOCAL, STORE_LOCAL}, f"{what} uses local memory"
    assert any(op == STORE for op, _ in counts), what
    # gemm_float32 and the ragged ones take any address; group_rows counts indices, one a thread.
    if source in {"gemm_float32", "group_rows"} or kernel.endswith("true>"):
        return
    if source != "swizzle_scales":  # it reads 4 bytes of each of 4 places
        assert counts[LOAD, SIXTEEN_BYTES], f"{what}: {counts}"
    if source not in {"gemm_skinny", "gemm_grouped"}:
        assert counts[STORE, SIXTEEN_BYTES], f"{what}: {counts}"
    if source.startswith("quantize"):
        assert not sum(n for (op, width), n in counts.items() if op == LOAD and width != SIXTEEN_BYTES), what


SAMPLE = (
    "quantize_rows<BF16, E4M3, false>",
    "quantize_columns<BF16, E4M3, PLAIN, false>",
    "quantize_columns<BF16, E4M3, BOTH, false>",
    "dequantize<BF16, E4M3, true, false>",
    "gemm_skinny<BF16, E4M3, 1>",
    "gemm_skinny<F32, E4M3, 8>",
    "gemm_skinny<E4M3, E4M3, 8>",
    "gemm_float32<F32, E4M3>",
    "finish<false>",
    "bfloat16_parts<F32, false>",
    "bfloat16_rounded<F32, false>",
    "swizzle_scales",
)
"""One or two instances of every source; the slow test takes all of them."""


@pytest.mark.parametrize("arch", ["sm_80", "sm_120a"])
@looped("kernel", SAMPLE)
def test_kernels_compile_without_spills_and_access_16_bytes(arch, kernel):
    """With the oldest and the newest instructions."""
    check(kernel, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", build.TARGETS)
def test_every_kernel_compiles_without_spills_and_accesses_16_bytes(arch):
    for kernel in planner.kernels():
        check(kernel, arch)


@looped("arch", build.TARGETS)
def test_the_quantizer_converts_in_hardware_where_there_is_an_instruction(arch):
    kernel = "quantize_rows<BF16, E4M3, false>"
    ptx = compiled.cubin("quantize_rows", kernel, arch.replace("sm", "compute")).code.decode()
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (arch != "sm_80")
    assert ".ftz" not in ptx


def test_the_skinny_gemm_is_on_tensor_cores():
    ptx = compiled.cubin("gemm_skinny", "gemm_skinny<BF16, E4M3, 1>", "compute_90a").code.decode()
    assert ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") >= 8
    assert ".ftz" not in ptx


# --- The oldest NVRTC, out of its pip package alone ------------------------------------------------------------------


@pytest.fixture(scope="module")
def old_nvrtc() -> Path:
    """Installs it once. pip installs one version of a package, so it comes into a folder of its own."""
    folder = ROOT / "build" / f"nvrtc-{OLD_NVRTC}"
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            target = Path(temporary) / "target"
            command = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary=:all:", "--quiet"]
            command += ["--disable-pip-version-check", "--target", str(target), f"nvidia-cuda-nvrtc=={OLD_NVRTC}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"needs nvidia-cuda-nvrtc {OLD_NVRTC}, which pip cannot install: {done.stderr[-200:]}")
            if not folder.is_dir():  # another process may have been faster
                target.rename(folder)
    return folder


@pytest.mark.parametrize("arch", [None, *(pytest.param(arch, marks=pytest.mark.slow) for arch in build.TARGETS)])
def test_kernels_compile_with_the_old_nvrtc_alone(old_nvrtc, arch):
    """In a process whose loader knows no CUDA and that has not imported torch: a kernel of every source, or all."""
    script = """
import sys, test_cuda_build
from mxfp8_ops.cuda import build
assert build.nvrtc_version() == (13, 0), build.nvrtc_version()
for kernel in sys.argv[2:]:
    test_cuda_build.check(kernel, sys.argv[1])
assert "torch" not in sys.modules
"""
    one_each = {source_of(kernel): kernel for kernel in planner.kernels()}
    assert {*one_each} == {path.stem for path in build.SOURCES.glob("*.cu")}
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    paths = (old_nvrtc, ROOT, ROOT / "custom_ops", HERE, HERE.parent, native.library_path().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, "-c", script, arch or "sm_90a", *(planner.kernels() if arch else one_each.values())]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(("driver", "tried"), [((12, 8), ("12",)), ((13, 1), ("13", "12")), (None, ("13", "12"))])
def test_no_library_is_newer_than_the_driver(monkeypatch, driver, tried):
    def version():
        if driver is None:
            raise BackendError("no CUDA driver", expected="one", advice="install it")
        return driver

    monkeypatch.setattr(system, "driver_version", version)
    monkeypatch.setattr(sys, "path", [])
    assert system.candidates("libnvrtc", "cuda_nvrtc") == [f"libnvrtc.so.{each}" for each in tried]


# --- The cache and the errors ----------------------------------------------------------------------------------------


def test_a_cubin_is_compiled_once_for_each_kernel_architecture_and_source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = build.cubin("finish", "finish<true>", "sm_90a")
    (kept,) = (tmp_path / "mxfp8-graph" / "cuda").iterdir()
    assert kept.read_bytes() == code
    assert kept.name.startswith("finish-sm_90a-")
    monkeypatch.setattr(build, "compile_kernel", None)
    assert build.cubin("finish", "finish<true>", "sm_90a") == code
    keys = {build._key("finish", "finish<true>", arch) for arch in ("sm_90a", "sm_80")}
    shutil.copytree(build.SOURCES, tmp_path / "sources")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "sources")
    assert build._key("finish", "finish<true>", "sm_90a") in keys
    with (tmp_path / "sources" / "codec.cuh").open("a") as file:
        file.write("\n")
    keys.add(build._key("finish", "finish<true>", "sm_90a"))
    assert len(keys) == 3


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build.cubin("finish", "finish<true>", "sm_90a")
    assert "compiled again next time" in capsys.readouterr().err


def test_targets():
    assert [build.target(c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [*build.TARGETS]
    with pytest.raises(BackendError, match=r"compute capability 7\.5; expected 8\.0"):
        build.target((7, 5))


def test_a_kernel_that_does_not_compile_or_load_and_a_missing_nvrtc_are_errors(monkeypatch):
    with pytest.raises(BackendError, match=r"finish\.cu, nothing, does not compile for sm_90a:\n.*nothing"):
        build.compile_kernel("finish", "nothing", "sm_90a")

    class Module:
        def load(self, code: bytes) -> None:
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")

    cupy = SimpleNamespace(cuda=SimpleNamespace(function=SimpleNamespace(Module=Module)))
    monkeypatch.setattr(cuda_device, "cupy_module", lambda: cupy)
    monkeypatch.setattr(build, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(build.system, "driver_version", lambda: (12, 8))
    with pytest.raises(BackendError, match=r"driver \(CUDA 12\.8\) refuses finish, compiled by NVRTC 13\.0: CUDA_E"):
        cuda_device._load("finish", b"")
    monkeypatch.setattr(system, "_VERSIONS", ("0",))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(BackendError, match="pip install nvidia-cuda-nvrtc"):
        build._nvrtc.__wrapped__()
