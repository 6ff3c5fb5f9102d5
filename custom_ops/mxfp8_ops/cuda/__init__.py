"""The nodes on NVIDIA GPUs: the functions of `numpy_nodes.py` on CuPy arrays, on the current stream.

Importing this imports no CuPy and needs no GPU; the first call does.
"""

from mxfp8_ops.cuda.cupy_arrays import (
    dequantize,
    embedding,
    gemm,
    quantize,
    quantize_both,
    weight_gemm,
    wide_weight,
)
from mxfp8_ops.cuda.execution import WideWeight

__all__ = [
    "WideWeight",
    "dequantize",
    "embedding",
    "gemm",
    "quantize",
    "quantize_both",
    "weight_gemm",
    "wide_weight",
]
