"""Which nodes are quantized in another way than MXFP8, which `convert` cannot read."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialect_ops import dialect_of, is_blocked
from mxfp8_graph.onnx_pass.dialects import TRT
from mxfp8_graph.onnx_pass.graph import MICROSOFT, STANDARD, attribute

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


def may_be_mxfp8(node: ir.Node) -> bool:
    """Whether it is ONNX's DequantizeLinear, whose operands decide, or QuantizeLinear with the block size of MXFP8.

    Or MatMulNBits with 8 bits in such blocks, whose operands decide too.
    """
    if (node.domain, node.op_type) == (MICROSOFT, "MatMulNBits"):
        return is_blocked(node) and attribute(node, "bits", 4) == 8
    if node.domain not in STANDARD or node.op_type not in {"QuantizeLinear", "DequantizeLinear"}:
        return False
    return node.op_type == "DequantizeLinear" or is_blocked(node)


def is_quantized(node: ir.Node) -> bool:
    """Whether a node quantizes, or works on what is quantized, in no dialect of MXFP8 by its name alone."""
    domain = "" if node.domain in STANDARD else node.domain
    if domain == TRT:
        return (dialect_of(node) is None and "uantize" in node.op_type) or "QDQ" in node.op_type
    return node.op_type in _QUANTIZED.get(domain, ())
