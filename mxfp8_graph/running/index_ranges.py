"""The values that an integer input may take: indices inside of every table that it indexes.

Follows each integer input forward through ops that only move values (Cast, Reshape, Slice, Where, ...), in subgraphs
and local functions too, to the ops that index a table with them.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Final

import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import attribute, default, name_of, shape_of
from mxfp8_graph.onnx_pass.ops import names as ops_with
from mxfp8_graph.onnx_pass.prepare import infer, inline, run_onnx_passes
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

_MOVES: Final[dict[str, slice]] = {
    **dict.fromkeys(ops_with(lambda op: op.view is not None or op.gathers), slice(1)),
    **dict.fromkeys(["Flatten", "Compress", "Pad", "Clip", "GatherElements"], slice(1)),
    **dict.fromkeys(["Concat", "Min", "Max"], slice(None)),
    "Where": slice(1, 3),
}
"""Op -> the inputs whose values it moves to its outputs."""

_TABLES: Final = {
    "Gather": ((0, 1, "axis"),),
    "GatherBlockQuantized": ((0, 1, "gather_axis"),),
    "EmbedLayerNormalization": ((2, 0, None), (3, 7, None), (4, 1, None)),
    **{
        op.name: ((op.packed_at or 0, op.indices_at, None),)
        for op in contract.OPS.values()
        if op.indices_at is not None
    },
}
"""Op -> (input that is the table, input that indexes it, attribute with the axis)."""


def index_ranges(model: ir.Model) -> dict[str, range]:
    """Returns, for each integer input that indexes tables, the values that stay inside the smallest of them."""
    foreign = [(domain, name) for domain, name, _ in model.functions if domain != contract.DOMAIN]
    if foreign:
        # A model that cannot be inlined still has ranges for the tables of its main graph.
        with contextlib.suppress(ContractError):
            model = run_onnx_passes(model, [partial(inline, selected=foreign, model=name_of(model))])
    infer(model)  # for the lengths of tables that are computed from initializers
    # Value -> the graph inputs that it comes from.
    integers = (value for value in model.graph.inputs if value.dtype is not None and value.dtype.is_integer())
    origins: dict[ir.Value | None, set[str]] = {value: {str(value.name)} for value in integers}
    lengths: dict[str, int] = {}
    for node in model.graph.all_nodes():
        for table, index, axis in _TABLES.get(node.op_type, ()):
            if max(table, index) < len(node.inputs):
                length = _length(node.inputs[table], attribute(node, axis, 0) if axis else 0)
                for name in origins.get(node.inputs[index], ()):
                    lengths[name] = min(length, lengths.get(name, length))
        sources = node.inputs[_MOVES.get(node.op_type, slice(0))]
        names = {name for value in sources for name in origins.get(value, ())}
        origins |= dict.fromkeys(node.outputs, names)
    return {name: range(max(1, length)) for name, length in lengths.items()}


def _length(table: ir.Value | None, axis: int) -> int:
    """Returns the number of entries of a table; 1 if it is unknown, since index 0 is always inside."""
    if table is None:
        return 1
    # The default of an input that a caller may replace has a shape, even if the declared one is unknown.
    tensor = default(table)
    shape = tensor.shape.numpy() if tensor is not None else shape_of(table) or ()
    size = shape[axis] if -len(shape) <= axis < len(shape) else None
    return size if isinstance(size, int) else 1
