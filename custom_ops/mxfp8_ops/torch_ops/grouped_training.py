"""`mxfp8::grouped_linear_train`: linear layers of a mixture of experts, whose three products run in MXFP8.

For each expert e, with the rows x_e and dy_e that `offs` gives it, the products of `linear_train`:

    fprop  y_e  = x_e  w_e^T     x and w blocked along K
    dgrad  dx_e = dy_e w_e       dy and w blocked along N
    wgrad  dw_e = dy_e^T x_e     dy and x blocked along the rows of the group

No block of the last product lies in two groups: `quantize_groups` quantizes the rows of each on their own, and the last
block of a group may be partial, so nothing is padded in memory. The bits are the same as in a loop of `linear_train`
over the groups. On every device each group is one product of `gemm`, and `offs` is read on the host.

The columnwise copy of x is made in the forward pass and saved instead of x. A derivative of the gradients is an error.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError, ShapeError
from mxfp8_ops.torch_ops import gradients
from mxfp8_ops.torch_ops.cached_weights import quantized_weight
from mxfp8_ops.torch_ops.gradients import GRADIENT_FORMATS, Gradient
from mxfp8_ops.torch_ops.grouped import check_offs, groups, options
from mxfp8_ops.torch_ops.operands import Op, Pair, check_devices, check_dtype, check_memory
from mxfp8_ops.torch_ops.training import autocast, check_master, refuse_vmap

_INSTEAD: Final = "loop over the experts with mxfp8::linear_train"


def grouped_linear_train(
    x: Tensor, weight: Tensor, offs: Tensor, fp8_format: str = "E4M3", scale_rounding: str = "ceil"
) -> Tensor:
    """Returns each group of rows of `x` times the transpose of its own weight, both quantized along K.

    Args:
        x: [S, K] float32, float16 or bfloat16, sorted by expert.
        weight: [E, N, K] float32, float16 or bfloat16; the dtype may differ from `x`.
        offs: int32 or int64 [E], ascending: the end of each group of rows. A group may be empty.
        fp8_format: "E4M3", or "HYBRID" for gradients in E5M2.
        scale_rounding: "ceil", "floor" or "even".

    Returns:
        [S, N] in the dtype of `x`. Rows behind the last group are 0, and so are their gradients.

    Raises:
        ShapeError: shapes or dtypes do not fit, or `offs` is not ascending within 0..S.
        ContractError: unknown format or rounding.
        BackendError: no kernels for the device of `x`.
    """
    _check(x, weight, offs, fp8_format, scale_rounding)
    ops = torch.ops.mxfp8
    rows = ops.quantize.default(x, -1, "e4m3", scale_rounding)
    columns = quantized_weight(weight, scale_rounding)
    result: Tensor = ops.grouped_gemm.default(*rows, *columns, offs, "e4m3", "e4m3", x.dtype)
    return result


def _check(x: Tensor, weight: Tensor, offs: Tensor, fp8_format: str, scale_rounding: str) -> None:
    """Raises the errors of `grouped_linear_train`, except for the values of `offs`."""
    if fp8_format not in GRADIENT_FORMATS:
        raise ContractError.unknown("fp8_format", fp8_format, GRADIENT_FORMATS)
    formats.scale_increment(formats.E4M3, scale_rounding)
    check_master("grouped_linear_train", x, weight)
    if x.dim() != 2 or weight.dim() != 3 or x.shape[-1] != weight.shape[-1]:
        raise ShapeError(
            "grouped_linear_train",
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}",
            expected="[S, K] and [E, N, K] with the same K",
            advice="store each expert's weight with K last, or transpose it",
        )
    check_offs("grouped_linear_train", offs, weight.shape[0])
    check_devices("grouped_linear_train", x, weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves a columnwise copy of x, for the gradient of the weight, and the weight, for the gradient of x."""
    x, weight, offs, ctx.fp8_format, ctx.scale_rounding = inputs
    ctx.x_dtype, ctx.weight_dtype = x.dtype, gradients.dtype_of(weight)
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    copy: tuple[Tensor | None, ...] = (None, None)
    if needs_weight:
        copy = torch.ops.mxfp8.quantize_groups.default(x, offs, "e4m3", ctx.scale_rounding)
    ctx.save_for_backward(*copy, weight if needs_x else None, offs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Gradient, Gradient]:
    """Returns the gradients of x and weight; None for each that is not needed."""
    gradients.refuse_tangents("grouped_linear_train", _INSTEAD, dy)
    x_elements, x_scales, weight, offs = ctx.saved_tensors
    ops, fmt, rounding = torch.ops.mxfp8, GRADIENT_FORMATS[ctx.fp8_format], ctx.scale_rounding
    dx = dw = None
    if weight is not None:
        rows = ops.quantize.default(dy, -1, fmt, rounding)
        columns = quantized_weight(weight.mT, rounding)
        dx = ops.grouped_gemm.default(*rows, *columns, offs, fmt, "e4m3", ctx.x_dtype)
    if x_elements is not None:
        columns = ops.quantize_groups.default(dy, offs, fmt, rounding)
        dw = ops.grouped_wgrad.default(*columns, x_elements, x_scales, offs, fmt, "e4m3", ctx.weight_dtype)
    return dx, dw


_PLACES: Final = (0, 1)
_autograd: Final = gradients.kernel(
    "grouped_linear_train",
    _PLACES,
    gradients.recorder("grouped_linear_train", _PLACES, _save, gradients.first_order(_backward)),
    _INSTEAD,
)


# --- The product over the rows of groups ------------------------------------------------------------------------------


def _quantize_groups_fake(x: Tensor, offs: Tensor, element_format: str = "e4m3", scale_rounding: str = "ceil") -> Pair:
    formats.element_format(element_format)
    formats.scale_increment(formats.E4M3, scale_rounding)
    check_dtype("quantize_groups", x.dtype)
    if x.dim() != 2:
        raise ShapeError("quantize_groups", f"x has shape {tuple(x.shape)}", expected="[S, K]", advice="reshape it")
    check_offs("quantize_groups", offs)
    (rows, k), count = x.shape, offs.shape[0]
    # A group has at most one partial block: a bound that follows from shapes alone, so that a graph can be traced.
    return x.new_empty((k, rows), dtype=torch.uint8), x.new_empty((k, rows // 32 + count), dtype=torch.uint8)


def quantize_groups(x: Tensor, offs: Tensor, *args: str) -> Pair:
    """Returns `x` [S, K] blocked along S, as elements [K, S] and scales [K, S // 32 + E].

    The rows of a group are quantized on their own. The scales of its blocks follow the scales of the group before.
    Elements and scales are 0 behind the last group.

    Raises:
        ShapeError: x is no matrix, has another dtype, or `offs` is not ascending within 0..S.
        ContractError: unknown format or rounding.
    """
    elements, scales = (codes.zero_() for codes in _quantize_groups_fake(x, offs, *args))
    check_memory("quantize_groups", "x", x)
    check_memory("quantize_groups", "offs", offs)
    for _, rows, blocks in groups("quantize_groups", offs, x.shape[0]):
        elements[:, rows], scales[:, blocks] = torch.ops.mxfp8.quantize.default(x[rows].mT, -1, *args)
    return elements, scales


def _grouped_wgrad_fake(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, offs: Tensor, *rest: Any) -> Tensor:
    a_format, b_format, dtype = options(*rest)
    check_devices("grouped_wgrad", a, a_scales, b, b_scales)
    check_offs("grouped_wgrad", offs)
    for element_format, codes, scales in ((a_format, a, a_scales), (b_format, b, b_scales)):
        formats.element_format(element_format)
        wanted = (codes.shape[0], a.shape[-1]), (codes.shape[0], a.shape[-1] // 32 + offs.shape[0])
        if (codes.shape, scales.shape) != wanted or not codes.dtype is scales.dtype is torch.uint8:
            raise ShapeError(
                "grouped_wgrad",
                f"elements {tuple(codes.shape)} and scales {tuple(scales.shape)} for {tuple(offs.shape)} groups",
                expected="uint8 [N, S] and [N, S // 32 + E], with S of both operands the same",
                advice="pass what mxfp8::quantize_groups returns for the same offs",
            )
    return a.new_empty((offs.shape[0], a.shape[0], b.shape[0]), dtype=dtype or torch.float32)


def grouped_wgrad(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, offs: Tensor, *rest: Any) -> Tensor:
    """Returns [E, N, K]: for each group, the product of a [N, S] and b [K, S] over its rows (see `quantize_groups`).

    Raises:
        ShapeError: shapes or dtypes do not fit, or `offs` is not ascending within 0..S.
        ContractError: unknown format.
        BackendError: no kernels for the device of `a`.
    """
    y = _grouped_wgrad_fake(a, a_scales, b, b_scales, offs, *rest).zero_()
    operands = {"a": a, "a_scales": a_scales, "b": b, "b_scales": b_scales}
    for name, tensor in (*operands.items(), ("offs", offs)):
        check_memory("grouped_wgrad", name, tensor)
    for expert, rows, blocks in groups("grouped_wgrad", offs, a.shape[1]):
        parts = (tensor[:, blocks if name.endswith("scales") else rows] for name, tensor in operands.items())
        y[expert] = torch.ops.mxfp8.gemm.default(*parts, None, *options(*rest)[:2], y.dtype)
    return y


OPS: Final = (
    Op(
        """grouped_linear_train(Tensor x, Tensor weight, Tensor offs, str fp8_format="E4M3", str scale_rounding="ceil")
        -> Tensor""",
        {
            "CompositeExplicitAutograd": grouped_linear_train,
            "Autograd": _autograd,
            "AutocastCPU": autocast("grouped_linear_train"),
            "AutocastCUDA": autocast("grouped_linear_train"),
        },
        vmap=refuse_vmap("grouped_linear_train", "a group", "loop over the mapped dimension"),
    ),
    Op(
        """quantize_groups(Tensor x, Tensor offs, str element_format="e4m3", str scale_rounding="ceil")
        -> (Tensor, Tensor)""",
        {
            "CompositeExplicitAutograd": quantize_groups,
            "Autograd": gradients.cut("quantize_groups", quantize_groups),
        },
        _quantize_groups_fake,
    ),
    Op(
        """grouped_wgrad(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor offs, str a_format="e4m3",
        str b_format="e4m3", ScalarType? dtype=None) -> Tensor""",
        {"CompositeExplicitAutograd": grouped_wgrad},
        _grouped_wgrad_fake,
    ),
)
