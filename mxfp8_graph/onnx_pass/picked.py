"""Weights that are picked from a stack while the model runs: the experts of a mixture, one for each row.

    stack [E, N, K] -> Gather | GatherND (axis 0) -> (Identity | Cast | Transpose | Squeeze | Unsqueeze)* -> operand

The index goes to the node, and the stack is packed as it is. What the views do to the dimensions of the index is done
to the index; what they do to the matrices, to the stack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx_graphsurgeon as gs

from mxfp8_graph.onnx_model.walk import STANDARD
from mxfp8_graph.onnx_pass.static_operands import MOST_VIEWS, Static, StaticOperands, permutation
from mxfp8_graph.policy.eligibility import k_last

GATHERS: Final = frozenset({"Gather", "GatherND"})
_VIEWS: Final = frozenset({"Identity", "Cast", "Transpose", "Squeeze", "Unsqueeze"})


class _UnreadableError(Exception):
    """Why a gathered weight cannot be read as matrices picked from a stack."""


@dataclass(frozen=True, kw_only=True)
class Picked:
    """Matrices picked from a stack: which stack, and by which indices."""

    stack: Static
    """[E, N, K], or [E, K, N]."""
    index: str
    """Name of the tensor of integers."""
    is_int64: bool
    """Whether those are int64 already."""
    rank: int
    """Dimensions of the indices, after `index_steps`."""
    index_steps: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """("Squeeze" or "Unsqueeze", axes), from `index` to the indices of the matrices."""
    flipped: bool = False
    """The matrices are the transposes of those of the stack."""


def picked_of(tensor: gs.Tensor, statics: StaticOperands) -> Picked | None:
    """Returns how `tensor` is picked from a stack, or None if it is not."""
    try:
        return _read(tensor, statics)
    except _UnreadableError:
        return None


def experts_blocker(tensor: gs.Tensor, statics: StaticOperands) -> str | None:
    """Returns why a weight that is gathered while the model runs is not `picked_of`, or None if it is, or is none."""
    try:
        _read(tensor, statics)
    except _UnreadableError as error:
        return str(error)
    return None


def _read(tensor: gs.Tensor, statics: StaticOperands) -> Picked | None:
    gather, views = _gather_of(tensor)
    if gather is None or statics.is_constant(tensor):
        return None
    stack = statics.resolve(gather.inputs[0])
    if stack is None or len(stack.shape) < 3:
        return None
    where = f"weight {stack.name!r} holds experts that are gathered while the model runs"
    picked = _picked(gather, stack, statics, where)
    for node, output in reversed(views):
        picked = _viewed(picked, node, output, statics, where)
    return picked


def _gather_of(tensor: gs.Tensor) -> tuple[gs.Node | None, list[tuple[gs.Node, gs.Tensor]]]:
    """Returns the node that gathers `tensor`, and the views between, last to first."""
    views: list[tuple[gs.Node, gs.Tensor]] = []
    while len(views) <= MOST_VIEWS:
        node = tensor.inputs[0] if len(tensor.inputs) == 1 else None
        if node is None or node.domain not in STANDARD or not node.inputs:
            break
        if node.op in GATHERS and len(node.inputs) > 1:
            return node, views
        views.append((node, tensor))
        if node.op not in _VIEWS and node.op != "Reshape":
            break
        tensor = node.inputs[0]
    return None, views


def _picked(gather: gs.Node, stack: Static, statics: StaticOperands, where: str) -> Picked:
    if len(stack.shape) != 3:
        raise _UnreadableError(f"{where}, from shape {list(stack.shape)}; expected [E, N, K]; export the model so")
    index = gather.inputs[1]
    is_int64 = index.dtype == np.int64
    rank = None if index.shape is None else len(index.shape)
    if rank is None:
        raise _UnreadableError(f"{where}, by indices of unknown rank; give the model shape information")
    if gather.op == "Gather":
        axis = int(gather.attrs.get("axis", 0))
        if axis not in {0, -3}:
            what = f"along axis {axis}; expected axis 0; export the model with the experts first"
            raise _UnreadableError(f"{where}, {what}")
        return Picked(stack=stack, index=index.name, is_int64=is_int64, rank=rank)
    if gather.attrs.get("batch_dims", 0) or rank == 0 or index.shape[-1] != 1:
        raise _UnreadableError(f"{where}, by GatherND of more than axis 0; expected one index per matrix; use Gather")
    producer = index.inputs[0] if len(index.inputs) == 1 else None
    if producer is not None and producer.op == "Unsqueeze" and producer.domain in STANDARD:
        axes = statics.value(producer.inputs[1]) if len(producer.inputs) > 1 else None
        if axes is not None and axes in ([-1], [rank - 1]):
            return Picked(stack=stack, index=producer.inputs[0].name, is_int64=is_int64, rank=rank - 1)
    steps = (("Squeeze", (rank - 1,)),)
    return Picked(stack=stack, index=index.name, is_int64=is_int64, rank=rank - 1, index_steps=steps)


def _viewed(picked: Picked, node: gs.Node, output: gs.Tensor, statics: StaticOperands, where: str) -> Picked:
    """Returns `picked` after one view."""
    changed = None
    if node.op == "Identity":
        changed = picked
    elif node.op == "Cast":
        stack = statics.step(node, picked.stack, output)
        changed = replace(picked, stack=stack) if stack else None
    elif node.op == "Transpose":
        perm, rank = permutation(node, picked.rank + 2), picked.rank + 2
        if perm in {tuple(range(rank)), k_last(range(rank))}:
            changed = replace(picked, flipped=picked.flipped != (perm == k_last(range(rank))))
    elif node.op in {"Squeeze", "Unsqueeze"}:
        changed = _reranked(picked, node, statics)
    if changed is None:
        what = f"{where}, and then changed by {node.op}"
        expected = "expected the picked matrices as they are, or transposed"
        raise _UnreadableError(f"{what}; {expected}; export the model so")
    return changed


def _reranked(picked: Picked, node: gs.Node, statics: StaticOperands) -> Picked | None:
    """Returns `picked` with axes of size 1 more or less in front of the matrices, or None if others change."""
    axes = statics.value(node.inputs[1]) if len(node.inputs) > 1 and not node.inputs[1].is_empty() else None
    if axes is None:
        return None
    more = len(axes) if node.op == "Unsqueeze" else 0
    rank = picked.rank + 2 + more
    if not all(-rank <= axis < rank and axis % rank < picked.rank + more for axis in axes):
        return None
    step = node.op, tuple(axis % rank for axis in axes)
    left = picked.rank + (more or -len(axes))
    return replace(picked, rank=left, index_steps=(*picked.index_steps, step))
