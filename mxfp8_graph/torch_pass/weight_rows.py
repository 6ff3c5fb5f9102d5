"""Stored tensors of a program as rows for `weights.pack`, which reads them a slice at a time."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from mxfp8_graph.torch_pass.static_operands import Static
from mxfp8_graph.torch_program import internals
from mxfp8_graph.torch_program.values import to_numpy
from mxfp8_graph.weights import Rows
from mxfp8_ops.errors import ContractError

_ATEN: Final = torch.ops.aten
_MOVES: Final = frozenset({_ATEN.t, _ATEN.transpose, _ATEN.permute, _ATEN.mT, _ATEN.detach, _ATEN.alias})
"""Steps that copy nothing, whatever the tensor."""
_CASTS: Final = (_ATEN.to.dtype, _ATEN._to_copy.default)


def layout_of(static: Static, stored: torch.Tensor, transposed: bool) -> tuple[object, ...]:
    """Returns what tells apart the ways to see `stored`: equal where steps and `transposed` come to the same values.

    A table that an embedding reads as it is and an output projection reads through a transpose is one weight.
    """
    if any(target.overloadpacket not in _MOVES for target, _, _ in static.steps):
        return (repr(static.steps), transposed)
    seen = static.apply(stored)
    seen = seen.mT if transposed else seen
    return (seen.storage_offset(), tuple(seen.shape), seen.stride())


def rows_of(static: Static, stored: torch.Tensor) -> tuple[Rows, bool]:
    """Returns (the operand [..., R, C] as rows contiguous in memory, whether those are its columns).

    Raises:
        ContractError: `stored` has no values (it is on the meta device, or fake).
    """
    if not internals.has_values(stored):
        what = "has a shape but no values"
        advice = "export the model with real tensors"
        raise ContractError(f"weight {static.name!r}", what, expected="a program that holds its weights", advice=advice)
    data = to_numpy(static.apply(stored))
    *_, height, width = data.strides
    flipped = height == data.itemsize and width != data.itemsize
    seen = np.swapaxes(data, -1, -2) if flipped else data

    def index(at: tuple[int, ...]) -> list[int]:
        return _stored_index(static, stored, (*at[:-2], at[-1], at[-2]) if flipped else at)

    return Rows(shape=seen.shape, read=lambda at, start, stop: seen[at][start:stop], index=index), flipped


def _stored_index(static: Static, stored: torch.Tensor, at: tuple[int, ...]) -> list[int]:
    """Returns where in `stored` the value at index `at` of the operand is."""
    positions = torch.arange(stored.numel()).reshape(stored.shape)
    for target, arguments, keywords in static.steps:
        if target not in _CASTS:
            positions = target(positions, *arguments, **dict(keywords))
    return [int(i) for i in np.unravel_index(int(positions[at]), tuple(stored.shape))]
