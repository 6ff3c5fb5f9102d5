"""What `convert` refuses before it reads: nodes that are quantized in another way than MXFP8, and damaged ones.

onnx's checker does not know the ops of other dialects; the standard ones were checked when the model was opened.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialect_ops import dialect_of, is_blocked
from mxfp8_graph.onnx_pass.dialects import OPS, TRT
from mxfp8_graph.onnx_pass.graph import MICROSOFT, STANDARD, attribute, is_op, label, name_of
from mxfp8_graph.tools.dialects.bodies import marks
from mxfp8_graph.tools.dialects.edit import AGAIN, Advice, Edit, operand, rank_of, tensor_of
from mxfp8_ops.errors import ContractError

_QUANTIZED: Final = {
    "": {
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv"),
        *("MatMulInteger", "ConvInteger"),
    },
    MICROSOFT: {
        *("MatMulNBits", "MatMulBnb4", "GatherBlockQuantized", "QAttention", "QGemm", "DynamicQuantizeMatMul"),
        *("MatMulIntegerToFloat", "MatMulBlockQuantizedFp4Weight", "QMoE", "GemmFloat8", "QuantizeLinear"),
        *("DequantizeLinear", "QEmbedLayerNormalization", "DynamicQuantizeLSTM"),
    },
    "com.amd.quark": {"ExtendedQuantizeLinear", "ExtendedDequantizeLinear", "BFPQuantizeDequantize"},
    "com.vai.quantize": {"VitisQuantizeLinear", "VitisDequantizeLinear", "BFPFixNeuron"},
}
"""Ops that quantize, or work on what is quantized, in another way or perhaps in MXFP8."""

_KINDS: Final = {
    **dict.fromkeys(("axis", "block_size", "output_dtype", "rounding_mode"), ir.AttributeType.INT),
    **dict.fromkeys(("element_dtype", "scale_dtype"), ir.AttributeType.STRING),
}


def refuse_others(model: ir.Model) -> None:
    """Raises ContractError if something is quantized, but in no dialect of MXFP8."""
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    others = [node for graph in graphs for node in graph.all_nodes() if _is_other(node)]
    if others:
        kinds = Counter(f"{node.domain + '.' if node.domain else ''}{node.op_type}" for node in others)
        what = ", ".join(f"{count} {name}" for name, count in kinds.items())
        where = f"{name_of(model)}: node {label(others[0])!r}"
        advice = "start from the model that is not quantized: mxfp8-graph rewrite"
        raise ContractError(where, f"quantized, but not in MXFP8 ({what})", expected="MXFP8 alone", advice=advice)


def _is_other(node: ir.Node) -> bool:
    """Whether a node is quantized in no dialect of MXFP8, as far as its op, mark and blocks say."""
    if marks(node):
        return False
    if node.domain == TRT:
        return (dialect_of(node) is None and "uantize" in node.op_type) or "QDQ" in node.op_type
    if node.op_type not in _QUANTIZED.get("" if node.domain in STANDARD else node.domain, ()):
        return False
    if is_op(node, "QuantizeLinear"):
        return not is_blocked(node)
    if dialect_of(node) == "nbits":
        return not is_blocked(node) or attribute(node, "bits", 4) != 8
    return not is_op(node, "DequantizeLinear")  # its operands decide


def check_node(edit: Edit, node: ir.Node) -> None:
    """Raises ContractError for a node of another dialect that is damaged or unknown; other nodes are left alone."""
    key = node.domain, node.op_type
    row = OPS.get(key)
    if row is None or (is_op(node, "QuantizeLinear") and not is_blocked(node)):
        return
    least, most, outputs = row.ops[key]
    has_inputs = len(node.inputs) >= least and all(node.inputs[:least]) and not any(node.inputs[most:])
    names = [value.name if value is not None else "" for value in node.inputs]
    results = [output.name for output in node.outputs]
    what, range_ = f"inputs {names}, outputs {results}", f"{least}{'' if most == least else f' to {most}'}"
    has_outputs = len(results) == outputs and all(results)
    edit.require(has_inputs and has_outputs, node, what, f"{range_} inputs and {outputs}")
    if row.name == "trt":
        check_zero_point(edit, node)
    for entry in node.attributes.values():
        is_known, kind = not row.attributes or entry.name in row.attributes, _KINDS.get(entry.name, entry.type)
        expected = f"{', '.join(row.attributes)} alone, which are known to convert"
        edit.require(is_known, node, f"attribute {entry.name!r}", expected)
        edit.require(entry.type == kind, node, f"{entry.name} of another type", kind.name.lower())
    axis, value = attribute(node, "axis", None), node.inputs[0]
    rank = None if value is None else rank_of(value)
    is_axis = axis is None or rank is None or -rank <= axis < max(rank, 1)
    edit.require(is_axis, node, f"axis {axis}", f"one of {rank} dimensions")


def check_zero_point(edit: Edit, node: ir.Node, advice: Advice = AGAIN) -> None:
    """Raises ContractError unless the zero point of a node, its third input, is absent or stored zeros."""
    value = operand(node, 2)
    stored = tensor_of(value)
    is_none = value is None or (stored is not None and not np.any(stored.numpy() != 0))
    edit.require(is_none, node, f"zero point {value and value.name!r}", "none, or stored zeros", advice)
