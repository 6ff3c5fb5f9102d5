"""The CUDA kernels compile for every architecture, with no spills and 16-byte accesses; and the cache of cubins."""

from __future__ import annotations

import collections
import re
import shutil
import struct
import sys
from types import SimpleNamespace

import compiled
import pytest
from cuda_emulation import source_of
from grids import looped

from mxfp8_ops.cuda import build, planner
from mxfp8_ops.cuda import device as cuda_device
from mxfp8_ops.errors import BackendError

LOAD, STORE, LOAD_LOCAL, STORE_LOCAL = 0x981, 0x986, 0x983, 0x387
"""Opcodes of LDG, STG, LDL and STL: the low 12 bits of a machine instruction, the same from sm_80 to sm_120."""

SIXTEEN_BYTES = 6
"""Bits 73..75 of a memory instruction: 0, 1 one byte; 2, 3 two; 4 four; 5 eight; 6 sixteen."""


@pytest.fixture(scope="module", autouse=True)
def nvrtc():
    try:
        version = build.nvrtc_version()
    except BackendError as error:
        pytest.skip(str(error))
    if version < (12, 8):
        pytest.skip(f"NVRTC {version[0]}.{version[1]} does not know sm_100a and sm_120a")


def memory_instructions(code: bytes) -> collections.Counter[tuple[int, int]]:
    """Returns how often each (opcode, width) occurs in the one kernel of a cubin. An instruction has 16 bytes."""
    text = build.sections(code)[f".text.{build.entry(code)}"]
    return collections.Counter((low & 0xFFF, high >> 9 & 7) for low, high in struct.iter_unpack("<QQ", text))


def resources(log: str) -> dict[str, int]:
    """Returns what ptxas -v reported of one kernel: registers, stack, spill_stores, spill_loads, shared (bytes)."""
    patterns = {
        "registers": r"Used (\d+) registers",
        "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
        "shared": r"(\d+) bytes smem",
    }
    return {name: int(found[1]) for name, pattern in patterns.items() if (found := re.search(pattern, log))}


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
    assert kernel in planner.kernels()
    check(kernel, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", build.TARGETS)
def test_every_kernel_compiles_without_spills_and_accesses_16_bytes(arch):
    for kernel in planner.kernels():
        check(kernel, arch)


def check(kernel: str, arch: str) -> None:
    """What ptxas reports, and which memory instructions the machine code really has."""
    source = source_of(kernel)
    cubin = compiled.cubin(source, kernel, arch, ("--ptxas-options=-v",))
    used = resources(cubin.log)
    assert used["registers"] <= 255, kernel
    assert used["stack"] == used["spill_stores"] == used["spill_loads"] == 0, f"{kernel}, {arch}: {used}"
    found = memory_instructions(cubin.code)
    local = [op for op, _ in found if op in (LOAD_LOCAL, STORE_LOCAL)]
    assert not local, f"{kernel}, {arch} uses local memory"
    assert any(op == STORE for op, _ in found), kernel
    if source == "gemm_float32" or kernel.endswith("true>"):  # the ragged ones
        return
    if source == "group_rows":  # it counts indices, one a thread
        return
    if source == "swizzle_scales":  # it reads 4 bytes of each of 4 places
        assert found[STORE, SIXTEEN_BYTES], f"{kernel}, {arch}: {found}"
        return
    assert found[LOAD, SIXTEEN_BYTES], f"{kernel}, {arch}: {found}"
    if source in {"gemm_skinny", "gemm_grouped"}:
        return
    assert found[STORE, SIXTEEN_BYTES], f"{kernel}, {arch}: {found}"
    if source.startswith("quantize"):
        narrow = sum(n for (op, width), n in found.items() if op == LOAD and width != SIXTEEN_BYTES)
        assert narrow == 0, f"{kernel}, {arch}: {found}"


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


def test_a_cubin_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = build.cubin("finish", "finish<true>", "sm_90a")
    (kept,) = (tmp_path / "mxfp8-graph" / "cuda").iterdir()
    assert kept.read_bytes() == code
    assert kept.name.startswith("finish-sm_90a-")
    monkeypatch.setattr(build, "compile_kernel", None)
    assert build.cubin("finish", "finish<true>", "sm_90a") == code


def test_the_cache_tells_kernels_architectures_and_sources_apart(tmp_path, monkeypatch):
    keys = {build._key("finish", "finish<true>", "sm_90a"), build._key("finish", "finish<true>", "sm_80")}
    shutil.copytree(build.SOURCES, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._key("finish", "finish<true>", "sm_90a") in keys
    (tmp_path / "codec.cuh").write_bytes((tmp_path / "codec.cuh").read_bytes() + b"\n")
    assert build._key("finish", "finish<true>", "sm_90a") not in keys


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build.cubin("finish", "finish<true>", "sm_90a")
    assert "compiled again next time" in capsys.readouterr().err


def test_what_does_not_compile_says_why():
    with pytest.raises(BackendError, match=r"finish\.cu, nothing, does not compile for sm_90a:\n.*nothing"):
        build.compile_kernel("finish", "nothing", "sm_90a")


def test_targets():
    assert [build.target(c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [*build.TARGETS]
    with pytest.raises(BackendError, match=r"compute capability 7\.5; expected 8\.0"):
        build.target((7, 5))


def test_without_nvrtc_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(build, "_VERSIONS", ("0",))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(BackendError, match="pip install nvidia-cuda-nvrtc"):
        build._nvrtc.__wrapped__()


@pytest.mark.parametrize(("driver", "tried"), [((12, 8), ("12",)), ((13, 1), ("13", "12")), (None, ("13", "12"))])
def test_no_nvrtc_is_newer_than_the_driver(monkeypatch, driver, tried):
    def version():
        if driver is None:
            raise BackendError("no CUDA driver", expected="one", advice="install it")
        return driver

    monkeypatch.setattr(build.system, "driver_version", version)
    assert build._versions() == tried


def test_a_kernel_that_the_driver_refuses_names_both_versions(monkeypatch):
    class Module:
        def load(self, code: bytes) -> None:
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")

    cupy = SimpleNamespace(cuda=SimpleNamespace(function=SimpleNamespace(Module=Module)))
    monkeypatch.setattr(cuda_device, "cupy_module", lambda: cupy)
    monkeypatch.setattr(build, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(build.system, "driver_version", lambda: (12, 8))
    with pytest.raises(
        BackendError, match=r"driver \(CUDA 12\.8\) refuses finish, compiled by NVRTC 13\.0: CUDA_ERROR"
    ):
        cuda_device._load("finish", b"")
