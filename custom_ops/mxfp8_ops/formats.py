"""The number formats as data: one row per value dtype, element format and scale rounding.

A row has the names of the dtype in other libraries, and its layout; behaviour derives from the rows. "Add a format" in
custom_ops/README.md says what else a new row needs.

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
"""E8M0: the one code that is NaN; it poisons its block."""

ELEMENT_NAN: Final = 0x7F
"""The NaN we write: all exponent and mantissa bits set, sign clear, in every element format."""


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """The names and codes of one dtype in the libraries that store it or compute with it."""

    name: str
    """Our name, in arguments and recipes; in capitals, that of its code in src/mxfp8_ops.h."""
    numpy_name: str
    """Name of the dtype in NumPy or ml_dtypes, in torch and in torchao."""
    bytes: int
    """Bytes per value."""
    mantissa_bits: int
    """Bits after the leading one."""
    onnx_name: str
    """Name of its onnx.TensorProto.DataType."""
    onnx_dtype: int
    """That code; the native library has the same."""
    cuda_name: str
    """Type in src/cuda/codec.cuh."""
    cuda_data_type: int
    """cudaDataType, which cuBLAS and cuBLASLt take."""
    safetensors_name: str
    """Dtype in safetensors files, those of compressed-tensors among them."""


@dataclass(frozen=True, kw_only=True)
class ValueDtype(Dtype):
    """A dtype of unquantized tensors."""

    min_exponent: int
    """Exponent of the smallest normal number."""


@dataclass(frozen=True, kw_only=True)
class Minifloat:
    """An element: one sign bit, `exponent_bits`, `mantissa_bits`. With one exponent bit it is a fixed-point number.

    Codes above `max_code` are NaN, but if there are several the first is infinity.
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
        """Bits per value, the sign among them."""
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
        """Exponent of the smallest normal number; values below have the same steps as those of that exponent."""
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
    """A negative code is 256 less its magnitude, and each code is a number; else the top bit is the sign."""

    @property
    def mx_name(self) -> str:
        """Name of the format of blocks of these elements, OCP MX v1.0 section 5: MXFP8 or MXINT8."""
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
DTYPES: Final[Mapping[str, Dtype]] = MappingProxyType({**VALUE_DTYPES, **ELEMENT_FORMATS})

SCALE_ROUNDINGS: Final = ("ceil", "floor", "even")
"""How amax becomes a scale.

ceil   the smallest s with amax <= max * 2^(s - 127): nothing saturates. TransformerEngine, cuBLAS ("RCEIL"),
       NVIDIA's "Recipes for Pre-training LLMs with MXFP8".
floor  floor(log2(amax)) - emax: OCP MX v1.0 section 6.3. Values above max saturate.
even   floor after amax is rounded half up to the element's mantissa: torchao's EVEN.
"""


def scale_increment(fmt: Minifloat, scale_rounding: str) -> int:
    """Returns what to add to the bits of a float32 amax so that its exponent field, less emax, is the scale code.

    All three roundings are this one integer addition: it carries into the exponent exactly where the rounding
    says the next power of two is needed. No logarithm, so nothing is off by one near a boundary.

    A subnormal amax takes half of it, without its last bit. From 2^-127 on its bits are the leading one, which is not
    implied, and the mantissa shifted right by one. Below, neither carries: the scale code is 0.
    """
    # With bits = exponent << 23 | mantissa, the sum carries into the exponent where mantissa + increment >= 2^23.
    if scale_rounding == "ceil":
        return 0x7FFFFF - fmt.max_mantissa  # carries when the mantissa exceeds that of the format's maximum
    if scale_rounding == "floor":
        return 0
    if scale_rounding == "even":
        return 1 << (22 - fmt.mantissa_bits)  # half a unit in the last place of the element's mantissa
    raise ContractError.unknown("scale_rounding", scale_rounding, SCALE_ROUNDINGS)


LOG2_SLACK: Final = 2e-8
"""A quarter of the least distance of the logarithms of two float32 numbers, 8.6e-8. Those of float64 are 1e-13 off."""


def scale_offset(fmt: Minifloat, scale_rounding: str) -> float:
    """Returns what to add to log2(amax) so that the sum, truncated and clamped to 0..254, is the scale code.

    `scale_increment` for those who have no bits: it carries where the mantissa is above 0x7fffff - increment. The slack
    keeps that mantissa itself below the step, and no other number of float32 is so close. Subnormals need no rule of
    their own. For logarithms in float64.
    """
    mantissa = 1 + (0x7FFFFF - scale_increment(fmt, scale_rounding)) * 2.0**-23
    return SCALE_BIAS + 1 - fmt.emax - math.log2(mantissa) - LOG2_SLACK


def activation_dtype(name: str | None) -> ValueDtype:
    """Returns what values are rounded to before they are multiplied: BFLOAT16 for "bfloat16".

    FLOAT32 for None: it holds every value, so they are multiplied as they are.

    Raises:
        ContractError: another name.
    """
    if name is None:
        return FLOAT32
    if name != BFLOAT16.name:
        raise ContractError.unknown("activation_dtype", name, (BFLOAT16.name,))
    return BFLOAT16


def element_format(name: str) -> ElementFormat:
    """Returns the row of `ELEMENT_FORMATS` called `name`.

    Raises:
        ContractError: there is no such format.
    """
    try:
        return ELEMENT_FORMATS[name]
    except KeyError:
        raise ContractError.unknown("element_format", name, ELEMENT_FORMATS) from None
