"""The rows of the formats table, against ml_dtypes and against the arithmetic they stand for."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError, Mxfp8Error
from mxfp8_ops.formats import E4M3, E5M2, ElementFormat

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


@FORMATS
def test_the_row_says_what_ml_dtypes_says(fmt: ElementFormat) -> None:
    info = ml_dtypes.finfo(fmt.numpy_name)
    assert fmt.max == float(info.max)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert fmt.mantissa_bits == info.nmant
    assert fmt.exponent_bits == info.nexp
    assert fmt.exponent_bits + fmt.mantissa_bits == 7


@FORMATS
def test_max_code_is_the_largest_finite_value(fmt: ElementFormat) -> None:
    value, above = np.array([fmt.max_code, fmt.max_code + 1], np.uint8).view(fmt.numpy_name).astype(np.float32)
    assert value == fmt.max
    assert not np.isfinite(above)


@FORMATS
def test_the_nan_we_write_is_nan(fmt: ElementFormat) -> None:
    assert np.isnan(np.uint8(formats.ELEMENT_NAN).view(fmt.numpy_name).astype(np.float32))


@FORMATS
@pytest.mark.parametrize(
    ("scale_rounding", "largest"),
    [
        ("ceil", lambda fmt: Fraction(7, 4)),  # the element max is 1.75 * 2^emax: beyond it the scale must double
        ("floor", lambda fmt: 2 - Fraction(1, 1 << 23)),  # the exponent alone decides
        ("even", lambda fmt: 2 - Fraction(1, 1 << (fmt.mantissa_bits + 1)) - Fraction(1, 1 << 23)),
    ],
)
def test_the_increment_carries_just_above_the_largest_mantissa(fmt, scale_rounding, largest) -> None:
    largest_mantissa = (largest(fmt) - 1) * (1 << 23)
    assert largest_mantissa.denominator == 1
    increment = formats.scale_increment(fmt, scale_rounding)
    assert (int(largest_mantissa) + increment) >> 23 == 0
    assert (int(largest_mantissa) + 1 + increment) >> 23 == 1


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ContractError, match=r"element_format: 'e3m4'; expected one of e4m3, e5m2; correct the name"):
        formats.element_format("e3m4")
    with pytest.raises(ContractError, match=r"scale_rounding: 'up'; expected one of ceil, floor, even; correct"):
        formats.scale_increment(E4M3, "up")
    assert issubclass(ContractError, Mxfp8Error)
    assert issubclass(Mxfp8Error, ValueError)
