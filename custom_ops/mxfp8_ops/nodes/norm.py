"""MXFP8NormQuantize and MXFP8AddNormQuantize: rows normalized, and quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from mxfp8_ops import numerics, op_options
from mxfp8_ops.checks import check_value_dtype
from mxfp8_ops.errors import ContractError, ShapeError
from mxfp8_ops.node import FLOAT, FLOAT8E4M3FN, VALUES, Op, Port
from mxfp8_ops.nodes.quantize import QUANTIZE, quantize, quantized_rows
from mxfp8_ops.numerics import Array, Codes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mxfp8_ops.function_body import Body

Float64s = npt.NDArray[np.float64]

_UNIT: Final = 2.0**-24
"""Half a unit in the last place of 1 in float32."""

NORMS: Final = ("layer", "rms")
"""How rows are normalized: layer subtracts the mean of a row, rms does not."""


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
    codes = quantize(normalized, element_format=element_format, scale_rounding=scale_rounding)
    return *codes, normalized, total


def _rows(x: Array, norm: str, epsilon: float) -> tuple[Float64s, Float64s]:
    """Returns rows less their mean, and the root of the mean of the squares of that, in float64."""
    if norm not in NORMS:
        raise ContractError.unknown("norm", norm, NORMS)
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
        norm: one of `NORMS`.
        epsilon: that of the norm.
    """
    dtype = next(name for name, numpy in numerics.VALUE_DTYPES.items() if numpy == total.dtype)
    store, k = numerics.error_bound(dtype), total.shape[-1]
    d, deviation = _rows(total, norm, epsilon)
    # The error of a sum of K values, in any order, is at most K roundings of the sum of their magnitudes (Higham,
    # section 3.1).
    magnitudes = np.abs(total.astype(np.float64))
    mean = (k + 1) * _UNIT * magnitudes.mean(-1, keepdims=True) if norm == "layer" and k else np.zeros(1)
    # The two errors of v, relative to it: those of the sum of squares, and the square of the mean's own error.
    p = (k + 4) * _UNIT + (mean / deviation) ** 2
    shift = 0 if bias is None else np.abs(bias.astype(np.float64))
    gain = np.abs(scale.astype(np.float64)) / deviation
    # `rounded` is the size of the result, which is stored twice: by the implementation and by the reference.
    rounded = gain * np.abs(d) + shift
    inexact = gain * (2 * mean + np.abs(d) * (p + 8 * _UNIT)) + 2 * _UNIT * shift
    return np.asarray(inexact * (1 + 2 * store.store) + 2 * (store.store * rounded + store.tiny + 2.0**-149))


def check_norm(where: str, x: Any, scale: Any, bias: Any, residual: Any) -> None:
    """Raises ShapeError unless x [..., K], scale [K], bias [K] and a residual like `x` fit together.

    Args:
        where: the op, for errors.
        x: an array.
        scale: a float32 array.
        bias: the same, or None.
        residual: an array, or None.
    """
    if len(x.shape) < 1:
        raise ShapeError(where, "a scalar", expected="[..., K]", advice="reshape it")
    # float32 whatever the dtype of x: the C ABI takes these as float pointers, and they are small.
    for name, row in (("scale", scale), ("bias", bias)):
        if row is not None and (row.shape, row.dtype) != (x.shape[-1:], np.float32):
            raise ShapeError(
                where,
                f"{name} is {row.dtype} of shape {row.shape}",
                expected=f"float32 of shape {x.shape[-1:]}",
                advice="broadcast or cast it first",
            )
    # The residual does not broadcast: the kernels read it value by value beside x.
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ShapeError(
            where,
            f"a residual that is {residual.dtype} of shape {residual.shape}",
            expected=f"{x.dtype} of shape {x.shape}, as the input",
            advice="broadcast or cast it first",
        )


# --- The portable body


def _norm_quantize_body(g: Body) -> None:
    """X, scale, bias -> elements, scales, normalized."""
    _norm(g, g.floats("X"))


def _add_norm_quantize_body(g: Body) -> None:
    """X, residual, scale, bias -> elements, scales, normalized, sum."""
    g.result(g.like(g("Add", g.floats("X"), g("Cast", "residual", to=FLOAT)), "X"), "sum")
    _norm(g, "sum" if g.known("X").dtype == FLOAT else g("Cast", "sum", to=FLOAT))


def _norm(g: Body, x: str) -> None:
    """Rows of float32 values -> elements, scales, normalized."""
    # ONNX Runtime crashes where LayerNormalization has an empty name for a bias.
    bias = [] if g.known("bias").present is False else [g.or_zeros("bias", "scale")]
    y = g.choose("norm", lambda g, norm: _normalized(g, x, norm, bias))
    g.result(g.like(y, "X"), "normalized")
    quantized_rows(g, "normalized", g.known("X").dtype)


def _normalized(g: Body, x: str, norm: str, bias: Sequence[str]) -> str:
    """Returns x normalized, times scale, plus bias if there is one."""
    if norm not in NORMS:
        raise ContractError.unknown("norm", norm, NORMS)
    if norm == "layer":
        return g("LayerNormalization", x, "scale", *bias, axis=-1, epsilon=g.attribute("epsilon"))
    variance = g("ReduceMean", g("Mul", x, x), g.constant([-1]))
    y = g("Mul", g("Div", x, g("Sqrt", g("Add", variance, g.number("epsilon")))), "scale")
    return g("Add", y, *bias) if bias else y


# --- The contract


_NORM_INPUTS: Final = (Port("scale", (FLOAT,), "[K]"), Port("bias", (FLOAT,), "[K]", optional=True))
_NORM_OUTPUTS: Final = (*QUANTIZE.outputs, Port("normalized", VALUES, "shape of X", optional=True, like="X"))
_NORM_ATTRIBUTES: Final[Mapping[str, int | float | str]] = MappingProxyType(
    {"norm": "layer", "epsilon": 1e-5, "output_dtype": FLOAT8E4M3FN, "scale_rounding": "ceil"}
)
NORM_QUANTIZE: Final = Op(
    "MXFP8NormQuantize",
    (Port("X", VALUES, "[..., K]"), *_NORM_INPUTS),
    _NORM_OUTPUTS,
    _NORM_ATTRIBUTES,
    "Rows normalized in float32, times scale, plus bias, rounded to the dtype of X; and that in MXFP8.",
    _norm_quantize_body,
    fuses=(QUANTIZE.name, "norm"),
)
ADD_NORM_QUANTIZE: Final = Op(
    "MXFP8AddNormQuantize",
    (Port("X", VALUES, "[..., K]"), Port("residual", VALUES, "shape of X", like="X"), *_NORM_INPUTS),
    (*_NORM_OUTPUTS, Port("sum", VALUES, "shape of X", optional=True, like="X")),
    _NORM_ATTRIBUTES,
    "MXFP8NormQuantize of sum = X + residual.",
    _add_norm_quantize_body,
    fuses=(NORM_QUANTIZE.name, "sum"),
)


OPS: Final = (NORM_QUANTIZE, ADD_NORM_QUANTIZE)
