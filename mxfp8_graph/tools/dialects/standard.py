"""Standard ops alone, of opset 21: for ONNX Runtime without our library, OpenVINO and onnx's ReferenceEvaluator.

A weight of whole blocks is DequantizeLinear with its codes looked up in the table of all scales, which needs no E8M0
type. Everything else is the function body of its node: quantizing activations, partial blocks (which OpenVINO's
DequantizeLinear lacks), experts.
"""

from __future__ import annotations

import onnx

from mxfp8_graph.tools.dialects.graph_edit import Nodes, Scope, attribute
from mxfp8_graph.tools.dialects.qdq import dequantize_linear, shared, table_of_scales
from mxfp8_graph.tools.dialects.restored import taken_apart
from mxfp8_ops import contract
from mxfp8_ops.formats import BLOCK_SIZE


def write(scope: Scope, node: onnx.NodeProto, _: frozenset[str]) -> Nodes | None:
    """Returns standard ops for one of our nodes, or None for others."""
    if node.domain != contract.DOMAIN:
        return None
    if node.op_type == contract.DEQUANTIZE.name:
        elements, codes = scope.tensor(node.input[0]), scope.tensor(node.input[1])
        axis = attribute(node, "axis", -1)
        if elements is not None and codes is not None and elements.dims[axis] % BLOCK_SIZE == 0:
            scales = shared(scope, ("scales", node.input[1]), lambda _: _scales(scope, node))
            return dequantize_linear(scope, node, scales)
    return taken_apart(scope, node)


def _scales(scope: Scope, node: onnx.NodeProto) -> str:
    """Returns the float32 scales of a stored weight."""
    top = scope
    while top.outer is not None:
        top = top.outer
    table = shared(top, ("table",), lambda _: top.store("mxfp8_scale_values", contract.FLOAT, table_of_scales()))
    index = scope.make("Cast", node.input[1], wanted=f"{node.input[1]}_index", to=contract.INT32)
    return scope.make("Gather", table, index, wanted=f"{node.input[1]}_float")
