"""The nodes on the processor: the functions of `numerics.py`, natively, on NumPy arrays.

numpy_arrays.py  the functions
native.py        loads libmxfp8_ops and chooses the instruction set
"""

from mxfp8_ops.cpu.native import available_isas, force_isa, forced_isa, isa, library_path
from mxfp8_ops.cpu.numpy_arrays import Packed, dequantize, gemm, pack, quantize, weight_gemm

__all__ = [
    "Packed",
    "available_isas",
    "dequantize",
    "force_isa",
    "forced_isa",
    "gemm",
    "isa",
    "library_path",
    "pack",
    "quantize",
    "weight_gemm",
]
