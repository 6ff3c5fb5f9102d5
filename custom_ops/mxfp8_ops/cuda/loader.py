"""Gives the native library the CUDA driver and the compiled kernels (src/cuda_host/mxfp8_cuda.h).

The library requests the kernels of an ONNX Runtime node when its session opens, and the kernels of CuPy and PyTorch ops
on their first use.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import warnings
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_size_t, c_void_p
from typing import Any, Final

from mxfp8_ops import c_abi, native
from mxfp8_ops.cuda import build, device, system
from mxfp8_ops.cuda.system import DRIVER
from mxfp8_ops.errors import BackendError


class _Gpu(Structure):
    """The C struct `mxfp8_cuda_gpu`."""

    _fields_ = (("context", c_void_p), ("processors", c_int), ("capability", c_int), ("cublaslt", c_char_p))


_GPU = CFUNCTYPE(c_int, c_int, POINTER(_Gpu), c_void_p, c_size_t)
_KERNELS = CFUNCTYPE(c_int, c_int, c_int, POINTER(c_char_p), POINTER(c_void_p), c_void_p, c_size_t)
_WARN = CFUNCTYPE(None, c_char_p)


class _Loader(Structure):
    """The C struct `mxfp8_cuda_loader`."""

    _fields_ = (("gpu", _GPU), ("kernels", _KERNELS), ("warn", _WARN))


@functools.cache
def connect() -> None:
    """Gives the library the CUDA driver and the kernels; once per process.

    Raises:
        BackendError: CuPy, a GPU, the driver, NVRTC or the native library is missing, or the GPU is too old.
    """
    if not device.available():
        device.device(0)  # raises with the reason
    build.nvrtc_version()  # a missing NVRTC raises here, rather than at the first node of a session
    give(native.load())


def give(library: ctypes.CDLL) -> None:
    """Gives a loaded library the CUDA driver and the kernels.

    Raises:
        BackendError: there is no driver.
    """
    message = ctypes.create_string_buffer(1024)
    library.mxfp8_cuda_open.argtypes = c_abi.SIGNATURES["mxfp8_cuda_open"][1]
    if library.mxfp8_cuda_open(DRIVER.encode(), ctypes.byref(_LOADER), message, len(message)):
        raise BackendError(
            "cuda",
            f"no driver ({message.value.decode()})",
            expected=f"NVIDIA's {DRIVER}",
            advice="install the driver, or use the CPU kernels",
        )


def _answer(fill: Callable[[], None], message: int, size: int) -> int:
    """Calls `fill` and returns 0. If it raises, writes the text to `message` and returns 1, as C has no exceptions."""
    try:
        fill()
    except Exception as error:
        text = (str(error) or type(error).__name__).encode()[: size - 1] + b"\0"
        ctypes.memmove(message, text, len(text))
        return 1
    return 0


def _gpu(index: int, gpu: Any, message: int, size: int) -> int:
    def fill() -> None:
        with device.current(index) as gpu_device:
            gpu[0].context, gpu[0].processors = gpu_device.context(), gpu_device.processors
            gpu[0].capability = 10 * gpu_device.capability[0] + gpu_device.capability[1]
        gpu[0].cublaslt = cublaslt()  # whose cache keeps the text until the library has copied it

    return _answer(fill, message, size)


def _kernels(index: int, count: int, kernels: Any, functions: Any, *message: int) -> int:
    def fill() -> None:
        with device.current(index) as gpu_device:
            for i, function in enumerate(gpu_device.functions([name.decode() for name in kernels[:count]])):
                functions[i] = function.ptr

    return _answer(fill, *message)


def _warn(message: bytes) -> None:
    warnings.warn(message.decode(errors="replace"), stacklevel=2)


_LOADER: Final = _Loader(_GPU(_gpu), _KERNELS(_kernels), _WARN(_warn))
"""A global, because the library calls it for the life of the process."""


@functools.cache
def cublaslt() -> bytes | None:
    """Returns the file of cuBLASLt, or None: the one that this process has loaded, otherwise the newest."""
    if sys.platform == "win32":  # it has no RTLD_NOLOAD
        return None
    candidates = system.candidates("libcublasLt", "cublas")
    for mode in (os.RTLD_NOLOAD | os.RTLD_LAZY, os.RTLD_LAZY):
        for path in candidates:
            with contextlib.suppress(OSError):
                ctypes.CDLL(path, mode=mode)
                return path.encode()
    return None
