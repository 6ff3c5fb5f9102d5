"""Tells whether a device has instructions that multiply MXFP8. On other devices kernels decode it and multiply floats.

The answer is yes for GPUs of compute capability 10.x and 11.x, as in TransformerEngine's `is_mxfp8_available`. It
matters for speed only: results agree with `numpy_nodes.py` on every device.

The module needs the CUDA driver, but neither torch nor CuPy. The answers have not been verified on hardware.
"""

from __future__ import annotations

import platform
import re

from mxfp8_ops import native
from mxfp8_ops.cuda import system
from mxfp8_ops.errors import BackendError


def is_mxfp8_native(device: object = "cuda") -> bool:
    """Returns whether a device has tensor cores that multiply MXFP8 with its scales, in all layouts of the operands.

    Args:
        device: "cpu", "cuda" (GPU 0), "cuda:1", or a `torch.device`. The answer for a missing GPU is False.

    Raises:
        BackendError: `device` is another device.
    """
    return _answer(_gpu_index(device))[0]


def native_reason(device: object = "cuda") -> str:
    """Returns the reason for the answer of `is_mxfp8_native`; for the processor, it names the instruction set in use.

    Raises:
        BackendError: `device` is another device, or the native library is missing.
    """
    index = _gpu_index(device)
    reason = _answer(index)[1]
    return f"{reason}; the kernels emulate it on {native.isa()}" if index is None else reason


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Returns `is_mxfp8_native("cuda")`, or the pair (answer, reason) if `return_reason`.

    TransformerEngine has the same function. Its reason is empty if the answer is True; this one is not.
    """
    return (is_mxfp8_native(), native_reason()) if return_reason else is_mxfp8_native()


def _gpu_index(device: object) -> int | None:
    """Returns the number of a GPU, or None for the processor."""
    match = re.fullmatch(r"cpu|cuda(:(\d{1,9}))?", str(device))
    if match is None:
        advice = "name one of these devices"
        raise BackendError("device", repr(str(device)), expected="cpu, cuda or cuda:N", advice=advice)
    return None if match[0] == "cpu" else int(match[2] or 0)


def _answer(index: int | None) -> tuple[bool, str]:
    """Returns whether a device multiplies MXFP8 itself, and the reason."""
    if index is None:
        return False, f"{platform.machine()} processors have no MXFP8 instructions"
    try:
        gpus = system.gpus()
    except BackendError as error:
        return False, error.problem
    if index >= len(gpus):
        return False, f"the CUDA driver shows {len(gpus)} GPUs, none with number {index}"
    gpu, (major, minor) = gpus[index], gpus[index].capability
    here = f"{gpu.name} has compute capability {major}.{minor}"
    if major < 10:
        return False, f"{here}, and tensor cores multiply MXFP8 from 10.0 (Blackwell) on"
    if major >= 12:
        return False, f"{here}, which multiplies MXFP8 in one layout only: the one that these products have"
    return True, f"{here}, whose tensor cores multiply MXFP8"
