"""The functions of `numerics.py`, natively, on NumPy arrays: same names, same arguments, same results.

`quantize` and `dequantize` give the same bytes; the gemms accumulate in float32 and stay within
`numerics.gemm_error_bound`. The library loads on first use; `native.py` does that.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from typing import Final

import numpy as np

from mxfp8_ops import contract, formats, numerics
from mxfp8_ops.cpu import native
from mxfp8_ops.cpu.native import available_isas, force_isa, forced_isa, isa, library_path
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.formats import SCALE_ROUNDINGS
from mxfp8_ops.numerics import Array, Codes, scale_count

__all__ = [
    "Packed",
    "available_isas",
    "dequantize",
    "force_isa",
    "forced_isa",
    "gemm",
    "isa",
    "library_path",
    "pack",
    "quantize",
    "weight_gemm",
]

_DTYPE_CODES: Final = {name: code for code, name in contract.VALUE_NAMES.items()}


@dataclass(frozen=True)
class Packed:
    """A weight as the pass stores it, and how much of it the rounding lost."""

    elements: Codes
    """uint8 [N, K]."""
    scales: Codes
    """uint8 [N, ceil(K / 32)]."""
    signal: float
    """Sum of w^2, over the blocks that hold no NaN or Inf."""
    noise: float
    """Sum of (w - dequantized)^2, over the same blocks."""
    first_nonfinite: tuple[int, int] | None
    """Row and column, in the source, of the first NaN or Inf; None if there is none."""


def quantize(
    x: Array, *, axis: int = -1, element_format: str = "e4m3", scale_rounding: str = "ceil", threads: int = 0
) -> tuple[Codes, Codes]:
    """Returns (elements, scales), as `numerics.quantize` does, bit for bit.

    Args:
        x: [..., K, ...] float32, float16 or bfloat16.
        axis: the blocked axis (that of length K).
        element_format: "e4m3" or "e5m2".
        scale_rounding: "ceil", "floor" or "even".
        threads: how many to use; 0 for one per processor.

    Raises:
        ShapeError: wrong dtype, a scalar, or no such axis.
        ContractError: unknown format or rounding.
        BackendError: the native library is missing.
    """
    fmt = formats.element_format(element_format)
    formats.scale_increment(fmt, scale_rounding)  # checks the name
    numerics.check_value_dtype("quantize", x.dtype)
    axis = numerics.normalize_axis("quantize", x.ndim, axis)
    x = np.ascontiguousarray(x)
    outer, k, inner = _split(x.shape, axis)
    elements = np.empty(x.shape, np.uint8)
    scales = np.empty((*x.shape[:axis], scale_count(k), *x.shape[axis + 1 :]), np.uint8)
    status = native.load().mxfp8_quantize(
        _DTYPE_CODES[x.dtype.name],
        x.ctypes.data,
        outer,
        k,
        inner,
        fmt.onnx_dtype,
        SCALE_ROUNDINGS.index(scale_rounding),
        elements.ctypes.data,
        scales.ctypes.data,
        threads,
    )
    native.check("quantize", status)
    return elements, scales


def dequantize(
    elements: Codes,
    scales: Codes,
    *,
    axis: int = -1,
    element_format: str = "e4m3",
    dtype: str = "float32",
    threads: int = 0,
) -> Array:
    """Returns the values that (elements, scales) stand for, as `numerics.dequantize` does, bit for bit.

    Args:
        elements: uint8 [..., K, ...].
        scales: uint8, the shape of `elements` with K replaced by ceil(K / 32).
        axis: the blocked axis.
        element_format: "e4m3" or "e5m2".
        dtype: "float32", "float16" or "bfloat16".
        threads: how many to use; 0 for one per processor.

    Raises:
        ShapeError: the scales do not fit the elements.
        ContractError: unknown format.
        BackendError: the native library is missing.
    """
    fmt = formats.element_format(element_format)
    axis = numerics.normalize_axis("dequantize", elements.ndim, axis)
    _check_codes("dequantize", elements, scales, axis)
    elements, scales = np.ascontiguousarray(elements), np.ascontiguousarray(scales)
    outer, k, inner = _split(elements.shape, axis)
    y = np.empty(elements.shape, numerics.value_dtype(dtype))
    status = native.load().mxfp8_dequantize(
        fmt.onnx_dtype,
        elements.ctypes.data,
        scales.ctypes.data,
        outer,
        k,
        inner,
        _DTYPE_CODES[dtype],
        y.ctypes.data,
        threads,
    )
    native.check("dequantize", status)
    return y


def gemm(
    a: Codes,
    a_scales: Codes,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    *,
    a_format: str = "e4m3",
    b_format: str = "e4m3",
    dtype: str = "float32",
    threads: int = 0,
) -> Array:
    """Returns dequantize(a) @ dequantize(b).T + bias, within `numerics.gemm_error_bound` of `numerics.gemm`.

    Args:
        a: elements uint8 [..., M, K] (or [K], which gives [..., N]).
        a_scales: uint8 [..., M, ceil(K / 32)].
        b: elements uint8 [..., N, K]; leading dimensions broadcast against those of `a`.
        b_scales: uint8 [..., N, ceil(K / 32)].
        bias: float32 [N], or None.
        a_format: element format of `a`.
        b_format: element format of `b`.
        dtype: of the result: "float32", "float16" or "bfloat16".
        threads: how many to use; 0 for one per processor.

    Raises:
        ShapeError: shapes do not fit.
        ContractError: unknown format.
        BackendError: the native library is missing.
    """
    numerics.check_gemm_shapes("gemm", a.shape, b.shape, None if bias is None else bias.shape)
    _check_codes("gemm", a, a_scales, a.ndim - 1)
    _check_codes("gemm", b, b_scales, b.ndim - 1)
    a_code, b_code = formats.element_format(a_format).onnx_dtype, formats.element_format(b_format).onnx_dtype
    library = native.load()

    def product(p: _Product) -> int:
        status: int = library.mxfp8_gemm(
            a_code, *_data(*p.a), b_code, *_data(*p.b), p.bias, p.m, p.n, p.k, p.dtype, *_data(p.y), p.n, threads
        )
        return status

    return _batched(product, (a, a_scales), (b, b_scales), bias, dtype)


def weight_gemm(
    x: Array,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    *,
    b_format: str = "e4m3",
    dtype: str = "float32",
    threads: int = 0,
) -> Array:
    """Returns x @ dequantize(b).T + bias, within `numerics.gemm_error_bound` of `numerics.weight_gemm`.

    Args:
        x: [..., M, K] (or [K]) float32, float16 or bfloat16, used as it is.
        b: elements uint8 [..., N, K]; leading dimensions broadcast against those of `x`.
        b_scales: uint8 [..., N, ceil(K / 32)].
        bias: float32 [N], or None.
        b_format: element format of `b`.
        dtype: of the result: "float32", "float16" or "bfloat16".
        threads: how many to use; 0 for one per processor.

    Raises:
        ShapeError: shapes do not fit.
        ContractError: unknown format.
        BackendError: the native library is missing.
    """
    numerics.check_value_dtype("gemm", x.dtype)
    numerics.check_gemm_shapes("gemm", x.shape, b.shape, None if bias is None else bias.shape)
    _check_codes("gemm", b, b_scales, b.ndim - 1)
    x_code, b_code = _DTYPE_CODES[x.dtype.name], formats.element_format(b_format).onnx_dtype
    library = native.load()

    def product(p: _Product) -> int:
        status: int = library.mxfp8_weight_gemm(
            x_code, *_data(*p.a), p.k, b_code, *_data(*p.b), p.bias, p.m, p.n, p.k, p.dtype, *_data(p.y), p.n, threads
        )
        return status

    return _batched(product, (x,), (b, b_scales), bias, dtype)


def pack(
    w: Array,
    *,
    transposed: bool = False,
    element_format: str = "e4m3",
    scale_rounding: str = "ceil",
    threads: int = 0,
) -> Packed:
    """Returns a weight quantized along K and stored [N, K], whichever way `w` lies, with the error this made.

    Args:
        w: float32, float16 or bfloat16 [N, K], or [K, N] if `transposed`. Rows may be strided; values in a row may not.
        transposed: whether `w` is [K, N].
        element_format: "e4m3" or "e5m2".
        scale_rounding: "ceil", "floor" or "even".
        threads: how many to use; 0 for one per processor.

    Raises:
        ShapeError: wrong dtype, or not a matrix.
        ContractError: unknown format or rounding.
        BackendError: the native library is missing.
    """
    fmt = formats.element_format(element_format)
    formats.scale_increment(fmt, scale_rounding)  # checks the name
    numerics.check_value_dtype("pack", w.dtype)
    if w.ndim != 2:
        raise ShapeError("pack", f"weight has shape {w.shape}", expected="a matrix", advice="reshape it to [N, K]")
    if w.size and (w.strides[1] != w.itemsize or w.strides[0] % w.itemsize or w.strides[0] < w.shape[1] * w.itemsize):
        w = np.ascontiguousarray(w)
    stride = max(w.strides[0] // w.itemsize if w.size else 0, w.shape[1])
    n, k = w.shape[::-1] if transposed else w.shape
    elements, scales = np.empty((n, k), np.uint8), np.empty((n, scale_count(k)), np.uint8)
    stats = native.PackStats()
    status = native.load().mxfp8_pack(
        _DTYPE_CODES[w.dtype.name],
        w.ctypes.data,
        stride,
        transposed,
        n,
        k,
        fmt.onnx_dtype,
        SCALE_ROUNDINGS.index(scale_rounding),
        elements.ctypes.data,
        scales.ctypes.data,
        byref(stats),
        threads,
    )
    native.check("pack", status)
    first = None if stats.first_nonfinite < 0 else divmod(stats.first_nonfinite, w.shape[1])
    return Packed(elements, scales, stats.signal, stats.noise, first)


def _split(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """Returns (product of the dimensions before `axis`, shape[axis], product of those after)."""
    return int(np.prod(shape[:axis], dtype=np.int64)), shape[axis], int(np.prod(shape[axis + 1 :], dtype=np.int64))


def _check_codes(where: str, elements: Codes, scales: Codes, axis: int) -> None:
    expected = (*elements.shape[:axis], scale_count(elements.shape[axis]), *elements.shape[axis + 1 :])
    if scales.shape != expected:
        raise ShapeError(
            where,
            f"scales have shape {scales.shape}",
            expected=f"{expected} for elements {elements.shape} blocked along axis {axis}",
            advice="pass the scales quantize returned",
        )
    for name, codes in (("elements", elements), ("scales", scales)):
        if codes.dtype != np.uint8:
            raise ShapeError(
                where, f"{name} have dtype {codes.dtype}", expected="uint8 codes", advice="pass .view(numpy.uint8)"
            )


@dataclass(frozen=True)
class _Product:
    """One matrix product: operands with their scales, the address of the bias, sizes, and where the result goes."""

    a: tuple[Array, ...]
    b: tuple[Array, ...]
    bias: int | None
    m: int
    n: int
    k: int
    dtype: int
    y: Array


def _data(*arrays: Array) -> list[int]:
    return [array.ctypes.data for array in arrays]


def _batched(
    product: Callable[[_Product], int], a: tuple[Array, ...], b: tuple[Array, ...], bias: Array | None, dtype: str
) -> Array:
    """Returns the results of `product` for every broadcast leading index; one call if only `a` has leading indices."""
    y_dtype = numerics.value_dtype(dtype)
    vector = a[0].ndim == 1
    a = tuple(np.ascontiguousarray(t[None] if vector else t) for t in a)
    b = tuple(np.ascontiguousarray(t) for t in b)
    bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
    address = None if bias is None else bias.ctypes.data
    m, k = a[0].shape[-2:]
    n = b[0].shape[-2]
    try:
        leading = np.broadcast_shapes(a[0].shape[:-2], b[0].shape[:-2])
    except ValueError:
        raise ShapeError(
            "gemm",
            f"operands {a[0].shape} and {b[0].shape}",
            expected="leading dimensions that broadcast",
            advice="reshape one",
        ) from None
    y = np.empty((*leading, m, n), y_dtype)
    if b[0].ndim == 2:
        rows = int(np.prod(leading, dtype=np.int64)) * m
        native.check("gemm", product(_Product(a, b, address, rows, n, k, _DTYPE_CODES[dtype], y)))
    else:
        every_a = [np.broadcast_to(t, leading + t.shape[-2:]) for t in a]
        every_b = [np.broadcast_to(t, leading + t.shape[-2:]) for t in b]
        for i in np.ndindex(leading):
            one_a, one_b = tuple(t[i] for t in every_a), tuple(t[i] for t in every_b)
            native.check("gemm", product(_Product(one_a, one_b, address, m, n, k, _DTYPE_CODES[dtype], y[i])))
    return y[..., 0, :] if vector else y
