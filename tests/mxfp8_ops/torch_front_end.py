"""The torch ops as functions on NumPy arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest


class Torch:
    """The ops, which take and give tensors."""

    def __getattr__(self, name: str) -> Any:
        torch = pytest.importorskip("torch")
        pytest.importorskip("mxfp8_ops.torch_ops")
        import tensors  # here, because it needs torch

        def tensor(x: np.ndarray) -> Any:
            is_bfloat16 = x.dtype == ml_dtypes.bfloat16
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(x)

        def call(*operands: np.ndarray, **options: Any) -> Any:
            named = {k: getattr(torch, v) if k.endswith("dtype") else v for k, v in options.items()}
            result = getattr(torch.ops.mxfp8, name)(*map(tensor, operands), **named)
            return tuple(map(tensors.array, result)) if isinstance(result, tuple) else tensors.array(result)

        return call
