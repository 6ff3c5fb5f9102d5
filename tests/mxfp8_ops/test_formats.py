"""The rows of the formats table, against ml_dtypes and against the arithmetic they stand for."""

import os
import re
import shutil
import subprocess
import sys
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


# --- Adding one --------------------------------------------------------------------------------------------------

E3M4 = """E3M4: Final = ElementFormat(
    name="e3m4", numpy_name="float8_e3m4", exponent_bits=3, mantissa_bits=4, bias=3, max_code=0x6F,
    onnx_name="FLOAT8E3M4", onnx_dtype=99, cuda_name="E3M4", cuda_data_type=-1, safetensors_name="F8_E3M4",
)
VALUE_DTYPES: Final"""

PATH_ONLY = "import sys; sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]\n"
"""Leaves Python's own ways to find modules: that of an editable install would come before the copy's."""

CHECK = """
import ml_dtypes
import numpy as np
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx import helper
from mxfp8_ops import contract, formats, numerics, numpy_nodes, onnx_functions, standard_ops
from mxfp8_ops.case import Input

E3M4 = ml_dtypes.float8_e3m4
row = formats.element_format("e3m4")
assert (row.max, row.emax, row.min_subnormal) == (15.5, 3, 2.0**-6)
assert 99 in contract.ELEMENTS

codes = np.arange(256, dtype=np.uint8)
assert np.array_equal(numerics.decode(codes, row), codes.view(E3M4).astype(np.float32), equal_nan=True)
x = np.random.default_rng(0).uniform(-20, 20, 1 << 16).astype(np.float32)
assert (numerics.encode(x, row) == np.clip(x, -15.5, 15.5).astype(E3M4).view(np.uint8)).all()


class Cast(OpRun):
    # ONNX has no such dtype.
    op_domain = ""

    def _run(self, x, to=None, **_):
        if to == 99:
            return (np.clip(x, -15.5, 15.5).astype(E3M4),)
        types = {1: np.float32, 2: np.uint8, 6: np.int32, 7: np.int64, 11: np.float64}
        return (x.astype(types[to]),)


class QuantizeLinear(OpRun):
    op_domain = ""

    def _run(self, x, scale, output_dtype=None, **_):
        return (np.clip(x / scale, -15.5, 15.5).astype(E3M4),)


def body(name, feeds, **attributes):
    op = contract.OPS[name]
    node = helper.make_node(name, [*feeds], [port.name for port in op.outputs], **attributes)
    case = onnx_functions.case_of(node, {"elements": Input(99)})
    nodes, opset = standard_ops.body_of(case), [helper.make_opsetid("", 21)]
    function = helper.make_function("test", name, node.input, node.output, nodes, opset)
    return ReferenceEvaluator(function, new_ops=[Cast, QuantizeLinear]).run(None, feeds, attributes={})


x = (np.exp(np.random.default_rng(1).standard_normal((5, 70)) * 4) * 3).astype(np.float32)
for rounding in formats.SCALE_ROUNDINGS:
    elements, scales = numpy_nodes.quantize(x, element_format="e3m4", scale_rounding=rounding)
    if rounding == "ceil":
        values = numpy_nodes.dequantize(elements, scales, element_format="e3m4")
        half_least = row.min_subnormal / 2 * numerics.decode_scale(scales).repeat(32, 1)[:, :70]
        assert (abs(values - x) <= abs(x) * 2.0**-5 + half_least).all()
    got = body("MXFP8Quantize", {"X": x}, output_dtype=99, scale_rounding=rounding)
    assert (got[0].view(np.uint8) == elements).all() and (got[1] == scales).all(), rounding
    y, = body("MXFP8Dequantize", {"elements": elements.view(E3M4), "scales": scales})
    assert (y == numpy_nodes.dequantize(elements, scales, element_format="e3m4")).all()
    numpy_nodes.gemm(elements, scales, elements, scales, a_format="e3m4", b_format="e3m4")
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of custom_ops with one format more: a row, and the name of its code in C."""
    shutil.copytree(PACKAGE, tmp_path / "mxfp8_ops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(PACKAGE.parent / "generate.py", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(PATH_ONLY, encoding="utf-8")
    for file, old, new in (
        ("formats.py", "VALUE_DTYPES: Final", E3M4),
        ("formats.py", "(E4M3, E5M2, INT8)})", "(E4M3, E5M2, INT8, E3M4)})"),
        ("src/mxfp8_ops.h", "MXFP8_E5M2 = 19", "MXFP8_E5M2 = 19, MXFP8_E3M4 = 99"),
    ):
        text = (tmp_path / "mxfp8_ops" / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, old
        (tmp_path / "mxfp8_ops" / file).write_text(text.replace(old, new), encoding="utf-8")
    return tmp_path


def run(copy: Path, *command: str) -> str:
    """Returns what a command prints that sees the copy instead of the package."""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_reference_and_the_function_bodies_need_only_the_row(copy: Path) -> None:
    run(copy, sys.executable, "-c", CHECK)


CPP = """
#define MXFP8_ISA portable
#include <cstdio>
#include "mxfp8_ops/src/cpu/kernels/codec.h"

int main() {
  using namespace mxfp8::portable;
  with_format(99, [](auto format) {
    using F = decltype(format);
    for (uint32_t code = 0; code < 256; ++code) std::printf("%a %u\\n", decode<F>(code), encode<F>(decode<F>(code)));
  });
}
"""


def test_the_codec_in_cpp_needs_only_its_generated_row(copy: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    run(copy, sys.executable, "-c", "import generate; generate.HEADER.write_text(generate.header())")
    (copy / "codes.cpp").write_text(CPP, encoding="utf-8")
    run(copy, compiler, "-std=c++17", "-I.", "codes.cpp", "-o", "codes")
    lines = [line.split() for line in run(copy, "./codes").splitlines()]
    codes = np.arange(256, dtype=np.uint8)
    values = np.array([float.fromhex(value) for value, _ in lines], np.float32)
    assert np.array_equal(values, codes.view(ml_dtypes.float8_e3m4).astype(np.float32), equal_nan=True)
    finite = np.isfinite(values)
    assert (np.array([int(code) for _, code in lines])[finite] == codes[finite]).all()
