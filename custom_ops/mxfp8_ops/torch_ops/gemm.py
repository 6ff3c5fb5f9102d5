"""`mxfp8::gemm` and `weight_gemm`. Results and errors are as in `numpy_nodes.py`; dtypes are torch's.

`gemm` takes integers, which have no gradients, and a bias, which has one. `weight_gemm` has gradients of x and bias, so
that adapters train on a packed model. You can differentiate the gradients again. Both ops raise BackendError if the
native library is missing.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from mxfp8_ops import contract, formats, native
from mxfp8_ops.checks import dtype_name, scale_count
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.nodes.gemm import product_shape
from mxfp8_ops.torch_ops import gradients
from mxfp8_ops.torch_ops.constant_weights import constant_weight
from mxfp8_ops.torch_ops.gradients import Gradient
from mxfp8_ops.torch_ops.operands import (
    DTYPE_CODES,
    EMPTY,
    FORMAT_CODES,
    Op,
    check_codes,
    check_devices,
    check_dtype,
    check_memory,
    library,
    plain,
    readable,
)
from mxfp8_ops.torch_ops.products import products
from mxfp8_ops.torch_ops.schemas import schema

# --- gemm ------------------------------------------------------------------------------------------------------------


def gemm_options(
    a_format: str = "e4m3", b_format: str = "e4m3", dtype: torch.dtype | None = None
) -> tuple[torch.dtype, int, int]:
    """Returns the dtype of the result and the codes of the formats, from the arguments of `gemm` after the bias.

    Raises:
        ContractError: unknown format.
        ShapeError: unknown dtype.
    """
    a_code, b_code, dtype = FORMAT_CODES[a_format], FORMAT_CODES[b_format], dtype or torch.float32
    if dtype not in DTYPE_CODES:
        check_dtype("gemm", dtype)
    return dtype, a_code, b_code


def _gemm_fake(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Gradient = None, *rest: Any) -> Tensor:
    check_devices("gemm", a, a_scales, b, b_scales, bias)
    dtype, *_ = gemm_options(*rest)
    return a.new_empty(gemm_shape("gemm", a, a_scales, b, b_scales, bias), dtype=dtype)


def gemm_cpu(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None = None, *rest: Any
) -> Tensor:
    """Returns dequantize(a) @ dequantize(b).T + bias, in float32 by default."""
    dtype, a_code, b_code = gemm_options(*rest)
    shape = gemm_shape("gemm", a, a_scales, b, b_scales, bias)
    if not plain(1, a, a_scales, b, b_scales):
        a, a_scales, b, b_scales = readable("gemm", "a a_scales b b_scales", a, a_scales, b, b_scales)
    if bias is not None:
        (bias,) = readable("gemm", "bias", bias)
    bias_at = None if bias is None else bias.data_ptr()
    y = EMPTY[dtype](*shape)
    n, k = shape[-1], a.shape[-1]
    # Names are looked up once, outside of the loop: a call of the op may take 5 us in Python.
    native_library, y_code, threads = library(), DTYPE_CODES[dtype], torch.get_num_threads()
    # The library wants an address for the scales of a even if K = 0 and there are none, when torch has null.
    for m, a_data, a_scales_data, b_data, b_scales_data, y_data in products(y, a, a_scales, b, b_scales):
        weight = constant_weight(b, b_scales, m)
        status = native_library.mxfp8_gemm(
            a_code, a_data, a_scales_data or y_data, b_code, b_data, b_scales_data, bias_at, m, n, k, y_code, y_data, n,
            0 if weight is None else weight.number, threads,
        )  # fmt: skip
        if status:
            native.check("gemm", status)
    return y


# It saves nothing: only the bias has a gradient, all other operands are integers.
_gemm_record: Final = gradients.recorder(
    "gemm", (4,), lambda *_: None, lambda ctx, dy: (gradients.of_bias(ctx, 4, dy),)
)
_gemm_autograd: Final = gradients.kernel("gemm", (4,), _gemm_record, "add the bias to the result", gemm_cpu)

_AS_IT_IS: Final = formats.activation_dtype(None).onnx_dtype

# --- weight_gemm -----------------------------------------------------------------------------------------------------


def weight_gemm_options(
    x_dtype: torch.dtype,
    b_format: str = "e4m3",
    dtype: torch.dtype | None = None,
    activation_dtype: torch.dtype | None = None,
) -> tuple[torch.dtype, int, int, int]:
    """Returns the dtype of the result, and the codes of the dtype of x, of the format of b and of the rounding of x.

    The arguments are the last ones of `weight_gemm`.

    Raises:
        ContractError: unknown format or activation_dtype.
        ShapeError: unknown dtype.
    """
    b_code = FORMAT_CODES[b_format]
    dtype = dtype or x_dtype
    if x_dtype not in DTYPE_CODES or dtype not in DTYPE_CODES:
        check_dtype("weight_gemm", x_dtype)
        check_dtype("weight_gemm", dtype)
    activation_code = _AS_IT_IS
    if activation_dtype is not None:
        activation_code = formats.activation_dtype(dtype_name(activation_dtype)).onnx_dtype
    return dtype, DTYPE_CODES[x_dtype], b_code, activation_code


def _weight_gemm_fake(x: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
    check_devices("weight_gemm", x, b, b_scales, bias)
    dtype, *_ = weight_gemm_options(x.dtype, *rest)
    return x.new_empty(gemm_shape("weight_gemm", x, None, b, b_scales, bias), dtype=dtype)


def weight_gemm_cpu(x: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
    """Returns x @ dequantize(b).T + bias, in the dtype of `x` by default; rows of `x` may be strided."""
    dtype, x_code, b_code, activation_code = weight_gemm_options(x.dtype, *rest)
    shape = gemm_shape("weight_gemm", x, None, b, b_scales, bias)
    n, k = shape[-1], x.shape[-1]
    stride = k
    if not (plain(x.itemsize, x) and plain(1, b, b_scales)):
        check_memory("weight_gemm", "x", x)
        # With one weight the library takes a stride between rows of x, so a view of a larger tensor is read in place. A
        # stack of weights needs each matrix of x contiguous.
        x, stride = _strided_rows(x) if b.dim() == 2 else (x.contiguous(), k)
        b, b_scales = readable("weight_gemm", "b b_scales", b, b_scales)
    if bias is not None:
        (bias,) = readable("weight_gemm", "bias", bias)
    bias_at = None if bias is None else bias.data_ptr()
    y = EMPTY[dtype](*shape)
    native_library, y_code, threads = library(), DTYPE_CODES[dtype], torch.get_num_threads()
    for m, x_data, _, b_data, b_scales_data, y_data in products(y, x, x, b, b_scales):
        weight = constant_weight(b, b_scales, m)
        status = native_library.mxfp8_weight_gemm(
            x_code, x_data, stride, activation_code, b_code, b_data, b_scales_data, bias_at, m, n, k, y_code, y_data, n,
            0 if weight is None else weight.number, threads,
        )  # fmt: skip
        if status:
            native.check("weight_gemm", status)
    return y


def _strided_rows(x: Tensor) -> tuple[Tensor, int]:
    """Returns `x` [..., K] as a matrix with contiguous rows, and their stride; a view where one exists."""
    k = x.shape[-1]
    x = x.reshape(math.prod(x.shape[:-1]), k)
    if x.stride(1) != 1 or x.stride(0) < k:
        x = x.contiguous()
    return x, max(x.stride(0), k)


def _weight_gemm_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, b, b_scales, _, ctx.b_format, *_ = inputs
    ctx.save_for_backward(b, b_scales)
    ctx.x_shape, ctx.x_dtype = x.shape, x.dtype


def _weight_gemm_backward(ctx: Any, grad: Tensor) -> tuple[Gradient, Gradient]:
    """Returns the gradients of x, through the frozen weight in float32, and of the bias.

    For adapters (LoRA) on a packed model: no gradient is quantized, and the packed weight has none. Where x is rounded
    to bfloat16, its gradient is the gradient of the rounded value.
    """
    dx = None
    if ctx.needs_input_grad[0]:
        # Dequantized again in every backward pass: a saved copy would take 4 bytes per weight.
        weight = torch.ops.mxfp8.dequantize.default(*ctx.saved_tensors, -1, ctx.b_format)
        rows = grad.float().unsqueeze(-2) if len(ctx.x_shape) == 1 else grad.float()
        dx = (rows @ weight).sum_to_size(ctx.x_shape).to(ctx.x_dtype)
    return dx, gradients.of_bias(ctx, 3, grad)


_weight_gemm_autograd: Final = gradients.kernel(
    "weight_gemm",
    (0, 3),
    gradients.recorder("weight_gemm", (0, 3), _weight_gemm_save, _weight_gemm_backward),
    "go through torch.ops.mxfp8.dequantize and a matmul",
    weight_gemm_cpu,
)

# --- both ------------------------------------------------------------------------------------------------------------


def gemm_shape(  # noqa: PLR0917 - the op's operands
    where: str, x: Tensor, x_scales: Tensor | None, b: Tensor, b_scales: Tensor, bias: Tensor | None
) -> tuple[int, ...]:
    """Returns the shape of x [..., M, K] (or [K]) times b [..., N, K] transposed.

    Raises:
        ShapeError: they do not fit together, or not with their scales [..., ceil(K / 32)] and the bias float32 [N].
    """
    # The usual call, in as few steps as Python allows: a whole op may take 5 us.
    x_shape, b_shape, codes = x.shape, b.shape, torch.uint8
    if len(b_shape) == 2 and x_shape:
        *lead, k = x_shape
        n, blocks = b_shape[0], scale_count(k)
        if (
            b_shape == (n, k)
            and b.dtype is b_scales.dtype is codes
            and b_scales.shape == (n, blocks)
            and (x_scales is None or (x.dtype is x_scales.dtype is codes and x_scales.shape == (*lead, blocks)))
            and (bias is None or (bias.dtype is torch.float32 and bias.shape == (n,)))
        ):
            return (*lead, n)
    return _gemm_shape(where, x, x_scales, b, b_scales, bias)


def _gemm_shape(  # noqa: PLR0917 - the op's operands
    where: str, x: Tensor, x_scales: Tensor | None, b: Tensor, b_scales: Tensor, bias: Tensor | None
) -> tuple[int, ...]:
    """Returns the result of `gemm_shape`, or raises its errors, for operands of any rank."""
    bias_shape = None if bias is None else tuple(bias.shape)
    broadcast: Any = torch.broadcast_shapes  # NumPy's does not take symbolic sizes
    shape = product_shape(where, tuple(x.shape), tuple(b.shape), bias_shape, broadcast)
    check_codes(where, b, b_scales, -1)
    if x_scales is not None:
        check_codes(where, x, x_scales, -1)
    if bias is not None and bias.dtype is not torch.float32:
        raise ShapeError(
            where, f"bias has dtype {dtype_name(bias.dtype)}", expected="float32", advice="pass bias.float()"
        )
    return shape


OPS: Final = (
    Op(
        schema("gemm", contract.GEMM),
        {"CPU": gemm_cpu, "Autograd": _gemm_autograd},
        _gemm_fake,
    ),
    Op(
        schema("weight_gemm", contract.WEIGHT_GEMM),
        {"CPU": weight_gemm_cpu, "Autograd": _weight_gemm_autograd},
        _weight_gemm_fake,
    ),
)
