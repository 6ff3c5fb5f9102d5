"""Fake quantization in standard ONNX ops: X -> the float32 values that a format of `number_formats.py` has for it.

One function body per `Quantizer`, for weights and activations alike: what is tested is what runs. Everything is exact
but what the format rounds: scaling is by powers of two, or by the float32 products and quotients that the format's own
definition has.

    X [..., K] -> blocks -> amax -> scale -> elements = round(X / scale) -> elements * scale -> Y [..., K]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    g = Body(Case(op, {}, {}), opset)
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
        codes = g("DynamicQuantizeLinear", "X", out="codes")
        g.nodes[-1].output.extend(["scale", "zero"])
        g("DequantizeLinear", codes, "scale", "zero", out="Y")
    elif quantizer.columns is None:
        sizes = _magnitudes(g, "X")
        if quantizer.rows == 1:
            amax = g("ReduceMax", sizes, g.constant([-1]), keepdims=1)
        else:
            amax = g("ReduceMax", g("Reshape", sizes, g.constant([-1])), keepdims=0, out="amax")
        g("Identity", _rounded(g, "X", "amax_before" if quantizer.scale == "delayed" else amax, quantizer), out="Y")
    else:
        blocks = Blocks.of(g, "X", -1, g.constant([quantizer.columns]))
        values = blocks.split("X")
        amax = g("ReduceMax", _magnitudes(g, values), g.constant([2]), keepdims=1)
        if quantizer.rows != 1:
            amax = _of_tiles(g, amax, blocks, quantizer.rows or 1)
        g("Identity", blocks.join(_rounded(g, values, amax, quantizer)), out="Y")


def _of_tiles(g: Body, amax: str, blocks: Blocks, rows: int) -> str:
    """Returns for each block of a row the largest amax of those in as many rows as share a scale."""
    by_row = g("Reshape", amax, g("Concat", blocks.lead, blocks.count, axis=0), allowzero=1)
    tiles = Blocks.of(g, by_row, -2, g.constant([rows]))
    largest = g("ReduceMax", tiles.split(by_row), g.constant([2]), keepdims=1)
    each = g("Expand", largest, g("Concat", tiles.p, tiles.count, tiles.block, tiles.q, axis=0))
    return g("Reshape", tiles.join(each), g("Shape", amax), allowzero=1)


def _rounded(g: Body, values: str, amax: str, quantizer: Quantizer) -> str:
    """Returns the values, rounded with the scales that their `amax` asks for."""
    element, rule = quantizer.element, quantizer.scale
    if rule in {"ceil", "floor", "even"}:
        code = _floor_log2(g, amax, scale_offset(element, rule))
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
        factor = g("Gather", g.powers(), _floor_log2(g, factor, SCALE_BIAS + LOG2_SLACK))  # its mantissa cleared
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


def _floor_log2(g: Body, values: str, offset: float) -> str:
    """Returns floor(log2(values) + offset) within 0..254, as int64."""
    log2 = g("Mul", g("Log", g("Cast", values, to=TensorProto.DOUBLE)), g.constant(np.float64(1 / math.log(2))))
    code = g("Clip", g("Add", log2, g.constant(np.float64(offset))), g.constant(0.0), g.constant(254.0))
    return g("Cast", code, to=TensorProto.INT64)


def _magnitudes(g: Body, values: str) -> str:
    """Returns |values|, a NaN as infinity: ReduceMax drops a NaN that does not come first."""
    return g("Where", g("IsNaN", values), g.constant(np.float32(np.inf)), g("Abs", values))


@dataclass(frozen=True)
class Blocks:
    """How a tensor [..., K, ...] maps to blocks [P, count, size, Q]. Fields name 1-D int64 tensors."""

    body: Body
    shape: str
    """[..., K, ...]"""
    lead: str
    """The dimensions before K; P is their product."""
    p: str
    k: str
    q: str
    block: str
    """[size]"""
    count: str
    """[ceil(K / size)]"""
    padded: str
    """[count * size]"""

    @classmethod
    def of(cls, g: Body, x: str, axis: int, block: str) -> Blocks:
        """Returns the blocks of `x` along `axis`; `block` is their size, as a 1-D tensor."""
        lead, rest = g("Shape", x, end=axis, out="lead"), g("Shape", x, start=axis)
        k = g("Slice", rest, g.constant([0]), g.constant([1]), out="k")
        trail = g("Slice", rest, g.constant([1]), g.constant([np.iinfo(np.int64).max]))
        one = g.constant([1])
        # A reduction over [1, ...] rather than a -1 in Reshape: with an empty dimension the -1 would be ambiguous.
        p, q = (g("ReduceProd", g("Concat", one, sizes, axis=0)) for sizes in (lead, trail))
        count = g("Div", g("Add", k, g("Sub", block, one)), block, out="count")
        return cls(g, g("Shape", x), lead, p, k, q, block, count, g("Mul", count, block))

    def split(self, x: str) -> str:
        """Returns `x` as [P, count, size, Q], the last block zero-padded."""
        g = self.body
        flat = g("Reshape", x, g("Concat", self.p, self.k, self.q, axis=0), allowzero=1)
        pads = g("Concat", g.constant([0, 0, 0, 0]), g("Sub", self.padded, self.k), g.constant([0]), axis=0)
        shape = g("Concat", self.p, self.count, self.block, self.q, axis=0)
        return g("Reshape", g("Pad", flat, pads), shape, allowzero=1, out="blocks")

    def join(self, blocks: str) -> str:
        """Returns [P, count, size, Q] in the shape that `split` took apart; the padding is dropped."""
        g = self.body
        flat = g("Reshape", blocks, g("Concat", self.p, self.padded, self.q, axis=0), allowzero=1)
        return g("Reshape", g("Slice", flat, g.constant([0]), self.k, g.constant([1])), self.shape, allowzero=1)
