"""`mxfp8::conv`: a convolution with a packed weight. Results and errors as in `numpy_nodes.conv`; dtypes are torch's.

Tensors of any strides are read; those that are not contiguous, such as channels_last ones, are copied first, and the
result is contiguous. It has no gradients: an operand that requires one is an error.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from mxfp8_ops import contract, native
from mxfp8_ops.checks import Shape, dtype_name
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.nodes.conv import EPILOGUES, Settings, Window, check_operands, check_residual_at, epilogue_function
from mxfp8_ops.torch_ops import gradients
from mxfp8_ops.torch_ops.constant_weights import constant_weight
from mxfp8_ops.torch_ops.operands import (
    DTYPE_CODES,
    EMPTY,
    FORMAT_CODES,
    ROUNDING_CODES,
    Op,
    check_codes,
    check_devices,
    check_dtype,
    library,
    plain,
    readable,
)
from mxfp8_ops.torch_ops.schemas import arguments, schema

_Axes: Final[Any] = ctypes.c_int64 * 12
"""Two mxfp8_conv_axis."""


_SETTINGS: Final = {argument.name: argument.default for argument in arguments(contract.CONV)[5:]}
"""The arguments after the tensors, with their defaults: torch leaves out arguments that equal them."""


def options(*rest: Any) -> tuple[Settings, torch.dtype]:
    """Returns the settings and the dtype of the result, from the arguments of `conv` after the tensors.

    Raises:
        ContractError: unknown format, rounding, epilogue or place of the residual.
        ShapeError: unknown dtype.
    """
    fields: dict[str, Any] = {**_SETTINGS, **dict(zip(_SETTINGS, rest, strict=False))}
    dtype: torch.dtype = fields["dtype"] or torch.float32
    if dtype not in DTYPE_CODES:
        check_dtype("conv", dtype)
    lists = {name: tuple(fields[name]) for name in ("strides", "pads", "dilations")}
    s = Settings(**{**fields, **lists, "dtype": dtype_name(dtype)})
    epilogue_function(s.epilogue), check_residual_at(s.residual_at)  # check the names
    FORMAT_CODES[s.b_format], FORMAT_CODES[s.x_format], ROUNDING_CODES[s.scale_rounding]
    return s, dtype


def check_conv(window: Window, x: Tensor, b: Tensor, b_scales: Tensor, *optional: Tensor | None) -> None:
    """Raises ShapeError unless the operands of a convolution fit its window. `optional`: bias and residual."""
    bias, residual = optional
    check_codes("conv", b, b_scales, -1)
    check_operands("conv", x, bias, residual, window.result)
    if bias is not None and bias.dtype is not torch.float32:
        what = f"bias has dtype {dtype_name(bias.dtype)}"
        raise ShapeError("conv", what, expected="float32", advice="pass bias.float()")


# Cached, because it takes as long as a small convolution.
@functools.lru_cache(maxsize=4096)
def _placed(x: Shape, b: Shape, settings: Settings) -> tuple[Window, Any]:
    """Returns the window of a convolution of x with b, and its two mxfp8_conv_axis."""
    window = Window.from_shapes("conv", x, b, settings)
    return window, _Axes(*itertools.chain(*window.rows(x[2:])))


def _fake(
    x: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *rest: Any
) -> Tensor:
    check_devices("conv", x, b, b_scales, bias, residual)
    settings, dtype = options(*rest)
    window = Window.from_shapes("conv", tuple(x.shape), tuple(b.shape), settings)
    check_conv(window, x, b, b_scales, bias, residual)
    return x.new_empty(window.result, dtype=dtype)


def _readable(*operands: Tensor | None) -> dict[str, Tensor]:
    """Returns x, b, b_scales, bias and residual, contiguous, by name; without those that are None."""
    names = ("x", "b", "b_scales", "bias", "residual")
    present = {name: t for name, t in zip(names, operands, strict=True) if t is not None}
    return {name: t if plain(t.itemsize, t) else readable("conv", name, t)[0] for name, t in present.items()}


def conv_cpu(
    x: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *rest: Any
) -> Tensor:
    """Returns epilogue(conv(x, dequantize(b)) + bias + residual), in float32 by default."""
    s, dtype = options(*rest)
    window, axes = _placed(tuple(x.shape), tuple(b.shape), s)
    check_conv(window, x, b, b_scales, bias, residual)
    read = _readable(x, b, b_scales, bias, residual)
    at = {name: t.data_ptr() for name, t in read.items()}
    y = EMPTY[dtype](*window.result)
    residual_code = DTYPE_CODES[torch.float32 if residual is None else residual.dtype]
    # Kernels take the weight as a matrix with a row for each output channel.
    rows = [read[name].flatten(1) for name in ("b", "b_scales")]
    weight = constant_weight(rows[0], rows[1], y.shape[2:].numel()) if y.numel() else None
    status = library().mxfp8_conv(
        DTYPE_CODES[x.dtype], at["x"], *x.shape[:2], b.shape[0], s.group, ctypes.addressof(axes),
        FORMAT_CODES[s.x_format], ROUNDING_CODES[s.scale_rounding], FORMAT_CODES[s.b_format], at["b"], at["b_scales"],
        at.get("bias"), residual_code, at.get("residual"), s.residual_at == "after", EPILOGUES.index(s.epilogue),
        s.alpha, s.beta, DTYPE_CODES[dtype], y.data_ptr(), 0 if weight is None else weight.number,
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        native.check("conv", status)
    return y


_FUNCTIONS: Final[Mapping[str, Callable[[Tensor, float, float], Tensor]]] = {
    "none": lambda y, _alpha, _beta: y,
    "relu": lambda y, _alpha, _beta: y.relu(),
    "gelu": lambda y, _alpha, _beta: functional.gelu(y),
    "gelu_tanh": lambda y, _alpha, _beta: functional.gelu(y, approximate="tanh"),
    "silu": lambda y, _alpha, _beta: functional.silu(y),
    "clip": lambda y, alpha, beta: y.clamp(alpha, beta),
    "leaky_relu": lambda y, alpha, _beta: torch.where(y < 0, alpha * y, y),
    "hard_swish": lambda y, alpha, beta: y * (alpha * y + beta).clamp(0, 1),
}
"""The epilogues in torch."""


def composed(
    x: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *rest: Any
) -> Tensor:
    """Returns the result of `conv` from quantize, dequantize and torch's convolution, on any device that has them.

    This is what a CUDA tensor meets. No GPU has run it yet. The convolution is in float32: a result in bfloat16 would
    round the sums. cuDNN may multiply in TF32, which is exact, as an element has at most 8 significant bits.
    """
    check_devices("conv", x, b, b_scales, bias, residual)
    s, dtype = options(*rest)
    window, _ = _placed(tuple(x.shape), tuple(b.shape), s)
    check_conv(window, x, b, b_scales, bias, residual)
    read, ops, axes = _readable(x, b, b_scales, bias, residual), torch.ops.mxfp8, len(window.kernel)
    codes = ops.quantize.default(read["x"], 1, s.x_format, s.scale_rounding)
    values = ops.dequantize.default(*codes, 1, s.x_format)
    weight = ops.dequantize.default(read["b"], read["b_scales"], -1, s.b_format).movedim(-1, 1)
    begins, ends = window.pads[:axes], window.pads[axes:]
    # torch counts the axes of pads from the last one.
    padded = functional.pad(values, [size for pair in zip(begins[::-1], ends[::-1], strict=True) for size in pair])
    convolve = functional.conv1d if axes == 1 else functional.conv2d
    y = convolve(padded, weight, bias, window.strides, 0, window.dilations, s.group)
    if residual is not None and s.residual_at == "before":
        y = y + residual
    y = _FUNCTIONS[s.epilogue](y, s.alpha, s.beta)
    if residual is not None and s.residual_at == "after":
        y = y + residual
    return y.to(dtype)


def _autograd(keys: torch._C.DispatchKeySet, *args: Any) -> Tensor:
    for name, at in (("x", 0), ("bias", 3), ("residual", 4)):
        if at < len(args) and args[at] is not None:
            gradients.refuse_cut("conv", args[at], name, "a packed convolution passes no derivative on")
    if keys.raw_repr() == gradients.PLAIN_CPU:
        return conv_cpu(*args)
    result: Tensor = gradients.below_autograd(torch.ops.mxfp8.conv, *args)
    return result


OPS: Final = (Op(schema("conv", contract.CONV), {"CPU": conv_cpu, "Autograd": _autograd}, _fake),)
