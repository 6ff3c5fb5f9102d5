"""MXFP8Conv: a convolution of quantized values with a packed weight, with an epilogue and a residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mxfp8_ops import numerics
from mxfp8_ops.checks import Shape, check_value_dtype
from mxfp8_ops.errors import ContractError, ShapeError
from mxfp8_ops.formats import BLOCK_SIZE, INT8
from mxfp8_ops.node import ELEMENTS, FLOAT, SCALES, VALUES, Op, Port
from mxfp8_ops.nodes.fused_gemm import FUNCTIONS, UNIT, Epilogue, Float64s, activated
from mxfp8_ops.nodes.quantize import dequantize, quantize, rounded
from mxfp8_ops.numerics import Array, Codes

if TYPE_CHECKING:
    from mxfp8_ops.function_body import Body


@dataclass(frozen=True)
class Settings:
    """The options of a convolution, which the functions of all backends take."""

    strides: Sequence[int] = (1,)
    """One for each spatial axis; a single one stands for all, here and below."""
    pads: Sequence[int] = (0,)
    """Zeros around x: all begins, then all ends, as in ONNX."""
    dilations: Sequence[int] = (1,)
    group: int = 1
    x_format: str = "int8"
    """Element format to which x is quantized: "int8", "e4m3" or "e5m2"."""
    b_format: str = "int8"
    scale_rounding: str = "ceil"
    """The rounding of the scales of x: "ceil", "floor" or "even"."""
    epilogue: str = "none"
    """One of `EPILOGUES`, with its constants `alpha` and `beta`."""
    alpha: float = 0.0
    beta: float = 0.0
    residual_at: str = "before"
    """Whether the residual is added "before" or "after" the epilogue."""
    dtype: str = "float32"
    """Dtype of the result: "float32", "float16" or "bfloat16"."""


def conv(
    x: Array,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    settings: Settings | None = None,
) -> Array:
    """Returns epilogue(conv(x, dequantize(b)) + bias + residual), with x quantized and the sums in float64.

    x is quantized in blocks of 32 channels of one pixel, and padding is zero: a NaN or Inf makes its own block NaN. The
    sums are rounded to float32 before the epilogue and after it, as in the kernels. Results of other implementations
    differ from this one by at most `conv_error_bound`.

    Args:
        x: float32, float16 or bfloat16 [N, C, D] or [N, C, H, W].
        b: elements uint8 [O, k..., C / group], channels last, so that blocks are contiguous as in every packed weight.
        b_scales: uint8 [O, k..., ceil(C / group / 32)].
        bias: float32 [O], or None.
        residual: values of the shape of the result, or None.
        settings: the rest; None for `Settings()`.

    Returns:
        [N, O, ...].

    Raises:
        ShapeError: shapes or dtypes do not fit.
        ContractError: unknown format, rounding or epilogue.
    """
    settings = settings or Settings()
    row = epilogue_function(settings.epilogue, settings.alpha, settings.beta)
    window = Window.from_shapes("conv", x.shape, b.shape, settings)
    weight = dequantize(b, b_scales, element_format=settings.b_format)
    check_operands("conv", x, bias, residual, window.result)
    codes = quantize(x, axis=1, element_format=settings.x_format, scale_rounding=settings.scale_rounding)
    values = dequantize(*codes, axis=1, element_format=settings.x_format)
    with np.errstate(over="ignore", invalid="ignore"):
        y = window.sums(values.astype(np.float64), weight.astype(np.float64))
        if bias is not None:
            y = y + _per_channel(bias, y.ndim)
        extra = 0.0 if residual is None else residual.astype(np.float64)
        before = check_residual_at(settings.residual_at) == "before"
        y = row.function(np.asarray(y + extra * before, np.float32).astype(np.float64)) + (0.0 if before else extra)
        return np.asarray(y, np.float32).astype(numerics.value_dtype(settings.dtype))


def _per_channel(bias: Array, rank: int) -> Float64s:
    return bias.astype(np.float64).reshape(-1, *[1] * (rank - 2))


# --- The window


@dataclass(frozen=True)
class Window:
    """The pixels of x that each output reads: a convolution without its values."""

    kernel: Shape
    strides: Shape
    pads: Shape
    """All begins, then all ends, as in ONNX."""
    dilations: Shape
    group: int
    result: Shape
    """[N, O, ...], the shape of the result."""

    @classmethod
    def from_shapes(cls, where: str, x: Shape, b: Shape, settings: Settings) -> Window:
        """Returns the window of a convolution of x [N, C, ...] with b [O, k..., C / group].

        Raises:
            ShapeError: the shapes do not fit each other, or a list of the settings.
        """
        axes, group = len(x) - 2, settings.group
        if axes not in {1, 2} or len(b) != len(x):
            expected = "[N, C, D] and [O, k, C / group], or [N, C, H, W] and [O, kh, kw, C / group]"
            raise ShapeError(where, f"operands {x} and {b}", expected=expected, advice="reshape one")
        if group < 1 or x[1] != b[-1] * group or b[0] % group:
            expected = f"C = {b[-1]} x group = {b[-1] * group} channels, and O a multiple of group"
            raise ShapeError(
                where, f"operands {x} and {b} with group {group}", expected=expected, advice="correct group"
            )
        if group > 1 and b[-1] % BLOCK_SIZE:
            # A block of x would belong to two groups, and its scale with it.
            expected = f"a multiple of {BLOCK_SIZE} channels in each group"
            raise ShapeError(where, f"{b[-1]} channels in a group", expected=expected, advice="keep it in float32")
        strides, dilations = (_list(where, name, getattr(settings, name), axes, 1) for name in ("strides", "dilations"))
        pads = _list(where, "pads", settings.pads, 2 * axes, 0)
        kernel = b[1:-1]
        sizes = []
        for size, k, s, d, begin, end in zip(x[2:], kernel, strides, dilations, pads, pads[axes:], strict=False):
            if (room := size + begin + end - d * (k - 1) - 1) < 0:
                expected = f"at least {d * (k - 1) + 1}, a kernel of {k} with dilation {d}"
                raise ShapeError(where, f"{size + begin + end} padded pixels", expected=expected, advice="pad x")
            sizes.append(room // s + 1)
        return cls(kernel, strides, pads, dilations, group, (x[0], b[0], *sizes))

    def rows(self, sizes: Shape) -> tuple[Shape, Shape]:
        """Returns the two mxfp8_conv_axis of mxfp8_ops.h, for x [N, C, *sizes]."""
        count = len(sizes)
        pads = self.pads[:count], self.pads[count:]
        rows = zip(sizes, self.kernel, self.strides, self.dilations, *pads, strict=True)
        last = [*((1, 1, 1, 1, 0, 0),) * (2 - count), *rows]
        return last[0], last[1]

    def sums(self, x: Float64s, weight: Float64s) -> Float64s:
        """Returns the convolution of x [N, C, ...] with a weight [O, k..., C / group]."""
        axes = len(self.kernel)
        padded = np.pad(x, [(0, 0), (0, 0), *zip(self.pads[:axes], self.pads[axes:], strict=True)])
        taps = []
        for at in np.ndindex(*self.kernel):
            starts = [i * d for i, d in zip(at, self.dilations, strict=True)]
            ends = [b + (n - 1) * s + 1 for b, n, s in zip(starts, self.result[2:], self.strides, strict=True)]
            steps = (slice(*one) for one in zip(starts, ends, self.strides, strict=True))
            taps.append(padded[(slice(None), slice(None), *steps)])
        # [N, group, C / group, taps, pixels] x [group, O / group, taps, C / group]
        channels, count = weight.shape[-1], int(np.prod(self.result[2:]))
        pixels = np.stack(taps, 2).reshape(x.shape[0], self.group, channels, len(taps), count)
        grouped = weight.reshape(self.group, self.result[1] // self.group, len(taps), channels)
        y = np.einsum("ngctp,gotc->ngop", pixels, grouped, optimize=True)
        return np.asarray(y.reshape(self.result))


def _list(where: str, name: str, values: Sequence[int], count: int, least: int) -> Shape:
    sizes = tuple(values) * (count if len(values) == 1 else 1)
    if len(sizes) != count or min(sizes) < least:
        expected = f"{count} integers of at least {least}, or one for all"
        raise ShapeError(where, f"{name} {list(values)}", expected=expected, advice="correct it")
    return sizes


def check_operands(where: str, x: Any, bias: Any, residual: Any, result: Shape) -> None:
    """Raises ShapeError unless x and residual are values, bias is [O], and residual has the shape `result`."""
    check_value_dtype(where, x.dtype)
    if bias is not None and bias.shape != result[1:2]:
        expected = f"({result[1]},), one value per output channel"
        raise ShapeError(where, f"bias has shape {tuple(bias.shape)}", expected=expected, advice="reshape it")
    if residual is not None:
        check_value_dtype(where, residual.dtype)
        if residual.shape != result:
            expected = f"{result}, the shape of the result"
            raise ShapeError(
                where, f"residual has shape {tuple(residual.shape)}", expected=expected, advice="broadcast it first"
            )


def check_residual_at(at: str) -> str:
    """Returns `at`, the place where a residual is added; ContractError if there is no such place."""
    if at not in {"before", "after"}:
        raise ContractError.unknown("residual_at", at, ("before", "after"))
    return at


# --- Epilogues, and the bound


EPILOGUES: Final = (*FUNCTIONS, "clip", "leaky_relu", "hard_swish")
"""The epilogues of a convolution: those of the gemms; clip to alpha..beta; leaky_relu with slope alpha; hard_swish,
x * clip(alpha * x + beta, 0, 1)."""


def epilogue_function(name: str, alpha: float = 0.0, beta: float = 0.0) -> Epilogue:
    """Returns the epilogue called `name` with its constants; ContractError if there is none."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    low, high = np.float64(np.float32(alpha)), np.float64(np.float32(beta))
    match name:
        case "clip":
            return Epilogue(lambda x: np.clip(x, low, high), 1.0, 0.0)
        case "leaky_relu":
            return Epilogue(lambda x: np.where(x < 0, low * x, x), max(1.0, abs(low)), abs(low))
        case "hard_swish":
            # The derivative 2 alpha x + beta is largest where the clip ends: 2 - beta there, -beta at its other end.
            steepest = max(1.0, abs(2 - high), abs(high))
            return Epilogue(lambda x: x * np.clip(low * x + high, 0, 1), steepest, 4.0)
    raise ContractError.unknown("epilogue", name, EPILOGUES)


def conv_error_bound(
    x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None, *, settings: Settings
) -> Float64s:
    """Returns the largest error of each output of a convolution, against its reference with dtype="float32".

    x [N, C, ...] and weight [O, k..., C / group] are dequantized values; the rest is as in `conv`. As in
    `gemm_error_bound`, K products add up; here K is taps x C / group.
    """
    window = Window.from_shapes("conv", x.shape, weight.shape, settings)
    row = epilogue_function(settings.epilogue, settings.alpha, settings.beta)
    bound = numerics.error_bound(settings.dtype)
    # As in `fused_gemm_error_bound`, with one more rounding, of the sum with a residual.
    bound = replace(
        bound,
        per_term=bound.per_term * row.steepest,
        store=bound.store + (row.error + 3) * UNIT * (1 + bound.store) * row.steepest,
        underflow=bound.underflow * row.steepest,
    )
    magnitude = window.sums(np.abs(x.astype(np.float64)), np.abs(weight.astype(np.float64)))
    if bias is not None:
        magnitude = magnitude + np.abs(_per_channel(bias, magnitude.ndim))
    if residual is not None:
        magnitude = magnitude + np.abs(residual.astype(np.float64))
    # Clip is the only epilogue whose result may exceed the magnitude of its sum: then the stores round a constant.
    constant = max(abs(settings.alpha), abs(settings.beta)) if settings.epilogue == "clip" else 0.0
    return np.asarray(bound.at(magnitude, int(np.prod(weight.shape[1:]))) + bound.store * constant + bound.tiny)


# --- The portable body


def _conv_body(g: Body) -> None:
    """X, B, B_scales, bias, residual -> Y."""
    # B has the channels of X, or of one group of them.
    values, rank = rounded(g, g.floats("X"), "x_dtype", whole=g.known("B").whole), g.known("X").rank
    lists = {name: g.attribute(name) for name in ("strides", "pads", "dilations")}
    # The default stands for all axes in ONNX too. Another single value is written for each axis, if X has a known rank.
    written = {name: value for name, value in lists.items() if value != g.op.attributes[name]}
    for name, value in written.items():
        if isinstance(value, tuple) and len(value) == 1 and rank is not None:
            written[name] = value * (rank - 2) * (2 if name == "pads" else 1)
    operands = [values, _weight(g)]
    if g.known("bias").present is not False:
        operands.append(g.or_zeros("bias", "B_scales", axis=0))
    y = g("Conv", *operands, group=g.attribute("group"), **written)
    if g.known("residual").present is False:
        y = g.choose("epilogue", lambda g, name: _activated(g, y, name))
    else:
        residual = g.floats("residual")
        y = g.choose("residual_at", lambda g, at: _with_residual(g, y, residual, at))
    g.result(g.cast(y, "output_dtype"), "Y")


def _with_residual(g: Body, x: str, residual: str, at: str) -> str:
    check_residual_at(at)
    if at == "before":
        x = g("Add", x, residual)
        return g.choose("epilogue", lambda g, name: _activated(g, x, name))
    return g("Add", g.choose("epilogue", lambda g, name: _activated(g, x, name)), residual)


def _activated(g: Body, x: str, name: str) -> str:
    """Returns the activation `name` of x; a NaN stays, which Clip and Relu of ONNX Runtime may drop."""
    alpha, beta = (g.number(constant) for constant in ("alpha", "beta")) if name not in FUNCTIONS else ("", "")
    match name:
        case "clip":
            low = g("Where", g("Less", x, alpha), alpha, x)
            return g("Where", g("Less", beta, low), beta, low)
        case "leaky_relu":
            return g("Where", g("Less", x, g.constant(np.float32(0))), g("Mul", x, alpha), x)
        case "hard_swish":
            gate = g("Add", g("Mul", x, alpha), beta)
            return g("Mul", x, g("Clip", gate, g.constant(np.float32(0)), g.constant(np.float32(1))))
    if name in FUNCTIONS:
        return activated(g, x, name)
    raise ContractError.unknown("epilogue", name, EPILOGUES)


def _weight(g: Body) -> str:
    """Returns the float32 values of B as [O, C / group, k...], the layout of ONNX's Conv."""
    values = g.values("B", "B_scales", g.known("B"))
    # Through [O, taps, C], because nodes with one and with two axes may share the body.
    o, k, c = (g("Shape", values, start=start, end=end) for start, end in ((0, 1), (1, -1), (-1, 1 << 31)))
    rows = g("Reshape", values, g("Concat", o, g("ReduceProd", k), c, axis=0), allowzero=1)
    return g("Reshape", g("Transpose", rows, perm=[0, 2, 1]), g("Concat", o, c, k, axis=0), allowzero=1)


# --- The contract


CONV: Final = Op(
    "MXFP8Conv",
    (
        Port("X", VALUES, "[N, C, D] or [N, C, H, W]"),
        Port("B", ELEMENTS, "[O, k..., C / group]"),
        Port("B_scales", SCALES, "[O, k..., ceil(C / group / 32)]"),
        Port("bias", (FLOAT,), "[O]", optional=True),
        Port("residual", VALUES, "shape of Y, or [0] for none", optional=True, like="X", has_stand_in=True),
    ),
    (Port("Y", VALUES, "[N, O, ...]"),),
    MappingProxyType(
        {
            "strides": (1,),
            "pads": (0,),
            "dilations": (1,),
            "group": 1,
            "x_dtype": INT8.onnx_dtype,
            "scale_rounding": "ceil",
            "epilogue": "none",
            "alpha": 0.0,
            "beta": 0.0,
            "residual_at": "before",
            "output_dtype": FLOAT,
        }
    ),
    "Y = epilogue(conv(X, B) + bias + residual), with X quantized in blocks of 32 channels.",
    _conv_body,
)


OPS: Final = (CONV,)
