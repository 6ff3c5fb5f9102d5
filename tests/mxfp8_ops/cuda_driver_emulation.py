"""A machine with a GPU, for `cuda_loader`: a driver and a CuPy device over the emulated kernels."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cublaslt_emulation
import cuda_emulation
import pytest

from mxfp8_ops.cuda import build as cuda_build
from mxfp8_ops.cuda import device as cuda_device
from mxfp8_ops.cuda import loader as cuda_loader
from mxfp8_ops.cuda import planner
from mxfp8_ops.errors import BackendError

CONTEXT = 0x1234
ANY_STREAM = 2**64 - 1
THREAD_STREAM = 2
"""CU_STREAM_PER_THREAD, the stream of device "cuda-copies"."""


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_int64),
        ("grid", ctypes.c_int64),
        ("stream", ctypes.c_int64),
        ("parameters", ctypes.c_uint64 * 16),
    )


@dataclass(frozen=True)
class Launched:
    """A launch as the driver saw it."""

    kernel: str
    grid: int
    parameters: tuple[int, ...]
    stream: int = field(default=0, compare=False)


class Driver:
    """The emulated driver, and the GPU on it."""

    index = 0
    capability = (9, 0)
    processors = 3
    name = "emulated"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
        self.library.launch.restype = ctypes.POINTER(_Launch)
        self.library.cuMemAlloc_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
        self.library.cuMemFree_v2.argtypes = (ctypes.c_uint64,)
        self.emulation = cuda_emulation.device().library
        self.kernels = [*planner.kernels()]
        self.loaded: list[str] = []

    def start(self, stream: int, *, run: bool = True, bounded: bool = True) -> None:
        """Forgets the launches so far.

        From now on work must be queued on `stream`; kernels run only if `run`, on memory of the driver if `bounded`.
        """
        emulate, parameters = (
            ctypes.cast(f, ctypes.c_void_p) for f in (self.emulation.emulate, self.emulation.parameters)
        )
        self.library.start(emulate if run else None, parameters, stream, bounded)
        self.loaded.clear()

    @property
    def launches(self) -> list[Launched]:
        """Returns the launches of kernels, in order; where memory was cleared is left out."""
        launches = []
        for i in range(self.library.launch_count()):
            launch = self.library.launch(i)[0]
            if launch.kernel >= 0:
                count = self.emulation.parameters(int(launch.kernel))
                kernel, parameters = self.kernels[launch.kernel], tuple(launch.parameters[:count])
                launches.append(Launched(kernel, launch.grid, parameters, launch.stream))
        return launches

    @property
    def allocations(self) -> int:
        """Returns how many pieces of memory are allocated."""
        return int(self.library.memory_count())

    def allocate(self, size: int) -> int:
        """Returns the address of poisoned memory."""
        address, unused = ctypes.c_uint64(), ctypes.c_void_p()
        assert self.library.cuCtxPushCurrent_v2(None) == 0
        assert self.library.cuMemAlloc_v2(ctypes.byref(address), size) == 0
        assert self.library.cuCtxPopCurrent_v2(ctypes.byref(unused)) == 0
        return address.value

    def free(self, address: int) -> None:
        unused = ctypes.c_void_p()
        assert self.library.cuCtxPushCurrent_v2(None) == 0
        assert self.library.cuMemFree_v2(address) == 0
        assert self.library.cuCtxPopCurrent_v2(ctypes.byref(unused)) == 0

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size) if size else b""

    # The part of `device.CudaDevice` that cuda_loader uses.

    def context(self) -> int:
        return CONTEXT

    def functions(self, kernels: list[str]) -> list[Any]:
        for kernel in kernels:
            if kernel not in self.kernels:
                raise BackendError(f"cuda: {cuda_emulation.source_of(kernel)}.cu, {kernel}, does not compile")
        self.loaded += kernels
        return [types.SimpleNamespace(ptr=self.kernels.index(kernel) + 1) for kernel in kernels]


@functools.cache
def driver() -> Driver:
    return Driver(cuda_emulation.driver_library())


@contextlib.contextmanager
def machine(monkeypatch: pytest.MonkeyPatch, stream: int = THREAD_STREAM) -> Iterator[Driver]:
    """Puts a GPU into this machine."""
    gpu = driver()

    @contextlib.contextmanager
    def current(index: int) -> Iterator[Driver]:
        if index != 0:
            raise BackendError(f"cuda: GPU {index}: no such device; expected a usable device; see nvidia-smi")
        yield gpu

    monkeypatch.setattr(cuda_device, "available", lambda: True)
    monkeypatch.setattr(cuda_device, "current", current)
    monkeypatch.setattr(cuda_build, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(cuda_loader, "DRIVER", str(gpu.path))
    monkeypatch.setattr(cuda_loader, "cublaslt", lambda: cublaslt_emulation.file())  # noqa: PLW0108 - tests replace it
    cuda_loader.connect.cache_clear()
    cublaslt_emulation.connect(contexts=gpu.library.context_depth)
    gpu.start(stream)
    yield gpu
    cuda_loader.connect.cache_clear()
    assert gpu.library.context_depth() == 0
