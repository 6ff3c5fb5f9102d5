"""Where Q, K and V come from: heads are followed back to what MXFP8Attention takes.

    Transpose(Reshape(x [B, S, H * D] -> [B, S, H, D]), 0 2 1 3)     x
    Reshape(Expand(Unsqueeze(x [B, H, T, D], 2)))                    x, whose heads serve a group of queries each
    Concat(past [B, H, P, D], x [B, H, T, D])                        x, and the past before it
    Mul(x, number), Div(x, number)                                   x, and a factor of the scores

Nothing is followed whose sizes are not known to fit. Names of sizes count: two values of one name are as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, TypeGuard

import onnx

from mxfp8_graph.onnx_pass.fuse.graph_view import Dim, GraphView, attribute, is_op

HEADS_APART: Final = (0, 2, 1, 3)
"""[B, S, H, D] <-> [B, H, S, D]."""

_TURNED: Final = (0, 1, 3, 2)
"""[B, H, T, D] -> [B, H, D, T]."""

_APART_AND_TURNED: Final = (0, 2, 3, 1)
"""[B, T, H, D] -> [B, H, D, T]."""

Layout = Literal["merged", "split", "heads"]
"""[B, S, H * D], [B, S, H, D] or [B, H, S, D]."""


@dataclass(frozen=True)
class Heads:
    """The sizes of Q, K or V."""

    batch: Dim
    count: int
    length: Dim
    size: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """A value that holds Q, K or V, and what else the graph says about it on the way."""

    name: str
    heads: Heads
    layout: Layout
    factor: float = 1.0
    """What it is multiplied by."""
    past: str = ""
    """What the graph puts in front of it, [B, H, P, D]; "" for nothing."""
    present: str = ""
    """What the graph calls both together."""


def follow(view: GraphView, name: str, *, scaled: bool = True, cached: bool = False) -> Source | None:
    """Returns what the heads `name` [B, H, S, D] come from, or None if their sizes are unknown.

    Args:
        view: the graph.
        name: the heads.
        scaled: follow them through multiplications by a number.
        cached: follow them through groups and past, which K and V may have.
    """
    factor, past, present = 1.0, "", ""
    if scaled:
        name, factor = unscaled(view, name)
    if cached:
        name = _ungrouped(view, name) or name
        if (concat := view.maker(name)) is not None and _puts_past_in_front(view, concat):
            present, (past, name) = name, concat.input
    heads = _heads(view, name)
    if heads is None:
        return None
    source = Source(name=name, heads=heads, layout="heads", factor=factor, past=past, present=present)
    transpose = view.maker(name)
    if is_transpose(transpose, HEADS_APART):
        return _follow_split(view, replace(source, name=transpose.input[0], layout="split"), scaled=scaled)
    return source


def follow_turned(view: GraphView, name: str, *, cached: bool) -> Source | None:
    """Returns what transposed heads `name` [B, H, D, T] come from; None if they are not known to be that."""
    name, factor = unscaled(view, name)
    maker = view.maker(name)
    source: Source | None = None
    if is_transpose(maker, _TURNED):
        source = follow(view, maker.input[0], cached=cached)
    elif is_transpose(maker, _APART_AND_TURNED):
        heads = _split(view, maker.input[0])
        if heads is not None:
            apart = Source(name=maker.input[0], heads=heads, layout="split")
            source = _follow_split(view, apart, scaled=True)
    elif (heads_name := _turned_in_three_dimensions(view, name)) is not None:
        source = follow(view, heads_name, cached=cached)
    return None if source is None else replace(source, factor=source.factor * factor)


def unscaled(view: GraphView, name: str) -> tuple[str, float]:
    """Returns (x, factor) such that the graph makes `name` as x * factor by numbers it stores."""
    factor = 1.0
    while is_op(node := view.maker(name), "Mul", "Div"):
        left, right = (view.scalar(operand) for operand in node.input)
        if right is not None and (right or node.op_type == "Mul"):
            name, factor = node.input[0], factor * right if node.op_type == "Mul" else factor / right
        elif left is not None and node.op_type == "Mul":
            name, factor = node.input[1], factor * left
        else:
            break
    return name, factor


def is_transpose(node: onnx.NodeProto | None, perm: tuple[int, ...]) -> TypeGuard[onnx.NodeProto]:
    """Whether there is a node and it permutes axes just so."""
    return is_op(node, "Transpose") and tuple(attribute(node, "perm", ())) == perm


def same(*sizes: Dim) -> bool:
    """Whether sizes are known to be equal."""
    return sizes[0] not in (None, "") and all(size == sizes[0] for size in sizes)


def shape_of(view: GraphView, name: str, rank: int) -> tuple[Dim, ...] | None:
    """Returns the shape of a value of that rank; None if it is another, or unknown."""
    shape = view.type_of(name).shape
    return shape if shape is not None and len(shape) == rank else None


def _heads(view: GraphView, name: str) -> Heads | None:
    """Returns the sizes of `name` [B, H, S, D]; None if they are not known to the count and size of heads."""
    maker = view.maker(name)
    if is_transpose(maker, HEADS_APART) and (split := _split(view, maker.input[0])) is not None:
        return split
    shape = shape_of(view, name, 4)
    return None if shape is None else _known(shape[0], shape[1], shape[2], shape[3])


def _split(view: GraphView, name: str) -> Heads | None:
    """Returns the sizes of `name` [B, S, H, D]. Of an H that a Reshape works out only the product H * D is known."""
    shape = shape_of(view, name, 4)
    if shape is None:
        return None
    batch, length, count, size = shape
    width = _width(view, name, batch, length)
    if width and not isinstance(count, int) and isinstance(size, int) and size > 0 and width % size == 0:
        count = width // size
    return _known(batch, count, length, size)


def _known(batch: Dim, count: Dim, length: Dim, size: Dim) -> Heads | None:
    if not isinstance(count, int) or not isinstance(size, int) or min(count, size) < 1:
        return None
    return Heads(batch, count, length, size)


def _width(view: GraphView, name: str, batch: Dim, length: Dim) -> int | None:
    """Returns the N of x [B, S, N] if a Reshape makes `name` of x and leaves B and S as they are."""
    reshape = view.maker(name)
    merged = shape_of(view, reshape.input[0], 3) if is_op(reshape, "Reshape") else None
    if merged is None or not same(merged[0], batch) or not same(merged[1], length) or not isinstance(merged[2], int):
        return None
    return merged[2]


def _follow_split(view: GraphView, source: Source, *, scaled: bool) -> Source:
    """Returns what heads come from that stand apart behind the tokens, [B, S, H, D]."""
    heads, reshape = source.heads, view.maker(source.name)
    if reshape is None or _width(view, source.name, heads.batch, heads.length) != heads.count * heads.size:
        return source
    name, factor = reshape.input[0], 1.0
    if scaled:
        name, factor = unscaled(view, name)
    return replace(source, name=name, layout="merged", factor=source.factor * factor)


def _ungrouped(view: GraphView, name: str) -> str | None:
    """Returns the heads [B, H, T, D] that the graph repeats to `name` [B, H * n, T, D], each n times in a row."""
    reshape = view.maker(name)
    expand = view.maker(reshape.input[0]) if is_op(reshape, "Reshape") else None
    unsqueeze = view.maker(expand.input[0]) if is_op(expand, "Expand") else None
    if expand is None or not is_op(unsqueeze, "Unsqueeze"):
        return None
    axes = view.constant(unsqueeze.input[1])
    before, repeated, after = (
        shape_of(view, value, rank) for value, rank in ((unsqueeze.input[0], 4), (expand.output[0], 5), (name, 4))
    )
    if axes is None or axes.tolist() not in ([2], [-3]) or before is None or repeated is None or after is None:
        return None
    count, times = repeated[1], repeated[2]
    if not isinstance(count, int) or not isinstance(times, int) or after[1] != count * times:
        return None
    same_sizes = (same(before[axis], repeated[axis if axis < 2 else axis + 1]) for axis in range(4))
    kept = (same(before[axis], after[axis]) for axis in (0, 2, 3))
    return unsqueeze.input[0] if all(same_sizes) and all(kept) else None


def _puts_past_in_front(view: GraphView, node: onnx.NodeProto) -> bool:
    """Whether `node` joins two values along the tokens of their heads."""
    along = attribute(node, "axis", None) in (2, -2)
    return is_op(node, "Concat") and along and len(node.input) == 2 and shape_of(view, node.input[0], 4) is not None


def _turned_in_three_dimensions(view: GraphView, name: str) -> str | None:
    """Returns the heads [B, H, T, D] behind Reshape -> Transpose of the last two axes -> Reshape [B, H, D, T]."""
    last = view.maker(name)
    transpose = view.maker(last.input[0]) if is_op(last, "Reshape") else None
    first = view.maker(transpose.input[0]) if is_transpose(transpose, (0, 2, 1)) else None
    if not is_op(first, "Reshape"):
        return None
    before, merged, after = (
        shape_of(view, value, rank) for value, rank in ((first.input[0], 4), (first.output[0], 3), (name, 4))
    )
    if before is None or merged is None or after is None:
        return None
    batch, count, length, size = before
    fits = same(merged[1], length) and same(merged[2], size)
    fits = fits and all(map(same, after, (batch, count, size, length)))
    return first.input[0] if fits else None
