"""check_node(): whether a node of another dialect has the inputs, outputs and attributes that readers count on.

onnx's checker does not know these ops; the standard ones were checked when the model was opened.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialects import OPS
from mxfp8_graph.onnx_pass.graph import attribute, is_op
from mxfp8_graph.tools.dialects.edit import Advice, Edit, dims, operand, rank_of, tensor_of
from mxfp8_ops.formats import BLOCK_SIZE

_KINDS: Final = {
    **dict.fromkeys(("axis", "block_size", "output_dtype", "rounding_mode"), ir.AttributeType.INT),
    **dict.fromkeys(("element_dtype", "scale_dtype"), ir.AttributeType.STRING),
}


def check_node(edit: Edit, node: ir.Node) -> None:
    """Raises ContractError for a node of another dialect that is damaged or unknown; other nodes are left alone."""
    key = node.domain, node.op_type
    row = OPS.get(key)
    if row is None or (is_op(node, "QuantizeLinear") and attribute(node, "block_size", 0) != BLOCK_SIZE):
        return
    least, most, outputs = row.ops[key]
    advice = "export the model again"
    if (
        not all([*node.inputs[:least], len(node.inputs) >= least])
        or any(node.inputs[most:])
        or [bool(output.name) for output in node.outputs] != [True] * outputs
    ):
        names = [value.name if value is not None else "" for value in node.inputs]
        what = f"inputs {names}, outputs {[output.name for output in node.outputs]}"
        expected = f"{least}{'' if most == least else f' to {most}'} inputs and {outputs}"
        raise edit.refuse(node, what, expected=expected, advice=advice)
    if row.name == "trt":
        check_zero_point(edit, node, advice)
    for entry in node.attributes.values():
        if row.attributes and entry.name not in row.attributes:
            expected = f"{', '.join(row.attributes)} alone, which are known to convert"
            raise edit.refuse(node, f"attribute {entry.name!r}", expected=expected, advice=advice)
        kind = _KINDS.get(entry.name, entry.type)
        if entry.type != kind:
            what = f"{entry.name} of another type"
            raise edit.refuse(node, what, expected=kind.name.lower(), advice=advice)
    axis, value = attribute(node, "axis", None), node.inputs[0]
    stored = tensor_of(value)
    rank = len(dims(stored)) if stored is not None else None if value is None else rank_of(value)
    if axis is not None and rank is not None and not -rank <= axis < max(rank, 1):
        raise edit.refuse(node, f"axis {axis}", expected=f"one of {rank} dimensions", advice=advice)


def check_zero_point(edit: Edit, node: ir.Node, advice: Advice) -> None:
    """Raises ContractError unless the zero point of a node, its third input, is absent or stored zeros."""
    value = operand(node, 2)
    stored = tensor_of(value)
    if value is not None and (stored is None or np.any(stored.numpy() != 0)):
        raise edit.refuse(node, f"zero point {value.name!r}", expected="none, or stored zeros", advice=advice)
