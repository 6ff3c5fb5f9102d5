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
from mxfp8_graph.tools.compare.number_formats import E4M3, Element, Quantizer
from mxfp8_ops.contract import MIN_OPSET, Op, Port
from mxfp8_ops.formats import SCALE_BIAS
from mxfp8_ops.function_body import Body

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
    g = Body(Op(name, ports, (), MappingProxyType({}), ""), opset)
    _write(g, quantizer)
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
        codes = _outputs(g, "DynamicQuantizeLinear", "X", out=("codes", "scale", "zero"))
        g("DequantizeLinear", *codes, out="Y")
        return
    if quantizer.columns is not None:
        blocks, shapes = _split(g, quantizer.rows or 1, quantizer.columns)
        axes = [2] if quantizer.rows == 1 else [2, 4]
        y = _rounded(g, blocks, _amax(g, blocks, axes), quantizer)
        _join(g, y, *shapes, tiled=quantizer.rows != 1)
        return
    amax = _amax(g, "X", [-1] if quantizer.rows == 1 else None, out="amax")
    g("Identity", _rounded(g, "X", "amax_before" if quantizer.scale == "delayed" else amax, quantizer), out="Y")


def _outputs(g: Body, op: str, *inputs: str, out: tuple[str, ...]) -> tuple[str, ...]:
    """Appends a node with several outputs and returns their names."""
    g.nodes.append(helper.make_node(op, inputs, out))
    return out


def _split(g: Body, rows: int, columns: int) -> tuple[str, tuple[str, str, str]]:
    """Returns (X as blocks, zero-padded, and what `_join` needs to undo that).

    Blocks of one row are [P, ceil(K / columns), columns], others [P, ceil(N / rows), rows, ceil(K / columns), columns],
    P being the product of the dimensions before.
    """
    tiled = rows > 1
    shape = g("Shape", "X")
    last = g("Shape", "X", start=-2 if tiled else -1)
    lead = g("Shape", "X", end=-2 if tiled else -1)
    p = g("ReduceProd", g("Concat", g.constant([1]), lead, axis=0))
    tile = g.constant([rows, columns] if tiled else [columns])
    count = g("Div", g("Add", last, g("Sub", tile, g.constant([1]))), tile)
    padded = g("Mul", count, tile)
    no_pads = g.constant([0] * (4 if tiled else 3))  # in front of every axis, and behind the first
    flat = g("Reshape", "X", g("Concat", p, last, axis=0), allowzero=1)
    flat = g("Pad", flat, g("Concat", no_pads, g("Sub", padded, last), axis=0))
    pairs = g("Unsqueeze", count, g.constant([1])), g("Unsqueeze", tile, g.constant([1]))
    sizes = g("Reshape", g("Concat", *pairs, axis=1), g.constant([-1]))  # count and size of each blocked axis
    blocks = g("Reshape", flat, g("Concat", p, sizes, axis=0), allowzero=1)
    return blocks, (shape, last, g("Concat", p, padded, axis=0))


def _join(g: Body, blocks: str, shape: str, last: str, padded: str, *, tiled: bool) -> None:
    """Makes Y, in the shape of X, of blocks; the padding is dropped."""
    flat = g("Reshape", blocks, padded, allowzero=1)
    axes = [1, 2] if tiled else [1]
    flat = g("Slice", flat, g.constant([0] * len(axes)), last, g.constant(axes))
    g("Reshape", flat, shape, allowzero=1, out="Y")


def _amax(g: Body, values: str, axes: list[int] | None, out: str = "") -> str:
    """Returns the largest magnitude of each block, a NaN as infinity: ReduceMax would drop it."""
    finite = g("Where", g("IsNaN", values), g.constant(np.float32(np.inf)), g("Abs", values))
    if axes is None:
        return g("ReduceMax", g("Reshape", finite, g.constant([-1])), keepdims=0, out=out)
    return g("ReduceMax", finite, g.constant(axes), keepdims=1, out=out)


def _rounded(g: Body, values: str, amax: str, quantizer: Quantizer) -> str:
    """Returns the values, rounded with the scales that their `amax` asks for."""
    element, rule = quantizer.element, quantizer.scale
    if rule in {"ceil", "floor", "even"}:
        code = _e8m0(g, amax, element, rule)
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
        factor = _power_below(g, factor)
    factor = _or_one(g, factor, amax)
    return g("Mul", _elements(g, g("Mul", values, factor), element), g("Reciprocal", factor))


def _or_one(g: Body, scale: str, amax: str) -> str:
    return g("Where", g("Equal", amax, g.constant(np.float32(0))), g.constant(np.float32(1)), scale)


def _two_level(g: Body, values: str, amax: str, element: Element) -> str:
    """NVFP4: as torchao's nvfp4_quantize, with the tensor's own scale."""
    most = g("ReduceMax", g("Reshape", amax, g.constant([-1])), keepdims=0)
    whole = _or_one(g, g("Div", most, g.constant(np.float32(E4M3.max * element.max))), most)
    wanted = g("Div", g("Div", amax, g.constant(np.float32(element.max))), whole)
    scale = _cast(g, g("Clip", wanted, g.constant(_E4M3_MIN_NORMAL), g.constant(np.float32(E4M3.max))))
    factor = g("Div", g("Reciprocal", whole), scale)
    return g("Mul", _elements(g, g("Mul", values, factor), element), g("Mul", whole, scale))


def _elements(g: Body, scaled: str, element: Element) -> str:
    """Returns the scaled values rounded to elements, to nearest even, saturating."""
    if element is E4M3:
        return _cast(g, scaled)
    clipped = g("Clip", scaled, g.constant(np.float32(-element.max)), g.constant(np.float32(element.max)))
    # The distance of neighbours doubles with every exponent above the smallest; by powers of two all of this is exact.
    step = g.constant(np.float32(element.min_step))
    for exponent in range(element.min_exponent + 1, element.emax + 1):
        above = g("GreaterOrEqual", g("Abs", clipped), g.constant(np.float32(2.0**exponent)))
        step = g("Where", above, g.constant(np.float32(2.0 ** (exponent - element.mantissa_bits))), step)
    return g("Mul", g("Round", g("Div", clipped, step)), step)


def _cast(g: Body, values: str) -> str:
    """Returns the values rounded to E4M3, to nearest even, saturating."""
    return g("Cast", g("Cast", values, to=TensorProto.FLOAT8E4M3FN), to=TensorProto.FLOAT)


def _exponent(g: Body, amax: str, mantissa: np.float32) -> str:
    """Returns the smallest i from 0 on, as int64, with amax <= mantissa * 2^(i - 127), mantissa from 1 to below 2.

    A logarithm may be off by one either way, which exact comparisons repair.
    """
    log2 = g("Mul", g("Log", amax), g.constant(np.float32(1 / np.log(2))))
    guess = g("Add", g("Floor", log2), g.constant(np.float32(SCALE_BIAS - 1)))
    guess = g("Clip", guess, g.constant(np.float32(0)), g.constant(np.float32(252)))
    guess = g("Cast", guess, to=TensorProto.INT64)
    for _ in range(3):
        limit = g("Mul", g("Gather", g.powers(), guess), g.constant(mantissa))
        guess = g("Add", guess, g("Cast", g("Greater", amax, limit), to=TensorProto.INT64))
    return guess


def _e8m0(g: Body, amax: str, element: Element, rounding: str) -> str:
    """Returns the code of the scale, as int64: see `mxfp8_ops.formats.scale_increment`."""
    largest = element.max / 2.0**element.emax
    mantissas = {
        "ceil": largest,  # nothing saturates
        "floor": 2 - 2.0**-23,  # every amax below the next power of two
        "even": 2 - 2.0 ** -(element.mantissa_bits + 1) - 2.0**-23,  # half a step below it rounds up
    }
    code = g("Sub", _exponent(g, amax, np.float32(mantissas[rounding])), g.constant(element.emax))
    return g("Clip", code, g.constant(np.int64(0)), g.constant(np.int64(254)))


def _power_below(g: Body, values: str) -> str:
    """Returns the largest powers of two that are not above positive normal values."""
    return g("Gather", g.powers(), _exponent(g, values, np.float32(2 - 2.0**-23)))


def attach(model: onnx.ModelProto, functions: list[FunctionProto]) -> None:
    """Adds functions of `DOMAIN` to a model."""
    model.functions.extend(functions)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
