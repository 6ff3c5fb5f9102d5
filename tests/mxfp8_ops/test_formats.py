"""The rows of the formats table, against ml_dtypes and against the arithmetic they stand for."""

import re
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from grids import looped
from onnx import TensorProto

from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError, Mxfp8Error
from mxfp8_ops.formats import E4M3, E5M2, INT8, Dtype, ElementFormat, ValueDtype

PACKAGE = Path(__file__).parents[2] / "custom_ops" / "mxfp8_ops"
"""The package in the checkout: an installed one has no C++ sources."""

ROWS = looped("row", [*formats.VALUE_DTYPES.values(), *formats.ELEMENT_FORMATS.values()])
FORMATS = looped("fmt", [E4M3, E5M2])


@FORMATS
def test_a_format_has_the_numbers_of_ml_dtypes(fmt: ElementFormat) -> None:
    info = ml_dtypes.finfo(fmt.numpy_name)
    assert (fmt.max, fmt.min_subnormal) == (float(info.max), float(info.smallest_subnormal))
    assert (fmt.mantissa_bits, fmt.exponent_bits, fmt.exponent_bits + fmt.mantissa_bits) == (info.nmant, info.nexp, 7)
    codes = np.array([fmt.max_code, fmt.max_code + 1, formats.ELEMENT_NAN], np.uint8)
    value, above, nan = codes.view(fmt.numpy_name).astype(np.float32)
    assert (value, np.isfinite(above), np.isnan(nan)) == (fmt.max, False, True)


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
    largest_mantissa = int((largest(fmt) - 1) * (1 << 23))
    increment = formats.scale_increment(fmt, scale_rounding)
    assert (largest_mantissa + increment) >> 23 == 0
    assert (largest_mantissa + 1 + increment) >> 23 == 1


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ContractError, match=r"element_format: 'e3m4'; expected one of e4m3, e5m2, int8; correct"):
        formats.element_format("e3m4")
    with pytest.raises(ContractError, match=r"scale_rounding: 'up'; expected one of ceil, floor, even; correct"):
        formats.scale_increment(E4M3, "up")
    assert issubclass(ContractError, Mxfp8Error)
    assert issubclass(Mxfp8Error, ValueError)


# --- What others call them ---------------------------------------------------------------------------------------


@ROWS
def test_the_row_says_what_others_call_the_dtype(row: Dtype) -> None:
    assert TensorProto.DataType.Value(row.onnx_name) == row.onnx_dtype
    if row is INT8:  # 127 / 64 is its largest code
        info = np.iinfo(row.numpy_name)
        assert (row.max * 64, 8 * row.bytes) == (info.max, info.bits)
        return
    info = ml_dtypes.finfo(row.numpy_name)
    assert (row.mantissa_bits, 8 * row.bytes) == (info.nmant, info.bits)
    if isinstance(row, ValueDtype):
        assert row.name == row.numpy_name
        assert row.min_exponent == info.minexp


@ROWS
def test_torch_has_the_dtype(row: Dtype) -> None:
    torch = pytest.importorskip("torch")
    assert getattr(torch, row.numpy_name).itemsize == row.bytes


@ROWS
def test_the_cuda_kernels_have_the_type(row: Dtype) -> None:
    text = (PACKAGE / "src/cuda/codec.cuh").read_text(encoding="utf-8")
    found = re.search(rf"struct {row.cuda_name} {{(.*?)\n}};", text, re.DOTALL)
    assert found is not None
    values = dict(re.findall(r"(\w+) = (\w+)", found[1]))
    if isinstance(row, ElementFormat):
        expected = {"mantissa_bits": row.mantissa_bits, "bias": row.bias, "emax": row.emax, "max_code": row.max_code}
        assert {name: int(values[name], 0) for name in expected} == expected
    else:
        assert int(values["bytes"]) == row.bytes
