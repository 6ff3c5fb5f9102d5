"""The nodes on NVIDIA GPUs: the functions of `numpy_nodes.py` on CuPy arrays, on the current stream.

The import needs neither CuPy nor a GPU; the first call needs both.
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
