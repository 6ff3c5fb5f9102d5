"""`mxfp8::linear_packed`: a linear layer on a packed weight that passes gradients on, to train the layers around it.

    fprop  y  = x  w^T    quantize(x), then gemm: the result of inference, bit for bit
    dgrad  dx = dy w      dy [..., M, N] and w^T [K, N] blocked along N

The weight is frozen: it has no gradient and no master copy. Its packed form is blocked along K; for dgrad it is
dequantized and quantized again along N in every backward pass, into memory that is free afterwards (4 bytes per weight,
then 1.03; nothing is kept). With "ceil" scales that costs next to nothing: both quantizations round to the same 4
significant bits, so only values that are subnormal in their block along N change. Of 1024 x 1024 normal weights 3 in a
million change, by 1e-8 of the norm; of heavy-tailed ones (normal times lognormal) 2 in 10,000, by 3e-7, where packing
had an error of 2.7e-2. The error of dx is 2.7e-2, from the quantization of dy, with or without it. Scales that
saturate, "floor" and "even", do so here too: 0.6e-2.

So dx is the dx of fake quantization with a straight-through estimator, and as exact as the dgrad of `linear_train`.
The same is true for gradients of gradients (`mxfp8::product`).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mxfp8_ops.errors import ContractError
from mxfp8_ops.torch_ops import gradients
from mxfp8_ops.torch_ops.gemm import gemm_cpu
from mxfp8_ops.torch_ops.gradients import GRADIENT_FORMATS, Gradient
from mxfp8_ops.torch_ops.operands import Op
from mxfp8_ops.torch_ops.quantize import quantize_cpu


def _options(
    a_format: str = "e4m3",
    b_format: str = "e4m3",
    fp8_format: str = "E4M3",
    scale_rounding: str = "ceil",
    dtype: torch.dtype | None = None,
) -> tuple[str, str, str, torch.dtype | None]:
    """Returns the formats of a and b, the rounding and the dtype, from the arguments of `linear_packed` after the bias.

    Raises:
        ContractError: unknown format of gradients.
    """
    if fp8_format not in GRADIENT_FORMATS:
        raise ContractError.unknown("fp8_format", fp8_format, GRADIENT_FORMATS)
    return a_format, b_format, scale_rounding, dtype


def linear_packed(x: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
    """Returns quantize(x) @ dequantize(b).mT + bias; see the module for the gradients.

    x [..., M, K] (or [K]) is float32, float16 or bfloat16, the packed weight uint8 [..., N, K] with scales
    [..., N, ceil(K / 32)], bias float32 [N]; the result [..., M, N] (or [N]), of the dtype of `x` by default.
    `fp8_format` "HYBRID" is for gradients in E5M2, `scale_rounding` for `x` and the backward pass.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        ContractError: unknown format or rounding.
        BackendError: no kernels for the device of `x`.
    """
    a_format, b_format, scale_rounding, dtype = _options(*rest)
    ops = torch.ops.mxfp8
    rows = ops.quantize.default(x, -1, a_format, scale_rounding)
    result: Tensor = ops.gemm.default(*rows, b, b_scales, bias, a_format, b_format, dtype or x.dtype)
    return result


def _cpu(x: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
    """Returns `linear_packed` of CPU tensors: two kernels in one call of the dispatcher."""
    a_format, b_format, scale_rounding, dtype = _options(*rest)
    rows, scales = quantize_cpu(x, -1, a_format, scale_rounding)
    return gemm_cpu(rows, scales, b, b_scales, bias, a_format, b_format, dtype or x.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, b, b_scales, _, ctx.a_format, ctx.b_format, fp8_format, ctx.scale_rounding, _ = inputs
    ctx.grad_format, ctx.x_shape, ctx.x_dtype = GRADIENT_FORMATS[fp8_format], x.shape, x.dtype
    ctx.save_for_backward(b, b_scales)  # not x: the weight is frozen, and dx does not depend on x


def _backward(ctx: Any, grad: Tensor) -> tuple[Gradient, Gradient]:
    """Returns the gradients of x and of the bias."""
    gradients.refuse_tangents("linear_packed", "differentiate in reverse mode", grad)
    dx = None
    if ctx.needs_input_grad[0]:
        # Dequantized again in every backward pass, and freed after it: 4 bytes per weight.
        weight = torch.ops.mxfp8.dequantize.default(*ctx.saved_tensors, -1, ctx.b_format)
        dy = grad.unsqueeze(-2) if len(ctx.x_shape) == 1 else grad
        formats = ctx.grad_format, ctx.b_format, ctx.a_format
        # `product` and not a gemm: it has gradients, which second derivatives need.
        dx = torch.ops.mxfp8.product.default(dy, weight.mT, *formats, ctx.scale_rounding, ctx.x_dtype)
        dx = dx.squeeze(-2) if len(ctx.x_shape) == 1 else dx
        dx = dx.sum_to_size(ctx.x_shape)
    return dx, gradients.of_bias(ctx, 3, grad)


_record: Final = gradients.recorder("linear_packed", (0, 3), _save, _backward)
_INSTEAD: Final = "go through torch.ops.mxfp8.dequantize and a matmul"

OPS: Final = (
    Op(
        """linear_packed(Tensor x, Tensor b, Tensor b_scales, Tensor? bias=None, str a_format="e4m3",
        str b_format="e4m3", str fp8_format="E4M3", str scale_rounding="ceil", ScalarType? dtype=None) -> Tensor""",
        {
            "CompositeExplicitAutograd": linear_packed,
            "CPU": _cpu,
            "Autograd": gradients.kernel("linear_packed", (0, 3), _record, _INSTEAD, _cpu),
        },
    ),
)
