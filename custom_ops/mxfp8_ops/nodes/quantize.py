"""MXFP8Quantize and MXFP8Dequantize: from blocks of 32 values to elements and scales, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from mxfp8_ops import formats
from mxfp8_ops.checks import Shape, check_scales, check_value_dtype, normalize_axis, scale_count, scale_shape
from mxfp8_ops.errors import ContractError, ShapeError
from mxfp8_ops.formats import (
    BLOCK_SIZE,
    ELEMENT_FORMATS,
    ELEMENT_NAN,
    INT8,
    SCALE_BIAS,
    SCALE_NAN,
    scale_offset,
)
from mxfp8_ops.node import DOUBLE, ELEMENTS, FLOAT, FLOAT8E4M3FN, INT32, SCALES, VALUES, Op, Port
from mxfp8_ops.numerics import Array, Codes, decode, decode_scale, encode, value_dtype

if TYPE_CHECKING:
    from mxfp8_ops.function_body import Body


def quantize(
    x: Array,
    *,
    axis: int = -1,
    element_format: str = "e4m3",
    scale_rounding: str = "ceil",
    out: tuple[Codes, Codes] | None = None,
) -> tuple[Codes, Codes]:
    """Returns (elements, scales): `x` in blocks of 32 along `axis`, each with one power-of-two scale.

    Per block: amax -> scale code s (`formats.SCALE_ROUNDINGS`), clamped to 0..254; then every value times
    2^(127 - s), rounded to nearest even, saturating. An all-zero block has s = 0. A NaN or Inf anywhere in a
    block gives s = 255 and 32 elements 0x7F, which are NaN in e4m3 and e5m2: all values of the block become NaN.

    Elements need the scales of their own blocks, and the arrays have no marks where blocks begin. Along `axis`, a part
    of the pair is elements[..., 32 * i : 32 * j] with scales[..., i:j]. If you cut elsewhere or reshape across `axis`,
    the shapes fit and the values are wrong. You may cut other axes anywhere, both arrays alike.

    Args:
        x: [..., K, ...] float32, float16 or bfloat16. The last block may be partial (as if zero-padded).
        axis: the blocked axis (its length is K).
        element_format: "e4m3", "e5m2" or "int8".
        scale_rounding: "ceil", "floor" or "even".
        out: the arrays for elements and scales, which are also the result: C-contiguous, and apart from each other
            and `x`.

    Returns:
        elements: uint8, the shape of `x`.
        scales: uint8, the shape of `x` with K replaced by ceil(K / 32).

    Raises:
        ShapeError: wrong dtype, a scalar, no such axis, or an `out` that does not fit.
        ContractError: unknown format or rounding.

    Source: OCP MX v1.0 section 6.3; the "ceil" rule from NVIDIA's "Recipes for Pre-training LLMs with MXFP8".
    """
    fmt = formats.element_format(element_format)
    increment = formats.scale_increment(fmt, scale_rounding)
    check_value_dtype("quantize", x.dtype)
    axis = normalize_axis("quantize", x.ndim, axis)
    if out is not None:
        out = check_out("quantize", out, x, scale_shape(x.shape, axis), np)
    # float32 holds every float16 and bfloat16, so the rules below need only one dtype.
    values = np.moveaxis(x, axis, -1).astype(np.float32)
    k = values.shape[-1]
    # A zero changes neither amax nor another element: a partial block quantizes as a whole one (docs/numerics.md).
    padded = np.zeros((*values.shape[:-1], scale_count(k) * BLOCK_SIZE), np.float32)
    padded[..., :k] = values
    blocks = padded.reshape(*values.shape[:-1], scale_count(k), BLOCK_SIZE)

    # Magnitudes order as their bits do, and NaN (above Inf) wins the maximum by itself.
    amax_bits = (blocks.view(np.uint32) & 0x7FFFFFFF).max(-1, initial=0).astype(np.int64)
    finite = amax_bits < 0x7F800000  # the bits of Inf; NaN has larger ones
    # The exponent field of float32 is log2(amax) + 127, and E8M0 has the bias 127 too (OCP MX v1.0, section 5.4). So
    # the field, without the mantissa, less emax is the scale code. Code 255 is NaN, so 254 is the largest.
    # Subnormals, below 0x800000, have no implied leading one: `scale_increment` says why they take half.
    added = np.where(amax_bits < 0x800000, increment >> 1, increment)
    scales = np.clip(((amax_bits + added) >> 23) - fmt.emax, 0, 254)
    # A product with a power of two is exact, so encode is the only rounding. Scale code 254 needs 2^-127 here, a
    # subnormal of float32, which ldexp makes; kernels that flush subnormals to zero would lose such blocks.
    inverse = np.ldexp(np.float32(1), SCALE_BIAS - scales).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        elements = encode(blocks * inverse[..., None], fmt)
    # The whole block becomes NaN, elements and scale: a reader that ignores either one still sees NaN.
    elements[~finite] = ELEMENT_NAN
    scales = np.where(finite, scales, SCALE_NAN).astype(np.uint8)

    elements, scales = (np.moveaxis(t, -1, axis) for t in (elements.reshape(padded.shape)[..., :k], scales))
    if out is None:
        return np.ascontiguousarray(elements), np.ascontiguousarray(scales)
    out[0][...], out[1][...] = elements, scales
    return out


def dequantize(
    elements: Codes, scales: Codes, *, axis: int = -1, element_format: str = "e4m3", dtype: str = "float32"
) -> Array:
    """Returns the values of (elements, scales); they are exact in float32 wherever float32 can hold them.

    Args:
        elements: uint8 [..., K, ...].
        scales: uint8, the shape of `elements` with K replaced by ceil(K / 32).
        axis: the blocked axis.
        element_format: "e4m3", "e5m2" or "int8".
        dtype: "float32", "float16" or "bfloat16"; the latter two are rounded from float32.

    Raises:
        ShapeError: the scales do not fit the elements.
        ContractError: unknown format.
    """
    fmt = formats.element_format(element_format)
    axis = normalize_axis("dequantize", elements.ndim, axis)
    check_scales("dequantize", elements.shape, scales.shape, axis)
    # Repeated 32 times and cut to K: the last block may be partial.
    per_value = np.repeat(decode_scale(scales), BLOCK_SIZE, axis).take(range(elements.shape[axis]), axis)
    with np.errstate(over="ignore", invalid="ignore"):
        values = decode(elements, fmt) * per_value
        return values.astype(value_dtype(dtype))


def check_out(where: str, out: Any, x: Any, scales: Shape, library: Any) -> tuple[Any, Any]:
    """Returns `out`, the arrays for the elements and scales of `x`, after a check.

    `scales` is the shape of the scales, `library` the module of the array `x`: NumPy or CuPy.

    Raises:
        ShapeError: they are not two C-contiguous, writeable uint8 arrays of these shapes, or share memory.
    """
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        expected, advice = "(elements, scales)", "pass the pair that quantize returned"
        raise ShapeError(where, f"out is a {type(out).__name__}, not a pair", expected=expected, advice=advice)
    for name, codes, shape in (("elements", out[0], x.shape), ("scales", out[1], scales)):
        what, expected = f"a {type(codes).__name__}", f"uint8 of shape {shape}"
        if isinstance(codes, library.ndarray):
            usable = codes.flags.c_contiguous and getattr(codes.flags, "writeable", True)  # CuPy's all are
            what = f"{codes.dtype} of shape {codes.shape}{'' if usable else ', strided or read-only'}"
        if what != expected:
            expected = f"C-contiguous, writeable {expected}"
            raise ShapeError(where, f"out: {name} are {what}", expected=expected, advice="pass other arrays")
    # A kernel reads x while it writes: with common memory it would read its own output. may_share_memory compares
    # only bounds, so it refuses views that interleave too; the exact test can take exponential time.
    if any(library.may_share_memory(*pair) for pair in (out, (out[0], x), (out[1], x))):
        what, expected = "out: elements, scales and x share memory", "three arrays without common memory"
        raise ShapeError(where, what, expected=expected, advice="pass other arrays")
    return out[0], out[1]


# --- The portable body


_ROWS: Final = {fmt.onnx_dtype: fmt for fmt in ELEMENT_FORMATS.values()}


def _quantize_body(g: Body) -> None:
    """X -> elements, scales."""
    x = _finite_or_infinite(g, g.floats("X"))
    lines = Lines.for_axis(g, x)
    blocks, back = lines.blocks(x) if lines else g.blocks(x, whole=g.case.whole)
    dtypes, dtype = g.case.attributes["output_dtype"], g.attribute("output_dtype")
    elements, index = _encoded(g, blocks, "output_dtype", 3 if lines else 2)
    is_float = is_mixed(dtypes)
    if not (lines.whole if lines else g.case.whole) and not is_float:  # ONNX Runtime has no Slice of float8
        elements, is_float = g("Cast", elements, to=FLOAT), True
    elements = back(elements)
    elements = g("Cast", elements, to=dtype) if is_float else elements
    # A slice of every 32nd value has one value for each block.
    ends, axes = g.constant([np.iinfo(np.int64).max]), g.vector("axis")
    sizes = g("Shape", g("Slice", x, g.constant([0]), ends, axes, g.constant([BLOCK_SIZE])))
    codes = g("Gather", _table(g, np.arange(256, dtype=np.uint8)), index)
    scales = g("Reshape", codes, sizes, allowzero=1)
    g.result(elements, "elements")
    g.result(scales, "scales")


def rounded(g: Body, x: str, name: str, *, whole: bool) -> str:
    """Returns the float32 values [N, C, ...] after a round trip through elements and scales, along the channels.

    The attribute `name` has the dtype of the elements. `whole` tells that all blocks are full.
    """
    x = _finite_or_infinite(g, x)
    blocks, back = Lines.along(g, x, 1, whole=whole).blocks(x)
    elements, index = _encoded(g, blocks, name, 3)
    if not is_mixed(g.case.attributes[name]):
        elements = g("Cast", elements, to=FLOAT)

    def factors(g: Body, dtype: Any) -> str:
        fmt = _row(dtype)
        unit = fmt.mantissa_bits if fmt.twos_complement else 0
        return g("Gather", _table(g, np.ldexp(decode_scale(np.arange(256, dtype=np.uint8)), -unit)), index)

    dtypes = g.case.attributes[name]
    return back(g("Mul", elements, g.choose(name, factors) if is_mixed(dtypes) else factors(g, dtypes[0])))


def is_mixed(dtypes: Sequence[int]) -> bool:
    """Whether elements of these dtypes, of which a node has one, need an If: float formats share their nodes."""
    return INT8.onnx_dtype in dtypes and len(dtypes) > 1


def _finite_or_infinite(g: Body, x: str) -> str:
    """Returns `x` with infinity for NaN, which ReduceMax may drop: both mark a bad block."""
    return g("Where", g("IsNaN", x), g.constant(np.float32(np.inf)), x)  # Where is slow if it has to broadcast


def _encoded(g: Body, blocks: str, name: str, rank: int) -> tuple[str, str]:
    """Returns the elements and the `_scale_index` of blocks [n, 32] or [n, 32, Q], which have no NaN.

    The attribute `name` has the dtype of the elements; if it `is_mixed`, they are in float32.
    """
    index = _scale_index(g, _largest(g, g("Abs", blocks), rank), name)
    if not is_mixed(g.case.attributes[name]):
        return _elements(g, blocks, index, g.attribute(name), name), index
    return g.choose(name, lambda g, each: g("Cast", _elements(g, blocks, index, each, name), to=FLOAT)), index


def _largest(g: Body, blocks: str, rank: int) -> str:
    """Returns the largest value of each block [n, 32] as [n, 1], and of [n, 32, Q] as [n, 1, Q]."""
    one = g.constant([1])
    if g.style.in_function:
        return g("ReduceMax", blocks, one, out="amax")
    # ONNX Runtime's symbolic shape inference, which programs run on graphs alone, does not know ReduceMax.
    if rank == 2:
        return g("Squeeze", g("MaxPool", g("Unsqueeze", blocks, one), kernel_shape=[BLOCK_SIZE]), one, out="amax")
    two = g.constant([2])
    wider = g("Pad", blocks, g.constant([0, 1]), "", two)  # MaxPool refuses a Q of 0
    largest = g("Squeeze", g("MaxPool", g("Unsqueeze", wider, one), kernel_shape=[BLOCK_SIZE, 1]), one)
    return g("Slice", largest, g.constant([0]), g.constant([-1]), two, out="amax")


def _row(dtype: int) -> formats.ElementFormat:
    if dtype not in _ROWS:
        raise ContractError.unknown("output_dtype", dtype, map(str, _ROWS))
    return _ROWS[dtype]


def _scale_index(g: Body, amax: str, name: str) -> str:
    """Returns the int32 indices into a `_table` for the scale codes of amax: see `formats.scale_offset`."""

    def of_rounding(g: Body, rounding: str) -> str:
        return g.choose(name, lambda g, each: g.constant(np.float64(scale_offset(_row(each), rounding))), DOUBLE)

    log2 = g("Mul", g("Log", g("Cast", amax, to=DOUBLE)), g.constant(np.float64(1 / math.log(2))))
    code = g("Add", log2, g.choose("scale_rounding", of_rounding, DOUBLE))
    code = g("Clip", code, g.constant(np.float64(0)), g.constant(np.float64(SCALE_NAN + 1)))
    return g("Cast", code, to=INT32, out="index")  # truncates


def _table(g: Body, values: npt.NDArray[Any]) -> str:
    """Returns a table of `values` [256], one for each scale code, for a `_scale_index`.

    Index 255 is for code 254, of finite values; index 256 is for code 255.
    """
    return g.constant(np.concatenate([values[:-1], values[-2:]]))


def _elements(g: Body, blocks: str, index: str, dtype: Any, name: str) -> str:
    """Returns the elements of blocks, which have no NaN; `index` is their `_scale_index`.

    `dtype` is an onnx.DataType, or a reference to one of several floating-point formats.
    """
    fmt = _row(dtype if isinstance(dtype, int) else g.case.attributes[name][0])
    # A product, and QuantizeLinear of a whole tensor: a quotient by the subnormal 2^-127 is no number where a session
    # takes that for 0, and OpenVINO has QuantizeLinear of blocks for static shapes only.
    factors = np.append(decode_scale(np.arange(254, -1, -1, dtype=np.uint8)), np.float32(np.nan))  # 2^(127 - s)
    if not fmt.twos_complement:  # the factor of a bad block is NaN
        scaled, unit = g("Mul", blocks, g("Gather", _table(g, factors), index)), 1.0
    else:  # no code of it is NaN: all values of a bad block become the largest one, which has the code ELEMENT_NAN
        least = np.full(256, -np.inf, np.float32)
        factors[SCALE_NAN], least[SCALE_NAN] = 1, np.inf
        scaled = g(
            "Mul", g("Max", blocks, g("Gather", _table(g, least), index)), g("Gather", _table(g, factors), index)
        )
        scaled = g("Clip", scaled, *(g.constant(np.float32(sign * fmt.max)) for sign in (-1, 1)))
        unit = 2.0**-fmt.mantissa_bits
    return g("QuantizeLinear", scaled, g.constant(np.float32(unit)), output_dtype=dtype)


def _dequantize_body(g: Body) -> None:
    """elements, scales -> Y."""
    known = g.known("elements")
    lines = Lines.for_axis(g, "elements")
    if lines is None:
        y = g.values("elements", "scales", known)
    else:
        blocks, back = lines.blocks(g("Cast", "elements", to=FLOAT))
        y = back(g("Mul", blocks, lines.rows(g.factors("scales", "elements", known), 1)))
    g.result(g.cast(y, "output_dtype"), "Y")


@dataclass(frozen=True)
class Lines:
    """The blocks of a tensor [..., K, ...] along another axis than the last one, as [n, 32, Q].

    Without a Transpose: it is slow, and ONNX Runtime may move it past other nodes.
    """

    body: Body
    p: str
    """The product of the sizes before K."""
    k: str
    q: str
    """The product of the sizes after K."""
    count: str
    """The number of blocks along K."""
    whole: bool
    """Whether they are known to be full."""

    @classmethod
    def for_axis(cls, g: Body, x: str) -> Lines | None:
        """Returns the lines of `x` along the attribute `axis`; None if that is the last axis."""
        axis, shape = g.attribute("axis"), g.known(g.op.inputs[0].name).shape
        if axis == -1 or (shape is not None and axis == len(shape) - 1):
            return None
        size = shape[axis] if shape is not None and isinstance(axis, int) else None
        return cls.along(g, x, axis, whole=g.case.whole or (size or 1) % BLOCK_SIZE == 0)

    @classmethod
    def along(cls, g: Body, x: str, axis: Any, *, whole: bool) -> Lines:
        """Returns the lines of `x` along `axis`, an integer or a reference to an attribute."""
        zero, one, end = (g.constant([value]) for value in (0, 1, np.iinfo(np.int64).max))
        sizes = g("Shape", x, start=axis)
        # A reduction over [1, ...] rather than a -1 in Reshape: with an empty axis the -1 would be ambiguous.
        p, q = (
            g("ReduceProd", g("Concat", one, each, axis=0))
            for each in (g("Shape", x, end=axis), g("Slice", sizes, one, end))
        )
        k = g("Slice", sizes, zero, one)
        count = g("Div", g("Add", k, g.constant([BLOCK_SIZE - 1])), g.constant([BLOCK_SIZE]))
        return cls(g, p, k, q, count, whole)

    def blocks(self, x: str) -> tuple[str, Callable[[str], str]]:
        """Returns x as blocks [n, 32, Q], zero-padded at the end of each line, and the function that undoes it."""
        g, shape = self.body, self.body("Shape", x)
        if not self.whole:
            lines = g("Reshape", x, g("Concat", self.p, self.k, self.q, axis=0), allowzero=1)
            more = g("Mod", g("Neg", self.k), g.constant([BLOCK_SIZE]))
            x = g("Pad", lines, g("Concat", g.constant([0]), more, axis=0), "", g.constant([1]))

        def back(blocks: str) -> str:
            if not self.whole:
                padded = g("Mul", self.count, g.constant([BLOCK_SIZE]))
                blocks = g("Reshape", blocks, g("Concat", self.p, padded, self.q, axis=0), allowzero=1)
                blocks = g("Slice", blocks, g.constant([0]), self.k, g.constant([1]))
            return g("Reshape", blocks, shape, allowzero=1)

        return self.rows(x, BLOCK_SIZE), back

    def rows(self, x: str, size: int) -> str:
        """Returns x as [n, size, Q]: whole blocks, or one value of each."""
        g = self.body
        sizes = g("Concat", g("Mul", self.p, self.count), g.constant([size]), self.q, axis=0)
        return g("Reshape", x, sizes, allowzero=1)


# --- The contract


QUANTIZE: Final = Op(
    "MXFP8Quantize",
    (Port("X", VALUES, "[..., K, ...]"),),
    (Port("elements", ELEMENTS, "shape of X"), Port("scales", SCALES, "shape of X, K -> ceil(K / 32)")),
    MappingProxyType({"axis": -1, "block_size": 32, "output_dtype": FLOAT8E4M3FN, "scale_rounding": "ceil"}),
    "Quantizes blocks of 32 values along `axis` to 8-bit elements and one E8M0 scale each.",
    _quantize_body,
)
DEQUANTIZE: Final = Op(
    "MXFP8Dequantize",
    (Port("elements", ELEMENTS, "[..., K, ...]"), Port("scales", SCALES, "shape of elements, K -> ceil(K / 32)")),
    (Port("Y", VALUES, "shape of elements"),),
    MappingProxyType({"axis": -1, "block_size": 32, "output_dtype": FLOAT}),
    "Computes the values of elements and scales.",
    _dequantize_body,
)


OPS: Final = (QUANTIZE, DEQUANTIZE)
