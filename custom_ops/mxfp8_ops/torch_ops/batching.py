"""torch.vmap over the ops: what is mapped becomes a leading dimension of one call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

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
