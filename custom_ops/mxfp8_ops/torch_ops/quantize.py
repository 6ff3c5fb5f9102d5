"""`mxfp8::quantize`, `quantize_both` and `dequantize`. Results and errors as in `numpy_nodes.py`; dtypes are torch's.

Where the native library takes a row stride, strided inputs are read in place; others are copied once. Results are
contiguous, whatever the strides of the inputs. BackendError if the library is missing.

Their results are integers, which pass no gradient and no tangent on: quantize refuses an x that has one.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch
from torch import Tensor

from mxfp8_ops import checks, contract, native
from mxfp8_ops.checks import scale_count, scale_shape, split_at
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.torch_ops import gradients
from mxfp8_ops.torch_ops.operands import (
    DTYPE_CODES,
    EMPTY,
    FORMAT_CODES,
    ROUNDING_CODES,
    Op,
    Pair,
    check_codes,
    check_devices,
    check_dtype,
    check_memory,
    library,
    plain,
    readable,
)
from mxfp8_ops.torch_ops.schemas import schema

# --- quantize --------------------------------------------------------------------------------------------------------


def check_quantize(
    x: Tensor, axis: int = -1, element_format: str = "e4m3", scale_rounding: str = "ceil"
) -> tuple[tuple[int, ...], int, int, int, int]:
    """Returns shape, `axis` as 0..rank-1, the codes of dtype, format and rounding; raises the errors of `quantize`."""
    element_code, rounding = FORMAT_CODES[element_format], ROUNDING_CODES[scale_rounding]
    dtype, shape = x.dtype, tuple(x.shape)  # slices of a tuple cost less than slices of a torch.Size
    if dtype not in DTYPE_CODES:
        check_dtype("quantize", dtype)
    return shape, checks.normalize_axis("quantize", len(shape), axis), DTYPE_CODES[dtype], element_code, rounding


def _quantize_fake(x: Tensor, *args: Any) -> Pair:
    shape, axis, *_ = check_quantize(x, *args)
    return x.new_empty(shape, dtype=torch.uint8), x.new_empty(scale_shape(shape, axis), dtype=torch.uint8)


def quantize_cpu(x: Tensor, *args: Any) -> Pair:
    """Returns (elements, scales) of `x` [..., K, ...]; `numpy_nodes.quantize` says where you may cut them.

    Contiguous tensors, matrices with strided rows and transposed matrices (blocked along their last axis, the one that
    is strided in memory) are read in place.
    """
    shape, axis, dtype, element_code, rounding = check_quantize(x, *args)
    if not plain(x.itemsize, x):
        check_memory("quantize", "x", x)
        if axis == len(shape) - 1 and not x.is_contiguous() and (strided := _strided_matrix(x)) is not None:
            return _quantize_strided(x, *strided, (dtype, element_code, rounding))
        if axis == 0 and len(shape) == 2 and x.t().is_contiguous():
            # Blocks are contiguous in memory: quantize the transpose, then transpose bytes instead of values.
            elements, scales = quantize_cpu(x.t(), 1, *args[1:])
            return elements.t().contiguous(), scales.t().contiguous()
        x = x.contiguous()
    empty = EMPTY[torch.uint8]
    elements, scales = empty(*shape), empty(*scale_shape(shape, axis))
    status = library().mxfp8_quantize(
        dtype, x.data_ptr(), *split_at(shape, axis), element_code, rounding, elements.data_ptr(), scales.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        native.check("quantize", status)
    return elements, scales


def _strided_matrix(x: Tensor) -> tuple[Tensor, bool] | None:
    """Returns the matrix in memory of `x` [..., K], and True if it is transposed; None if there is no such matrix.

    The matrix is [M, K] with K contiguous, or [K, M] with M contiguous (the transposed case); its rows are `stride(0)`
    apart.
    """
    k = x.shape[-1]
    if x.numel() == 0 or x.dim() < 2:
        return None
    try:
        matrix = x.view(-1, k)
    except RuntimeError:  # the leading dimensions do not have one common stride
        return None
    if matrix.stride(1) == 1 and matrix.stride(0) >= k:
        return matrix, False
    if matrix.stride(0) == 1 and matrix.stride(1) >= matrix.shape[0]:
        return matrix.t(), True
    return None


def _quantize_strided(x: Tensor, rows: Tensor, transposed: bool, codes: tuple[int, int, int]) -> Pair:
    """Returns (elements, scales) of `x` [..., K] blocked along K, read from `rows` (see `_strided_matrix`)."""
    shape = x.shape
    k = shape[-1]
    elements = torch.empty(shape, dtype=torch.uint8)
    scales = torch.empty((*shape[:-1], scale_count(k)), dtype=torch.uint8)
    dtype, element_code, rounding = codes
    # The kernel that packs weights is the one that takes strides and transposes; its statistics are not used here.
    status = library().mxfp8_pack(
        dtype, rows.data_ptr(), rows.stride(0), transposed, x.numel() // k, k, element_code, rounding,
        elements.data_ptr(), scales.data_ptr(), ctypes.byref(native.PackStats()), torch.get_num_threads(),
    )  # fmt: skip
    if status:
        native.check("quantize", status)
    return elements, scales


# --- quantize_both ---------------------------------------------------------------------------------------------------


def check_both(x: Tensor, *args: str) -> None:
    """Raises the errors of `quantize_both`."""
    check_quantize(x, -1, *args)
    if x.dim() != 2:
        raise ShapeError("quantize_both", f"x has shape {tuple(x.shape)}", expected="a matrix", advice="reshape it")


def _both_fake(x: Tensor, *args: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_both(x, *args)
    # The second pair is for the transpose: shape [K, M], blocked along M, as a gemm wants it.
    return *_quantize_fake(x, -1, *args), *_quantize_fake(x.t(), -1, *args)


def quantize_both_cpu(x: Tensor, *args: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the elements and scales of quantize(x) and of quantize(x.t()), for a matrix."""
    check_both(x, *args)
    return *quantize_cpu(x, -1, *args), *quantize_cpu(x.t(), -1, *args)


# --- dequantize ------------------------------------------------------------------------------------------------------


def check_dequantize(
    elements: Tensor, scales: Tensor, axis: int = -1, element_format: str = "e4m3", dtype: torch.dtype | None = None
) -> tuple[tuple[int, ...], int, torch.dtype, int]:
    """Returns the result's shape and dtype, `axis` as 0..rank-1, the format's code; raises as `dequantize` does."""
    element_code, dtype = FORMAT_CODES[element_format], dtype or torch.float32
    if dtype not in DTYPE_CODES:
        check_dtype("dequantize", dtype)
    shape = tuple(elements.shape)
    axis = checks.normalize_axis("dequantize", len(shape), axis)
    if scales.shape != scale_shape(shape, axis) or not elements.dtype is scales.dtype is torch.uint8:
        check_codes("dequantize", elements, scales, axis)
    return shape, axis, dtype, element_code


def _dequantize_fake(elements: Tensor, scales: Tensor, *args: Any) -> Tensor:
    check_devices("dequantize", elements, scales)
    shape, _, dtype, _ = check_dequantize(elements, scales, *args)
    return elements.new_empty(shape, dtype=dtype)


def dequantize_cpu(elements: Tensor, scales: Tensor, *args: Any) -> Tensor:
    """Returns the values of (elements, scales)."""
    shape, axis, dtype, element_code = check_dequantize(elements, scales, *args)
    if not plain(1, elements, scales):
        elements, scales = readable("dequantize", "elements scales", elements, scales)
    y = EMPTY[dtype](*shape)
    status = library().mxfp8_dequantize(
        element_code, elements.data_ptr(), scales.data_ptr(), *split_at(shape, axis), DTYPE_CODES[dtype], y.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        native.check("dequantize", status)
    return y


OPS: Final = (
    Op(
        schema("quantize", contract.QUANTIZE),
        {"CPU": quantize_cpu, "Autograd": gradients.cut("quantize", quantize_cpu)},
        _quantize_fake,
    ),
    Op(
        """quantize_both(Tensor x, str element_format="e4m3", str scale_rounding="ceil")
        -> (Tensor, Tensor, Tensor, Tensor)""",
        {"CPU": quantize_both_cpu, "Autograd": gradients.cut("quantize_both", quantize_both_cpu)},
        _both_fake,
    ),
    Op(
        schema("dequantize", contract.DEQUANTIZE),
        {"CPU": dequantize_cpu},
        _dequantize_fake,
    ),
)
