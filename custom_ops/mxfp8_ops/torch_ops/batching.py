"""torch.vmap over the ops: the mapped dimension becomes a leading dimension of one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mxfp8_ops.errors import ShapeError

Dims = Sequence[int | None]
"""Which dimension of each argument is mapped; None for none."""


def leading(size: int, in_dims: Dims, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors with the mapped dimension first, expanded where they have none."""
    return tuple(
        t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims[: len(tensors)], strict=True)
    )


def padded(t: Tensor, rank: int) -> Tensor:
    """Returns `t` with ones after its first dimension, the mapped one, so that `rank` dimensions follow it."""
    return t.reshape(t.shape[0], *[1] * (rank + 1 - t.dim()), *t.shape[1:])


def rule(name: str, a_tensors: int, b_tensors: int) -> Callable[..., tuple[Tensor, int]]:
    """Returns the rule of torch.vmap for op `name`, a product a [..., M, K] times b [..., N, K] transposed.

    Args:
        name: of the op.
        a_tensors: how many tensors stand for a; they are the op's first arguments.
        b_tensors: how many stand for b after them. A bias comes next, if the op has one.
    """

    def mapped(info: Any, in_dims: Dims, *args: Any) -> tuple[Tensor, int]:
        return _mapped_gemm(name, info.batch_size, in_dims, (a_tensors, b_tensors), *args)

    return mapped


def _mapped_gemm(name: str, size: int, in_dims: Dims, operands: tuple[int, int], *args: Any) -> tuple[Tensor, int]:
    """Returns the op on mapped operands, with the mapped dimension first: the work of `rule`.

    Raises:
        ShapeError: the bias is mapped over.
    """
    b_at, bias_at = operands[0], sum(operands)
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
        a = leading(size, in_dims[:b_at], *a)
    if b_mapped:
        b = leading(size, in_dims[b_at:bias_at], *b)
    # A vector [K] with a mapped dimension before it looks like a matrix: it gets its row dimension first.
    vector = a[0].dim() - a_mapped == 1
    if vector:
        a = tuple(t.unsqueeze(-2) for t in a)
    rank = max(a[0].dim() - a_mapped, b[0].dim() - b_mapped)
    # One weight takes any leading dimensions of a; else both need as many dimensions behind the mapped one, so that
    # broadcasting does not meet the mapped dimension of one with another dimension of the other.
    if a_mapped and not (b[0].dim() == 2 and not b_mapped):
        a = tuple(padded(t, rank) for t in a)
    if b_mapped:
        b = tuple(padded(t, rank) for t in b)
    y: Tensor = getattr(torch.ops.mxfp8, name).default(*a, *b, *args[bias_at:])
    return y.squeeze(-2) if vector else y, 0
