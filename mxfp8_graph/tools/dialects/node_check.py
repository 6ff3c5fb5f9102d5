"""check_node(): whether a node of another dialect has the inputs, outputs and attributes that readers count on.

onnx's checker does not know these ops; the standard ones were checked when the model was opened.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx

from mxfp8_graph.onnx_model.dialect_ops import dialect_of, may_be_mxfp8
from mxfp8_graph.onnx_model.dialects import OPS
from mxfp8_graph.onnx_model.walk import STANDARD
from mxfp8_graph.tools.dialects.graph_edit import Advice, Scope

_KINDS: Final = {
    **dict.fromkeys(("axis", "block_size", "output_dtype", "rounding_mode"), onnx.AttributeProto.INT),
    **dict.fromkeys(("element_dtype", "scale_dtype"), onnx.AttributeProto.STRING),
}


def check_node(scope: Scope, node: onnx.NodeProto) -> None:
    """Raises ContractError for a node of another dialect that is damaged or unknown; other nodes are left alone."""
    dialect = dialect_of(node)
    if dialect in {None, "mxfp8"} and not may_be_mxfp8(node):
        return
    key = "" if node.domain in STANDARD else node.domain, node.op_type
    row = OPS[key]
    least, most, outputs = row.ops[key]
    advice = "export the model again"
    if (
        not all([*node.input[:least], len(node.input) >= least])
        or any(node.input[most:])
        or not all([*node.output, len(node.output) == outputs])
    ):
        what = f"inputs {[*node.input]}, outputs {[*node.output]}"
        expected = f"{least}{'' if most == least else f' to {most}'} inputs and {outputs}"
        raise scope.edit.refuse(node, what, expected=expected, advice=advice)
    if dialect == "trt":
        check_zero_point(scope, node, advice)
    for attribute in node.attribute:
        if row.attributes and attribute.name not in row.attributes:
            expected = f"{', '.join(row.attributes)} alone, which are known to convert"
            raise scope.edit.refuse(node, f"attribute {attribute.name!r}", expected=expected, advice=advice)
        kind = _KINDS.get(attribute.name, attribute.type)
        if attribute.type != kind:
            expected = onnx.AttributeProto.AttributeType.Name(kind).lower()
            raise scope.edit.refuse(node, f"{attribute.name} of another type", expected=expected, advice=advice)
    axis = next((a.i for a in node.attribute if a.name == "axis"), None)
    stored = scope.tensor(node.input[0])
    rank = scope.edit.ranks.get(node.input[0]) if stored is None else len(stored.dims)
    if axis is not None and rank is not None and not -rank <= axis < max(rank, 1):
        raise scope.edit.refuse(node, f"axis {axis}", expected=f"one of {rank} dimensions", advice=advice)


def check_zero_point(scope: Scope, node: onnx.NodeProto, advice: Advice) -> None:
    """Raises ContractError unless the zero point of a node, its third input, is absent or stored zeros."""
    name = node.input[2] if len(node.input) > 2 else ""
    stored = scope.tensor(name) if name else None
    if name and (stored is None or np.any(scope.values(stored) != 0)):
        raise scope.edit.refuse(node, f"zero point {name!r}", expected="none, or stored zeros", advice=advice)
