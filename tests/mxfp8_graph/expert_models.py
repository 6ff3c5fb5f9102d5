"""Models with experts: weights picked from a stack while the model runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from models import model, node, steps, weight

STACK = weight(4, 70, 40, seed=1).transpose(0, 2, 1).copy()
"""[E, N, K]: 4 experts, K no multiple of 32."""


def experts(
    nodes: str | list[onnx.NodeProto],
    *,
    x: Any = ("s", 1, 70),
    index: Any = ("s",),
    stack: np.ndarray = STACK,
    index_dtype: Any = np.int64,
    rank: int = 0,
    **initializers: np.ndarray,
) -> onnx.ModelProto:
    """Returns a model that picks from `stack` by `i` and multiplies with `x`, giving `h`; its result is y = -h."""
    nodes = steps(nodes) if isinstance(nodes, str) else nodes
    inputs = {"x": (stack.dtype, x), "i": (index_dtype, index)}
    outputs = {"y": (stack.dtype, [None] * (rank or max(len(x), len(index) + 2)))}
    return model([*nodes, node("Neg", "h", "y")], inputs, outputs, {"stack": stack, **initializers})
