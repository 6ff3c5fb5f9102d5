"""Builds the CUDA kernels for the CPU with g++ and `cuda_emulation.h`, and launches them on host memory.

`EmulatedDevice` is a `cuda_kernels.Device`, so the tests run the launch code of the package too.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxfp8_ops.cuda import build as cuda_build
from mxfp8_ops.cuda import instances as cuda_instances
from mxfp8_ops.cuda.launches import THREADS, Launch, Queue

HERE = Path(__file__).parent
FLAGS = "MXFP8_TEST_EMULATION_FLAGS"
"""Environment variable with more flags for g++, such as those of a sanitizer."""

OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off")


def build(*extra: str) -> Path:
    """Returns the library, built now unless a build of the same sources is in the temporary folder."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the emulation of CUDA threads needs g++ on Linux")
    names = [(launch.source, launch.kernel) for launch in cuda_instances.instances()]
    lines = ['#include "cuda_emulation.h"']
    lines += [f'#include "{source}.cu"' for source in dict.fromkeys(source for source, _ in names)]
    lines += [
        'extern "C" int emulate(int index, unsigned grid, int threads, const uint64_t* arguments) {',
        "mma_calls = wgmma_calls = 0;",
        "switch (index) {",
    ]
    for index, (_, kernel) in enumerate(names):
        call = f"emulation::launch(grid, threads, [=] {{ emulation::call(&{kernel}, arguments); }});"
        lines.append(f"case {index}: {call} return 0;")
    lines += ["}", "return 1;", "}", 'extern "C" int parameters(int index) {', "switch (index) {"]
    lines += [f"case {i}: return emulation::parameters(&{kernel});" for i, (_, kernel) in enumerate(names)]
    lines += ["}", "return 0;", "}"]
    lines.append('extern "C" uint64_t emulated_mmas() { return mma_calls; }')
    lines.append('extern "C" void share(size_t bytes) { emulation::shared_bytes = bytes; }')
    lines.append('extern "C" uint64_t emulated_wgmmas() { return wgmma_calls; }')
    text = "\n".join(lines)
    digest = hashlib.sha256(repr((text, OPTIONS, extra)).encode())
    for path in (*sorted(HERE.glob("cuda_emulation*.h")), *sorted(cuda_build.SOURCES.glob("*.cu*"))):
        digest.update(path.read_bytes())
    library = Path(tempfile.gettempdir()) / f"mxfp8-cuda-emulation-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as folder:
            source, built = Path(folder) / "emulation.cpp", Path(folder) / "emulation.so"
            source.write_text(text)
            includes = [f"-I{HERE}", f"-I{cuda_build.SOURCES}"]
            subprocess.run([compiler, *OPTIONS, *extra, *includes, str(source), "-o", str(built)], check=True)
            staged = library.with_suffix(f".{os.getpid()}")
            shutil.copy(built, staged)
            staged.replace(library)
    return library


class EmulatedDevice:
    """A device whose memory is the host's."""

    capability = (9, 0)
    processors = 3

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.emulate.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p)
        self.library.share.argtypes = (ctypes.c_size_t,)
        self.library.emulated_mmas.restype = ctypes.c_uint64
        self.indices = {launch.kernel: i for i, launch in enumerate(cuda_instances.instances())}
        self.launched: list[str] = []
        self.ever_launched: set[str] = set()

    def mmas(self) -> int:
        """Returns how many tensor core instructions the warps of the last launch ran."""
        count: int = self.library.emulated_mmas()
        return count // 32

    def launch(self, launch: Launch, stream: int) -> None:
        assert launch.kernel.startswith(launch.source)
        assert 0 < launch.grid < 2**31
        self.launched.append(launch.kernel)
        self.ever_launched.add(launch.kernel)
        arguments = (ctypes.c_uint64 * len(launch.arguments))(*launch.arguments)
        self.library.share(launch.shared)
        assert self.library.emulate(self.indices[launch.kernel], launch.grid, THREADS, arguments) == 0

    def matmul_bf16(self, x: int, w: int, y: int, sizes: tuple[int, int, int], *, dtype: str, queue: Queue) -> None:
        self.launched.append(f"matmul_bf16 {dtype}")
        m, n, k = sizes
        values = [
            np.frombuffer((ctypes.c_char * (2 * rows * k)).from_address(at), ml_dtypes.bfloat16).reshape(rows, k)
            for at, rows in ((x, m), (w, n))
        ]
        with np.errstate(over="ignore", invalid="ignore"):
            result = (values[0].astype(np.float64) @ values[1].astype(np.float64).T).astype(np.float32)
            result = result.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
        ctypes.memmove(y, result.ctypes.data, result.nbytes)


@functools.cache
def device() -> EmulatedDevice:
    return EmulatedDevice(build(*os.environ.get(FLAGS, "").split()))


def queue(on: EmulatedDevice | None = None) -> Queue:
    return Queue(on or device(), 0, allocate)


def allocate(size: int, zero: bool) -> tuple[Any, int]:
    memory = aligned(size)
    if zero:
        memory[:] = 0
    return memory, memory.ctypes.data


def aligned(size: int, offset: int = 0) -> np.ndarray:
    """Returns `size` poisoned bytes whose address is `offset` past a multiple of 16."""
    memory = np.full(size + offset, 0xAA, np.uint8)
    if memory.ctypes.data % 16:  # malloc aligns to 16; if not, the end is no longer where AddressSanitizer watches
        memory = np.full(size + offset + 16, 0xAA, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    return memory[start : start + size]
