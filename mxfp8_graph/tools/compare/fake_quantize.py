"""Fake quantization in standard ONNX ops: X -> the float32 values of X in a format of `number_formats.py`.

    X [..., N, K] -> tiles -> amax -> scale -> elements = round(X / scale) -> elements * scale -> Y [..., N, K]

One function serves weights and activations. Only the format's own steps round: scales are powers of two, or the float32
products and quotients of the format's definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import FunctionProto, TensorProto, helper

from mxfp8_graph.running.sessions import Session
from mxfp8_graph.tools.compare.number_formats import Quantizer
from mxfp8_ops.case import Case
from mxfp8_ops.contract import MIN_OPSET, Op, Port
from mxfp8_ops.formats import E4M3, LOG2_SLACK, SCALE_BIAS, Minifloat, scale_offset
from mxfp8_ops.function_body import Body

DOMAIN: Final = "mxfp8.emulated"
NAME: Final = "Round"
"""Domain and name of the function."""

_FLOAT_MAX: Final = np.finfo(np.float32).max
_E4M3_MIN_NORMAL: Final = np.float32(2.0**E4M3.min_exponent)
_OPSET_IR: Final = 10
"""The IR version of opset 21."""


def function(quantizer: Quantizer, opset: int) -> FunctionProto:
    """Returns the ONNX function (X) -> Y, float32; for "delayed" it is (X, amax_before) -> (Y, amax of X)."""
    delayed = quantizer.scale == "delayed"
    inputs, outputs = (("X", "amax_before"), ("Y", "amax")) if delayed else (("X",), ("Y",))
    ports = tuple(Port(port, (TensorProto.FLOAT,), "") for port in inputs)
    op = Op(NAME, ports, (), MappingProxyType({}), "", body=lambda g: _write(g, quantizer))
    g = Body(Case(op, {}, {}), opset)
    op.body(g)
    return helper.make_function(DOMAIN, NAME, inputs, outputs, g.nodes, [helper.make_opsetid("", opset)])


def fake_quantizer(quantizer: Quantizer) -> Callable[..., npt.NDArray[np.float32]]:
    """Returns a function that rounds arrays [..., N, K] in ONNX Runtime; for "delayed" it takes (array, amax)."""
    rule = function(quantizer, MIN_OPSET)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "XY")
    inputs = [x, *(helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in rule.input[1:])]
    graph = helper.make_graph([helper.make_node(NAME, rule.input, rule.output, domain=DOMAIN)], "g", inputs, [y])
    imports = [helper.make_opsetid("", MIN_OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=_OPSET_IR)
    model.functions.append(rule)
    session = Session(model, kernels=False, where="fake quantization")

    def rounded(*values: Any) -> npt.NDArray[np.float32]:
        arrays = (np.asarray(value, np.float32) for value in values)
        return np.asarray(session.run(dict(zip(rule.input, arrays, strict=True)))["Y"])

    return rounded


def _write(g: Body, quantizer: Quantizer) -> None:
    """Writes the body of the function."""
    # ONNX's own op defines the rule, see `ScaleRule`.
    if quantizer.scale == "asymmetric":
        codes = g("DynamicQuantizeLinear", "X", out="codes")
        g.nodes[-1].output.extend(["scale", "zero"])
        g("DequantizeLinear", codes, "scale", "zero", out="Y")
    elif quantizer.tile == (None, None):
        amax = g("ReduceMax", g("Reshape", _magnitudes(g, "X"), g.constant([-1])), keepdims=0, out="amax")
        g("Identity", _rounded(g, "X", "amax_before" if quantizer.scale == "delayed" else amax, quantizer), out="Y")
    elif quantizer.tile == (1, None):
        amax = g("ReduceMax", _magnitudes(g, "X"), g.constant([-1]), keepdims=1)
        g("Identity", _rounded(g, "X", amax, quantizer), out="Y")
    else:
        _write_tiles(g, quantizer, [size for size in quantizer.tile if size not in {None, 1}])


def _write_tiles(g: Body, quantizer: Quantizer, tile: list[Any]) -> None:
    """Writes the body for tiles of the last axes: [P, N, K] is padded and seen as [P, N / n, n, K / k, k]."""
    axes = len(tile)
    sizes, whole = g("Shape", "X", start=-axes), g("Shape", "X")
    # A product over [1, ...] and not a -1 in Reshape: beside an empty dimension a -1 is ambiguous.
    lead = g("ReduceProd", g("Concat", g.constant([1]), g("Shape", "X", end=-axes), axis=0))
    count = g("Div", g("Add", sizes, g.constant([size - 1 for size in tile])), g.constant(tile))
    padded = g("Mul", count, g.constant(tile))
    flat = g("Reshape", "X", g("Concat", lead, sizes, axis=0), allowzero=1)
    pads = g("Concat", g.constant([0] * (axes + 2)), g("Sub", padded, sizes), axis=0)
    parts = [lead]
    for axis, size in enumerate(tile):
        parts += [g("Slice", count, g.constant([axis]), g.constant([axis + 1])), g.constant([size])]
    tiles = g("Reshape", g("Pad", flat, pads), g("Concat", *parts, axis=0), allowzero=1)
    amax = g("ReduceMax", _magnitudes(g, tiles), g.constant([2 * axis + 2 for axis in range(axes)]), keepdims=1)
    rounded = _rounded(g, tiles, amax, quantizer)
    joined = g("Reshape", rounded, g("Concat", lead, padded, axis=0), allowzero=1)
    cut = g("Slice", joined, g.constant([0] * axes), sizes, g.constant(list(range(1, axes + 1))))
    g("Reshape", cut, whole, allowzero=1, out="Y")


def _rounded(g: Body, values: str, amax: str, quantizer: Quantizer) -> str:
    """Returns the values, rounded with the scales that follow from their `amax`."""
    element, rule = quantizer.element, quantizer.scale
    if rule in {"ceil", "floor", "even"}:
        code = _floor_log2(g, amax, scale_offset(element, rule))
        inverse = g("Gather", g.powers(), g("Sub", g.constant(2 * SCALE_BIAS), code))
        scale = g("Gather", g.powers(), code)
        scale = g(
            "Where", g("IsInf", amax), g.constant(np.float32(np.nan)), scale
        )  # NaN makes all values of its block NaN
        return g("Mul", _elements(g, g("Mul", values, inverse), element), scale)
    if rule == "integer":
        scale = _or_one(g, g("Div", amax, g.constant(np.float32(element.max))), amax)
        return g("Mul", _elements(g, g("Div", values, scale), element), scale)
    if rule == "two_level":
        return _two_level(g, values, amax, element)
    # The quotient of a tiny amax is infinite.
    factor = g("Min", g("Div", g.constant(np.float32(element.max)), amax), g.constant(_FLOAT_MAX))
    if rule == "divide_pow2":
        factor = g("Gather", g.powers(), _floor_log2(g, factor, SCALE_BIAS + LOG2_SLACK))  # clears its mantissa
    factor = _or_one(g, factor, amax)
    return g("Mul", _elements(g, g("Mul", values, factor), element), g("Reciprocal", factor))


def _or_one(g: Body, scale: str, amax: str) -> str:
    # An amax of 0 gives no scale; with 1 the zeros of its tile stay zeros.
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
    # The distance of neighbours doubles with every exponent above the smallest. Powers of two keep each step exact.
    step = g.constant(np.float32(element.min_subnormal))
    for exponent in range(element.min_exponent + 1, element.emax + 1):
        above = g("GreaterOrEqual", g("Abs", clipped), g.constant(np.float32(2.0**exponent)))
        step = g("Where", above, g.constant(np.float32(2.0 ** (exponent - element.mantissa_bits))), step)
    return g("Mul", g("Round", g("Div", clipped, step)), step)


def _cast(g: Body, values: str) -> str:
    """Returns the values rounded to E4M3, to nearest even, saturating."""
    return g("Cast", g("Cast", values, to=TensorProto.FLOAT8E4M3FN), to=TensorProto.FLOAT)


def _floor_log2(g: Body, values: str, offset: float) -> str:
    """Returns floor(log2(values) + offset) within 0..254, as int64."""
    log2 = g("Mul", g("Log", g("Cast", values, to=TensorProto.DOUBLE)), g.constant(np.float64(1 / math.log(2))))
    code = g("Clip", g("Add", log2, g.constant(np.float64(offset))), g.constant(0.0), g.constant(254.0))
    return g("Cast", code, to=TensorProto.INT64)


def _magnitudes(g: Body, values: str) -> str:
    """Returns |values|, a NaN as infinity: ReduceMax drops a NaN that does not come first."""
    return g("Where", g("IsNaN", values), g.constant(np.float32(np.inf)), g("Abs", values))
