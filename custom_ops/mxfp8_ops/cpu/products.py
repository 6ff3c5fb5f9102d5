"""Gemms of NumPy arrays, as one call of the native library per product of two matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mxfp8_ops import checks, formats, native, numerics
from mxfp8_ops.cpu.operands import array, call, contiguous, empty, floats
from mxfp8_ops.nodes import fused_gemm
from mxfp8_ops.nodes.gemm import product_shape
from mxfp8_ops.numerics import Array


def multiply(  # noqa: PLR0913, PLR0917 - all gemms go through this function
    a: tuple[Array, ...],
    b: tuple[Array, Array],
    bias: Array | None,
    kinds: tuple[Any, ...],
    threads: int,
    end: tuple[str, Array | None] = ("none", None),
    weight: native.ConstantWeight | None = None,
) -> Array:
    """Returns epilogue(a @ dequantize(b).T + bias) * factor, [..., M, N].

    Args:
        a: (elements, scales), or (values,).
        b: (elements, scales).
        bias: [N], or None.
        kinds: the result of `op_options.gemm`; of `op_options.weight_gemm` if `a` is values.
        threads: the number of threads; 0 for one per processor.
        end: (epilogue, factor).
        weight: the copy of b, if b never changes.
    """
    number = 0 if weight is None else weight.number
    epilogue, factor = end
    fused_gemm.epilogue_function(epilogue)  # checks the name
    if factor is not None:
        checks.check_value_dtype("gemm", array("gemm", "factor", factor).dtype)
    kind, rounding, b_format, dtype = checked_kinds("gemm", a, kinds)
    y, bias = result(a, b, bias, dtype)
    if factor is not None:
        fused_gemm.check_factor("gemm", factor, y.shape)
        factor = contiguous("gemm", factor)
    n, k = b[0].shape[-2:]
    function, more = ("mxfp8_fused_weight_gemm", (k, *rounding)) if rounding else ("mxfp8_fused_gemm", ())
    of_factor = "float32" if factor is None else factor.dtype  # the library checks the dtype even without a factor
    for one_a, one_b, m, (one_y, one_factor) in products(a, b, y, factor):
        call(
            "gemm", function, kind, *one_a, *more, b_format, *one_b, bias, epilogue, of_factor, one_factor, m, n, k,
            dtype, one_y, n, number, threads=threads,
        )  # fmt: skip
    return y


def checked_kinds(where: str, a: tuple[Array, ...], kinds: tuple[Any, ...]) -> tuple[Any, tuple[int, ...], str, str]:
    """Checks the names in `kinds` (see `multiply`) and returns (kind of a, rounding, b_format, dtype).

    The kind of a is its element format, or the dtype of its values. The rounding is empty for elements; for values it
    has the code of the dtype to which the gemm rounds them.
    """
    rounding: tuple[int, ...] = ()
    if len(a) == 1:
        b_format, dtype, activation_dtype = kinds
        checks.check_value_dtype(where, array(where, "x", a[0]).dtype)
        kind, rounding = a[0].dtype, (formats.activation_dtype(activation_dtype).onnx_dtype,)
    else:
        kind, b_format, dtype = kinds
        formats.element_format(kind)
    formats.element_format(b_format)
    return kind, rounding, b_format, dtype


def result(a: tuple[Array, ...], b: tuple[Array, ...], bias: Array | None, dtype: str) -> tuple[Array, Array | None]:
    """Returns (an array for the result of a gemm, the bias in float32); raises ShapeError if operands do not fit."""
    for name, operand in (("a", a), ("b", b)):
        for which, codes in zip((name, f"{name}_scales"), operand, strict=False):
            array("gemm", which, codes)
    bias = None if bias is None else floats("gemm", "bias", bias)
    shape = product_shape("gemm", a[0].shape, b[0].shape, None if bias is None else bias.shape)
    # After the shapes, so that the message for a wrong K names K and not the scales.
    for operand in (a, b):
        if len(operand) == 2:
            checks.check_codes("gemm", *operand, -1)
    return empty("gemm", shape, numerics.value_dtype(dtype)), bias


def products(a: tuple[Array, ...], b: tuple[Array, ...], *rows: Any) -> Iterator[Any]:
    """Yields (a, b, M, rows) of each product of two matrices, with the parts of `rows` that belong to it.

    There is one product per leading index; a single one if `b` has no leading indices. `rows` are y and other arrays of
    y's shape, or None.
    """
    # A vector is a matrix of one row. These are views, so the calls write into the caller's arrays.
    if a[0].ndim == 1:
        rows = tuple(None if t is None else t[..., None, :] for t in rows)
    a = tuple(contiguous("gemm", np.atleast_2d(t)) for t in a)
    b = tuple(contiguous("gemm", t) for t in b)
    # With one weight for all rows, the leading dimensions of a are more rows of one product: one call decodes b once.
    flat, shape = b[0].ndim == 2, rows[0].shape
    leading, m = ((), math.prod(shape[:-1])) if flat else (shape[:-2], shape[-2])
    if not flat:
        a, b = (tuple(np.broadcast_to(t, leading + t.shape[-2:]) for t in operand) for operand in (a, b))
    # ndindex of () yields once, ndindex of (0,) never: an empty result needs no call.
    for i in np.ndindex(leading if rows[0].size else (0,)):
        yield [t[i] for t in a], [t[i] for t in b], m, [None if t is None else t[i] for t in rows]
