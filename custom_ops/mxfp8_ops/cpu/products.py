"""Products of matrices with leading dimensions, as calls of the library for two matrices each."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mxfp8_ops import checks, native, numerics
from mxfp8_ops.cpu.operands import array, contiguous, empty, floats
from mxfp8_ops.nodes.gemm import product_shape
from mxfp8_ops.numerics import Array

End = tuple[int | None, int | None]
"""The addresses of a bias and a factor, or None."""

Product = Callable[[list[int], list[int], End, int, int], int]
"""Multiplies matrices; from the addresses of a and b (each with its scales), their end, M, and the address of y."""


def result(a: tuple[Array, ...], b: tuple[Array, ...], bias: Array | None, dtype: str) -> tuple[Array, Array | None]:
    """Returns an empty result of a gemm whose operands come with their scales, if they have any, and the bias.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        BackendError: there is no memory for the result.
    """
    for name, operand in (("a", a), ("b", b)):
        for which, codes in zip((name, f"{name}_scales"), operand, strict=False):
            array("gemm", which, codes)
    bias = None if bias is None else floats("gemm", "bias", bias)
    shape = product_shape("gemm", a[0].shape, b[0].shape, None if bias is None else bias.shape)
    # After the shapes, so that a wrong K is reported as such and not as scales that do not fit.
    for operand in (a, b):
        if len(operand) == 2:
            checks.check_codes("gemm", *operand, -1)
    return empty("gemm", shape, numerics.value_dtype(dtype)), bias


def multiply(
    product: Product,
    a: tuple[Array, ...],
    b: tuple[Array, ...],
    end: tuple[Array | None, Array | None],
    result: Array,
) -> Array:
    """Returns `result`, filled by one `product` per leading index; by one in all if only `a` has leading indices.

    `end` is a bias, and a factor of the shape of the result.
    """
    bias, factor = end
    # A vector is a matrix of one row; y is a view, so the caller's `result` is filled.
    y = result[..., None, :] if a[0].ndim == 1 else result
    factor = None if factor is None else contiguous("gemm", factor).reshape(y.shape)
    a = tuple(contiguous("gemm", np.atleast_2d(t)) for t in a)
    b = tuple(contiguous("gemm", t) for t in b)
    # One weight for all rows makes the leading dimensions of a more rows of one product: one call, decoding b once.
    flat = b[0].ndim == 2
    leading = () if flat else y.shape[:-2]
    m = math.prod(y.shape[:-1]) if flat else y.shape[-2]
    every_a, every_b = (
        operand if flat else [np.broadcast_to(t, leading + t.shape[-2:]) for t in operand] for operand in (a, b)
    )
    # ndindex of () yields once, of (0,) never: an empty result needs no call, however many batches it has.
    for i in np.ndindex(leading if y.size else (0,)):
        one_a, one_b = ([t[i].ctypes.data for t in operand] for operand in (every_a, every_b))
        one_end = None if bias is None else bias.ctypes.data, None if factor is None else factor[i].ctypes.data
        native.check("gemm", product(one_a, one_b, one_end, m, y[i].ctypes.data))
    return result
