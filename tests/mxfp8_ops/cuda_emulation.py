"""Builds the CUDA kernels for the CPU with g++ and `cuda_emulation.h`, and launches them on host memory.

`EmulatedDevice` is an `execution.Device` whose launches come from the native library through an emulated CUDA driver
(cuda_driver_emulation.cpp), so the tests run the planner and what does its plans too.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compiled
import cublaslt_emulation
import numpy as np
import pytest

from mxfp8_ops import formats, native, numerics
from mxfp8_ops.cuda import build as cuda_build
from mxfp8_ops.cuda import dispatch, loader, planner
from mxfp8_ops.cuda.execution import Queue
from mxfp8_ops.cuda.planner import CODES

HERE = Path(__file__).parent
FORMATS = tuple(formats.ELEMENT_FORMATS)
FLAGS = "MXFP8_TEST_EMULATION_FLAGS"
"""Environment variable with more flags for g++, such as those of a sanitizer."""


def products(x_kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Returns (kind of x, format of b) of all products: those of INT8 elements are with INT8 or with values."""
    pairs = itertools.product(x_kinds, FORMATS)
    return [(x, b) for x, b in pairs if x not in FORMATS or (x == "int8") == (b == "int8")]


def source_of(kernel: str) -> str:
    return kernel.partition("<")[0]


def build(names: list[str], *extra: str) -> Path:
    """Returns a library of these kernels."""
    lines = ['#include "cuda_emulation.h"']
    lines += [f'#include "{source}.cu"' for source in dict.fromkeys(map(source_of, names))]
    lines += [
        'extern "C" int emulate(int index, unsigned grid, int threads, const uint64_t* arguments) {',
        "mma_calls = 0;",
        "switch (index) {",
    ]
    for index, kernel in enumerate(names):
        call = f"emulation::launch(grid, threads, [=] {{ emulation::call(&{kernel}, arguments); }});"
        lines.append(f"case {index}: {call} return 0;")
    lines += ["}", "return 1;", "}", 'extern "C" int parameters(int index) {', "switch (index) {"]
    lines += [f"case {i}: return emulation::parameters(&{kernel});" for i, kernel in enumerate(names)]
    lines += ["}", "return 0;", "}"]
    lines.append('extern "C" uint64_t emulated_mmas() { return mma_calls; }')
    included = (HERE / "cuda_emulation.h", *sorted(cuda_build.SOURCES.glob("*.cu*")))
    return compiled.library("kernels", "\n".join(lines), ("-w", "-ffp-contract=off", *extra), included)


_EMULATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_uint, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
"""`emulate` of the library of kernels."""


class EmulatedDevice:
    """A device whose memory is the host's."""

    index = 0
    capability = (9, 0)
    processors = 3

    def __init__(self, names: list[str], *flags: str) -> None:
        self.library = ctypes.CDLL(str(build(names, *flags)))
        self.library.emulate.argtypes = (*_EMULATE._argtypes_[:-1], ctypes.c_void_p)
        self.library.emulated_mmas.restype = ctypes.c_uint64
        self.names = names
        self.indices = {kernel: i for i, kernel in enumerate(names)}
        self.launched: list[str] = []
        self.ever_launched: set[str] = set()
        # Alive as long as the device: the driver and the native library call them.
        self._callbacks = (
            _EMULATE(self._launched),
            cublaslt_emulation.OBSERVE(self._multiplied),
            loader._Loader(loader._GPU(self._gpu), loader._KERNELS(self._kernels), loader._WARN(loader._warn)),
        )

    def mmas(self) -> int:
        """Returns how many tensor core instructions the warps of the last launch ran."""
        count: int = self.library.emulated_mmas()
        return count // 32

    def connect(self) -> None:
        """Makes this the GPU that the native library launches on."""
        function, _, callbacks = self._callbacks
        driver = ctypes.CDLL(str(driver_library()))
        driver.start.argtypes = (_EMULATE, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
        driver.start(function, ctypes.cast(self.library.parameters, ctypes.c_void_p), 0, 0)
        message = ctypes.create_string_buffer(1024)
        path = str(driver_library()).encode()
        assert native.load().mxfp8_cuda_open(path, ctypes.byref(callbacks), message, len(message)) == 0, message.value

    def functions(self, kernels: Sequence[str]) -> list[Callable[..., None]]:
        """Returns kernels as CuPy has them."""
        return [lambda grid, block, arguments, k=kernel: self.launch(k, grid[0], arguments) for kernel in kernels]

    def _launched(self, kernel: int, grid: int, block: int, arguments: Any) -> int:
        assert block == 256
        try:
            self.launch(self.names[kernel], grid, arguments[: self.library.parameters(kernel)])
        except BaseException:  # no exception leaves a callback
            traceback.print_exc()
            return 1
        return 0

    def _gpu(self, index: int, gpu: Any, message: int, size: int) -> int:
        gpu[0].context, gpu[0].processors, gpu[0].capability = 1, self.processors, 90
        gpu[0].cublaslt = cublaslt_emulation.file()
        contexts = ctypes.CDLL(str(driver_library())).context_depth
        cublaslt_emulation.connect(contexts=contexts, observe=self._callbacks[1])
        return 0

    def _multiplied(self, b_type: int, y_type: int) -> None:
        b, y = (cublaslt_emulation.NAMES[each] for each in (b_type, y_type))
        self.launched.append(f"matmul_{'bf16' if b == 'bfloat16' else 'fp8'} {y}")

    def _kernels(self, _index: int, count: int, kernels: Any, functions: Any, *_: int) -> int:
        for i in range(count):
            functions[i] = self.indices[kernels[i].decode()] + 1
        return 0

    def launch(self, kernel: str, grid: int, arguments: Sequence[int]) -> None:
        """Launches a kernel by hand, or for the driver."""
        assert 0 < grid < 2**31
        self.launched.append(kernel)
        self.ever_launched.add(kernel)
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        assert self.library.emulate(self.indices[kernel], grid, 256, values) == 0


@functools.cache
def driver_library() -> Path:
    """Returns the emulated driver."""
    return compiled.library("driver", (HERE / "cuda_driver_emulation.cpp").read_text(), ("-Wall", "-Wextra"))


@functools.cache
def device() -> EmulatedDevice:
    return EmulatedDevice([*planner.kernels()], *os.environ.get(FLAGS, "").split())


def queue(on: EmulatedDevice | None = None) -> Queue:
    on = on or device()
    on.connect()
    return Queue(on, 0, allocate)


def allocate(size: int) -> tuple[Any, int]:
    memory = aligned(size)
    return memory, memory.ctypes.data


def launch(kernel: str, grid: int, *arguments: int) -> None:
    """Launches one kernel by hand."""
    device().launch(kernel, grid, arguments)


def plan_gemm(
    kinds: tuple[str, str, str],
    sizes: tuple[int, int, int],
    *,
    address: int = 1 << 20,
    capability: tuple[int, int] = (9, 0),
    processors: int = 132,
    cublaslt: int = planner.BFLOAT16_PRODUCTS,
    kept: bool = False,
    inexact: int = 1 << 20,
    forced: bool = True,
) -> planner.Plan:
    """Plans a product y [M, N] of kinds (x, b, y) on operands at one address, under the choices of `dispatch`."""
    on = types.SimpleNamespace(capability=capability, processors=processors)
    place = dispatch.place(on, cublaslt)
    operands = (address, address if kinds[0] in formats.ELEMENT_FORMATS else 0, address, address, 0, 1 << 20)
    product = planner.Gemm(*map(CODES.__getitem__, kinds), *operands, *sizes)
    wide = (1 << 20, inexact) if kept else (0, 0)
    return planner.gemm(
        place if forced else place._replace(forced=0), product._replace(wide=wide[0], wide_inexact=wide[1])
    )


def route(kinds: tuple[str, str], sizes: tuple[int, int, int], **options: Any) -> str:
    """Returns the row of the dispatch table that a product takes."""
    return planner.routes()[plan_gemm((*kinds, "float32"), sizes, **options).route].kernel


def sampled(names: str, some: Sequence[Any], every: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with some cases, and with all others in `make test-cuda`: emulated threads take time."""
    rest = [pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in some]
    return pytest.mark.parametrize(names, [*some, *rest])


def aligned(size: int, offset: int = 0) -> np.ndarray:
    """Returns `size` poisoned bytes whose address is `offset` past a multiple of 16."""
    memory = np.full(size + offset, 0xAA, np.uint8)
    if memory.ctypes.data % 16:  # malloc aligns to 16; if not, the end is no longer where AddressSanitizer watches
        memory = np.full(size + offset + 16, 0xAA, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    return memory[start : start + size]


def swizzle(scales: np.ndarray) -> np.ndarray:
    """The 128x4 layout of scales [M, blocks], from its definition."""
    m, blocks = scales.shape
    padded = np.zeros((-(-m // 128) * 128, -(-blocks // 4) * 4), np.uint8)
    padded[:m, :blocks] = scales
    return padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4).reshape(-1)


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
