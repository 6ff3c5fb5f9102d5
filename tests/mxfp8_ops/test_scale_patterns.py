"""The scale code of every bfloat16 and of float32 values around every power of two: the reference is the definition.

The kernels give the same codes in test_backends.py and, on emulated CUDA threads, in test_cuda_emulated.py.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from compare import ROUNDINGS, assert_same
from grids import instruction_sets, looped
from scale_definition import FIRST_NORMAL, boundary_values, codes_by_definition, near

from mxfp8_ops import cpu, numpy_nodes
from mxfp8_ops.formats import ELEMENT_FORMATS

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning")

BFLOAT16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
KINDS = looped("fmt, rounding", itertools.product(ELEMENT_FORMATS, ROUNDINGS))


@KINDS
def test_the_reference_is_the_definition(fmt: str, rounding: str) -> None:
    for x in (boundary_values(), BFLOAT16.astype(np.float32)):
        elements, scales = numpy_nodes.quantize(x[:, None], element_format=fmt, scale_rounding=rounding)
        expected = codes_by_definition(x[:, None], ELEMENT_FORMATS[fmt], rounding)
        assert_same(scales, expected[1], "scales", x[:, None])
        assert_same(elements, expected[0], "elements", x[:, None])


@pytest.mark.parametrize(("rounding", "last"), [("ceil", 0x7F0000), ("even", 0x7F7FFF), ("floor", 0x7FFFFF)])
def test_a_subnormal_amax_takes_the_smallest_scale_that_the_definition_allows(rounding: str, last: int) -> None:
    """By fractions: with INT8, scale code 0 holds 127/64 * 2^-127, which has the bits 0x7f0000."""
    amax = np.array([last, last + 1], np.uint32).view(np.float32)
    scales = numpy_nodes.quantize(amax[:, None], element_format="int8", scale_rounding=rounding)[1]
    assert scales[:, 0].tolist() == [0, 1]
    exact = [Fraction(float(value)) for value in amax]
    if rounding == "ceil":
        assert exact[0] == Fraction(127, 64) * Fraction(1, 2**127)
    if rounding == "even":  # the mantissa of 2^-127 has units of 2^-133
        assert [int(value * 2**133 + Fraction(1, 2)) for value in exact] == [127, 128]


@pytest.mark.slow
@KINDS
def test_kernels_give_the_definition_of_all_values_around_powers_of_two(fmt: str, rounding: str) -> None:
    """2^24 float32 values: 2^16 around each power of two, and with them every subnormal where scale codes step."""
    for exponent in range(256):
        start = (exponent << 23) - (1 << 15)
        bits = np.arange(start, start + (1 << 16))
        if exponent == 1:
            bits = np.concatenate([bits, near(FIRST_NORMAL, 0x20000)])
        x = bits[(bits >= 0)].astype(np.uint32).view(np.float32)
        elements, scales = codes_by_definition(x[:, None], ELEMENT_FORMATS[fmt], rounding)
        for isa in instruction_sets():
            with cpu.forced_isa(isa):
                got = cpu.quantize(x[:, None], element_format=fmt, scale_rounding=rounding)
            assert_same(got[1], scales, f"scales, {isa}, around 2^{exponent - 127}", x[:, None])
            assert_same(got[0], elements, f"elements, {isa}, around 2^{exponent - 127}", x[:, None])
