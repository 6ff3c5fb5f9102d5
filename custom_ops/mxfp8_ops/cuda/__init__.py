"""The nodes on NVIDIA GPUs: the functions of `numpy_nodes.py` on CuPy arrays, on the current stream.

Importing this imports no CuPy and needs no GPU; the first call does.
"""

from mxfp8_ops.cuda.cupy_arrays import (
    dequantize,
    embedding,
    gemm,
    quantize,
    weight_gemm,
)

__all__ = [
    "dequantize",
    "embedding",
    "gemm",
    "quantize",
    "weight_gemm",
]
