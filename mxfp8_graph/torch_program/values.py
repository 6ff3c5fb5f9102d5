"""Tensors as NumPy arrays without copies, and the addresses of their memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


def to_numpy(tensor: torch.Tensor) -> Array:
    """Returns the values of a tensor, bfloat16 as ml_dtypes has it; they share its memory if that is on the CPU."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # NumPy has no such type; ml_dtypes does, and the bits are the same
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: Array = tensor.numpy()
    return array


def storage_of(tensor: Any) -> int:
    """Returns the address where the memory of a tensor begins; 0 for a tensor without memory of its own."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0
