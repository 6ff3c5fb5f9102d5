"""`mxfp8::linear_train`: a linear layer whose three products, forward and backward, all run in MXFP8.

    fprop  y  = x  w^T    x  [M, K] and w  [N, K] blocked along K ("rowwise")
    dgrad  dx = dy w      dy [M, N] blocked along N, w   [N, K] along N ("columnwise")
    wgrad  dw = dy^T x    dy [M, N] blocked along M, x   [M, K] along M ("columnwise")

A stack [..., N, K] multiplies x [..., M, K] with the same leading sizes matrix by matrix. It need not be a weight: the
products Q K^T and P V of attention are such calls, with w = K and w = V^T, and these three give dQ, dK, dP and dV.

A block must lie along the axis a product sums over, so x, w and dy are each quantized twice, always from the
high-precision tensor and never from the other quantized copy. Elements are E4M3; with fp8_format="HYBRID" dy
has E5M2. The weight stays a master parameter in its own dtype, and the gradient of the bias is summed in float32.

The columnwise copy of x is made in the forward pass and saved instead of x: 1.03 bytes per value instead of 2 or 4.
A weight [N, K] itself is saved (it is a parameter and lives anyway) and quantized columnwise in the backward pass. Of a
stack, which may be an activation, the columnwise copy is saved.

A derivative of the gradients is an error.

Source: NVIDIA, "Recipes for Pre-training LLMs with MXFP8"; TransformerEngine's MXFP8BlockScaling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError, ShapeError
from mxfp8_ops.formats import BLOCK_SIZE
from mxfp8_ops.nodes.gemm import check_gemm_shapes
from mxfp8_ops.torch_ops import gradients
from mxfp8_ops.torch_ops.cached_weights import quantized_weight
from mxfp8_ops.torch_ops.gradients import GRADIENT_FORMATS, Gradient
from mxfp8_ops.torch_ops.operands import Op, check_dtype, readable

Saved = tuple[Tensor | None, Tensor | None]
"""An operand for the backward pass: as it is, or elements and scales."""


def linear_train(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, fp8_format: str = "E4M3", scale_rounding: str = "ceil"
) -> Tensor:
    """Returns x @ weight.T + bias, both operands quantized along K; see the module for the gradients.

    Args:
        x: [..., M, K] (or [K]) float32, float16 or bfloat16. Any M and K, also 0.
        weight: [N, K] float32, float16 or bfloat16; the dtype may differ from `x`. Also [..., N, K] for x [..., M, K]
            with the same leading sizes.
        bias: [N] float32, float16 or bfloat16, or None.
        fp8_format: "E4M3", or "HYBRID" for gradients in E5M2.
        scale_rounding: "ceil", "floor" or "even".

    Returns:
        [..., M, N] (or [N]) in the dtype of `x`.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        ContractError: unknown format or rounding.
        BackendError: no kernels for the device of `x`.
    """
    _check(x, weight, bias, fp8_format, scale_rounding)
    ops = torch.ops.mxfp8
    # Both along K, the axis that this product sums over; the gradients need their own copies along other axes.
    rows = ops.quantize.default(x, -1, "e4m3", scale_rounding)
    columns = quantized_weight(weight, scale_rounding)
    # The kernels add a float32 bias to float32 sums, whatever the dtype of the master parameter.
    if bias is not None:
        (bias,) = readable("linear_train", "bias", bias)
        bias = bias.float()
    result: Tensor = ops.gemm.default(*rows, *columns, bias, "e4m3", "e4m3", x.dtype)
    return result


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, fp8_format: str, scale_rounding: str) -> None:
    """Raises the errors of `linear_train`."""
    if fp8_format not in GRADIENT_FORMATS:
        raise ContractError.unknown("fp8_format", fp8_format, GRADIENT_FORMATS)
    formats.scale_increment(formats.E4M3, scale_rounding)
    check_master("linear_train", x, weight)
    if bias is not None:
        check_dtype("linear_train", bias.dtype)
    if weight.dim() != 2 and not (weight.dim() == x.dim() > 2 and weight.shape[:-2] == x.shape[:-2]):
        raise ShapeError(
            "linear_train",
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}",
            expected="a weight [N, K], or [..., N, K] for x [..., M, K] with the same leading sizes",
            advice="store it as nn.Linear does, or expand x",
        )
    bias_shape = None if bias is None else tuple(bias.shape)
    check_gemm_shapes("linear_train", tuple(x.shape), tuple(weight.shape), bias_shape)


def check_master(where: str, x: Tensor, weight: Tensor) -> None:
    """Raises ShapeError unless both are float32, float16 or bfloat16; a packed weight cannot be trained."""
    if weight.dtype is torch.uint8:
        raise ShapeError(
            where,
            "the weight is packed (uint8 codes)",
            expected="a master weight in float32, float16 or bfloat16: an optimizer's steps are smaller than the "
            "distances between MXFP8 values",
            advice="train the original weight and pack it then, or train the layers around it (mxfp8::linear_packed)",
        )
    for tensor in (x, weight):
        check_dtype(where, tensor.dtype)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves a columnwise copy of x, for the gradient of the weight, and the weight, for the gradient of x."""
    x, weight, bias, ctx.fp8_format, ctx.scale_rounding = inputs
    ctx.x_shape, ctx.x_dtype, ctx.stack = x.shape, x.dtype, weight.dim() > 2
    ctx.weight_dtype = gradients.dtype_of(weight)
    ctx.bias_dtype = None if bias is None else bias.dtype
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    saved_x: Saved = (None, None)
    saved_weight: Saved = (None, None)
    if needs_weight:
        saved_x = _columnwise(x if ctx.stack or _in_parts(x) else _matrix(x), "e4m3", ctx.scale_rounding)
    if needs_x:
        saved_weight = quantized_weight(weight.mT, ctx.scale_rounding) if ctx.stack else (weight, None)
    ctx.save_for_backward(*saved_x, *saved_weight)


def backward(ctx: Any, grad: Tensor) -> tuple[Gradient, Gradient, Gradient]:
    """Returns the gradients of x, weight and bias; None for each that is not needed."""
    needs_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]  # absent if no bias was passed
    dy = grad if ctx.stack or _in_parts(grad) else _matrix(grad)
    gradients.refuse_tangents("linear_train", "keep this layer in high precision", grad)
    dx, dw = _products(ctx, dy)
    db = rounded(dy.sum([*range(dy.dim() - 1)], dtype=torch.float32), ctx.bias_dtype) if needs_bias else None
    return dx if dx is None else dx.reshape(ctx.x_shape), dw, db


def _products(ctx: Any, dy: Tensor) -> tuple[Gradient, Gradient]:
    """Returns the gradients of x, as a matrix, and of the weight; dy is read once where both are needed."""
    x_elements, x_scales, *weight = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ops, fmt = torch.ops.mxfp8, GRADIENT_FORMATS[ctx.fp8_format]
    dx = dw = None
    rows: tuple[Tensor, ...] = ()
    columns: tuple[Tensor, ...] = ()
    # dy is the only operand that both gradients read: one pass over it makes both of its copies.
    if needs_x and needs_weight and dy.dim() == 2:
        both = ops.quantize_both.default(dy, fmt, ctx.scale_rounding)
        rows, columns = both[:2], both[2:]
    if needs_x and not rows:
        rows = ops.quantize.default(dy, -1, fmt, ctx.scale_rounding)
    if needs_weight and not columns:
        columns = _columnwise(dy, fmt, ctx.scale_rounding)
    if needs_x:
        # A weight matrix is quantized along N only now: its copy lives as long as this product, or in the cache.
        w = weight if ctx.stack else quantized_weight(weight[0].mT, ctx.scale_rounding)
        dx = ops.gemm.default(*rows, *w, None, fmt, "e4m3", ctx.x_dtype)
    if needs_weight:
        operands = *columns, x_elements, x_scales
        operands = operands if ctx.stack else tuple(map(_flat_columns, operands))
        dw = ops.gemm.default(*operands, None, fmt, "e4m3", ctx.weight_dtype)
    return dx, dw


_PLACES: Final = (0, 1, 2)
_record: Final = gradients.recorder("linear_train", _PLACES, setup_context, gradients.first_order(backward))


def autocast(name: str) -> Callable[..., Any]:
    """Returns the kernel that calls an op with x, and so with its result, in the autocast dtype.

    Weight and bias are used as they are: the weight is quantized anyway, and from its master precision.
    """

    def kernel(x: Tensor, *args: Any) -> Any:
        device = x.device.type
        # Disabled inside, or the op would be dispatched to this function again.
        with torch.autocast(device, enabled=False):
            x = x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() else x
            return getattr(torch.ops.mxfp8, name).default(x, *args)

    return kernel


def _matrix(x: Tensor) -> Tensor:
    """Returns `x` [..., K] as [M, K]."""
    if x.dim() == 2:
        return x
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns float32 sums in another dtype; where each process has a part of them, they are reduced first."""
    places = getattr(total, "placements", ())  # of a DTensor
    if dtype is not torch.float32 and any(place.is_partial() for place in places):
        from torch.distributed.tensor import DTensor, Replicate

        assert isinstance(total, DTensor)
        total = total.redistribute(placements=[Replicate() if place.is_partial() else place for place in places])
    return total.to(dtype)


def _in_parts(x: Tensor) -> bool:
    """Returns True if the caller has to quantize `x` [..., M, K] before it flattens the rows.

    `x` is then a DTensor with a shard along rows in the middle (a sequence), which _matrix would gather, and no block
    has rows of two matrices. After the quantization, torch gathers codes.
    """
    places = getattr(x, "placements", ())
    return any(place.is_shard() and 0 < place.dim < x.dim() - 1 for place in places) and x.shape[-2] % BLOCK_SIZE == 0


def _flat_columns(codes: Tensor) -> Tensor:
    """Returns columnwise codes [..., K, M] as [K, all rows]."""
    return codes if codes.dim() == 2 else codes.movedim(-2, 0).flatten(1)


def _columnwise(x: Tensor, element_format: str, scale_rounding: str) -> tuple[Tensor, Tensor]:
    """Returns `x` [..., M, K] blocked along M and stored [..., K, M]: the blocked axis last, as gemm wants it."""
    pair: tuple[Tensor, Tensor] = torch.ops.mxfp8.quantize.default(x.mT, -1, element_format, scale_rounding)
    return pair


def refuse_vmap(name: str, of: str, advice: str) -> Callable[..., Any]:
    """Returns the torch.vmap rule that refuses an op whose gradients are blocked along the rows of operand `of`."""

    def refuse(*_: Any) -> Any:
        expected = f"a plain call, because its gradients are blocked along all rows of {of}"
        raise ShapeError(name, "called under torch.vmap", expected=expected, advice=advice)

    return refuse


OPS: Final = (
    Op(
        """linear_train(Tensor x, Tensor weight, Tensor? bias=None, str fp8_format="E4M3", str scale_rounding="ceil")
        -> Tensor""",
        {
            "CompositeExplicitAutograd": linear_train,
            "Autograd": gradients.kernel("linear_train", _PLACES, _record, "keep this layer in high precision"),
            "AutocastCPU": autocast("linear_train"),
            "AutocastCUDA": autocast("linear_train"),
        },
        vmap=refuse_vmap(
            "linear_train", "one call", "loop over the mapped dimension, or pass it as a leading dimension of x"
        ),
    ),
)
