"""The nodes on the processor: the functions of `numpy_nodes.py`, run by the native library."""

from mxfp8_ops.cpu.attention import attention
from mxfp8_ops.cpu.conv import conv
from mxfp8_ops.cpu.numpy_arrays import (
    Packed,
    dequantize,
    embedding,
    fused_gemm,
    fused_weight_gemm,
    gemm,
    grouped_gemm,
    grouped_weight_gemm,
    pack,
    quantize,
    weight_gemm,
)
from mxfp8_ops.cpu.profile import Call, Profile, profiled
from mxfp8_ops.native import available_isas, force_isa, forced_isa, isa, library_path

__all__ = [
    "Call",
    "Packed",
    "Profile",
    "attention",
    "available_isas",
    "conv",
    "dequantize",
    "embedding",
    "force_isa",
    "forced_isa",
    "fused_gemm",
    "fused_weight_gemm",
    "gemm",
    "grouped_gemm",
    "grouped_weight_gemm",
    "isa",
    "library_path",
    "pack",
    "profiled",
    "quantize",
    "weight_gemm",
]
