"""The operands of a product: stored, picked from a stack of stored matrices while the model runs, or computed.

    initializer | Constant -> views -> operand                        stored, see `views.py`
    stack [E, N, K] -> Gather | GatherND (axis 0) -> views -> operand    experts of a mixture, one for each row
    anything else -> operand                                          computed: its axes are permuted by new nodes

The index of experts becomes an input of the new node, and the stack is packed. A view that changes the dimensions of
the index is applied to the index; a view that changes the matrices, to the stack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import onnx_ir as ir

from mxfp8_graph.onnx_pass.forms import AS_IS, Form, Layout, Lookup, optional
from mxfp8_graph.onnx_pass.graph import (
    INLINE_BYTES,
    STANDARD,
    attribute,
    dtype_of,
    is_large,
    is_op,
    is_overridable,
    shape_of,
    stored,
    subgraphs_of,
)
from mxfp8_graph.onnx_pass.ops import GATHERS, REPEATS, op_of
from mxfp8_graph.onnx_pass.views import BEHIND_REPEAT, Static, apply, cast, permutation
from mxfp8_graph.policy import eligibility
from mxfp8_graph.policy.eligibility import k_last

_INTEGERS: Final = frozenset({ir.DataType.INT32, ir.DataType.INT64})
"""The dtypes in which nodes take shapes and axes."""

_FLOATS: Final = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
"""Dtypes of a table of numbers. A table of integers is a shape, or has further indices."""


_CODES: Final = frozenset(
    dtype
    for dtype in ir.DataType
    if dtype.name.removeprefix("U").startswith(("INT2", "INT4", "INT8", "INT16", "FLOAT4", "FLOAT6", "FLOAT8"))
)
"""Dtypes of weights that are quantized already."""


@dataclass(frozen=True, kw_only=True)
class Picked:
    """A stack of matrices, and the indices that pick from it."""

    stack: Static
    """[E, N, K], or [E, K, N]."""
    index: ir.Value
    """Integers."""
    rank: int
    """Dimensions of the indices, after `index_steps`."""
    index_steps: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """("Squeeze" or "Unsqueeze", axes), from `index` to the indices of the matrices."""
    flipped: bool = False
    """Whether the matrices are transposed behind the pick."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One side of the product."""

    value: ir.Value
    rank: int | None
    shape: Sequence[Any] | None
    """Shape with K last; None if it is unknown."""
    transposed: bool = False
    """K is the last axis but one."""
    static: Static | None = None
    picked: Picked | None = None
    """The indices that pick the weight from the stack `static`; None if `static` is the whole weight."""
    perm: tuple[int, ...] | None = None
    """Permutation that moves K of a run-time operand to the end; None if K is there, or for an unknown rank."""
    merged: tuple[int, ...] | None = None
    """Shape of a Reshape after that, for a run-time operand; None without one."""


class Operands:
    """Reads the operands of the products of one model."""

    def __init__(self, model: ir.Model) -> None:
        self._static: dict[ir.Value, Static | None] = {}
        """Results of `static`."""
        self._computed: set[ir.Value] = set()
        """Values that are computed from constants alone."""
        for graph in model.graphs():
            for node in graph:
                inputs = [value for value in node.inputs if value is not None]
                # A subgraph may read values besides the inputs of its node.
                if inputs and all(map(self.is_constant, inputs)) and not any(subgraphs_of(node)):
                    self._computed.update(node.outputs)

    def is_constant(self, value: ir.Value) -> bool:
        """Whether `value` depends on no graph input, through any ops."""
        return value in self._computed or stored(value) is not None

    def static(self, value: ir.Value | None) -> Static | None:
        """Returns `value` as stored data and views, or None if it is not static in that way."""
        views: list[ir.Value] = []
        # Iterative, since chains of views may be longer than Python's stack is deep.
        while value is not None and value not in self._static:
            node = _view_of(value)
            tensor = stored(value)
            if tensor is not None or node is None:
                self._static[value] = None
                if tensor is not None:
                    shape, dtype = tuple(tensor.shape.numpy()), int(tensor.dtype)
                    self._static[value] = Static(value=value, tensor=tensor, shape=shape, dtype=dtype)
                break
            views.append(value)
            value = node.inputs[0]
        static = None if value is None else self._static[value]
        for output in reversed(views):
            node = output.producer()
            view = None if node is None else op_of(node.domain, node.op_type).view
            if static is None or node is None or view is None or (static.repeated_axes and view not in BEHIND_REPEAT):
                static = None
            else:
                static = view(node, static, output, self.integers)
            self._static[output] = static
        return static

    def integers(self, value: ir.Value | None) -> list[int] | None:
        """Returns the values of a small static vector of integers, or None."""
        static = self.static(value)
        if static is None or static.repeated_axes or len(static.shape) != 1 or static.dtype not in _INTEGERS:
            return None
        # Sizes and axes are few numbers: no file is read for them.
        if static.byte_size > INLINE_BYTES or is_large(static.tensor):
            return None
        return [int(number) for number in apply(static.steps, static.tensor.numpy())]

    def repeated(self, value: ir.Value) -> str | None:
        """Returns the name of the stored tensor that `value` repeats a number of times known at run time, or None."""
        while (node := _view_of(value)) is not None and node.op_type not in REPEATS and node.inputs[0] is not None:
            value = node.inputs[0]
        static = None if node is None else self.static(node.inputs[0])
        return None if static is None else static.name

    def operands_of(self, form: Form) -> tuple[Operand, Operand, bool]:
        """Returns (X, W, whether the weight comes first, so that the gemm computes the transpose of the result).

        Where neither operand is static, one that is picked from a stack is the weight.
        """
        # If both operands are static, or both are picked from stacks, b is the weight.
        ways = ((form, False), (_mirrored(form), True))
        for mine, first in ways if self.static(form.b) or not self.static(form.a) else ways[1:]:
            x = _run_time(mine.a, mine.a_transposed, mine.a_layout, mine.rank)
            if static := self.static(mine.b):
                w = _stored(mine.b, static, mine.b_transposed, mine.b_layout)
                return x, w, first and x.rank != 1  # a vector stays as it is
            # The indices pick along the first axis of the stack, so its axes cannot be permuted.
            if mine.b_layout == AS_IS and (picked := self._picked(mine.b)):
                return x, _of_stack(mine.b, picked, mine.b_transposed), first
        x = _run_time(form.a, form.a_transposed, form.a_layout, form.rank)
        return x, _run_time(form.b, form.b_transposed, form.b_layout, form.rank), False

    def weight_of(self, form: Form) -> Static | None:
        """Returns the stored weight of a matmul, from which it may be picked; None if it has none."""
        static = self.static(form.b) or self.static(form.a)
        picked = None if static else self._picked(form.b) or self._picked(form.a)
        return picked.stack if picked else static

    def lookup_of(self, node: ir.Node) -> Form | None:
        """Returns the form of a node in which ids pick rows of a table that is known before the model runs, or None.

            Gather(table [V, D], ids [...], axis 0)         -> [..., D]
            GatherND(table [V, D], ids [..., 1])            -> [..., D]

        In the form, b is the table [N, K] = [V, D], and a is the ids. Only a table of rank 2 counts: a vector has no
        rows, and a stack of matrices holds experts.
        """
        if not is_op(node, *GATHERS):
            return None
        table, ids = node.inputs
        if table is None or ids is None or not (self.is_constant(table) or is_overridable(table)):
            return None
        static = self.static(table)
        shape, dtype = (static.shape, static.dtype) if static else (shape_of(table), dtype_of(table))
        if shape is None or len(shape) != 2 or dtype not in _FLOATS:
            return None
        blocker = self._lookup_blocker(node, ids, static)
        return Lookup(a=ids, b=table, blocker=blocker)

    def _lookup_blocker(self, node: ir.Node, ids: ir.Value, static: Static | None) -> str | None:
        """Returns the reason why a lookup in a table cannot be rewritten, or None."""
        if node.op_type == "Gather" and attribute(node, "axis", 0) not in {0, -2}:
            return "it picks columns of its table; expected rows (axis 0)"
        if node.op_type == "GatherND":
            shape = shape_of(ids)
            if attribute(node, "batch_dims", 0) or not shape or shape[-1] != 1:
                return "it picks single values of its table, or how many is unknown; expected rows (ids [..., 1])"
        if self.is_constant(ids):
            return "its ids are constant; fold the constants of the model first"
        return eligibility.weight_blocker(static.shape) if static else None

    def experts_blocker(self, value: ir.Value) -> str | None:
        """Returns the reason why a weight that is gathered at run time cannot be rewritten, or None."""
        picked = self._read_picked(value)
        return picked if isinstance(picked, str) else None

    def _picked(self, value: ir.Value) -> Picked | None:
        picked = self._read_picked(value)
        return picked if isinstance(picked, Picked) else None

    def _read_picked(self, value: ir.Value) -> Picked | str | None:
        """Returns the stack and the indices that pick `value`, or a reason why not; None if it is not gathered."""
        gather, views = _gather_of(value)
        if gather is None or self.is_constant(value):
            return None
        stack = self.static(gather.inputs[0])
        if stack is None or len(stack.shape) < 3:
            return None
        where = f"weight {stack.name!r} holds experts that are gathered while the model runs"
        picked = self._gathered(gather, stack, where)
        if isinstance(picked, str):
            return picked
        for output in reversed(views):
            node = output.producer()
            assert node is not None  # `_gather_of` came through it
            changed = self._behind(picked, node, output)
            if changed is None:
                what = f"{where}, and then changed by {node.op_type}"
                expected = "expected the picked matrices as they are, or transposed"
                return f"{what}; {expected}; export the model so"
            picked = changed
        return picked

    def _gathered(self, gather: ir.Node, stack: Static, where: str) -> Picked | str:
        index = gather.inputs[1]
        if len(stack.shape) != 3:
            return f"{where}, from shape {list(stack.shape)}; expected [E, N, K]; export the model so"
        shape = None if index is None else shape_of(index)
        if shape is None or index is None:
            return f"{where}, by indices of unknown rank; give the model shape information"
        rank = len(shape)
        if gather.op_type == "Gather":
            axis = attribute(gather, "axis", 0)
            if axis not in {0, -3}:
                what = f"along axis {axis}; expected axis 0; export the model with the experts first"
                return f"{where}, {what}"
            return Picked(stack=stack, index=index, rank=rank)
        if attribute(gather, "batch_dims", 0) or rank == 0 or shape[-1] != 1:
            what = "by GatherND of more than axis 0; expected one index per matrix; use Gather"
            return f"{where}, {what}"
        # GatherND has one more axis of size 1. If an Unsqueeze adds it, the indices before that are taken.
        producer = index.producer()
        before = None if producer is None or not is_op(producer, "Unsqueeze") else producer.inputs[0]
        if producer is not None and before is not None and self.integers(optional(producer, 1)) in ([-1], [rank - 1]):
            return Picked(stack=stack, index=before, rank=rank - 1)
        return Picked(stack=stack, index=index, rank=rank - 1, index_steps=(("Squeeze", (rank - 1,)),))

    def _behind(self, picked: Picked, node: ir.Node, output: ir.Value) -> Picked | None:
        """Returns `picked` after one view, or None for a view that neither the index nor the stack can take over."""
        rank = picked.rank + 2
        if node.op_type == "Identity":
            return picked
        # A cast of the picked matrices gives the same values as a cast of the stack.
        if node.op_type == "Cast":
            return replace(picked, stack=cast(node, picked.stack, output, self.integers))
        if node.op_type == "Transpose":
            perm = permutation(node, rank)
            swaps = perm == k_last(range(rank))
            return replace(picked, flipped=picked.flipped != swaps) if swaps or perm == tuple(range(rank)) else None
        axes = self.integers(optional(node, 1)) if node.op_type in {"Squeeze", "Unsqueeze"} else None
        if axes is None:
            return None
        more = len(axes) if node.op_type == "Unsqueeze" else 0
        rank += more
        # Only axes of the index: the last two are the matrices' axes.
        if not all(-rank <= axis < rank and axis % rank < picked.rank + more for axis in axes):
            return None
        step = node.op_type, tuple(axis % rank for axis in axes)
        return replace(picked, rank=picked.rank + (more or -len(axes)), index_steps=(*picked.index_steps, step))


def origin_of(value: ir.Value) -> ir.Value:
    """Returns the value in front of the views that make `value`."""
    while (node := _view_of(value)) is not None and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def source_of(value: ir.Value) -> str:
    """Returns the type of the op that makes a constant, in front of its views; the first view for a stored one."""
    while (node := _view_of(value)) is not None and node.inputs[0] is not None and node.inputs[0].producer():
        value = node.inputs[0]
    maker = value.producer()
    return "" if maker is None else maker.op_type


def is_decoded(value: ir.Value) -> bool:
    """Whether a constant is computed from stored codes, as by Mul(Cast(codes), scales): the largest of its tensors."""
    seen: set[ir.Value] = set()
    waiting, tensors = [value], list[ir.TensorProtocol]()
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if (tensor := stored(each)) is not None:
            tensors.append(tensor)
        elif (node := each.producer()) is not None:
            waiting += [before for before in node.inputs if before is not None]
    size_of = lambda tensor: (math.prod(tensor.shape.numpy()), tensor.dtype.bitwidth)  # noqa: E731
    return bool(tensors) and max(tensors, key=size_of).dtype in _CODES


def _view_of(value: ir.Value) -> ir.Node | None:
    """Returns the node that makes `value` as a view of its first input, or None."""
    node = value.producer()
    if node is None or op_of(node.domain, node.op_type).view is None:
        return None
    return node if node.inputs and node.inputs[0] is not None else None


def _gather_of(value: ir.Value) -> tuple[ir.Node | None, list[ir.Value]]:
    """Returns the node that gathers `value`, and the outputs of the views between, last to first."""
    views: list[ir.Value] = []
    while True:
        node = value.producer()
        if node is None or node.domain not in STANDARD or not node.inputs or node.inputs[0] is None:
            break
        if node.op_type in GATHERS and len(node.inputs) > 1:
            return node, views
        views.append(value)
        # A part or a repetition of the picked matrices is no longer a list of matrices of the stack.
        if op_of(node.domain, node.op_type).view is None or node.op_type in {"Split", "Slice", *REPEATS}:
            break
        value = node.inputs[0]
    return None, views


def _stored(value: ir.Value, static: Static, transposed: bool, layout: Layout) -> Operand:
    if layout.perm is not None and layout.perm != tuple(range(len(layout.perm))) and not static.repeated_axes:
        static = static.then("Transpose", layout.perm, shape=Layout(perm=layout.perm).shape_after(static.shape))
    if layout.shape is not None and layout.shape != static.shape:
        static = static.then("Reshape", layout.shape, shape=layout.shape)
    shape = k_last(static.shape, transposed)
    return Operand(value=value, rank=len(static.shape), shape=shape, transposed=transposed, static=static)


def _of_stack(value: ir.Value, picked: Picked, transposed: bool) -> Operand:
    """Returns `value` as the weight of a product; `transposed` if it is [..., K, N]."""
    transposed = transposed != picked.flipped
    known = shape_of(value)
    lead = (None,) * picked.rank if known is None else known[:-2]
    shape = (*lead, *k_last(picked.stack.shape[1:], transposed))
    rank = picked.rank + 2
    return Operand(value=value, rank=rank, shape=shape, transposed=transposed, static=picked.stack, picked=picked)


def _run_time(value: ir.Value, transposed: bool, layout: Layout, rank: int | None) -> Operand:
    """Returns an operand computed at run time. A Transpose in front of it and the one it needs become one, or none."""
    known = shape_of(value)
    rank = rank or (None if known is None else len(known))
    if layout.perm is not None:
        rank = len(layout.perm)
    # The only axis of a vector is K.
    transposed = transposed and rank != 1
    shape = None if known is None else k_last(layout.shape_after(known), transposed)
    needed = None if rank is None else k_last(layout.perm or range(rank), transposed)
    if needed is not None and needed != tuple(range(len(needed))):
        # As for K^T in Q @ K^T: the exporter's Transpose and the one that is needed here cancel.
        producer = value.producer()
        if producer is not None and is_op(producer, "Transpose") and producer.inputs[0] is not None:
            before = permutation(producer, len(needed))
            if before is not None:
                value, needed = producer.inputs[0], tuple(before[axis] for axis in needed)
    perm = None if needed is None or needed == tuple(range(len(needed))) else needed
    rank = rank if layout.shape is None else len(layout.shape)
    return Operand(value=value, rank=rank, shape=shape, transposed=transposed, perm=perm, merged=layout.shape)


def _mirrored(form: Form) -> Form:
    """Returns `form` with its operands swapped."""
    sides = [field.name for field in fields(form) if field.name == "a" or field.name.startswith("a_")]
    pairs = [(name, f"b{name[1:]}") for name in sides]
    return replace(form, **{mine: getattr(form, other) for pair in pairs for mine, other in (pair, pair[::-1])})
