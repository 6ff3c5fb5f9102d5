"""The elements and scales of a part of a packed weight: weight[3], weight[:64, 32:96].

A part has whole blocks, so that its scales belong to it alone: along K, slices begin and end between blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mxfp8_ops.checks import Shape, scale_count
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.formats import BLOCK_SIZE

Index = tuple[Any, ...]


def part(where: str, shape: Shape, index: Any) -> tuple[Index, Index, Shape]:
    """Returns (index of a part in the elements, its index in the scales, shape of its elements).

    Args:
        where: the weight, for errors.
        shape: that of the whole, [..., K].
        index: integers, slices and `...`, as NumPy takes them.

    Raises:
        ShapeError: the index has another type, cuts a block, or is out of range.
    """
    indices = index if isinstance(index, tuple) else (index,)
    what = f"part [{', '.join(map(_text, indices))}] of {list(shape)}"
    if not all(_is_basic(each) for each in indices) or indices.count(...) > 1:
        expected, advice = "integers, slices and at most one ...", "index elements and scales with NumPy"
        raise ShapeError(where, what, expected=expected, advice=advice)
    at = indices.index(...) if ... in indices else len(indices)
    every = (slice(None),) * (len(shape) - len(indices) + (... in indices))
    full = (*indices[:at], *every, *indices[at + 1 :])
    try:
        # NumPy checks the index on an array that takes one byte.
        size = np.broadcast_to(np.uint8(0), shape)[full].shape
    except (IndexError, TypeError, ValueError) as error:
        raise ShapeError(
            where, f"{what}: {error}", expected="indices within the shape", advice="correct the index"
        ) from None
    return full, (*full[:-1], _blocks(where, what, shape[-1], full[-1])), size


def _blocks(where: str, what: str, k: int, along_k: Any) -> slice:
    """Returns the slice of the blocks of a slice of K; ShapeError if it cuts one."""
    # An index along K is a part of a block: step 0 is no step of a slice, so the check below refuses it.
    first, last, step = along_k.indices(k) if isinstance(along_k, slice) else (along_k, along_k, 0)
    # An empty slice may end before it begins.
    last = max(first, last)
    if step != 1 or first % BLOCK_SIZE or (last % BLOCK_SIZE and last != k):
        expected = f"along K a slice from and to multiples of {BLOCK_SIZE}, where blocks begin, or to the end"
        raise ShapeError(where, what, expected=expected, advice="cut there, or cut what dequantize() returns")
    return slice(first // BLOCK_SIZE, scale_count(last))


def _is_basic(each: Any) -> bool:
    return each is ... or (isinstance(each, (slice, int, np.integer)) and not isinstance(each, bool))


def _text(each: Any) -> str:
    """Returns one index as Python code: 3, "32:96", "..."."""
    if not isinstance(each, slice):
        return "..." if each is ... else str(each)[:80]
    ends = (each.start, each.stop, *([] if each.step is None else [each.step]))
    return ":".join("" if end is None else str(end) for end in ends)
