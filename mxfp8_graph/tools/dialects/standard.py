"""Standard ops alone, of opset 21: for ONNX Runtime without our library, OpenVINO and onnx's ReferenceEvaluator.

A weight of whole blocks is DequantizeLinear with its codes looked up in the table of all scales, which needs no E8M0
type. Everything else is the function body of its node: quantizing activations, partial blocks (which OpenVINO's
DequantizeLinear lacks), experts.
"""

from __future__ import annotations

import onnx_ir as ir

from mxfp8_graph.onnx_model.graph import attribute
from mxfp8_graph.onnx_pass.fuse.replacement import is_ours
from mxfp8_graph.tools.dialects.decompose import taken_apart
from mxfp8_graph.tools.dialects.edit import Edit, Nodes, dims, operands, tensor_of
from mxfp8_graph.tools.dialects.qdq import dequantize_linear, table_of_scales
from mxfp8_ops import contract
from mxfp8_ops.formats import BLOCK_SIZE


def write(edit: Edit, node: ir.Node, _: frozenset[str]) -> Nodes | None:
    """Returns standard ops for one of our nodes, or None for others."""
    if node.domain != contract.DOMAIN:
        return None
    if is_ours(node, contract.DEQUANTIZE):
        value, scales = operands(node)
        elements, axis = tensor_of(value), attribute(node, "axis", -1)
        if elements is not None and tensor_of(scales) is not None and dims(elements)[axis] % BLOCK_SIZE == 0:
            kind = int(elements.dtype)
            looked_up = edit.shared(node.graph, "scales", scales, kind, make=lambda: _looked_up(edit, scales, kind))
            return dequantize_linear(edit, node, looked_up)
    return taken_apart(edit, node)


def _looked_up(edit: Edit, scales: ir.Value, kind: int) -> ir.Value:
    """Returns the float32 scales of a stored weight of dtype `kind`."""
    top, values = edit.model.graph, table_of_scales(kind)
    make = lambda: edit.store(top, "mxfp8_scale_values", contract.FLOAT, values)  # noqa: E731
    table = edit.shared(top, "table", values.tobytes(), make=make)
    index = edit.make("Cast", scales, wanted=f"{scales.name}_index", to=contract.INT32)
    return edit.make("Gather", table, index, wanted=f"{scales.name}_float")
