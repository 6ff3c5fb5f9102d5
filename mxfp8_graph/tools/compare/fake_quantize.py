"""Fake quantization in standard ONNX ops: X -> the float32 values that a format of `number_formats.py` has for it.

One function body per `Quantizer`, for weights and activations alike: what is tested is what runs. Everything is exact
but what the format rounds: scaling is by powers of two, or by the float32 products and quotients that the format's own
definition has.

    X [..., K] -> blocks -> amax -> scale -> elements = round(X / scale) -> elements * scale -> Y [..., K]
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import FunctionProto, TensorProto, helper

from mxfp8_graph.checking.sessions import Session
from mxfp8_graph.tools.compare.number_formats import Quantizer
from mxfp8_ops.contract import MIN_OPSET, Op, Port
from mxfp8_ops.formats import E4M3, SCALE_BIAS, Minifloat, scale_increment
from mxfp8_ops.function_body import Blocks, Body
from mxfp8_ops.nodes.quantize import biased_exponent, magnitudes

DOMAIN: Final = "mxfp8.emulated"
"""Domain of the functions in this module."""

_FLOAT_MAX: Final = np.finfo(np.float32).max
_E4M3_MIN_NORMAL: Final = np.float32(2.0**E4M3.min_exponent)
_OPSET_IR: Final = 10
"""The IR version of opset 21."""


def function(name: str, quantizer: Quantizer, opset: int) -> FunctionProto:
    """Returns the function `name` of X; of X and amax_before for "delayed", whose second result is the amax of X.

    X and Y are float32 of rank 2 or more, amax_before and amax are float32 scalars.
    """
    delayed = quantizer.scale == "delayed"
    inputs, outputs = (("X", "amax_before"), ("Y", "amax")) if delayed else (("X",), ("Y",))
    ports = tuple(Port(port, (TensorProto.FLOAT,), "") for port in inputs)
    op = Op(name, ports, (), MappingProxyType({}), "", body=lambda g: _write(g, quantizer))
    g = Body(op, opset)
    op.body(g)
    return helper.make_function(DOMAIN, name, inputs, outputs, g.nodes, [helper.make_opsetid("", opset)])


class FakeQuantize:
    """Rounds arrays [..., N, K] in ONNX Runtime, with the function that rounds activations in a model."""

    def __init__(self, quantizer: Quantizer) -> None:
        """Makes the session, for any scale rule but "delayed"."""
        shape = helper.make_tensor_value_info("X", TensorProto.FLOAT, None)
        result = helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)
        graph = helper.make_graph([helper.make_node("Round", ["X"], ["Y"], domain=DOMAIN)], "g", [shape], [result])
        imports = [helper.make_opsetid("", MIN_OPSET), helper.make_opsetid(DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=_OPSET_IR)
        model.functions.append(function("Round", quantizer, MIN_OPSET))
        self._session = Session(model, kernels=False, where="fake quantization")

    def __call__(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Returns the values that the format has for them."""
        return np.asarray(self._session.run({"X": values.astype(np.float32)})["Y"])


def _write(g: Body, quantizer: Quantizer) -> None:
    """Writes the body: blocks of X, their scales, the elements, and X again."""
    if quantizer.scale == "asymmetric":
        g("DequantizeLinear", *g.several("DynamicQuantizeLinear", "X", out=("codes", "scale", "zero")), out="Y")
    elif quantizer.columns is None:
        sizes = magnitudes(g, "X")
        if quantizer.rows == 1:
            amax = g("ReduceMax", sizes, g.constant([-1]), keepdims=1)
        else:
            amax = g("ReduceMax", g("Reshape", sizes, g.constant([-1])), keepdims=0, out="amax")
        g("Identity", _rounded(g, "X", "amax_before" if quantizer.scale == "delayed" else amax, quantizer), out="Y")
    else:
        blocks = g.blocks("X", -1, g.constant([quantizer.columns]))
        values = blocks.split("X")
        amax = g("ReduceMax", magnitudes(g, values), g.constant([2]), keepdims=1)
        if quantizer.rows != 1:
            amax = _of_tiles(g, amax, blocks, quantizer.rows or 1)
        g("Identity", blocks.join(_rounded(g, values, amax, quantizer)), out="Y")


def _of_tiles(g: Body, amax: str, blocks: Blocks, rows: int) -> str:
    """Returns for each block of a row the largest amax of those in as many rows as share a scale."""
    by_row = g("Reshape", amax, g("Concat", blocks.lead, blocks.count, axis=0), allowzero=1)
    tiles = g.blocks(by_row, -2, g.constant([rows]))
    largest = g("ReduceMax", tiles.split(by_row), g.constant([2]), keepdims=1)
    each = g("Expand", largest, g("Concat", tiles.p, tiles.count, tiles.block, tiles.q, axis=0))
    return g("Reshape", tiles.join(each), g("Shape", amax), allowzero=1)


def _rounded(g: Body, values: str, amax: str, quantizer: Quantizer) -> str:
    """Returns the values, rounded with the scales that their `amax` asks for."""
    element, rule = quantizer.element, quantizer.scale
    if rule in {"ceil", "floor", "even"}:
        code = g("Sub", _exponent(g, amax, scale_increment(element, rule)), g.constant(element.emax))
        code = g("Clip", code, g.constant(np.int64(0)), g.constant(np.int64(254)))
        inverse = g("Gather", g.powers(), g("Sub", g.constant(2 * SCALE_BIAS), code))
        scale = g("Gather", g.powers(), code)
        scale = g("Where", g("IsInf", amax), g.constant(np.float32(np.nan)), scale)  # a bad value poisons its block
        return g("Mul", _elements(g, g("Mul", values, inverse), element), scale)
    if rule == "integer":
        scale = _or_one(g, g("Div", amax, g.constant(np.float32(element.max))), amax)
        return g("Mul", _elements(g, g("Div", values, scale), element), scale)
    if rule == "two_level":
        return _two_level(g, values, amax, element)
    factor = g("Min", g("Div", g.constant(np.float32(element.max)), amax), g.constant(_FLOAT_MAX))
    if rule == "divide_pow2":
        factor = g("Gather", g.powers(), _exponent(g, factor, 0))  # its mantissa cleared
    factor = _or_one(g, factor, amax)
    return g("Mul", _elements(g, g("Mul", values, factor), element), g("Reciprocal", factor))


def _or_one(g: Body, scale: str, amax: str) -> str:
    return g("Where", g("Equal", amax, g.constant(np.float32(0))), g.constant(np.float32(1)), scale)


def _two_level(g: Body, values: str, amax: str, element: Minifloat) -> str:
    """NVFP4: as torchao's nvfp4_quantize, with the tensor's own scale."""
    most = g("ReduceMax", g("Reshape", amax, g.constant([-1])), keepdims=0)
    whole = _or_one(g, g("Div", most, g.constant(np.float32(E4M3.max * element.max))), most)
    wanted = g("Div", g("Div", amax, g.constant(np.float32(element.max))), whole)
    scale = _cast(g, g("Clip", wanted, g.constant(_E4M3_MIN_NORMAL), g.constant(np.float32(E4M3.max))))
    factor = g("Div", g("Reciprocal", whole), scale)
    return g("Mul", _elements(g, g("Mul", values, factor), element), g("Mul", whole, scale))


def _elements(g: Body, scaled: str, element: Minifloat) -> str:
    """Returns the scaled values rounded to elements, to nearest even, saturating."""
    if element is E4M3:
        return _cast(g, scaled)
    clipped = g("Clip", scaled, g.constant(np.float32(-element.max)), g.constant(np.float32(element.max)))
    # The distance of neighbours doubles with every exponent above the smallest; by powers of two all of this is exact.
    step = g.constant(np.float32(element.min_subnormal))
    for exponent in range(element.min_exponent + 1, element.emax + 1):
        above = g("GreaterOrEqual", g("Abs", clipped), g.constant(np.float32(2.0**exponent)))
        step = g("Where", above, g.constant(np.float32(2.0 ** (exponent - element.mantissa_bits))), step)
    return g("Mul", g("Round", g("Div", clipped, step)), step)


def _cast(g: Body, values: str) -> str:
    """Returns the values rounded to E4M3, to nearest even, saturating."""
    return g("Cast", g("Cast", values, to=TensorProto.FLOAT8E4M3FN), to=TensorProto.FLOAT)


def _exponent(g: Body, values: str, increment: int) -> str:
    first = g.constant(0)
    return biased_exponent(g, values, np.array([[increment]], np.int32), (first, first))


def attach(model: onnx.ModelProto, functions: list[FunctionProto]) -> None:
    """Adds functions of `DOMAIN` to a model."""
    model.functions.extend(functions)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
