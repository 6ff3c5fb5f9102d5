"""The nodes on NVIDIA GPUs: the functions of `numpy_nodes.py` on CuPy arrays, on the current stream.

The import needs neither CuPy nor a GPU; the first call needs both. The other nodes have no function here.
"""

from typing import Any

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


def __getattr__(name: str) -> Any:
    advice = "torch.ops.mxfp8 and ONNX Runtime run other nodes on a GPU"
    raise AttributeError(f"mxfp8_ops.cuda has no {name}; expected one of {', '.join(__all__)}; {advice}")
