"""Quantize, dequantize, GEMM and embedding in NumPy: the reference that every other implementation is tested against.

Written to be read, not to be fast. The backends have the same functions with the same signatures.

Elements and scales are `uint8` arrays that hold the codes; see `formats.py` for what the codes mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes  # noqa: F401 - gives NumPy bfloat16 and float8
import numpy as np
import numpy.typing as npt

from mxfp8_ops import formats, op_options
from mxfp8_ops.checks import (
    check_experts,
    check_indices,
    check_out,
    check_scales,
    check_value_dtype,
    embedding_shape,
    gemm_shape,
    grouped_shape,
    normalize_axis,
    scale_count,
    scale_shape,
)
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.formats import BLOCK_SIZE, ELEMENT_NAN, SCALE_BIAS, SCALE_NAN, ElementFormat

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]

VALUE_DTYPES: Final = {name: np.dtype(row.numpy_name) for name, row in formats.VALUE_DTYPES.items()}
"""The dtypes of unquantized tensors, by name."""


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
    scales = np.clip(((amax_bits + increment) >> 23) - fmt.emax, 0, 254)
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


def gemm(
    a: Codes, a_scales: Codes, b: Codes, b_scales: Codes, bias: Array | None = None, **options: Unpack[op_options.Gemm]
) -> Array:
    """Returns dequantize(a) @ dequantize(b).T + bias, with the sums in float64.

    Other implementations accumulate in float32, in any order: they differ from this by at most
    `gemm_error_bound`.

    Args:
        a: elements uint8 [..., M, K] (or [K], which gives [..., N]).
        a_scales: uint8 [..., M, ceil(K / 32)].
        b: elements uint8 [..., N, K]; leading dimensions broadcast against those of `a`.
        b_scales: uint8 [..., N, ceil(K / 32)].
        bias: float32 [N], or None.
        **options: see `op_options.Gemm`.

    Returns:
        [..., M, N].

    Raises:
        ShapeError: shapes do not fit.
        ContractError: unknown format.
    """
    a_format, b_format, dtype = op_options.gemm(**options)
    return weight_gemm(
        dequantize(a, a_scales, element_format=a_format), b, b_scales, bias, b_format=b_format, dtype=dtype
    )


def weight_gemm(
    x: Array, b: Codes, b_scales: Codes, bias: Array | None = None, **options: Unpack[op_options.WeightGemm]
) -> Array:
    """Returns x @ dequantize(b).T + bias, with the sums in float64.

    All as in `gemm`, but x [..., M, K] (or [K]) is float32, float16 or bfloat16; see `op_options.WeightGemm`.
    """
    b_format, dtype, activation_dtype = op_options.weight_gemm(**options)
    check_value_dtype("gemm", x.dtype)
    gemm_shape("gemm", x.shape, b.shape, None if bias is None else bias.shape)
    if formats.activation_dtype(activation_dtype) is formats.BFLOAT16:
        x = x.astype(value_dtype("bfloat16"))
    weight = dequantize(b, b_scales, element_format=b_format)
    with np.errstate(over="ignore", invalid="ignore"):
        # An element has 4 significant bits and x at most 24: each product is exact in the 53 bits of float64.
        y = x.astype(np.float64) @ np.swapaxes(weight, -1, -2).astype(np.float64)
        if bias is not None:
            y = y + bias.astype(np.float64)
        # Through float32 to 16 bits, as the kernels do: they accumulate in float32 and round that.
        return np.asarray(y, np.float32).astype(value_dtype(dtype))


def embedding(indices: Array, b: Codes, b_scales: Codes, *, b_format: str = "e4m3", dtype: str = "float32") -> Array:
    """Returns dequantize(b)[indices]: the rows of a packed table, as ONNX's Gather and torch's embedding give them.

    Args:
        indices: int32 or int64 [...]; a negative one counts from the last row.
        b: elements uint8 [V, D]: laid out as the second operand of a gemm with N = V and K = D, which may share them.
        b_scales: uint8 [V, ceil(D / 32)].
        b_format: "e4m3" or "e5m2".
        dtype: dtype of the result, "float32", "float16" or "bfloat16"; the latter two are rounded from float32.

    Returns:
        [..., D].

    Raises:
        ShapeError: shapes or dtypes do not fit, or an index names no row.
        ContractError: unknown format.
    """
    # First, as in the backends: a call with two errors raises the same one everywhere.
    formats.element_format(b_format), value_dtype(dtype)
    embedding_shape("embedding", indices, b.shape)
    check_scales("embedding", b.shape, b_scales.shape, -1)
    check_indices("embedding", indices, b.shape[0])
    return dequantize(b[indices], b_scales[indices], element_format=b_format, dtype=dtype)


def grouped_gemm(
    a: Codes,
    a_scales: Codes,
    b: Codes,
    b_scales: Codes,
    experts: npt.NDArray[np.int64],
    **options: Unpack[op_options.Gemm],
) -> Array:
    """Returns a times the transposes of the matrices of `b` that `experts` pick, with the sums in float64.

    The same as `gemm(a, a_scales, b[experts], b_scales[experts])`, but for rows without an expert.

    Args:
        a: elements uint8 [..., M, K].
        a_scales: uint8 [..., M, ceil(K / 32)].
        b: elements uint8 [E, N, K].
        b_scales: uint8 [E, N, ceil(K / 32)].
        experts: int64 [...], which broadcasts with the leading dimensions of `a`; -1 is the last expert, and E is none:
            the result is 0 there, whatever `a` holds.
        **options: see `op_options.Gemm`.

    Returns:
        [..., M, N].

    Raises:
        ShapeError: shapes do not fit, or an index is beyond -E..E.
        ContractError: unknown format.
    """
    a_format, b_format, dtype = op_options.gemm(**options)
    values = dequantize(a, a_scales, element_format=a_format)
    return grouped_weight_gemm(values, b, b_scales, experts, b_format=b_format, dtype=dtype)


def grouped_weight_gemm(
    x: Array, b: Codes, b_scales: Codes, experts: npt.NDArray[np.int64], **options: Unpack[op_options.WeightGemm]
) -> Array:
    """Returns x times the transposes of the matrices of `b` that `experts` pick, with the sums in float64.

    All as in `grouped_gemm`, but with x [..., M, K] and the options of `weight_gemm`.
    """
    check_value_dtype("grouped_gemm", x.dtype)
    grouped_shape("grouped_gemm", x.shape, b.shape, experts.shape)
    check_scales("grouped_gemm", b.shape, b_scales.shape, -1)
    picked = check_experts("grouped_gemm", experts, b.shape[0])
    no_expert = picked == b.shape[0]
    # One matrix more, of zeros: NumPy needs some matrix at the index E, which stands for no expert.
    b, b_scales = (np.concatenate([t, np.zeros((1, *t.shape[1:]), np.uint8)])[picked] for t in (b, b_scales))
    y = weight_gemm(x, b, b_scales, **options)
    y[np.broadcast_to(no_expert, y.shape[:-2])] = 0  # a NaN in x times the zeros would give NaN
    return y


@dataclass(frozen=True)
class ErrorBound:
    """How far a correct float32-accumulating x @ weight.T + bias may be from the exact result, per output.

        magnitude * ((K + 2) * per_term + store) + (K + 2) * underflow + tiny,   magnitude = sum |x||w| + |bias|

    The classic forward bound gamma_K * magnitude with gamma_K = K * u, u = 2^-24 (Higham, Accuracy and Stability of
    Numerical Algorithms, section 3.1; two extra roundings for the bias and the final store), which holds for every
    order of the sum; plus K products that may underflow; plus half a unit in the last place of the result's dtype.
    """

    per_term: float
    store: float
    """Half a unit in the last place of a normal result."""
    underflow: float
    tiny: float
    """Half a unit in the last place of a subnormal result."""

    def at(self, magnitude: Any, k: int) -> Any:
        """Returns the bound where the magnitude is `magnitude`."""
        return magnitude * ((k + 2) * self.per_term + self.store) + ((k + 2) * self.underflow + self.tiny)


def error_bound(dtype: str) -> ErrorBound:
    """Returns the bound for results of `dtype`: "float32", "float16" or "bfloat16"."""
    row = formats.VALUE_DTYPES[dtype]
    narrow = row is not formats.FLOAT32  # the sum is in float32 already: storing that rounds nothing
    store = 2.0 ** -(row.mantissa_bits + 1) if narrow else 0.0
    tiny = 2.0 ** (row.min_exponent - row.mantissa_bits - 1) if narrow else 0.0
    # 1 + store: storing rounds the error of the sum too. A product in the subnormal range of float32, whose spacing is
    # 2^-149, is off by up to half of that: 2^-150.
    return ErrorBound(2.0**-24 * (1 + store), store, 2.0**-150 * (1 + store), tiny)


def gemm_error_bound(
    x: Array, weight: Array, dtype: str = "float32", bias: Array | None = None
) -> npt.NDArray[np.float64]:
    """Returns the `ErrorBound` of every output of x @ weight.T + bias.

    Compare with `gemm(..., dtype="float32")`: a reference rounded to 16 bits adds a rounding of its own.

    Args:
        x: [..., M, K] dequantized values.
        weight: [..., N, K] dequantized values.
        dtype: dtype of the result being judged.
        bias: [N], or None.
    """
    magnitude = np.abs(x.astype(np.float64)) @ np.swapaxes(np.abs(weight.astype(np.float64)), -1, -2)
    if bias is not None:
        magnitude = magnitude + np.abs(bias.astype(np.float64))
    return np.asarray(error_bound(dtype).at(magnitude, x.shape[-1]), np.float64)


def encode(x: npt.NDArray[np.float32], fmt: ElementFormat) -> Codes:
    """Returns the codes of float32 values in `fmt`: round to nearest even, saturating, NaN -> 0x7f, -0 stays -0."""
    bits = x.view(np.uint32)
    sign = ((bits >> 24) & 0x80).astype(np.uint8)
    magnitude = (bits & 0x7FFFFFFF).astype(np.int64)
    # Normal elements: rebias the exponent, then round away the low mantissa bits, half to even. The sum
    # before the shift adds half a unit less one, plus the lowest bit that stays: a half carries only where that bit is
    # odd. A carry out of the mantissa raises the exponent, which is right, because codes order as magnitudes do.
    shift = 23 - fmt.mantissa_bits
    rebased = magnitude - ((127 - fmt.bias) << 23)
    normal = (rebased + (1 << (shift - 1)) - 1 + ((rebased >> shift) & 1)) >> shift
    # Subnormal elements: multiples of min_subnormal. rint rounds half to even; a carry gives the first normal.
    with np.errstate(over="ignore", invalid="ignore"):
        subnormal = np.rint(np.minimum(np.abs(x), np.float32(1)) / np.float32(fmt.min_subnormal))
    first_normal = (128 - fmt.bias) << 23  # bits of 2^(1 - bias), the smallest normal element
    codes = np.where(magnitude < first_normal, np.nan_to_num(subnormal).astype(np.int64), normal)
    # Saturation (OCP MX v1.0, section 6.3): a larger magnitude becomes the largest element, never E5M2's infinity.
    codes = np.minimum(codes, fmt.max_code).astype(np.uint8)
    codes = np.where(sign, 0 - codes, codes) if fmt.twos_complement else codes | sign
    return np.where(magnitude > 0x7F800000, np.uint8(ELEMENT_NAN), codes).astype(np.uint8)


def decode(codes: Codes, fmt: ElementFormat) -> npt.NDArray[np.float32]:
    """Returns the float32 values of element codes."""
    # A table of all 256 codes, indexed at the end: each value is computed once, from the definition.
    if fmt.twos_complement:
        return np.ldexp(np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32), -fmt.mantissa_bits)[codes]
    code = np.arange(256)
    exponent = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    # Exponent field 0 is subnormal: no implicit leading one, and the exponent of field 1.
    significand = mantissa + np.where(exponent > 0, 1 << fmt.mantissa_bits, 0)
    values = np.ldexp(significand.astype(np.float32), np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits)
    special = code & 0x7F
    values = np.where(special > fmt.max_code, np.float32(np.nan), values)
    if fmt.max_code + 1 < ELEMENT_NAN:  # E5M2 keeps the IEEE infinity between its maximum and its NaNs
        values = np.where(special == fmt.max_code + 1, np.float32(np.inf), values)
    return np.where(code & 0x80, -values, values).astype(np.float32)[codes]


def decode_scale(codes: Codes) -> npt.NDArray[np.float32]:
    """Returns the float32 values 2^(s - 127) of E8M0 codes; 255 is NaN. Code 0 is 2^-127, a subnormal."""
    with np.errstate(over="ignore"):  # the NaN code, replaced below
        values = np.ldexp(np.float32(1), codes.astype(np.int32) - SCALE_BIAS)
    return np.where(codes == SCALE_NAN, np.float32(np.nan), values).astype(np.float32)


def value_dtype(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype called `name`.

    Raises:
        ShapeError: it is not float32, float16 or bfloat16.
    """
    try:
        dtype: np.dtype[Any] = VALUE_DTYPES[name]
    except KeyError:
        raise ShapeError(
            "dtype", f"{name!r}", expected=f"one of {', '.join(VALUE_DTYPES)}", advice="cast the tensor first"
        ) from None
    return dtype
