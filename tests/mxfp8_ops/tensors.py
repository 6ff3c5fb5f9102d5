"""Tensors for the tests of torch ops."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> torch.Tensor:
    """Returns normal values times exponentials of others: heavy-tailed, so that the order of a sum matters."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp(spread * torch.randn(shape, generator=generator))).to(dtype)


def array(t: torch.Tensor) -> np.ndarray:
    """Returns the tensor as the NumPy array that the reference takes."""
    t = t.detach().cpu()
    return t.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16) if t.dtype == torch.bfloat16 else t.numpy()


def name(dtype: torch.dtype) -> str:
    """Returns the name that the reference has for a dtype."""
    return str(dtype).removeprefix("torch.")
