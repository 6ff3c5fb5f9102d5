"""The reference of each node in NumPy, from the files of nodes/. Tests compare every other implementation with it.

The code is simple rather than fast. The backends have the same functions with the same signatures. Elements and scales
are `uint8` arrays of codes; `formats.py` defines the codes.
"""

from mxfp8_ops.nodes.attention import attention, attention_error_bound
from mxfp8_ops.nodes.conv import conv, conv_error_bound
from mxfp8_ops.nodes.embedding import embedding
from mxfp8_ops.nodes.fused_gemm import fused_gemm, fused_gemm_error_bound, fused_weight_gemm
from mxfp8_ops.nodes.gemm import gemm, gemm_error_bound, weight_gemm
from mxfp8_ops.nodes.grouped import grouped_gemm, grouped_weight_gemm
from mxfp8_ops.nodes.quantize import dequantize, quantize

__all__ = [
    "attention",
    "attention_error_bound",
    "conv",
    "conv_error_bound",
    "dequantize",
    "embedding",
    "fused_gemm",
    "fused_gemm_error_bound",
    "fused_weight_gemm",
    "gemm",
    "gemm_error_bound",
    "grouped_gemm",
    "grouped_weight_gemm",
    "quantize",
    "weight_gemm",
]
