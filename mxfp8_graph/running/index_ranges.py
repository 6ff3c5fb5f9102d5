"""The values that an integer input may take: indices that are inside of every table it indexes.

Follows each integer input forward through ops that only move values around (Cast, Reshape, Slice, Where, ...) or shift
them by a constant (Add, Sub), into subgraphs and local functions, to the ops that index a table with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Final

import onnx_ir as ir
from onnx import inliner

from mxfp8_graph.onnx_pass.graph import attribute, default, dtype_of, is_large, is_op, shape_of, subgraphs_of
from mxfp8_graph.onnx_pass.ops import borders, names
from mxfp8_graph.onnx_pass.prepare import infer, through
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

_MOVES: Final[dict[str, slice]] = {
    **dict.fromkeys(names(lambda op: op.view is not None or op.gathers), slice(1)),
    **dict.fromkeys(["Flatten", "Compress", "Pad", "Clip", "GatherElements"], slice(1)),
    **dict.fromkeys(["Concat", "Min", "Max"], slice(None)),
    "Where": slice(1, 3),
}
"""Op -> the inputs whose values its outputs have."""

_TABLES: Final = {
    "Gather": ((0, 1, "axis"),),
    "GatherElements": ((0, 1, "axis"),),
    "ScatterElements": ((0, 1, "axis"),),
    "GatherBlockQuantized": ((0, 1, "gather_axis"),),
    "EmbedLayerNormalization": ((2, 0, None), (3, 7, None), (4, 1, None)),
    **{
        op.name: ((op.packed_at or 0, op.indices_at, None),)
        for op in contract.OPS.values()
        if op.indices_at is not None
    },
}
"""Op -> (input that is the table, input that indexes it, attribute that says along which axis)."""

Origins = set[tuple[str, int]]
"""Pairs of (graph input that a value comes from, number that was added to it)."""


def index_ranges(model: ir.Model) -> dict[str, range]:
    """Returns, for each integer input that indexes tables, the values that stay inside the smallest of them."""
    model = _inlined(model)
    infer(model, [])  # lengths of tables: one may be computed from an initializer
    walk = _Walk()
    walk.origins = {v: {(str(v.name), 0)} for v in model.graph.inputs if _is_integer(dtype_of(v))}
    walk.graph(model.graph)
    return walk.ranges


class _Walk:
    """One pass over the nodes in order, subgraphs where they stand."""

    def __init__(self) -> None:
        self.origins: dict[ir.Value, Origins] = {}
        self.ranges: dict[str, range] = {}

    def graph(self, graph: ir.Graph) -> None:
        for node in graph:
            for table, index, axis in _TABLES.get(node.op_type, ()):
                if max(table, index) < len(node.inputs):
                    self._bound(node.inputs[index], _length(node, table, axis))
            # OneHot's depth is a value and not the length of a table. At an opset that lacks an op, onnx does not check
            # how many inputs it has.
            if is_op(node, "OneHot") and len(node.inputs) > 1 and (depth := _integer(node.inputs[1])) is not None:
                self._bound(node.inputs[0], depth)
            self._follow(node)

    def _follow(self, node: ir.Node) -> None:
        if node.op_type in _MOVES:
            self._join(node.inputs[_MOVES[node.op_type]], node.outputs)
        elif is_op(node, "Add", "Sub") and len(node.inputs) == 2:
            left, right = node.inputs
            if (number := _integer(right)) is not None:
                self._join([left], node.outputs, number if node.op_type == "Add" else -number)
            elif node.op_type == "Add" and (number := _integer(left)) is not None:
                self._join([right], node.outputs, number)
        for inner in subgraphs_of(node):
            for start, end in borders(node, inner):  # into it: what its own nodes make has no origin yet
                self._join([start], [end])
            self.graph(inner)
            for start, end in borders(node, inner):
                self._join([start], [end])

    def _join(self, sources: Iterable[ir.Value | None], targets: Iterable[ir.Value], shift: int = 0) -> None:
        known = [self.origins[source] for source in sources if source is not None and source in self.origins]
        origins = {(name, by + shift) for each in known for name, by in each}
        for target in targets if origins else ():
            self.origins.setdefault(target, set()).update(origins)

    def _bound(self, indices: ir.Value | None, length: int) -> None:
        for name, shift in self.origins.get(indices, ()) if indices is not None else ():
            # An index shifted by a constant has to stay inside of [0, length).
            low, high = max(0, -shift), length - shift
            bounds = self.ranges.get(name, range(low, high))
            # The intersection over all tables: one id goes to each of them.
            low, high = max(bounds.start, low), min(bounds.stop, high)
            # Never empty: tables that contradict each other would leave no value to try.
            self.ranges[name] = range(low, max(high, low + 1))


def _length(node: ir.Node, table: int, axis_name: str | None) -> int:
    """Returns how many entries the table has; 1 if that is unknown, since index 0 is always inside."""
    value = node.inputs[table]
    if value is None:
        return 1
    # What a caller does not replace is the default, whose shape can say more than the declared one.
    tensor = default(value)
    shape = tensor.shape.numpy() if tensor is not None else shape_of(value) or ()
    axis = attribute(node, axis_name, 0) if axis_name else 0
    size = shape[axis] if -len(shape) <= axis < len(shape) else None
    return size if isinstance(size, int) else 1


def _inlined(model: ir.Model) -> ir.Model:
    """Returns the model with local functions inlined, if onnx can do that; ours have no tables."""
    foreign = [(domain, name) for domain, name, _ in model.functions if domain != contract.DOMAIN]
    if foreign:
        # A model that cannot be inlined still has ranges for what its main graph indexes.
        with contextlib.suppress(ContractError):
            return through(model, lambda proto: inliner.inline_selected_functions(proto, foreign), "inliner")
    return model


def _is_integer(dtype: int) -> bool:
    return bool(dtype) and ir.DataType(dtype).is_integer() and dtype != ir.DataType.UINT64


def _integer(value: ir.Value | None) -> int | None:
    """Returns the value of an integer constant that has one value."""
    tensor = None if value is None else default(value)
    if tensor is None or is_large(tensor) or not _is_integer(tensor.dtype) or tensor.size != 1:
        return None
    return int(tensor.numpy().item())
