"""`mxfp8::product`: a product of two operands that are quantized while it runs, with gradients of every order.

    y  = a b^T       a   [..., M, K] and b   [..., N, K] blocked along K
    da = dy b        dy  [..., M, N] and b^T [..., K, N] blocked along N
    db = dy^T a      dy^T [..., N, M] and a^T [..., K, M] blocked along M

Rounding is passed straight through, as in fake quantization with a straight-through estimator: the derivative of
quantize(x) by x is one, saturated values included. So a gradient of a product is a product of the same kind, and so is
a gradient of that. Each operand is quantized from its own values along the axis that is summed; in derivatives of any
order the operand in the place of a has the element format of a, and likewise for b and dy.

`linear_packed` computes its gradients with this op.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mxfp8_ops.torch_ops import gradients
from mxfp8_ops.torch_ops.gradients import Gradient
from mxfp8_ops.torch_ops.operands import Op


def product(  # noqa: PLR0917 - the op's schema
    a: Tensor,
    b: Tensor,
    a_format: str = "e4m3",
    b_format: str = "e4m3",
    grad_format: str = "e4m3",
    scale_rounding: str = "ceil",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns a @ b.mT [..., M, N], both quantized along K; see the module for the gradients.

    a [..., M, K] and b [..., N, K] are float32, float16 or bfloat16, and leading dimensions broadcast. A dtype of None
    is the dtype of `a`; `grad_format` is the element format of gradients of the result.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        ContractError: unknown format or rounding.
        BackendError: no kernels for the device of `a`.
    """
    ops = torch.ops.mxfp8
    rows = ops.quantize.default(a, -1, a_format, scale_rounding)
    columns = ops.quantize.default(b, -1, b_format, scale_rounding)
    result: Tensor = ops.gemm.default(*rows, *columns, None, a_format, b_format, dtype or a.dtype)
    return result


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.a_format, ctx.b_format, ctx.grad_format, ctx.scale_rounding, _ = inputs
    ctx.a_like, ctx.b_like = (a.shape, a.dtype), (b.shape, b.dtype)
    # Each gradient needs only the other operand: the rest is not saved.
    needs_a, needs_b, *_ = ctx.needs_input_grad
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Gradient, Gradient]:
    """Returns the gradients of a and b, which are products."""
    a, b = ctx.saved_tensors
    op, da, db = torch.ops.mxfp8.product.default, None, None
    if b is not None:
        # sum_to_size adds up what broadcasting repeated.
        (shape, dtype), formats = ctx.a_like, (ctx.grad_format, ctx.b_format, ctx.a_format)
        da = op(grad, b.mT, *formats, ctx.scale_rounding, dtype).sum_to_size(shape)
    if a is not None:
        (shape, dtype), formats = ctx.b_like, (ctx.grad_format, ctx.a_format, ctx.b_format)
        db = op(grad.mT, a.mT, *formats, ctx.scale_rounding, dtype).sum_to_size(shape)
    return da, db


_record: Final = gradients.recorder("product", (0, 1), _save, _backward)

OPS: Final = (
    Op(
        """product(Tensor a, Tensor b, str a_format="e4m3", str b_format="e4m3", str grad_format="e4m3",
        str scale_rounding="ceil", ScalarType? dtype=None) -> Tensor""",
        {
            "CompositeExplicitAutograd": product,
            "Autograd": gradients.kernel("product", (0, 1), _record, "multiply in high precision"),
        },
    ),
)
