"""Which dialect of MXFP8 a node is of, by its name; and which nodes are quantized in another way."""

from __future__ import annotations

from typing import Final

import onnx

from mxfp8_graph.onnx_model.walk import MICROSOFT, STANDARD, iter_graphs, stored_in
from mxfp8_ops import contract
from mxfp8_ops.formats import BLOCK_SIZE

TRT: Final = "trt"
"""The domain of TensorRT's ops."""

TRT_QUANTIZE: Final = "TRT_MXFP8DynamicQuantize"
TRT_STATIC_QUANTIZE: Final = "TRT_MXFP8QuantizeLinear"
TRT_DEQUANTIZE: Final = "TRT_MXFP8DequantizeLinear"

_OPS: Final = {
    (TRT, TRT_QUANTIZE): "trt",
    (TRT, TRT_STATIC_QUANTIZE): "trt",
    (TRT, TRT_DEQUANTIZE): "trt",
    (MICROSOFT, "MatMulBlockQuantizedFp8Weight"): "ort-cuda",
    ("com.amd.quark", "MXQuantizeDequantize"): "quark",
    ("com.vai.quantize", "MXFixNeuron"): "quark",
}

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


def may_be_mxfp8(node: onnx.NodeProto) -> bool:
    """Whether it is ONNX's DequantizeLinear, whose operands decide, or QuantizeLinear with the block size of MXFP8."""
    if node.domain not in STANDARD or node.op_type not in {"QuantizeLinear", "DequantizeLinear"}:
        return False
    return node.op_type == "DequantizeLinear" or _is_blocked(node)


def _is_blocked(node: onnx.NodeProto) -> bool:
    return any(a.name == "block_size" and a.i == BLOCK_SIZE for a in node.attribute)


def dialect_of(node: onnx.NodeProto) -> str | None:
    """Returns the dialect whose own op a node is: "mxfp8", "trt", "ort-cuda" or "quark"; standard ops are of none."""
    return "mxfp8" if node.domain == contract.DOMAIN else _OPS.get((node.domain, node.op_type))


def is_quantized(node: onnx.NodeProto) -> bool:
    """Whether a node quantizes, or works on what is quantized, in no dialect of MXFP8 by its name alone."""
    domain = "" if node.domain in STANDARD else node.domain
    if domain == TRT:
        return (dialect_of(node) is None and "uantize" in node.op_type) or "QDQ" in node.op_type
    return node.op_type in _QUANTIZED.get(domain, ())


def foreign(model: onnx.ModelProto) -> tuple[str, onnx.NodeProto] | None:
    """Returns (dialect, node) of the first node that is MXFP8 of another dialect than ours, or None."""
    for graph in iter_graphs(model.graph):
        stored = stored_in(graph)
        for node in graph.node:
            found = dialect_of(node)
            if found is not None and found != "mxfp8":
                return found, node
            tensor = stored.get(node.input[0]) if node.input else None
            is_qdq = node.op_type == "DequantizeLinear" and node.domain in STANDARD and _is_blocked(node)
            if is_qdq and tensor is not None and tensor.data_type in contract.ELEMENTS:
                return "qdq", node
    return None
