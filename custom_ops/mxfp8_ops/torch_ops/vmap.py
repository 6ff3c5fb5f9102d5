"""torch.vmap over the ops: what is mapped becomes a leading dimension of one call.

linear_train is refused: its gradients are blocked along all the rows of a call, so one call over the mapped dimension
would not compute what the separate calls do. So is a mapped bias, for which the kernels have no operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxfp8_ops import checks
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.torch_ops.shapes import Pair

Dims = Sequence[int | None]


def quantize(info: Any, in_dims: Dims, x: Tensor, axis: int = -1, *rest: str) -> tuple[Pair, tuple[int, int]]:
    """Returns (elements, scales) with the mapped dimension first."""
    (x,) = _leading(info.batch_size, in_dims, x)
    axis = checks.normalize_axis("quantize", x.dim() - 1, axis)
    return torch.ops.mxfp8.quantize.default(x, axis + 1, *rest), (0, 0)


def dequantize(
    info: Any, in_dims: Dims, elements: Tensor, scales: Tensor, axis: int = -1, *rest: Any
) -> tuple[Tensor, int]:
    """Returns the values with the mapped dimension first."""
    elements, scales = _leading(info.batch_size, in_dims, elements, scales)
    axis = checks.normalize_axis("dequantize", elements.dim() - 1, axis)
    return torch.ops.mxfp8.dequantize.default(elements, scales, axis + 1, *rest), 0


def gemm(info: Any, in_dims: Dims, *args: Any) -> tuple[Tensor, int]:
    """Returns the products with the mapped dimension first."""
    return _product("gemm", info.batch_size, in_dims, 2, *args)


def weight_gemm(info: Any, in_dims: Dims, *args: Any) -> tuple[Tensor, int]:
    """Returns the products with the mapped dimension first."""
    return _product("weight_gemm", info.batch_size, in_dims, 1, *args)


def linear_train(info: Any, in_dims: Dims, *args: Any) -> tuple[Tensor, int]:
    """Raises ShapeError: see the module."""
    raise ShapeError(
        "linear_train",
        "called under torch.vmap",
        expected="a plain call, its gradients are blocked along all rows of one call",
        advice="loop over the mapped dimension, or pass it as a leading dimension of x",
    )


def _product(name: str, size: int, in_dims: Dims, b_at: int, *args: Any) -> tuple[Tensor, int]:
    """Returns the op `name` of a = args[:b_at] and b = the next two, with the mapped dimension first."""
    bias_at = b_at + 2
    if len(args) > bias_at and in_dims[bias_at] is not None:
        raise ShapeError(
            name,
            "torch.vmap maps over the bias",
            expected="one bias [N] for all",
            advice="call without it and add it to the result",
        )
    a, b = args[:b_at], args[b_at:bias_at]
    a_mapped, b_mapped = (any(dim is not None for dim in dims) for dims in (in_dims[:b_at], in_dims[b_at:bias_at]))
    if a_mapped:
        a = _leading(size, in_dims[:b_at], *a)
    if b_mapped:
        b = _leading(size, in_dims[b_at:bias_at], *b)
    vector = a[0].dim() - a_mapped == 1
    if vector:
        a = tuple(t.unsqueeze(-2) for t in a)
    rank = max(a[0].dim() - a_mapped, b[0].dim() - b_mapped)
    if a_mapped and not (b[0].dim() == 2 and not b_mapped):
        a = tuple(_padded(t, rank) for t in a)
    if b_mapped:
        b = tuple(_padded(t, rank) for t in b)
    y: Tensor = getattr(torch.ops.mxfp8, name).default(*a, *b, *args[bias_at:])
    return y.squeeze(-2) if vector else y, 0


def _leading(size: int, in_dims: Dims, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors with the mapped dimension first, expanded where they have none."""
    return tuple(
        t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims[: len(tensors)], strict=True)
    )


def _padded(t: Tensor, rank: int) -> Tensor:
    """Returns `t` with ones after its first dimension, the mapped one, so that `rank` dimensions follow it."""
    return t.reshape(t.shape[0], *[1] * (rank + 1 - t.dim()), *t.shape[1:])
