"""The GPUs of this machine through CuPy: an implementation of `execution.Device`, and the current device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mxfp8_ops.cuda import build, system
from mxfp8_ops.errors import BackendError


def available() -> bool:
    """Returns whether CuPy and a CUDA device are available."""
    try:
        return bool(cupy_module().cuda.runtime.getDeviceCount())
    except BackendError:
        return False


@functools.cache
def cupy_module() -> Any:
    """Returns the module cupy, imported on first use.

    Raises:
        BackendError: CuPy cannot be imported, or there is no usable GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise BackendError(
            "cuda",
            f"CuPy cannot be imported ({error})",
            expected="CuPy 14 or later",
            advice=f"{system.INSTALL}, or use the CPU kernels",
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendError(
            "cuda", f"no usable GPU ({error})", expected="a CUDA device and its driver", advice="use the CPU kernels"
        ) from error
    if not count:
        raise BackendError("cuda", "no GPU", expected="a CUDA device", advice="use the CPU kernels")
    return cupy


class CudaDevice:
    """A GPU, through CuPy."""

    def __init__(self, index: int) -> None:
        properties = cupy_module().cuda.runtime.getDeviceProperties(index)
        self.index = index
        self.capability = (int(properties["major"]), int(properties["minor"]))
        self.processors = int(properties["multiProcessorCount"])
        self.name: str = properties["name"].decode()
        self._target = build.target(self.capability)
        # Kernels by instance: each module is loaded once.
        self._functions: dict[str, Any] = {}

    def functions(self, kernels: Sequence[str]) -> list[Any]:
        """Returns kernels as CuPy functions; loads those that are used for the first time. The device must be current.

        Raises:
            BackendError: NVRTC is missing or refuses a source, or the driver refuses a kernel.
        """
        missing = [kernel for kernel in dict.fromkeys(kernels) if kernel not in self._functions]
        # NVRTC takes up to seconds per kernel, and compiles in parallel on several threads. To load takes no time.
        with ThreadPoolExecutor() if len(missing) > 1 else contextlib.nullcontext() as pool:
            codes = (pool.map if pool else map)(self._code, missing)
            for kernel, code in zip(missing, codes, strict=True):
                self._functions[kernel] = _load(kernel, code)
        return [self._functions[kernel] for kernel in kernels]

    def _code(self, kernel: str) -> bytes:
        return build.cubin(kernel.partition("<")[0], kernel, self._target)

    def context(self) -> int:
        """Returns the address of the primary context."""
        cupy_module().cuda.runtime.free(0)  # creates the context if there is none yet
        address: int = cupy_module().cuda.driver.ctxGetCurrent()
        return address


def _load(kernel: str, code: bytes) -> Any:
    module = cupy_module().cuda.function.Module()
    try:
        module.load(code)
    except RuntimeError as error:  # CuPy's CUDADriverError is one
        compiler, driver = (".".join(map(str, v)) for v in (build.nvrtc_version(), system.driver_version()))
        what = f"the driver (CUDA {driver}) refuses {kernel}, compiled by NVRTC {compiler}: {error}"
        advice = "update the driver, or install the NVRTC of its CUDA version"
        raise BackendError("cuda", what, expected="a kernel that loads", advice=advice) from error
    return module.get_function(build.entry(code))


@functools.cache
def device(index: int) -> CudaDevice:
    """Returns GPU number `index`.

    Raises:
        BackendError: no CuPy, no GPU, or a GPU that is too old.
    """
    return CudaDevice(index)


@contextlib.contextmanager
def current(index: int) -> Iterator[CudaDevice]:
    """Makes GPU number `index` the current device and yields it.

    Raises:
        BackendError: no CuPy, no such GPU, or a GPU that is too old.
    """
    cupy = cupy_module()
    try:
        # CuPy's wheels contain a CUDA runtime of their own, which does not know the device that torch selects.
        same = cupy.cuda.runtime.getDevice() == index
        with contextlib.nullcontext() if same else cupy.cuda.Device(index):
            yield device(index)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendError(
            "cuda", f"GPU {index}: {error}", expected="a usable device", advice="see nvidia-smi"
        ) from error
