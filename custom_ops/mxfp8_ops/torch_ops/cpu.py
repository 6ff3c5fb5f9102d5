"""The torch ops on the CPU: the native library, called on the tensors' own memory with torch's number of threads.

Where the library takes a row stride, strided inputs are read in place; what it cannot express is copied once. Meaning,
shapes and errors are those of `numerics.py`, and BackendError if the native library is missing; dtypes are torch's.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from typing import Final

import torch
from torch import Tensor

from mxfp8_ops import native
from mxfp8_ops.checks import scale_count, scale_shape, split_at
from mxfp8_ops.formats import ELEMENT_FORMATS, SCALE_ROUNDINGS
from mxfp8_ops.torch_ops import shapes
from mxfp8_ops.torch_ops.products import products
from mxfp8_ops.torch_ops.shapes import DTYPE_CODES, NO_GRADIENT, Pair

_FORMAT_CODES: Final = {name: fmt.onnx_dtype for name, fmt in ELEMENT_FORMATS.items()}
_ROUNDING_CODES: Final = {name: code for code, name in enumerate(SCALE_ROUNDINGS)}


def quantize(x: Tensor, axis: int = -1, element_format: str = "e4m3", scale_rounding: str = "ceil") -> Pair:
    """Returns (elements, scales) of `x` [..., K, ...].

    Contiguous tensors, matrices with strided rows and transposed matrices (blocked along their last axis, the one that
    is strided in memory) are read in place.
    """
    axis = shapes.check_quantize(x, axis, element_format, scale_rounding)
    if x.requires_grad and torch.is_grad_enabled():
        warnings.warn(NO_GRADIENT, stacklevel=2)
    codes = _FORMAT_CODES[element_format], _ROUNDING_CODES[scale_rounding]
    if not x.is_contiguous():
        if axis == x.dim() - 1 and (strided := _strided_matrix(x)) is not None:
            return _quantize_strided(x, *strided, *codes)
        if axis == 0 and x.dim() == 2 and x.t().is_contiguous():
            # Blocks are contiguous in memory: quantize the transpose, then transpose bytes instead of values.
            elements, scales = quantize(x.t(), 1, element_format, scale_rounding)
            return elements.t().contiguous(), scales.t().contiguous()
        x = x.contiguous()
    shape = tuple(x.shape)  # whose slices cost less than those of a torch.Size
    elements = torch.empty(*shape, dtype=torch.uint8)
    scales = torch.empty(*scale_shape(shape, axis), dtype=torch.uint8)
    status = native.load().mxfp8_quantize(
        DTYPE_CODES[x.dtype], x.data_ptr(), *split_at(shape, axis), *codes, elements.data_ptr(), scales.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        native.check("quantize", status)
    return elements, scales


def quantize_both(
    x: Tensor, element_format: str = "e4m3", scale_rounding: str = "ceil"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns quantize(x) and quantize(x.t()) of a matrix: (elements, scales) of either."""
    shapes.check_quantize_both(x, element_format, scale_rounding)
    return *quantize(x, -1, element_format, scale_rounding), *quantize(x.t(), -1, element_format, scale_rounding)


def dequantize(
    elements: Tensor, scales: Tensor, axis: int = -1, element_format: str = "e4m3", dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the values that (elements, scales) stand for, in float32 if `dtype` is None."""
    axis, dtype = shapes.check_dequantize(elements, scales, axis, element_format, dtype)
    shape = tuple(elements.shape)
    y = torch.empty(*shape, dtype=dtype)
    outer, k, inner = split_at(shape, axis)
    elements, scales = elements.contiguous(), scales.contiguous()
    status = native.load().mxfp8_dequantize(
        _FORMAT_CODES[element_format], elements.data_ptr(), scales.data_ptr(), outer, k, inner, DTYPE_CODES[dtype],
        y.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if status:
        native.check("dequantize", status)
    return y


def gemm(  # noqa: PLR0917 - the op's schema
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None = None,
    a_format: str = "e4m3",
    b_format: str = "e4m3",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns dequantize(a) @ dequantize(b).T + bias, in float32 if `dtype` is None."""
    shape, dtype = shapes.check_gemm(a, a_scales, b, b_scales, bias, a_format, b_format, dtype)
    y = torch.empty(*shape, dtype=dtype)
    n, k = shape[-1], a.shape[-1]
    a, a_scales, b, b_scales = a.contiguous(), a_scales.contiguous(), b.contiguous(), b_scales.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    # The library wants an address for the scales of a even if K = 0 and there are none, when torch has null.
    for m, a_data, a_scales_data, b_data, b_scales_data, y_data in products(y, n, (a, a_scales), (b, b_scales)):
        status = native.load().mxfp8_gemm(
            _FORMAT_CODES[a_format], a_data, a_scales_data or y_data, _FORMAT_CODES[b_format], b_data, b_scales_data,
            None if bias is None else bias.data_ptr(), m, n, k, DTYPE_CODES[dtype], y_data, n, torch.get_num_threads(),
        )  # fmt: skip
        if status:
            native.check("gemm", status)
    return y


def weight_gemm(  # noqa: PLR0917 - the op's schema
    x: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None = None,
    b_format: str = "e4m3",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns x @ dequantize(b).T + bias, in the dtype of `x` if `dtype` is None; rows of `x` may be strided."""
    shape, dtype = shapes.check_weight_gemm(x, b, b_scales, bias, b_format, dtype)
    y = torch.empty(*shape, dtype=dtype)
    n, k = shape[-1], x.shape[-1]
    b, b_scales, stride = b.contiguous(), b_scales.contiguous(), k
    if b.dim() == 2 and not x.is_contiguous():
        x, stride = _strided_rows(x)
    else:
        x = x.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    for m, x_data, _, b_data, b_scales_data, y_data in products(y, n, (x, x), (b, b_scales)):
        status = native.load().mxfp8_weight_gemm(
            DTYPE_CODES[x.dtype], x_data, stride, _FORMAT_CODES[b_format], b_data, b_scales_data,
            None if bias is None else bias.data_ptr(), m, n, k, DTYPE_CODES[dtype], y_data, n,
            torch.get_num_threads(),
        )  # fmt: skip
        if status:
            native.check("weight_gemm", status)
    return y


def _strided_matrix(x: Tensor) -> tuple[Tensor, bool] | None:
    """Returns `x` [..., K] as the matrix it is in memory, and whether that is transposed; None if there is none.

    The rows are [M, K] with K contiguous, or [K, M] with M contiguous (the transposed case), `stride(0)` apart.
    """
    k = x.shape[-1]
    if x.numel() == 0 or x.dim() < 2:
        return None
    try:
        matrix = x.view(-1, k)
    except RuntimeError:  # no single row stride
        return None
    if matrix.stride(1) == 1 and matrix.stride(0) >= k:
        return matrix, False
    if matrix.stride(0) == 1 and matrix.stride(1) >= matrix.shape[0]:
        return matrix.t(), True
    return None


def _quantize_strided(x: Tensor, rows: Tensor, transposed: bool, format_code: int, rounding: int) -> Pair:
    """Returns (elements, scales) of `x` [..., K] blocked along K, read from `rows` (see `_strided_matrix`)."""
    shape = x.shape
    k = shape[-1]
    elements = torch.empty(shape, dtype=torch.uint8)
    scales = torch.empty((*shape[:-1], scale_count(k)), dtype=torch.uint8)
    status = native.load().mxfp8_pack(
        DTYPE_CODES[x.dtype], rows.data_ptr(), rows.stride(0), transposed, x.numel() // k, k, format_code, rounding,
        elements.data_ptr(), scales.data_ptr(), ctypes.byref(native.PackStats()),
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        native.check("quantize", status)
    return elements, scales


def _strided_rows(x: Tensor) -> tuple[Tensor, int]:
    """Returns `x` [..., K] as a matrix with contiguous rows, and their stride; a view where one exists."""
    k = x.shape[-1]
    x = x.reshape(math.prod(x.shape[:-1]), k)
    if x.stride(1) != 1 or x.stride(0) < k:
        x = x.contiguous()
    return x, max(x.stride(0), k)
