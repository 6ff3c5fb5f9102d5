"""Which elements and scales an index of a packed weight names: weight[3], weight[:64, 32:96].

A part has whole blocks, so that its scales are its own: along K only slices between blocks are one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mxfp8_ops.checks import Shape, scale_count
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.formats import BLOCK_SIZE

Index = tuple[Any, ...]


def part(where: str, shape: Shape, index: Any) -> tuple[Index, Index, Shape]:
    """Returns the index of a part in the elements, that in the scales, and the shape of its elements.

    Args:
        where: the weight, for errors.
        shape: that of the whole, [..., K].
        index: integers, slices and `...`, as NumPy takes them.

    Raises:
        ShapeError: it is none of these, cuts a block, or names what is not there.
    """
    given = index if isinstance(index, tuple) else (index,)
    what = f"part [{', '.join(map(_text, given))}] of {list(shape)}"
    if not all(_is_basic(each) for each in given) or given.count(...) > 1:
        expected, advice = "integers, slices and at most one ...", "pick from elements and scales alike"
        raise ShapeError(where, what, expected=expected, advice=advice)
    at = given.index(...) if ... in given else len(given)
    every = (slice(None),) * (len(shape) - len(given) + (... in given))
    full = (*given[:at], *every, *given[at + 1 :])
    try:
        size = np.broadcast_to(np.uint8(0), shape)[full].shape
    except (IndexError, TypeError, ValueError) as error:
        raise ShapeError(where, f"{what}: {error}", expected="one that is there", advice="correct the index") from None
    return full, (*full[:-1], _blocks(where, what, shape[-1], full[-1])), size


def _blocks(where: str, what: str, k: int, along_k: Any) -> slice:
    """Returns the blocks that a slice of K has; ShapeError unless it has all their elements."""
    first, last, step = along_k.indices(k) if isinstance(along_k, slice) else (along_k, along_k, 0)
    last = max(first, last)
    if step != 1 or first % BLOCK_SIZE or (last % BLOCK_SIZE and last != k):
        expected = f"along K a slice from and to multiples of {BLOCK_SIZE}, where blocks begin, or to the end"
        raise ShapeError(where, what, expected=expected, advice="cut there, or cut what dequantize() returns")
    return slice(first // BLOCK_SIZE, scale_count(last))


def _is_basic(each: Any) -> bool:
    return each is ... or (isinstance(each, (slice, int, np.integer)) and not isinstance(each, bool))


def _text(each: Any) -> str:
    """Returns what stood between the brackets."""
    if not isinstance(each, slice):
        return "..." if each is ... else str(each)[:80]
    ends = (each.start, each.stop, *([] if each.step is None else [each.step]))
    return ":".join("" if end is None else str(end) for end in ends)
