"""Follows the heads of Q, K and V back to the inputs of MXFP8Attention.

    Transpose(Reshape(x [B, S, H * D] -> [B, S, H, D]), 0 2 1 3)     x
    Reshape(Expand(Unsqueeze(x [B, H, T, D], 2)))                    x, whose heads serve a group of queries each
    Concat(past [B, H, P, D], x [B, H, T, D])                        x, and the past before it
    Mul(x, number), Div(x, number)                                   x, and a factor of the scores

A node is followed only if its sizes are known to fit. Two sizes of one name are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.nodes import type_of
from mxfp8_graph.onnx_pass.graph import Dim, attribute, constant, made_by, scalar

HEADS_APART: Final = (0, 2, 1, 3)
"""[B, S, H, D] <-> [B, H, S, D]."""

_TURNED: Final = (0, 1, 3, 2)
"""[B, H, T, D] -> [B, H, D, T]."""

_APART_AND_TURNED: Final = (0, 2, 3, 1)
"""[B, T, H, D] -> [B, H, D, T]."""

Layout = Literal["merged", "split", "heads"]
"""[B, S, H * D], [B, S, H, D] or [B, H, S, D]."""

_Value = ir.Value | None


@dataclass(frozen=True)
class Heads:
    """The sizes of Q, K or V."""

    batch: Dim
    count: int
    length: Dim
    size: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """A value that holds Q, K or V, and the steps from it to the heads."""

    value: ir.Value
    heads: Heads
    layout: Layout
    factor: float = 1.0
    """Factor of the value, and so of the scores."""
    past: _Value = None
    """The past [B, H, P, D] that the graph puts in front of it, or None."""
    present: _Value = None
    """Past and value in one [B, H, P + T, D], or None."""


def follow(value: _Value, *, scaled: bool = True, cached: bool = False) -> Source | None:
    """Returns the source of heads [B, H, S, D], or None if their sizes are unknown.

    Args:
        value: the heads.
        scaled: whether to follow them through multiplications by a number; false for V, which does not scale scores.
        cached: whether to follow them through groups and past, which K and V may have.
    """
    factor, past, present = 1.0, None, None
    if scaled:
        value, factor = unscaled(value)
    if cached:
        value = _ungrouped(value) or value
        # Past and new tokens are joined along the third of four axes.
        concat = made_by(value, "Concat")
        has_past = concat and len(concat.inputs) == 2 and attribute(concat, "axis", None) in (2, -2)
        if concat and has_past and shape_of_rank(concat.inputs[0], 4) is not None:
            present, (past, value) = value, concat.inputs
    heads = _heads(value)
    if value is None or heads is None:
        return None
    source = Source(value=value, heads=heads, layout="heads", factor=factor, past=past, present=present)
    split = transposed(value, HEADS_APART)
    return source if split is None else _follow_split(replace(source, value=split, layout="split"), scaled=scaled)


def follow_turned(value: _Value, *, cached: bool) -> Source | None:
    """Returns the source of transposed heads [B, H, D, T], or None if no Transpose makes them."""
    value, factor = unscaled(value)
    source: Source | None = None
    # Two Transposes, first of heads and then of the last axes; or one for both; or one between two Reshapes.
    if (heads := transposed(value, _TURNED)) is not None:
        source = follow(heads, cached=cached)
    elif (split := transposed(value, _APART_AND_TURNED)) is not None:
        if (sizes := _split(split)) is not None:
            source = _follow_split(Source(value=split, heads=sizes, layout="split"), scaled=True)
    elif (heads := _turned_in_three_dimensions(value)) is not None:
        source = follow(heads, cached=cached)
    return None if source is None else replace(source, factor=source.factor * factor)


def unscaled(value: _Value) -> tuple[_Value, float]:
    """Returns (x, factor) such that the graph computes `value` as x * factor by numbers it stores."""
    factor = 1.0
    while (node := made_by(value, "Mul", "Div")) is not None:
        left, right = map(scalar, node.inputs)
        # A division by 0 is no multiplication by a number.
        if right is not None and (right or node.op_type == "Mul"):
            value, factor = node.inputs[0], factor * right if node.op_type == "Mul" else factor / right
        elif left is not None and node.op_type == "Mul":
            value, factor = node.inputs[1], factor * left
        else:
            break
    return value, factor


def transposed(value: _Value, perm: tuple[int, ...]) -> _Value:
    """Returns the input of the Transpose by `perm` that makes a value; None if there is none."""
    node = made_by(value, "Transpose")
    return node.inputs[0] if node is not None and tuple(attribute(node, "perm", ())) == perm else None


def same(*sizes: Dim) -> bool:
    """Whether sizes are known to be equal."""
    # A size without a name may be any size.
    return sizes[0] not in (None, "") and all(size == sizes[0] for size in sizes)


def shape_of_rank(value: _Value, rank: int) -> tuple[Dim, ...] | None:
    """Returns the shape of a value of that rank; None if it is another, or unknown."""
    shape = type_of(value).shape
    return shape if shape is not None and len(shape) == rank else None


def _heads(value: _Value) -> Heads | None:
    """Returns the sizes of a value [B, H, S, D]; None if the count or the size of its heads is unknown."""
    if (heads := _split(transposed(value, HEADS_APART))) is not None:
        return heads
    shape = shape_of_rank(value, 4)
    return None if shape is None else _known(*shape)


def _split(value: _Value) -> Heads | None:
    """Returns the sizes of a value [B, S, H, D]; None if the count or the size of its heads is unknown."""
    shape = shape_of_rank(value, 4)
    if shape is None:
        return None
    batch, length, count, size = shape
    # A Reshape to [B, S, -1, D] leaves H unknown, but its input has H * D.
    _, width = _merged(value, batch, length)
    if width and not isinstance(count, int) and isinstance(size, int) and size > 0 and width % size == 0:
        count = width // size
    return _known(batch, count, length, size)


def _known(batch: Dim, count: Dim, length: Dim, size: Dim) -> Heads | None:
    if not isinstance(count, int) or not isinstance(size, int) or min(count, size) < 1:
        return None
    return Heads(batch, count, length, size)


def _merged(value: _Value, batch: Dim, length: Dim) -> tuple[_Value, int]:
    """Returns (x [B, S, N], N) for a value that is a Reshape of x with the same B and S; else (None, 0)."""
    reshape = made_by(value, "Reshape")
    shape = None if reshape is None else shape_of_rank(reshape.inputs[0], 3)
    if reshape is None or shape is None or not same(shape[0], batch) or not same(shape[1], length):
        return None, 0
    return (reshape.inputs[0], shape[2]) if isinstance(shape[2], int) else (None, 0)


def _follow_split(source: Source, *, scaled: bool) -> Source:
    """Returns the source of heads [B, S, H, D]: a value [B, S, H * D], or `source` if no Reshape makes them of one."""
    heads, factor = source.heads, 1.0
    value, width = _merged(source.value, heads.batch, heads.length)
    if width != heads.count * heads.size:
        return source
    if scaled:
        value, factor = unscaled(value)
    return source if value is None else replace(source, value=value, layout="merged", factor=source.factor * factor)


def _ungrouped(value: _Value) -> _Value:
    """Returns the heads [B, H, T, D] that the graph repeats to a value [B, H * n, T, D], each n times in a row."""
    # repeat_kv of transformers is exported so.
    reshape = made_by(value, "Reshape")
    expand = None if reshape is None else made_by(reshape.inputs[0], "Expand")
    unsqueeze = None if expand is None else made_by(expand.inputs[0], "Unsqueeze")
    if expand is None or unsqueeze is None or unsqueeze.inputs[1] is None:
        return None
    axes = constant(unsqueeze.inputs[1])
    before, repeated, after = (
        shape_of_rank(each, rank) for each, rank in ((unsqueeze.inputs[0], 4), (expand.outputs[0], 5), (value, 4))
    )
    if axes is None or axes.tolist() not in ([2], [-3]) or before is None or repeated is None or after is None:
        return None
    count, times = repeated[1], repeated[2]
    if not isinstance(count, int) or not isinstance(times, int) or after[1] != count * times:
        return None
    same_sizes = (same(before[axis], repeated[axis if axis < 2 else axis + 1]) for axis in range(4))
    kept = (same(before[axis], after[axis]) for axis in (0, 2, 3))
    return unsqueeze.inputs[0] if all(same_sizes) and all(kept) else None


def _turned_in_three_dimensions(value: _Value) -> _Value:
    """Returns the heads [B, H, T, D] behind Reshape -> Transpose of the last two axes -> Reshape [B, H, D, T]."""
    last = made_by(value, "Reshape")
    first = None if last is None else made_by(transposed(last.inputs[0], (0, 2, 1)), "Reshape")
    if first is None:
        return None
    before, merged, after = (
        shape_of_rank(each, rank) for each, rank in ((first.inputs[0], 4), (first.outputs[0], 3), (value, 4))
    )
    if before is None or merged is None or after is None:
        return None
    batch, count, length, size = before
    fits = same(merged[1], length) and same(merged[2], size)
    fits = fits and all(map(same, after, (batch, count, size, length)))
    return first.inputs[0] if fits else None
