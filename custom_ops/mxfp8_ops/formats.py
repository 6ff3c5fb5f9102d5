"""The number formats as data: one row per value dtype, element format and scale rounding.

A row has the names of the dtype in other libraries and its bit layout; behaviour derives from the rows. "Add a format"
in custom_ops/README.md lists what else a new row needs.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.2 (MXFP8), 5.3 (FP8 elements), 5.4 (E8M0 scales).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mxfp8_ops.errors import ContractError

BLOCK_SIZE: Final = 32
"""Values that share one scale (OCP MX v1.0, table 1: 32 for every MX format)."""

SCALE_BIAS: Final = 127
"""E8M0: code s stands for 2^(s - 127)."""

SCALE_NAN: Final = 255
"""E8M0: the only NaN code; every value of its block is NaN."""

ELEMENT_NAN: Final = 0x7F
"""The NaN we write: all exponent and mantissa bits set, sign clear, in every element format."""


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """The names and codes of one dtype in the libraries that store it or compute with it."""

    name: str
    """Our name, in arguments and recipes. Its code in src/codes.h has the same name in capitals."""
    numpy_name: str
    """Name of the dtype in NumPy or ml_dtypes, in torch and in torchao."""
    bytes: int
    """Bytes per value."""
    mantissa_bits: int
    """Bits after the leading one."""
    onnx_name: str
    """Name in onnx.TensorProto.DataType."""
    onnx_dtype: int
    """Code in onnx.TensorProto.DataType; the native library uses the same code."""
    cuda_name: str
    """Name of the type in src/cuda/codec.cuh."""
    cuda_data_type: int
    """Code in cudaDataType, which cuBLASLt takes."""
    safetensors_name: str
    """Name of the dtype in safetensors files, also in files of compressed-tensors."""


@dataclass(frozen=True, kw_only=True)
class ValueDtype(Dtype):
    """A dtype of unquantized tensors."""

    min_exponent: int
    """Exponent of the smallest normal number."""


@dataclass(frozen=True, kw_only=True)
class Minifloat:
    """The layout of an element: a sign bit, exponent bits, mantissa bits. One exponent bit gives a fixed-point number.

    Codes above `max_code` are NaN; if there are several such codes, the first is infinity.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    """Bits after the leading one."""
    bias: int
    max_code: int
    """Code of the largest finite magnitude; quantization saturates to it."""

    @property
    def bits(self) -> int:
        """Bits per value, the sign bit included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def emax(self) -> int:
        """Exponent of the largest finite magnitude."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def max_mantissa(self) -> int:
        """Mantissa of the largest finite magnitude as the top bits of a float32 mantissa."""
        return (self.max_code << (23 - self.mantissa_bits)) & 0x7FFFFF

    @property
    def max(self) -> float:
        """Largest finite magnitude."""
        return (1 + self.max_mantissa * 2.0**-23) * 2.0**self.emax

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; subnormal numbers have the same step as numbers of this exponent."""
        return 1 - self.bias

    @property
    def min_subnormal(self) -> float:
        """Smallest positive magnitude."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


@dataclass(frozen=True, kw_only=True)
class ElementFormat(Dtype, Minifloat):
    """An 8-bit element that kernels read and write."""

    bytes: int = 1
    twos_complement: bool = False
    """Whether a negative value has the code 256 - magnitude, and no code is NaN; otherwise the top bit is the sign."""

    @property
    def mx_name(self) -> str:
        """Name of the block format with these elements, as in OCP MX v1.0 section 5: MXFP8 or MXINT8."""
        return "MXINT8" if self.twos_complement else "MXFP8"


FLOAT32: Final = ValueDtype(
    name="float32", numpy_name="float32", bytes=4, mantissa_bits=23, min_exponent=-126,
    onnx_name="FLOAT", onnx_dtype=1, cuda_name="F32", cuda_data_type=0, safetensors_name="F32",
)  # fmt: skip
FLOAT16: Final = ValueDtype(
    name="float16", numpy_name="float16", bytes=2, mantissa_bits=10, min_exponent=-14,
    onnx_name="FLOAT16", onnx_dtype=10, cuda_name="F16", cuda_data_type=2, safetensors_name="F16",
)  # fmt: skip
BFLOAT16: Final = ValueDtype(
    name="bfloat16", numpy_name="bfloat16", bytes=2, mantissa_bits=7, min_exponent=-126,
    onnx_name="BFLOAT16", onnx_dtype=16, cuda_name="BF16", cuda_data_type=14, safetensors_name="BF16",
)  # fmt: skip

E4M3: Final = ElementFormat(
    name="e4m3", numpy_name="float8_e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7,
    max_code=0x7E,  # 448; 0x7f is NaN and there is no infinity
    onnx_name="FLOAT8E4M3FN", onnx_dtype=17, cuda_name="E4M3", cuda_data_type=28, safetensors_name="F8_E4M3",
)  # fmt: skip
E5M2: Final = ElementFormat(
    name="e5m2", numpy_name="float8_e5m2", exponent_bits=5, mantissa_bits=2, bias=15,
    max_code=0x7B,  # 57344; 0x7c is infinity, 0x7d..0x7f are NaN
    onnx_name="FLOAT8E5M2", onnx_dtype=19, cuda_name="E5M2", cuda_data_type=29, safetensors_name="F8_E5M2",
)  # fmt: skip
INT8: Final = ElementFormat(
    name="int8", numpy_name="int8", exponent_bits=1, mantissa_bits=6, bias=1, twos_complement=True,
    max_code=0x7F,  # 127 / 64; -128 is read, and never written
    onnx_name="INT8", onnx_dtype=3, cuda_name="INT8", cuda_data_type=3, safetensors_name="I8",
)  # fmt: skip

VALUE_DTYPES: Final[Mapping[str, ValueDtype]] = MappingProxyType({d.name: d for d in (FLOAT32, FLOAT16, BFLOAT16)})
ELEMENT_FORMATS: Final[Mapping[str, ElementFormat]] = MappingProxyType({f.name: f for f in (E4M3, E5M2, INT8)})
ELEMENT_NAMES: Final[Mapping[int, str]] = MappingProxyType({f.onnx_dtype: f.name for f in ELEMENT_FORMATS.values()})
"""Their names, by onnx.TensorProto.DataType."""
DTYPES: Final[Mapping[str, Dtype]] = MappingProxyType({**VALUE_DTYPES, **ELEMENT_FORMATS})

SCALE_ROUNDINGS: Final = ("ceil", "floor", "even")
"""The rules that derive a scale from the amax of a block.

ceil   the smallest s with amax <= max * 2^(s - 127): nothing saturates. TransformerEngine, cuBLAS ("RCEIL"),
       NVIDIA's "Recipes for Pre-training LLMs with MXFP8".
floor  floor(log2(amax)) - emax: OCP MX v1.0 section 6.3. Values above max saturate.
even   floor after amax is rounded half up to the element's mantissa: torchao's EVEN.
"""


def scale_increment(fmt: Minifloat, scale_rounding: str) -> int:
    """Returns the integer to add to the bits of a float32 amax; the exponent field of the sum, less emax, is the scale.

    All three roundings are one integer addition: it carries into the exponent exactly where the rounding needs the next
    power of two. It needs no logarithm, so no scale is off by one near a boundary.

    Add half the integer, rounded down, to a subnormal amax. From 2^-127 on, the bits of a subnormal are its leading
    one, which is explicit, and its mantissa shifted right by one. Below 2^-127 nothing carries: the scale code is 0.
    """
    # With bits = exponent << 23 | mantissa, the sum carries into the exponent where mantissa + increment >= 2^23.
    if scale_rounding == "ceil":
        return 0x7FFFFF - fmt.max_mantissa  # carries when the mantissa exceeds the mantissa of the format's maximum
    if scale_rounding == "floor":
        return 0
    if scale_rounding == "even":
        return 1 << (22 - fmt.mantissa_bits)  # half a unit in the last place of the element's mantissa
    raise ContractError.unknown("scale_rounding", scale_rounding, SCALE_ROUNDINGS)


LOG2_SLACK: Final = 2e-8
"""A quarter of 8.6e-8, the smallest distance between the logarithms of two float32 numbers.

The error of a float64 logarithm is at most 1e-13, far below the slack.
"""


def scale_offset(fmt: Minifloat, scale_rounding: str) -> float:
    """Returns the number to add to a float64 log2(amax); the sum, truncated and clamped to 0..254, is the scale code.

    It replaces `scale_increment` in standard ONNX ops, which cannot read the bits of a float. The integer carries where
    the mantissa is above 0x7fffff - increment. The slack keeps this mantissa itself below the step; every other float32
    number is farther from the step. Subnormals need no rule of their own.
    """
    mantissa = 1 + (0x7FFFFF - scale_increment(fmt, scale_rounding)) * 2.0**-23
    return SCALE_BIAS + 1 - fmt.emax - math.log2(mantissa) - LOG2_SLACK


def activation_dtype(name: str | None) -> ValueDtype:
    """Returns the dtype to which a gemm rounds its activations first: BFLOAT16 for "bfloat16", FLOAT32 for None.

    Rounding to FLOAT32 changes no value.

    Raises:
        ContractError: `name` is another name.
    """
    if name is None:
        return FLOAT32
    if name != BFLOAT16.name:
        raise ContractError.unknown("activation_dtype", name, (BFLOAT16.name,))
    return BFLOAT16


def element_format(name: str) -> ElementFormat:
    """Returns the row of `ELEMENT_FORMATS` called `name`.

    Raises:
        ContractError: no format has this name.
    """
    try:
        return ELEMENT_FORMATS[name]
    except KeyError:
        raise ContractError.unknown("element_format", name, ELEMENT_FORMATS) from None
