"""The fused nodes in NumPy: compositions of `numerics`, and how far float32 may be from them.

The other backends have functions with these signatures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from mxfp8_ops import contract, numerics, op_options
from mxfp8_ops.checks import check_factor, check_norm, check_value_dtype
from mxfp8_ops.errors import ContractError
from mxfp8_ops.numerics import Array, Codes

if TYPE_CHECKING:
    from typing_extensions import Unpack

Float64s = npt.NDArray[np.float64]

UNIT: Final = 2.0**-24
"""Half a unit in the last place of 1 in float32."""


def gemm(
    a: Codes,
    a_scales: Codes,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    **options: Unpack[op_options.FusedGemm],
) -> Array:
    """Returns epilogue(A @ B.T + bias) * factor, as `numerics.gemm` multiplies.

    Args:
        a: elements uint8 [..., M, K] (or [K], which gives [..., N]).
        a_scales: uint8 [..., M, ceil(K / 32)].
        b: elements uint8 [..., N, K]; leading dimensions broadcast against those of `a`.
        b_scales: uint8 [..., N, ceil(K / 32)].
        bias: float32 [N], or None.
        **options: see `op_options.FusedGemm`.

    Raises:
        ShapeError: shapes do not fit.
        ContractError: unknown format or epilogue.
    """
    epilogue, factor, rest = op_options.epilogue(**options)
    a_format, b_format, dtype = op_options.gemm(**rest)
    values = numerics.dequantize(a, a_scales, element_format=a_format)
    return weight_gemm(values, b, b_scales, bias, factor=factor, epilogue=epilogue, b_format=b_format, dtype=dtype)


def gemm_quantize(
    a: Codes,
    a_scales: Codes,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    **options: Unpack[op_options.GemmQuantize],
) -> tuple[Codes, Codes, Array]:
    """Returns (elements, scales, y): y = epilogue(A @ B.T + bias) in float32, and its rows quantized.

    All as in `gemm`; see `op_options.GemmQuantize`.

    Returns:
        elements: uint8, the shape of `y`.
        scales: uint8 [..., ceil(N / 32)].
        y: float32 [..., M, N] (or [..., N]), the values that were quantized.
    """
    a_format, b_format, epilogue, element_format, scale_rounding = op_options.gemm_quantize(**options)
    y = gemm(a, a_scales, b, b_scales, bias, epilogue=epilogue, a_format=a_format, b_format=b_format)
    return *numerics.quantize(y, element_format=element_format, scale_rounding=scale_rounding), y


def weight_gemm(
    x: Array, b: Codes, b_scales: Codes, bias: Array | None = None, **options: Unpack[op_options.FusedWeightGemm]
) -> Array:
    """Returns epilogue(x @ dequantize(b).T + bias) * factor, as `numerics.weight_gemm` multiplies.

    All as in `gemm`, but x [..., M, K] (or [K]) is float32, float16 or bfloat16; see `op_options.FusedWeightGemm`.
    """
    epilogue, factor, rest = op_options.epilogue(**options)
    b_format, dtype, activation_dtype = op_options.weight_gemm(**rest)
    row = _epilogue(epilogue)
    sums = numerics.weight_gemm(x, b, b_scales, bias, b_format=b_format, activation_dtype=activation_dtype)
    if factor is not None:
        check_factor("gemm", factor, sums.shape)
    # The sums are rounded to float32 once before the epilogue and once after it, as in the kernels; in between float64.
    with np.errstate(over="ignore", invalid="ignore"):
        y = row.of(sums.astype(np.float64))
        if factor is not None:
            y = y * factor.astype(np.float64)
        return np.asarray(y, np.float32).astype(numerics.value_dtype(dtype))


def norm_quantize(
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    **options: Unpack[op_options.NormQuantize],
) -> tuple[Codes, Codes, Array, Array]:
    """Returns (elements, scales, normalized, sum): rows of x + residual, normalized, and quantized along the last axis.

    Args:
        x: [..., K] float32, float16 or bfloat16.
        scale: float32 [K].
        bias: float32 [K], or None.
        residual: dtype and shape of `x`; None adds nothing.
        **options: see `op_options.NormQuantize`.

    Returns:
        elements: uint8, the shape of `x`.
        scales: uint8 [..., ceil(K / 32)].
        normalized: the values that were quantized, in the dtype of `x`.
        sum: x + residual in the dtype of `x`, the values that were normalized.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        ContractError: unknown norm, format or rounding.
    """
    norm, epsilon, element_format, scale_rounding = op_options.norm_quantize(**options)
    check_value_dtype("norm_quantize", x.dtype)
    check_norm("norm_quantize", x, scale, bias, residual)
    total = x
    with np.errstate(all="ignore"):
        # The sum is an output and is stored in the dtype of x: the norm sees the rounded sum, so that both agree.
        if residual is not None:
            total = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
        centred, deviation = _rows(total, norm, epsilon)
        y = centred / deviation * scale.astype(np.float64) + (0 if bias is None else bias.astype(np.float64))
        normalized = np.asarray(y, np.float32).astype(x.dtype)
    codes = numerics.quantize(normalized, element_format=element_format, scale_rounding=scale_rounding)
    return *codes, normalized, total


def _rows(x: Array, norm: str, epsilon: float) -> tuple[Float64s, Float64s]:
    """Returns rows less their mean, and the root of the mean of the squares of that, in float64."""
    if norm not in contract.NORMS:
        raise ContractError.unknown("norm", norm, contract.NORMS)
    wide = x.astype(np.float64)
    # The mean of no values is NaN, with a warning; a row without values has no deviation to divide by.
    if wide.shape[-1] == 0:
        return wide, np.ones_like(wide)
    centred = wide - wide.mean(-1, keepdims=True) if norm == "layer" else wide
    return centred, np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)


def norm_error_bound(
    total: Array, scale: Array, bias: Array | None = None, *, norm: str = "layer", epsilon: float = 1e-5
) -> Float64s:
    """Returns how far a float32 `normalized` may be from that of `norm_quantize`, both in the dtype of `total`.

    For means that are sums in any order, of the rows and then of the squares of what is left of them (two passes), with
    u = 2^-24, deviation d = x - mean and v = mean(d^2) + epsilon:

        mean      off by at most m = (K + 1) u mean|x|;  0 for "rms"
        v         off by at most p v, p = (K + 4) u + m^2 / v: the deviations sum to 0, so m counts squared
        result    |scale| / sqrt(v) (2 m + |d| (p + 8 u)) + 2 u |bias|, and a unit in the last place for the stores

    It says nothing of rows whose squares leave the range of float32, and only what is smaller than v of p v.

    Args:
        total: [..., K], the values to normalize.
        scale: float32 [K].
        bias: float32 [K], or None.
        norm: one of `contract.NORMS`.
        epsilon: that of the norm.
    """
    dtype = next(name for name, numpy in numerics.VALUE_DTYPES.items() if numpy == total.dtype)
    store, k = numerics.error_bound(dtype), total.shape[-1]
    d, deviation = _rows(total, norm, epsilon)
    # The error of a sum of K values, in any order, is at most K roundings of the sum of their magnitudes (Higham,
    # section 3.1).
    magnitudes = np.abs(total.astype(np.float64))
    mean = (k + 1) * UNIT * magnitudes.mean(-1, keepdims=True) if norm == "layer" and k else np.zeros(1)
    # The two errors of v, relative to it: those of the sum of squares, and the square of the mean's own error.
    p = (k + 4) * UNIT + (mean / deviation) ** 2
    shift = 0 if bias is None else np.abs(bias.astype(np.float64))
    gain = np.abs(scale.astype(np.float64)) / deviation
    # `rounded` is the size of the result, which is stored twice: by the implementation and by the reference.
    rounded = gain * np.abs(d) + shift
    inexact = gain * (2 * mean + np.abs(d) * (p + 8 * UNIT)) + 2 * UNIT * shift
    return np.asarray(inexact * (1 + 2 * store.store) + 2 * (store.store * rounded + store.tiny + 2.0**-149))


# --- Epilogues -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Epilogue:
    """The function that a gemm applies to its sums, and the error of float32 in it."""

    of: Callable[[Float64s], Float64s]
    steepest: float
    """The greatest magnitude of its derivative: the factor on an error of the sum, at most."""
    error: float
    """The greatest error of evaluating it in float32, in units of 2^-24 |x|: no epilogue exceeds |x|."""


def error_bound(dtype: str, epilogue: str) -> numerics.ErrorBound:
    """Returns the bound for results of `dtype` of a fused gemm, where there is a factor of 1.

    Its magnitude is that of the gemm, which no epilogue exceeds. A factor multiplies it and the bound but for `tiny`.
    """
    # An error of the sum grows with the derivative at most; then come the epilogue's own error and two roundings more,
    # of its result and of the product with a factor.
    bound, row = numerics.error_bound(dtype), _epilogue(epilogue)
    return numerics.ErrorBound(
        per_term=bound.per_term * row.steepest,
        store=bound.store + (row.error + 2) * UNIT * (1 + bound.store),
        underflow=bound.underflow * row.steepest,
        tiny=bound.tiny,
    )


def gemm_error_bound(
    x: Array,
    weight: Array,
    dtype: str = "float32",
    bias: Array | None = None,
    *,
    epilogue: str = "none",
    factor: Array | None = None,
) -> Float64s:
    """Returns how far every output of a fused gemm may be from `gemm` or `weight_gemm` with dtype="float32".

    Args:
        x: [..., M, K] dequantized values.
        weight: [..., N, K] dequantized values.
        dtype: dtype of the result being judged.
        bias: [N], or None.
        epilogue: one of `contract.EPILOGUES`.
        factor: the shape of the result, or None.
    """
    bound = error_bound(dtype, epilogue)
    magnitude = np.abs(x.astype(np.float64)) @ np.swapaxes(np.abs(weight.astype(np.float64)), -1, -2)
    if bias is not None:
        magnitude = magnitude + np.abs(bias.astype(np.float64))
    # `tiny` twice: inside the bound it is scaled by the factor, and the store after the factor has one of its own.
    times = np.ones(1) if factor is None else np.abs(factor.astype(np.float64))
    return np.asarray(times * bound.at(magnitude, x.shape[-1]) + bound.tiny)


def _relu(x: Float64s) -> Float64s:
    # A comparison, as in the kernels: -0 and NaN pass through.
    return np.where(x < 0, 0.0, x)


def _gelu(x: Float64s) -> Float64s:
    # erfc(-z) and not 1 + erf(z), which cancels for negative x: there gelu is small but not 0.
    return np.asarray(x * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2)))


def _gelu_tanh(x: Float64s) -> Float64s:
    # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2z)), which does not cancel.
    return np.asarray(x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _silu(x: Float64s) -> Float64s:
    return np.asarray(x / (1 + np.exp(-x)))


# The derivatives of gelu and gelu_tanh reach 1.129, that of silu 1.0998. An exponential or an erf in float32 and the
# operations around it may be off by 8 roundings of |x|; none and relu do not round at all.
EPILOGUES: Final[Mapping[str, Epilogue]] = MappingProxyType(
    {
        "none": Epilogue(lambda x: x, 1.0, 0.0),
        "relu": Epilogue(_relu, 1.0, 0.0),
        "gelu": Epilogue(_gelu, 1.13, 8.0),
        "gelu_tanh": Epilogue(_gelu_tanh, 1.13, 8.0),
        "silu": Epilogue(_silu, 1.1, 8.0),
    }
)
"""Each of `contract.EPILOGUES`."""


def _epilogue(name: str) -> Epilogue:
    try:
        return EPILOGUES[name]
    except KeyError:
        raise ContractError.unknown("epilogue", name, EPILOGUES) from None
