"""The nodes of `contract.py` as ONNX model-local functions made of standard ops.

A model that carries them runs in any ONNX Runtime, with no library: the runtime inlines the body. Where our library
is registered, its kernel of the same name wins. The gemms accumulate in float32 and stay within
`numerics.gemm_error_bound`; the others give the bytes of `numerics`. The fused nodes are in `fused_functions.py`.

Every body works on a tensor [..., K, ...] reshaped to blocks [P, ceil(K / 32), 32, Q]: P is the product of the
dimensions before the blocked axis, Q of those after it (1 when the axis is the last). No transpose is needed, and no
op touches float8 except Cast: ONNX Runtime has no float8 Slice, Concat, Gather or Pad. Weights that are initializers
are decoded once, when the session is made: from then on they take the memory, and the time, of float32; a table of
MXFP8Embedding, those of float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
from onnx import FunctionProto, GraphProto, TensorProto, helper

from mxfp8_ops import attention_functions, contract, fused_functions
from mxfp8_ops.contract import Op
from mxfp8_ops.errors import ContractError
from mxfp8_ops.formats import BLOCK_SIZE, ELEMENT_FORMATS, SCALE_BIAS, SCALE_NAN, SCALE_ROUNDINGS, scale_increment
from mxfp8_ops.function_body import Attribute, Body

BITCAST_OPSET: Final = 26
"""First opset with BitCast. Below it, exponents are found by comparison instead."""

_LAST: Final = -1
_END: Final = np.iinfo(np.int64).max


def functions(opset: int, ops: Iterable[str] = tuple(contract.OPS)) -> list[FunctionProto]:
    """Returns the function bodies of `ops`, in the order given, each behind those of the nodes in it.

    They are for a model whose default domain is at `opset`: ONNX Runtime resolves an inlined body at the opset of the
    model and ignores the function's own import, so generate the bodies for the opset the model has. Attach them with
    `model.functions.extend(...)`, and import the domain `contract.DOMAIN` at `contract.VERSION`.

    Args:
        opset: version of the default domain the model imports, at least `contract.MIN_OPSET`.
        ops: names of nodes in `contract.OPS`.

    Raises:
        ContractError: the opset is too low, or there is no such node.
    """
    if opset < contract.MIN_OPSET:
        raise ContractError(
            "functions",
            f"opset {opset}",
            expected=f"at least {contract.MIN_OPSET}",
            advice="convert the model up with onnx.version_converter",
        )
    made: dict[str, FunctionProto] = {}

    def make(name: str) -> None:
        if name not in made:
            function, called = _function(name, opset)
            for op in called:
                make(op.name)
            made[name] = function

    for name in ops:
        make(name)
    return [*made.values()]


def weight_gemm_dtype(wanted: int) -> int:
    """Returns the output_dtype to give an MXFP8WeightGemm for a result of dtype `wanted`; a Cast must make up for it.

    ONNX Runtime runs a float16 node between nodes that it has in float32 only in float32 too, but leaves its attributes
    alone: a node with float16 on both sides whose dtype is an attribute then fails to load. So float32 stands for it.

    Args:
        wanted: an onnx.TensorProto.DataType.
    """
    return contract.FLOAT if wanted == contract.FLOAT16 else wanted


def _function(name: str, opset: int) -> tuple[FunctionProto, list[Op]]:
    """Returns the body of a node, and the nodes in it."""
    if name not in BODIES:
        raise ContractError(
            "functions", f"no node {name!r}", expected=f"one of {', '.join(BODIES)}", advice="correct the name"
        )
    op = contract.OPS[name]
    body = Body(op, opset)
    BODIES[name](body)
    imports = [helper.make_opsetid("", opset)]
    if body.called:
        imports.append(helper.make_opsetid(contract.DOMAIN, contract.VERSION))
    function = helper.make_function(
        contract.DOMAIN,
        op.name,
        [port.name for port in op.inputs],
        [port.name for port in op.outputs],
        body.nodes,
        imports,
        attribute_protos=[helper.make_attribute(key, default) for key, default in op.attributes.items()],
    )
    return function, body.called


# --- The bodies --------------------------------------------------------------------------------------------------


def _quantize(g: Body) -> None:
    """X -> elements, scales."""
    axis, block = g.attribute("axis"), g.vector("block_size")
    x = g("Cast", "X", to=TensorProto.FLOAT)
    blocks = Blocks.of(g, x, axis, block)
    values = blocks.split(g, x)

    amax = _largest(g, magnitudes(g, values))
    bad = g("IsInf", amax, out="bad")

    format_index = g.index_of("output_dtype", [fmt.onnx_dtype for fmt in ELEMENT_FORMATS.values()])
    rounding_index = g.index_of("scale_rounding", SCALE_ROUNDINGS)
    increments = np.array(
        [[scale_increment(fmt, name) for name in SCALE_ROUNDINGS] for fmt in ELEMENT_FORMATS.values()], np.int32
    )
    exponent = biased_exponent(g, amax, increments, (format_index, rounding_index))
    emax = g("Gather", g.constant([fmt.emax for fmt in ELEMENT_FORMATS.values()]), format_index)
    scale = g("Max", g("Sub", exponent, emax), g.constant(0), out="scale")

    # 2^(127 - s) is the power of two with code 254 - s; s = 254 makes it the subnormal 2^-127.
    inverse = g("Gather", g.powers(), g("Sub", g.constant(2 * SCALE_BIAS), scale), out="inverse")
    scaled = g("Mul", values, inverse, out="scaled")
    # The NaN stands second on purpose: ONNX Runtime's Where turns -0 in its second operand into +0.
    scaled = g("Where", bad, g.constant(np.float32(np.nan)), scaled)
    g("Cast", blocks.join(g, scaled), to=g.attribute("output_dtype"), out="elements")

    codes = g("Cast", g("Where", bad, g.constant(SCALE_NAN), scale), to=TensorProto.UINT8)
    g("Reshape", codes, g("Concat", blocks.lead, blocks.count, blocks.trail, axis=0), allowzero=1, out="scales")


def magnitudes(g: Body, values: str) -> str:
    """Returns |values|, a NaN as infinity: ReduceMax drops a NaN that does not come first."""
    return g("Where", g("IsNaN", values), g.constant(np.float32(np.inf)), g("Abs", values))


def _largest(g: Body, magnitudes: str) -> str:
    """Returns the largest value along axis 2, which stays with size 1."""
    if g.given is None:
        return g("ReduceMax", magnitudes, g.constant([2]), keepdims=1, out="amax")
    values, _ = g.several("TopK", magnitudes, g.constant([1]), out=("amax", "place"), axis=2)
    return values


def _dequantize(g: Body) -> None:
    """elements, scales -> Y."""
    y = _values(g, "elements", "scales", g.attribute("axis"), g.vector("block_size"))
    g("Cast", y, to=g.attribute("output_dtype"), out="Y")


def _gemm(g: Body) -> None:
    """A, A_scales, B, B_scales, bias -> Y."""
    _matmul(g, _values(g, "A", "A_scales", _LAST, g.constant([BLOCK_SIZE])))


def _activations(g: Body) -> str:
    """Returns the float32 values of X. That holds every X: a Cast to it, the default, changes nothing."""
    return g("Cast", g("Cast", "X", to=g.attribute("activation_dtype")), to=TensorProto.FLOAT)


def _weight_gemm(g: Body) -> None:
    """X, B, B_scales, bias -> Y."""
    _matmul(g, _activations(g))


def _embedding(g: Body) -> None:
    """indices, B, B_scales -> Y."""
    # Float16 holds every element: Gather takes that, and a table that is an initializer is widened no further.
    elements = g("Gather", g("Cast", "B", to=TensorProto.FLOAT16), "indices", axis=0)
    scales = g("Gather", "B_scales", "indices", axis=0)
    y = _values(g, elements, scales, _LAST, g.constant([BLOCK_SIZE]))
    g("Cast", y, to=g.attribute("output_dtype"), out="Y")


def _grouped_gemm(g: Body) -> None:
    """A, A_scales, B, B_scales, experts -> Y."""
    _grouped_matmul(g, _values(g, "A", "A_scales", _LAST, g.constant([BLOCK_SIZE])))


def _grouped_weight_gemm(g: Body) -> None:
    """X, B, B_scales, experts -> Y."""
    _grouped_matmul(g, _activations(g))


BODIES: Final[Mapping[str, Callable[[Body], None]]] = MappingProxyType(
    {
        contract.QUANTIZE.name: _quantize,
        contract.DEQUANTIZE.name: _dequantize,
        contract.GEMM.name: _gemm,
        contract.WEIGHT_GEMM.name: _weight_gemm,
        contract.EMBEDDING.name: _embedding,
        contract.GROUPED_GEMM.name: _grouped_gemm,
        contract.GROUPED_WEIGHT_GEMM.name: _grouped_weight_gemm,
        **fused_functions.BODIES,
        contract.ATTENTION.name: attention_functions.attention,
    }
)
"""The function that writes the body of each node, by op type."""


# --- Blocks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """How a tensor [..., K, ...] maps to blocks [P, ceil(K / 32), 32, Q]. Every field names a 1-D int64 tensor."""

    shape: str
    """[..., K, ...]"""
    lead: str
    """The dimensions before K; P is their product."""
    trail: str
    """The dimensions after K; Q is their product."""
    p: str
    k: str
    q: str
    block: str
    """[32], or the size of other blocks."""
    count: str
    """[ceil(K / 32)]"""
    padded: str
    """[ceil(K / 32) * 32]"""

    @classmethod
    def of(cls, g: Body, x: str, axis: int | Attribute, block: str) -> Blocks:
        """Returns the blocks of `x` along `axis`."""
        lead = g("Shape", x, end=axis, out="lead")
        rest = g("Shape", x, start=axis)
        k = g("Slice", rest, g.constant([0]), g.constant([1]), out="k")
        trail = g("Slice", rest, g.constant([1]), g.constant([_END]), out="trail")
        one = g.constant([1])
        # A reduction over [1, ...] rather than a -1 in Reshape: with an empty dimension the -1 would be ambiguous.
        p = g("ReduceProd", g("Concat", one, lead, axis=0), out="p")
        q = g("ReduceProd", g("Concat", one, trail, axis=0), out="q")
        count = g("Div", g("Add", k, g("Sub", block, one)), block, out="count")
        padded = g("Mul", count, block, out="padded")
        return cls(g("Shape", x, out="shape"), lead, trail, p, k, q, block, count, padded)

    def split(self, g: Body, x: str) -> str:
        """Returns `x` as [P, ceil(K / 32), 32, Q], the last block zero-padded."""
        flat = g("Reshape", x, g("Concat", self.p, self.k, self.q, axis=0), allowzero=1)
        pads = g("Concat", g.constant([0, 0, 0, 0]), g("Sub", self.padded, self.k), g.constant([0]), axis=0)
        shape = g("Concat", self.p, self.count, self.block, self.q, axis=0)
        return g("Reshape", g("Pad", flat, pads), shape, allowzero=1, out="blocks")

    def join(self, g: Body, blocks: str) -> str:
        """Returns [P, ceil(K / 32), 32, Q] in the shape that `split` took apart; the padding is dropped."""
        flat = g("Reshape", blocks, g("Concat", self.p, self.padded, self.q, axis=0), allowzero=1)
        return g("Reshape", g("Slice", flat, g.constant([0]), self.k, g.constant([1])), self.shape, allowzero=1)


# --- Scales and values -------------------------------------------------------------------------------------------


def biased_exponent(g: Body, amax: str, increments: npt.NDArray[np.int32], row: tuple[str, str]) -> str:
    """Returns (bits(amax) + increment) >> 23 as int64: the biased exponent of amax, rounded as the increment says.

    Args:
        g: the body.
        amax: float32 [P, ceil(K / 32), 1, Q], no NaN; the result at Inf is arbitrary but small enough for a table.
        increments: one per element format and scale rounding, see `formats.scale_increment`.
        row: names of the two indices into `increments`.
    """
    if g.opset >= BITCAST_OPSET:
        bits = g("BitCast", amax, to=TensorProto.INT32)
        rounded = g("Add", bits, g.lookup(increments, row))
        return g("Cast", g("Div", rounded, g.constant(np.int32(1 << 23))), to=TensorProto.INT64, out="exponent")

    # Without the bits: the addition carries when the mantissa exceeds 0x7fffff - increment, so the result is the
    # smallest i with amax <= m * 2^(i - 127), m being 1.that-mantissa. With e = floor(log2(amax)) that i is e + 127 or
    # e + 128: two exact comparisons from e + 126 on find it. They also repair a logarithm that is off by one: low just
    # above a power of two (where i = e + 127), high just below the next. Zero and subnormals, whose logarithm is -inf
    # or below the clip, come out as 0 or 1: less than emax, so scale 0.
    mantissas = (np.int32(0x3F800000) | (np.int32(0x7FFFFF) - increments)).view(np.float32)
    log2 = g("Mul", g("Log", amax), g.constant(np.float32(1 / np.log(2))))
    guess = g("Add", g("Floor", log2), g.constant(np.float32(SCALE_BIAS - 1)))
    guess = g("Clip", guess, g.constant(np.float32(0)), g.constant(np.float32(253)))  # 255 at most
    guess = g("Cast", guess, to=TensorProto.INT64, out="guess")
    candidates = g("Add", guess, g.constant([[0], [1]]))  # along axis 2, the axis amax was reduced over
    thresholds = g("Mul", g("Gather", g.powers(), candidates), g.lookup(mantissas, row))
    exceeded = g("Cast", g("Greater", amax, thresholds), to=TensorProto.INT64)
    return g("Add", guess, g("ReduceSum", exceeded, g.constant([2]), keepdims=1), out="exponent")


def _values(g: Body, elements: str, scales: str, axis: int | Attribute, block: str) -> str:
    """Returns the float32 values of (elements, scales) in the shape of the elements."""
    x = g("Cast", elements, to=TensorProto.FLOAT)
    blocks = Blocks.of(g, x, axis, block)
    codes = g.shaped(scales, g("Concat", blocks.lead, blocks.count, blocks.trail, axis=0))
    codes = g("Cast", codes, to=TensorProto.INT64)
    codes = g("Reshape", codes, g("Concat", blocks.p, blocks.count, g.constant([1]), blocks.q, axis=0), allowzero=1)
    return blocks.join(g, g("Mul", blocks.split(g, x), g("Gather", g.powers(), codes)))


def _matmul(g: Body, a: str) -> None:
    """Y = a @ transpose(B) + bias."""
    b = _values(g, "B", "B_scales", _LAST, g.constant([BLOCK_SIZE]))
    y = g("MatMul", a, g("Einsum", b, equation="...nk->...kn"))
    if "bias" not in g.absent:
        y = g("Add", y, g.or_zeros("bias", g("Shape", b, start=-2, end=-1)))
    g("Cast", y, to=g.attribute("output_dtype"), out="Y")


def _grouped_matmul(g: Body, a: str) -> None:
    """Y = a @ transpose(B[experts]), one MatMul per expert that is picked: no matrix of B is repeated per row."""
    b = g("Transpose", _values(g, "B", "B_scales", _LAST, g.constant([BLOCK_SIZE])), perm=[0, 2, 1], out="b")
    count = g("Squeeze", g("Shape", b, end=1), out="count")
    experts = g("Unsqueeze", _experts(g, count), g.constant([_LAST]))
    experts = g("Expand", experts, g("Shape", a, end=_LAST), out="of_rows")
    lead = g("Shape", experts, out="lead")  # [..., M], broadcast
    rows = g("Reshape", g("Size", experts), g.constant([1]), out="rows")
    k, n = g("Shape", a, start=_LAST), g("Shape", b, start=_LAST)
    a = g("Expand", a, g("Concat", lead, g.constant([1]), axis=0))
    a = g("Reshape", a, g("Concat", rows, k, axis=0), allowzero=1, out="a")
    experts = g("Reshape", experts, rows, allowzero=1)
    picked = g("Unique", g("Compress", experts, g("Less", experts, count)), out="picked")
    zero = g("ConstantOfShape", g("Concat", rows, n, axis=0), out="no_expert")
    y = g("Loop", g("Size", picked), "", zero, body=_expert(g, a, b, experts, picked), out="y")
    y = g("Reshape", y, g("Concat", lead, n, axis=0), allowzero=1)
    g("Cast", y, to=g.attribute("output_dtype"), out="Y")


def _experts(g: Body, count: str) -> str:
    """Returns the indices of experts as 0..count, count being none; other indices fail at run time, in the Gather."""
    from_end = g("Add", "experts", count)
    experts = g("Where", g("Less", "experts", g.constant(0)), from_end, "experts", out="from_start")
    beyond = g("Or", g("Less", experts, g.constant(0)), g("Greater", experts, count), out="beyond")
    end = g("Add", count, g.constant(1))
    return g("Gather", g("Range", g.constant(0), end, g.constant(1)), g("Where", beyond, end, experts))


def _expert(outer: Body, a: str, b: str, experts: str, picked: str) -> GraphProto:
    """Returns the body of a Loop over `picked`: the rows of one expert are multiplied and put into the result."""
    g = outer.inner()
    turn, more, before = (g.unique(name) for name in ("turn", "more", "before"))
    expert = g("Gather", picked, turn, out="expert")
    at = g("Transpose", g("NonZero", g("Equal", experts, expert)), out="at")  # [rows of this expert, 1]
    after = g("ScatterND", before, at, g("MatMul", g("GatherND", a, at), g("Gather", b, expert)), out="after")
    inputs = [(turn, TensorProto.INT64, []), (more, TensorProto.BOOL, []), (before, TensorProto.FLOAT, [None, None])]
    outputs = [(g("Identity", more), TensorProto.BOOL, []), (after, TensorProto.FLOAT, [None, None])]
    ports, results = ([helper.make_tensor_value_info(*port) for port in side] for side in (inputs, outputs))
    return helper.make_graph(g.nodes, "of_one_expert", ports, results)
