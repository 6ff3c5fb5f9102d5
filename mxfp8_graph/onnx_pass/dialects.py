"""The ops of other MXFP8 dialects: the pass refuses their models, and `mxfp8_graph.convert` reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TRT: Final = "trt"
"""The domain of TensorRT's ops."""

TRT_QUANTIZE: Final = "TRT_MXFP8DynamicQuantize"
TRT_STATIC_QUANTIZE: Final = "TRT_MXFP8QuantizeLinear"
TRT_DEQUANTIZE: Final = "TRT_MXFP8DequantizeLinear"

DIALECT_OF: Final[Mapping[tuple[str, str], str]] = {
    ("", "DequantizeLinear"): "qdq",
    ("", "QuantizeLinear"): "qdq",
    (TRT, TRT_QUANTIZE): "trt",
    (TRT, TRT_STATIC_QUANTIZE): "trt",
    (TRT, TRT_DEQUANTIZE): "trt",
    ("com.microsoft", "MatMulNBits"): "nbits",
    ("com.amd.quark", "MXQuantizeDequantize"): "quark",
    ("com.vai.quantize", "MXFixNeuron"): "quark",
}
"""The dialect by (domain, op)."""
