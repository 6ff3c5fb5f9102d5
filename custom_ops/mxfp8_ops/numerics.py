"""The arithmetic of the formats in NumPy: elements, scales, dtypes, and the error bound of a float32 sum.

The code is simple rather than fast. Elements and scales are `uint8` arrays of codes; `formats.py` defines the codes.
The references of the nodes are in nodes/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes  # noqa: F401 - gives NumPy bfloat16 and float8
import numpy as np
import numpy.typing as npt

from mxfp8_ops import formats
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.formats import ELEMENT_NAN, SCALE_BIAS, SCALE_NAN, ElementFormat

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]

VALUE_DTYPES: Final = {name: np.dtype(row.numpy_name) for name, row in formats.VALUE_DTYPES.items()}
"""The dtypes of unquantized tensors, by name."""


@dataclass(frozen=True)
class ErrorBound:
    """The largest error of x @ weight.T + bias with sums in float32, per output, against the exact result.

        magnitude * ((K + 2) * per_term + store) + (K + 2) * underflow + tiny,   magnitude = sum |x||w| + |bias|

    The classic forward bound gamma_K * magnitude with gamma_K = K * u, u = 2^-24 (Higham, Accuracy and Stability of
    Numerical Algorithms, section 3.1; two more roundings for the bias and the store), which holds for any order of the
    sum; plus K products that may underflow; plus half a unit in the last place of the result's dtype.
    """

    per_term: float
    store: float
    """Half a unit in the last place of a normal result."""
    underflow: float
    tiny: float
    """Half a unit in the last place of a subnormal result."""

    def at(self, magnitude: Any, k: int) -> Any:
        """Returns the bound for sums of `k` products whose magnitude, sum |x||w| + |bias|, is `magnitude`."""
        return magnitude * ((k + 2) * self.per_term + self.store) + ((k + 2) * self.underflow + self.tiny)


def error_bound(dtype: str) -> ErrorBound:
    """Returns the bound for results of `dtype`: "float32", "float16" or "bfloat16"."""
    row = formats.VALUE_DTYPES[dtype]
    narrow = row is not formats.FLOAT32  # the sum is in float32 already: storing it as float32 rounds nothing
    store = 2.0 ** -(row.mantissa_bits + 1) if narrow else 0.0
    tiny = 2.0 ** (row.min_exponent - row.mantissa_bits - 1) if narrow else 0.0
    # 1 + store: storing rounds the error of the sum too. Subnormal float32 numbers are 2^-149 apart, so the rounding of
    # a product there has an error of up to 2^-150.
    return ErrorBound(2.0**-24 * (1 + store), store, 2.0**-150 * (1 + store), tiny)


def encode(x: npt.NDArray[np.float32], fmt: ElementFormat) -> Codes:
    """Returns the codes of float32 values in `fmt`: round to nearest even, saturating, NaN -> 0x7f, -0 stays -0."""
    bits = x.view(np.uint32)
    sign = ((bits >> 24) & 0x80).astype(np.uint8)
    magnitude = (bits & 0x7FFFFFFF).astype(np.int64)
    # Normal elements: rebias the exponent, then round away the low mantissa bits, half to even. The sum
    # before the shift adds half a unit less one, plus the lowest bit that stays: a half carries only where that bit is
    # odd. A carry out of the mantissa raises the exponent, which is right, because codes order as magnitudes do.
    shift = 23 - fmt.mantissa_bits
    rebased = magnitude - ((127 - fmt.bias) << 23)
    normal = (rebased + (1 << (shift - 1)) - 1 + ((rebased >> shift) & 1)) >> shift
    # Subnormal elements: multiples of min_subnormal. rint rounds half to even; a carry gives the first normal.
    with np.errstate(over="ignore", invalid="ignore"):
        subnormal = np.rint(np.minimum(np.abs(x), np.float32(1)) / np.float32(fmt.min_subnormal))
    first_normal = (128 - fmt.bias) << 23  # bits of 2^(1 - bias), the smallest normal element
    codes = np.where(magnitude < first_normal, np.nan_to_num(subnormal).astype(np.int64), normal)
    # Saturation (OCP MX v1.0, section 6.3): a larger magnitude becomes the largest element, never E5M2's infinity.
    codes = np.minimum(codes, fmt.max_code).astype(np.uint8)
    codes = np.where(sign, 0 - codes, codes) if fmt.twos_complement else codes | sign
    return np.where(magnitude > 0x7F800000, np.uint8(ELEMENT_NAN), codes).astype(np.uint8)


def decode(codes: Codes, fmt: ElementFormat) -> npt.NDArray[np.float32]:
    """Returns the float32 values of element codes."""
    # A table of all 256 codes, indexed at the end: each value is computed once, from the definition.
    if fmt.twos_complement:
        return np.ldexp(np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32), -fmt.mantissa_bits)[codes]
    code = np.arange(256)
    exponent = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    # Exponent field 0 is subnormal: no implicit leading one, and the exponent of field 1.
    significand = mantissa + np.where(exponent > 0, 1 << fmt.mantissa_bits, 0)
    values = np.ldexp(significand.astype(np.float32), np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits)
    special = code & 0x7F
    values = np.where(special > fmt.max_code, np.float32(np.nan), values)
    if fmt.max_code + 1 < ELEMENT_NAN:  # E5M2 keeps the IEEE infinity between its maximum and its NaNs
        values = np.where(special == fmt.max_code + 1, np.float32(np.inf), values)
    return np.where(code & 0x80, -values, values).astype(np.float32)[codes]


def decode_scale(codes: Codes) -> npt.NDArray[np.float32]:
    """Returns the float32 values 2^(s - 127) of E8M0 codes; 255 is NaN. Code 0 is 2^-127, a subnormal."""
    with np.errstate(over="ignore"):  # the NaN code, replaced below
        values = np.ldexp(np.float32(1), codes.astype(np.int32) - SCALE_BIAS)
    return np.where(codes == SCALE_NAN, np.float32(np.nan), values).astype(np.float32)


def value_dtype(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype called `name`.

    Raises:
        ShapeError: it is not float32, float16 or bfloat16.
    """
    try:
        dtype: np.dtype[Any] = VALUE_DTYPES[name]
    except KeyError:
        raise ShapeError(
            "dtype", f"{name!r}", expected=f"one of {', '.join(VALUE_DTYPES)}", advice="cast the tensor first"
        ) from None
    return dtype
