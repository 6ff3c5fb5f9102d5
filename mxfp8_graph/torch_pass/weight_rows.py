"""Stored tensors of a program as rows for `weights.pack`, which reads them a slice at a time."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from mxfp8_graph.torch_pass.static_operands import Static
from mxfp8_graph.torch_program import internals
from mxfp8_graph.torch_program.internals import to_numpy
from mxfp8_graph.weights import Rows
from mxfp8_ops.errors import ContractError

_ATEN: Final = torch.ops.aten
_MOVES: Final = frozenset({_ATEN.t, _ATEN.transpose, _ATEN.permute, _ATEN.mT, _ATEN.detach, _ATEN.alias})
"""Steps that copy nothing, whatever the tensor."""
_CASTS: Final = (_ATEN.to.dtype, _ATEN._to_copy.default)


def layout_of(static: Static, stored: torch.Tensor, transposed: bool) -> tuple[object, ...]:
    """Returns a key of a view of `stored`: equal where steps and `transposed` give the same values in the same order.

    A table that an embedding reads as it is and an output projection reads through a transpose is one weight.
    """
    # A step that copies has no strides to compare, so its text is the key.
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
    # A transposed view is read along its columns, which are contiguous: by rows each value would be a cache miss.
    flipped = height == data.itemsize and width != data.itemsize
    seen = np.swapaxes(data, -1, -2) if flipped else data

    def index(at: tuple[int, ...]) -> list[int]:
        return _stored_index(static, stored, (*at[:-2], at[-1], at[-2]) if flipped else at)

    return Rows(shape=seen.shape, read=lambda at, start, stop: seen[at][start:stop], index=index), flipped


def _stored_index(static: Static, stored: torch.Tensor, at: tuple[int, ...]) -> list[int]:
    """Returns the index in `stored` of the value at index `at` of the operand."""
    # The steps run on positions instead of values, so that an error can name the index in the user's own tensor.
    positions = torch.arange(stored.numel()).reshape(stored.shape)
    for target, arguments, keywords in static.steps:
        # A cast to float16 would round the positions.
        if target not in _CASTS:
            positions = target(positions, *arguments, **dict(keywords))
    return [int(i) for i in np.unravel_index(int(positions[at]), tuple(stored.shape))]
