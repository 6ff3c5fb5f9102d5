"""check_node(): whether a node of another dialect has the inputs, outputs and attributes that readers count on.

onnx's checker does not know these ops; the standard ones were checked when the model was opened.
"""

from __future__ import annotations

from typing import Final

import onnx

from mxfp8_graph.dialects.graph_edit import Scope
from mxfp8_graph.onnx_model.dialect_ops import dialect_of, may_be_mxfp8

_PORTS: Final = {
    "TRT_MXFP8DynamicQuantize": (1, 2),
    "TRT_MXFP8QuantizeLinear": (2, 1),
    "TRT_MXFP8DequantizeLinear": (2, 1),
    "MatMulBlockQuantizedFp8Weight": (3, 1),
    "MXQuantizeDequantize": (1, 1),
    "MXFixNeuron": (1, 1),
    "DequantizeLinear": (2, 1),
    "QuantizeLinear": (2, 1),
}
"""How many inputs, at least, and outputs a node has."""

_KINDS: Final = {
    **dict.fromkeys(("axis", "block_size", "output_dtype"), onnx.AttributeProto.INT),
    **dict.fromkeys(("element_dtype", "scale_dtype"), onnx.AttributeProto.STRING),
}


def check_node(scope: Scope, node: onnx.NodeProto) -> None:
    """Raises ContractError for a node of another dialect that is damaged; other nodes are left alone."""
    if dialect_of(node) in {None, "mxfp8"} and not may_be_mxfp8(node):
        return
    inputs, outputs = _PORTS[node.op_type]
    advice = "export the model again"
    if not all([*node.input[:inputs], len(node.input) >= inputs]) or not all(
        [*node.output, len(node.output) == outputs]
    ):
        what = f"inputs {[*node.input]}, outputs {[*node.output]}"
        raise scope.edit.refuse(node, what, expected=f"{inputs} inputs or more and {outputs}", advice=advice)
    for attribute in node.attribute:
        kind = _KINDS.get(attribute.name, attribute.type)
        if attribute.type != kind:
            expected = onnx.AttributeProto.AttributeType.Name(kind).lower()
            raise scope.edit.refuse(node, f"{attribute.name} of another type", expected=expected, advice=advice)
    axis = next((a.i for a in node.attribute if a.name == "axis"), None)
    stored = scope.tensor(node.input[0])
    rank = scope.edit.ranks.get(node.input[0]) if stored is None else len(stored.dims)
    if axis is not None and rank is not None and not -rank <= axis < max(rank, 1):
        raise scope.edit.refuse(node, f"axis {axis}", expected=f"one of {rank} dimensions", advice=advice)
