"""The CUDA driver of this machine and its GPUs. The module needs neither CuPy nor torch."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mxfp8_ops.errors import BackendError

DRIVER: Final = "libcuda.so.1"
"""File name of the CUDA driver."""

INSTALL: Final = "pip install 'mxfp8-graph[cuda13]' (CUDA 12: [cuda12])"
"""Advice if a package for GPUs is missing."""

_VERSIONS: Final = ("13", "12")
"""Major versions of CUDA."""

_MAJOR, _MINOR, _PROCESSORS = 75, 76, 16
"""Values of CUdevice_attribute."""

_NO_DEVICE: Final = 100
"""CUDA_ERROR_NO_DEVICE of CUresult."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of the driver."""

    name: str
    capability: tuple[int, int]
    processors: int
    memory: int
    """Bytes."""


def driver_version() -> tuple[int, int]:
    """Returns the latest CUDA version that the driver supports.

    Raises:
        BackendError: there is no driver.
    """
    version = ctypes.c_int()
    _check(_driver().cuDriverGetVersion(ctypes.byref(version)))
    # CUDA encodes 12.9 as 12090.
    return version.value // 1000, version.value % 1000 // 10


def gpus() -> list[Gpu]:
    """Returns the GPUs, in the driver's order.

    Raises:
        BackendError: there is no driver, or it does not work.
    """
    driver, count = _driver(), ctypes.c_int()
    # No error: a container without access to a GPU may have the driver.
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        return []
    _check(status)
    _check(driver.cuDeviceGetCount(ctypes.byref(count)))
    return [_gpu(driver, index) for index in range(count.value)]


def candidates(library: str, package: str) -> list[str]:
    """Returns the paths and names of a CUDA library, for each major version that the driver supports, newest first.

    Each version's pip packages come first: they belong to this environment, and the system's toolkit may be older.

    Args:
        library: file name without ".so": "libnvrtc".
        package: folder of its pip package for CUDA 12: "cuda_nvrtc".
    """
    try:
        newest, _ = driver_version()
    except BackendError:  # a machine that only compiles
        newest = int(_VERSIONS[0])
    paths = []
    # A driver refuses code for a newer major version, because it cannot read its format.
    for version in (each for each in _VERSIONS if int(each) <= newest):
        name = f"{library}.so.{version}"
        for entry in map(Path, sys.path):
            for folder in (f"nvidia/cu{version}/lib", f"nvidia/{package}/lib"):
                if (entry / folder / name).is_file():
                    paths.append(str(entry / folder / name))
        paths.append(name)
    return paths


def _gpu(driver: Any, index: int) -> Gpu:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    _check(driver.cuDeviceGet(ctypes.byref(device), index))
    _check(driver.cuDeviceGetName(name, len(name), device))
    _check(driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    values = []
    for attribute in (_MAJOR, _MINOR, _PROCESSORS):
        value = ctypes.c_int()
        _check(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        values.append(value.value)
    return Gpu(name.value.decode(errors="replace"), (values[0], values[1]), values[2], memory.value)


def _driver() -> Any:
    try:
        return ctypes.CDLL(DRIVER)
    except OSError as error:
        advice = "install NVIDIA's driver, if this machine has a GPU"
        raise BackendError(f"no CUDA driver ({error})", expected=f"NVIDIA's {DRIVER}", advice=advice) from error


def _check(status: int) -> None:
    if status:
        advice = "run nvidia-smi to see the state of the driver"
        raise BackendError(f"the CUDA driver returns error {status}", expected="success", advice=advice)
