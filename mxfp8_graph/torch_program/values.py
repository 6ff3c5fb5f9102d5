"""Tensors as NumPy sees them, without copies, and as rows for `weights.pack`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from mxfp8_graph.torch_program import internals
from mxfp8_graph.weights import Rows
from mxfp8_ops.contract import VALUE_NAMES
from mxfp8_ops.errors import ContractError

Array = npt.NDArray[Any]

DTYPE_NAMES = {getattr(torch, name): name for name in VALUE_NAMES.values()}
"""The dtypes of unquantized tensors, by torch dtype."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def to_numpy(tensor: torch.Tensor, name: str) -> Array:
    """Returns the values of a tensor; they share its memory if it lies in the CPU's.

    Raises:
        ContractError: the tensor has no values (it is on the meta device, or fake).
    """
    if not internals.has_values(tensor):
        raise ContractError(
            f"weight {name!r}",
            "has a shape but no values",
            expected="a program that holds its weights",
            advice="export the model with real tensors",
        )
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # NumPy has no such type; ml_dtypes does, and the bits are the same
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: Array = tensor.numpy()
    return array


def storage_of(tensor: Any) -> int:
    """Returns where the memory of a tensor begins; 0 for a tensor without memory of its own."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0


def rows_of(tensor: torch.Tensor, name: str, stored_index: Callable[[tuple[int, ...]], list[int]]) -> tuple[Rows, bool]:
    """Returns (the tensor as rows that lie in one piece, whether those are its columns).

    Args:
        tensor: [..., R, C].
        name: what to call it in errors.
        stored_index: where in the stored tensor the value at an index of `tensor` is.
    """
    data = to_numpy(tensor, name)
    *_, height, width = data.strides
    flipped = height == data.itemsize and width != data.itemsize
    seen = np.swapaxes(data, -1, -2) if flipped else data

    def index(at: tuple[int, ...]) -> list[int]:
        return stored_index((*at[:-2], at[-1], at[-2]) if flipped else at)

    return Rows(shape=seen.shape, read=lambda at, start, stop: seen[at][start:stop], index=index), flipped
