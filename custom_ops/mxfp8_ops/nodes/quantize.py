"""MXFP8Quantize and MXFP8Dequantize: blocks of 32 values to elements and scales, and back."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from mxfp8_ops import formats
from mxfp8_ops.checks import Shape, check_scales, check_value_dtype, normalize_axis, scale_count, scale_shape
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.formats import (
    BLOCK_SIZE,
    ELEMENT_FORMATS,
    ELEMENT_NAN,
    INT8,
    SCALE_BIAS,
    SCALE_NAN,
    SCALE_ROUNDINGS,
    scale_increment,
)
from mxfp8_ops.node import ELEMENTS, FLOAT, FLOAT8E4M3FN, INT32, INT64, SCALES, UINT8, VALUES, Op, Port
from mxfp8_ops.numerics import Array, Codes, decode, decode_scale, encode, value_dtype

if TYPE_CHECKING:
    from mxfp8_ops.function_body import Body

BITCAST_OPSET: Final = 26
"""First opset with BitCast. Below it, exponents are found by comparison instead."""


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
    block gives s = 255 and 32 NaN elements: bad values surface.

    Elements mean something with the scales of their own blocks only, and nothing marks where those begin: a part of
    the pair along `axis` is elements[..., 32 * i : 32 * j] with scales[..., i:j]. Cut elsewhere, or reshaped across
    `axis`, it has shapes that fit and values that are wrong. Other axes may be cut anywhere, both arrays alike.

    Args:
        x: [..., K, ...] float32, float16 or bfloat16. The last block may be partial (as if zero-padded).
        axis: the blocked axis (that of length K).
        element_format: "e4m3" or "e5m2".
        scale_rounding: "ceil", "floor" or "even".
        out: arrays to write elements and scales to, and to return: C-contiguous, and apart from each other and `x`.

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
    # float32 holds every float16 and bfloat16, so the rules below need one dtype only.
    values = np.moveaxis(x, axis, -1).astype(np.float32)
    k = values.shape[-1]
    # A zero changes neither amax nor another element: a partial block quantizes as a whole one (docs/numerics.md).
    padded = np.zeros((*values.shape[:-1], scale_count(k) * BLOCK_SIZE), np.float32)
    padded[..., :k] = values
    blocks = padded.reshape(*values.shape[:-1], scale_count(k), BLOCK_SIZE)

    # Magnitudes order as their bits do, and NaN (above Inf) wins the maximum by itself.
    amax_bits = (blocks.view(np.uint32) & 0x7FFFFFFF).max(-1, initial=0).astype(np.int64)
    finite = amax_bits < 0x7F800000  # the bits of Inf; NaN has larger ones
    # The exponent field of float32 is log2(amax) + 127, and E8M0 has the bias 127 too (OCP MX v1.0, section 5.4):
    # shifting the mantissa out and taking off emax gives the scale code. Code 255 is NaN, so 254 is the largest.
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
    """Returns the values that (elements, scales) stand for; exact in float32 wherever float32 can hold them.

    Args:
        elements: uint8 [..., K, ...].
        scales: uint8, the shape of `elements` with K replaced by ceil(K / 32).
        axis: the blocked axis.
        element_format: "e4m3" or "e5m2".
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
    """Returns `out`, the arrays that the elements and scales of `x` are to be written to.

    Args:
        where: the op, for errors.
        out: the argument of the caller.
        x: an array of NumPy or CuPy.
        scales: shape of the scales.
        library: the module that `x` is an array of.

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
    # bounds only, so views that interleave are refused too; the exact test can take exponential time.
    if any(library.may_share_memory(*pair) for pair in (out, (out[0], x), (out[1], x))):
        what, expected = "out: elements, scales and x share memory", "three arrays without common memory"
        raise ShapeError(where, what, expected=expected, advice="pass other arrays")
    return out[0], out[1]


# --- The portable body


def _quantize_body(g: Body) -> None:
    """X -> elements, scales."""
    axis, block = g.attribute("axis"), g.vector("block_size")
    x = g("Cast", "X", to=FLOAT)
    blocks = g.blocks(x, axis, block)
    values = blocks.split(x)

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
    scaled = _whole_codes(g, scaled, format_index)
    # The NaN stands second on purpose: ONNX Runtime's Where turns -0 in its second operand into +0.
    nans = [np.float32(ELEMENT_NAN if fmt.twos_complement else np.nan) for fmt in ELEMENT_FORMATS.values()]
    scaled = g("Where", bad, g("Gather", g.constant(np.array(nans)), format_index), scaled)
    g("Cast", blocks.join(scaled), to=g.attribute("output_dtype"), out="elements")

    codes = g("Cast", g("Where", bad, g.constant(SCALE_NAN), scale), to=UINT8)
    g("Reshape", codes, g("Concat", blocks.lead, blocks.count, blocks.trail, axis=0), allowzero=1, out="scales")


def _whole_codes(g: Body, scaled: str, format_index: str) -> str:
    """Returns `scaled` as codes for INT8, to which Cast neither rounds nor saturates; `scaled` for other formats."""

    def codes(g: Body) -> str:
        rounded = g("Round", g("Mul", scaled, g.constant(np.float32(2.0**INT8.mantissa_bits))))
        return g("Clip", rounded, g.constant(np.float32(-INT8.max_code)), g.constant(np.float32(INT8.max_code)))

    if g.given is not None:
        return codes(g) if g.given["output_dtype"] == INT8.onnx_dtype else scaled
    # A branch that the attribute chooses: ONNX Runtime folds it, and the others do not pay for INT8.
    whole, same = g.inner(), g.inner()
    branches = [(whole, codes(whole)), (same, same("Identity", scaled))]
    graphs = [each.graph(f"branch_{i}", [], [(out, FLOAT, None)]) for i, (each, out) in enumerate(branches)]
    is_int8 = g("Equal", format_index, g.constant([*ELEMENT_FORMATS].index(INT8.name)))
    return g("If", is_int8, then_branch=graphs[0], else_branch=graphs[1], out="codes")


def magnitudes(g: Body, values: str) -> str:
    """Returns |values|, a NaN as infinity: ReduceMax drops a NaN that does not come first."""
    return g("Where", g("IsNaN", values), g.constant(np.float32(np.inf)), g("Abs", values))


def _largest(g: Body, magnitudes: str) -> str:
    """Returns the largest value along axis 2, which stays with size 1."""
    if g.given is None:
        return g("ReduceMax", magnitudes, g.constant([2]), keepdims=1, out="amax")
    values, _ = g.several("TopK", magnitudes, g.constant([1]), out=("amax", "place"), axis=2)
    return values


def biased_exponent(g: Body, amax: str, increments: npt.NDArray[np.int32], row: tuple[str, str]) -> str:
    """Returns (bits(amax) + increment) >> 23 as int64: the biased exponent of amax, rounded as the increment says.

    Args:
        g: the body.
        amax: float32 [P, ceil(K / 32), 1, Q], no NaN; the result at Inf is arbitrary but small enough for a table.
        increments: one per element format and scale rounding, see `formats.scale_increment`.
        row: names of the two indices into `increments`.
    """
    if g.opset >= BITCAST_OPSET:
        bits = g("BitCast", amax, to=INT32)
        rounded = g("Add", bits, g.lookup(increments, row))
        return g("Cast", g("Div", rounded, g.constant(np.int32(1 << 23))), to=INT64, out="exponent")

    # Without the bits: the addition carries when the mantissa exceeds 0x7fffff - increment, so the result is the
    # smallest i with amax <= m * 2^(i - 127), m being 1.that-mantissa. With e = floor(log2(amax)) that i is e + 127 or
    # e + 128: two exact comparisons from e + 126 on find it. They also repair a logarithm that is off by one: low just
    # above a power of two (where i = e + 127), high just below the next. Zero and subnormals, whose logarithm is -inf
    # or below the clip, come out as 0 or 1: less than emax, so scale 0.
    mantissas = (np.int32(0x3F800000) | (np.int32(0x7FFFFF) - increments)).view(np.float32)
    log2 = g("Mul", g("Log", amax), g.constant(np.float32(1 / np.log(2))))
    guess = g("Add", g("Floor", log2), g.constant(np.float32(SCALE_BIAS - 1)))
    guess = g("Clip", guess, g.constant(np.float32(0)), g.constant(np.float32(253)))  # 255 at most
    guess = g("Cast", guess, to=INT64, out="guess")
    candidates = g("Add", guess, g.constant([[0], [1]]))  # along axis 2, the axis amax was reduced over
    thresholds = g("Mul", g("Gather", g.powers(), candidates), g.lookup(mantissas, row))
    exceeded = g("Cast", g("Greater", amax, thresholds), to=INT64)
    return g("Add", guess, g("ReduceSum", exceeded, g.constant([2]), keepdims=1), out="exponent")


def _dequantize_body(g: Body) -> None:
    """elements, scales -> Y."""
    y = g.values("elements", "scales", g.attribute("axis"), g.vector("block_size"))
    g("Cast", y, to=g.attribute("output_dtype"), out="Y")


# --- The contract


QUANTIZE: Final = Op(
    "MXFP8Quantize",
    (Port("X", VALUES, "[..., K, ...]"),),
    (Port("elements", ELEMENTS, "shape of X"), Port("scales", SCALES, "shape of X, K -> ceil(K / 32)")),
    MappingProxyType({"axis": -1, "block_size": 32, "output_dtype": FLOAT8E4M3FN, "scale_rounding": "ceil"}),
    "Blocks of 32 values along `axis` -> 8-bit elements and one E8M0 scale per block.",
    _quantize_body,
)
DEQUANTIZE: Final = Op(
    "MXFP8Dequantize",
    (Port("elements", ELEMENTS, "[..., K, ...]"), Port("scales", SCALES, "shape of elements, K -> ceil(K / 32)")),
    (Port("Y", VALUES, "shape of elements"),),
    MappingProxyType({"axis": -1, "block_size": 32, "output_dtype": FLOAT}),
    "The inverse of MXFP8Quantize.",
    _dequantize_body,
)


def quantized_rows(g: Body, y: str) -> None:
    """Quantizes rows of y, to elements and scales, by a call of MXFP8Quantize with the attributes of the caller."""
    settings = {name: g.attribute(name) for name in ("output_dtype", "scale_rounding")}
    g.call(QUANTIZE, y, out=["elements", "scales"], **settings)


OPS: Final = (QUANTIZE, DEQUANTIZE)
