"""The functions of `numpy_nodes.py` in the native library, on NumPy arrays: same names, same arguments, same errors.

`quantize`, `dequantize` and `embedding` give the same bytes; gemms accumulate in float32 and stay within
`numpy_nodes.gemm_error_bound`. Each function also takes `threads`, the number of threads (0: one per processor); gemms
of one weight b [N, K] that never changes take its `native.ConstantWeight`, and then copy b once. The first call loads
the library; a function raises BackendError if it is missing.
"""

from __future__ import annotations

import math
from ctypes import byref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mxfp8_ops import checks, contract, formats, native, numerics, op_options
from mxfp8_ops.cpu.operands import array, call, contiguous, empty
from mxfp8_ops.cpu.products import checked_kinds, multiply
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.nodes.embedding import check_indices, embedding_shape
from mxfp8_ops.nodes.grouped import check_experts, grouped_shape
from mxfp8_ops.nodes.quantize import check_out
from mxfp8_ops.numerics import Array, Codes

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Packed:
    """A weight as a rewrite stores it, with the error of its rounding."""

    elements: Codes
    """uint8 [N, K]."""
    scales: Codes
    """uint8 [N, ceil(K / 32)]."""
    signal: float
    """Sum of w^2, over the blocks that hold no NaN or Inf."""
    noise: float
    """Sum of (w - dequantized)^2, over the same blocks."""
    first_nonfinite: tuple[int, int] | None
    """Row and column of the first NaN or Inf in the array that was packed; None if there is none."""


def quantize(
    x: Array,
    *,
    axis: int = -1,
    element_format: str = "e4m3",
    scale_rounding: str = "ceil",
    out: tuple[Codes, Codes] | None = None,
    threads: int = 0,
) -> tuple[Codes, Codes]:
    """Returns (elements, scales) of `x` [..., K, ...], blocked along `axis`, as `numpy_nodes.quantize` does."""
    fmt = formats.element_format(element_format)
    formats.scale_increment(fmt, scale_rounding)  # checks the name
    checks.check_value_dtype("quantize", array("quantize", "x", x).dtype)
    axis = checks.normalize_axis("quantize", x.ndim, axis)
    shape = checks.scale_shape(x.shape, axis)
    if out is None:
        elements, scales = (empty("quantize", size, np.uint8) for size in (x.shape, shape))
    else:
        elements, scales = check_out("quantize", out, x, shape, np)
    # After check_out: a strided x is copied, and the copy shares memory with nothing.
    x = contiguous("quantize", x)
    call(
        "quantize", "mxfp8_quantize", x.dtype, x, *checks.split_at(x.shape, axis), element_format, scale_rounding,
        elements, scales, threads=threads,
    )  # fmt: skip
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
    """Returns the values of (elements, scales), as `numpy_nodes.dequantize` does."""
    formats.element_format(element_format)
    array("dequantize", "elements", elements), array("dequantize", "scales", scales)
    axis = checks.normalize_axis("dequantize", elements.ndim, axis)
    checks.check_codes("dequantize", elements, scales, axis)
    elements, scales = contiguous("dequantize", elements), contiguous("dequantize", scales)
    y = empty("dequantize", elements.shape, numerics.value_dtype(dtype))
    sizes = checks.split_at(elements.shape, axis)
    call("dequantize", "mxfp8_dequantize", element_format, elements, scales, *sizes, dtype, y, threads=threads)
    return y


def gemm(  # noqa: PLR0913 - the operands and two settings
    a: Codes,
    a_scales: Codes,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    *,
    threads: int = 0,
    weight: native.ConstantWeight | None = None,
    **options: Unpack[op_options.Gemm],
) -> Array:
    """Returns dequantize(a) @ dequantize(b).T + bias; a [..., M, K], b [..., N, K], as in `numpy_nodes.gemm`."""
    return multiply((a, a_scales), (b, b_scales), bias, op_options.gemm(**options), threads, weight=weight)


def weight_gemm(
    x: Array,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    *,
    threads: int = 0,
    weight: native.ConstantWeight | None = None,
    **options: Unpack[op_options.WeightGemm],
) -> Array:
    """Returns x @ dequantize(b).T + bias; x [..., M, K], b [..., N, K], as in `numpy_nodes.weight_gemm`."""
    return multiply((x,), (b, b_scales), bias, op_options.weight_gemm(**options), threads, weight=weight)


def fused_gemm(  # noqa: PLR0913 - the operands and two settings
    a: Codes,
    a_scales: Codes,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    *,
    threads: int = 0,
    weight: native.ConstantWeight | None = None,
    **options: Unpack[op_options.FusedGemm],
) -> Array:
    """Returns epilogue(A @ B.T + bias) * factor; a [..., M, K], b [..., N, K], as in `numpy_nodes.fused_gemm`."""
    epilogue, factor, rest = op_options.epilogue(**options)
    return multiply((a, a_scales), (b, b_scales), bias, op_options.gemm(**rest), threads, (epilogue, factor), weight)


def fused_weight_gemm(
    x: Array,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    *,
    threads: int = 0,
    weight: native.ConstantWeight | None = None,
    **options: Unpack[op_options.FusedWeightGemm],
) -> Array:
    """Returns epilogue(x @ dequantize(b).T + bias) * factor; x [..., M, K], as in `numpy_nodes.fused_weight_gemm`."""
    epilogue, factor, rest = op_options.epilogue(**options)
    return multiply((x,), (b, b_scales), bias, op_options.weight_gemm(**rest), threads, (epilogue, factor), weight)


def embedding(
    indices: Array,
    b: Codes,
    b_scales: Codes,
    *,
    b_format: str = "e4m3",
    dtype: str = "float32",
    threads: int = 0,
) -> Array:
    """Returns dequantize(b)[indices]: rows of b [V, D] for indices [...], as in `numpy_nodes.embedding`."""
    formats.element_format(b_format)
    y_dtype = numerics.value_dtype(dtype)
    for name, operand in (("indices", indices), ("b", b), ("b_scales", b_scales)):
        array("embedding", name, operand)
    shape = embedding_shape("embedding", indices, b.shape)
    checks.check_codes("embedding", b, b_scales, -1)
    indices, b, b_scales = (contiguous("embedding", t) for t in (indices, b, b_scales))
    y = empty("embedding", shape, y_dtype)
    index_dtype = contract.INT32 if indices.dtype == np.int32 else contract.INT64
    try:
        call(
            "embedding", "mxfp8_embedding", index_dtype, indices, indices.size, b_format, b, b_scales, *b.shape, dtype,
            y, threads=threads,
        )  # fmt: skip
    except ShapeError:
        # The library reports an index by its position in memory; this check reports its position in the array.
        check_indices("embedding", indices, b.shape[0])
        raise
    return y


def grouped_gemm(
    a: Codes,
    a_scales: Codes,
    b: Codes,
    b_scales: Codes,
    experts: npt.NDArray[np.int64],
    *,
    threads: int = 0,
    **options: Unpack[op_options.Gemm],
) -> Array:
    """Returns dequantize(a) @ dequantize(b[experts]).T; a [..., M, K], b [E, N, K], as `numpy_nodes.grouped_gemm`."""
    return _grouped((a, a_scales), (b, b_scales), experts, op_options.gemm(**options), threads)


def grouped_weight_gemm(
    x: Array,
    b: Codes,
    b_scales: Codes,
    experts: npt.NDArray[np.int64],
    *,
    threads: int = 0,
    **options: Unpack[op_options.WeightGemm],
) -> Array:
    """Returns x @ dequantize(b[experts]).T; x [..., M, K], b [E, N, K], as in `numpy_nodes.grouped_weight_gemm`."""
    return _grouped((x,), (b, b_scales), experts, op_options.weight_gemm(**options), threads)


def pack(
    w: Array, *, transposed: bool = False, element_format: str = "e4m3", scale_rounding: str = "ceil", threads: int = 0
) -> Packed:
    """Returns a weight quantized along K and stored as [N, K], with the error of the rounding.

    Args:
        w: float32, float16 or bfloat16 [N, K], or [K, N] if `transposed`. A slice of its rows or columns is not copied.
        transposed: whether `w` is [K, N].
        element_format: a name of `formats.ELEMENT_FORMATS`.
        scale_rounding: "ceil", "floor" or "even".
        threads: the number of threads; 0 for one per processor.

    Raises:
        ShapeError: wrong dtype, or not a matrix.
        ContractError: unknown format or rounding.
    """
    fmt = formats.element_format(element_format)
    formats.scale_increment(fmt, scale_rounding)  # checks the name
    checks.check_value_dtype("pack", array("pack", "w", w).dtype)
    if w.ndim != 2:
        raise ShapeError("pack", f"weight has shape {w.shape}", expected="a matrix", advice="reshape it to [N, K]")
    # The library reads a slice of rows or columns in place. It refuses a negative stride, a stride of a fraction of a
    # value, and rows that overlap: those are copied.
    if w.size and (w.strides[1] != w.itemsize or w.strides[0] % w.itemsize or w.strides[0] < w.shape[1] * w.itemsize):
        w = contiguous("pack", w)
    if not w.flags.aligned:
        w = contiguous("pack", w)
    # An empty matrix may have any strides in NumPy, but the library takes only a stride of at least one row.
    stride = max(w.strides[0] // w.itemsize if w.size else 0, w.shape[1])
    n, k = w.shape[::-1] if transposed else w.shape
    elements, scales = (empty("pack", shape, np.uint8) for shape in ((n, k), (n, checks.scale_count(k))))
    stats = native.PackStats()
    call(
        "pack", "mxfp8_pack", w.dtype, w, stride, transposed, n, k, element_format, scale_rounding, elements, scales,
        byref(stats), threads=threads,
    )  # fmt: skip
    # The library counts positions in w as the caller passes it, before a transposition.
    first = None if stats.first_nonfinite < 0 else divmod(stats.first_nonfinite, w.shape[1])
    return Packed(elements, scales, stats.signal, stats.noise, first)


def _grouped(
    a: tuple[Array, ...], b: tuple[Array, Array], experts: Array, kinds: tuple[Any, ...], threads: int
) -> Array:
    """Returns the rows of `a` times the matrices of `b` that `experts` pick; operands and kinds as in `multiply`."""
    where = "grouped_gemm"
    kind, rounding, b_format, dtype = checked_kinds(where, a, kinds)
    for name, operand in (("a", a), ("b", b)):
        for each, t in zip((name, f"{name}_scales"), operand, strict=False):
            array(where, each, t)
    shape = grouped_shape(where, a[0].shape, b[0].shape, array(where, "experts", experts).shape)
    for codes in (a, b) if len(a) == 2 else (b,):
        checks.check_codes(where, *codes, -1)
    lead, (m, n), (count, _, k) = shape[:-2], shape[-2:], b[0].shape
    picked = check_experts(where, experts, count)
    function = "mxfp8_grouped_weight_gemm" if rounding else "mxfp8_grouped_gemm"
    # Each row of the result has its own row of a and its own expert, so operands that broadcast are copied. b is not
    # copied: an expert is an index of its matrices.
    rows = [contiguous(where, np.broadcast_to(t, (*lead, *t.shape[-2:]))) for t in a]
    matrices = [contiguous(where, t) for t in b]
    of_rows = contiguous(where, np.broadcast_to(picked[..., None], (*lead, m)))
    y = empty(where, shape, numerics.value_dtype(dtype))
    call(
        where, function, kind, *rows, *rounding, b_format, *matrices, of_rows, count, math.prod((*lead, m)), n, k,
        dtype, y, threads=threads,
    )  # fmt: skip
    return y
