"""The gemms, as calls of the library for two matrices each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mxfp8_ops import checks, formats, numerics
from mxfp8_ops.cpu.operands import array, call, contiguous, empty, floats
from mxfp8_ops.nodes import fused_gemm
from mxfp8_ops.nodes.gemm import product_shape
from mxfp8_ops.numerics import Array


def multiply(  # noqa: PLR0917 - one for the gemms of every kind
    a: tuple[Array, ...],
    b: tuple[Array, Array],
    bias: Array | None,
    kinds: tuple[Any, ...],
    threads: int,
    end: tuple[str, Array | None] = ("none", None),
) -> Array:
    """Returns epilogue(a @ dequantize(b).T + bias) * factor.

    `a` is elements and scales, or values alone; `kinds` are what `op_options.gemm` returns, or for values
    `op_options.weight_gemm`; `end` is epilogue and factor.
    """
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
    of_factor = "float32" if factor is None else factor.dtype  # without a factor its dtype is checked all the same
    for one_a, one_b, m, (one_y, one_factor) in products(a, b, y, factor):
        call(
            "gemm", function, kind, *one_a, *more, b_format, *one_b, bias, epilogue, of_factor, one_factor, m, n, k,
            dtype, one_y, n, threads=threads,
        )  # fmt: skip
    return y


def checked_kinds(where: str, a: tuple[Array, ...], kinds: tuple[Any, ...]) -> tuple[Any, tuple[int, ...], str, str]:
    """Returns the kind of `a`, the code of what values are rounded to, and the last two of `kinds`: see `multiply`."""
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
    """Returns an empty result of a gemm of such operands, and the bias; ShapeError if they do not fit."""
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


def products(a: tuple[Array, ...], b: tuple[Array, ...], *rows: Any) -> Iterator[Any]:
    """Yields the operands of each product of two matrices, M, and the parts of `rows`, which have the rows of y.

    One per leading index; one in all if only `a` has leading indices. y is the first of `rows`, others may be None.
    """
    # A vector is a matrix of one row; these are views, so the caller's arrays are filled.
    if a[0].ndim == 1:
        rows = tuple(None if t is None else t[..., None, :] for t in rows)
    a = tuple(contiguous("gemm", np.atleast_2d(t)) for t in a)
    b = tuple(contiguous("gemm", t) for t in b)
    # One weight for all rows makes the leading dimensions of a more rows of one product: one call, decoding b once.
    flat, shape = b[0].ndim == 2, rows[0].shape
    leading, m = ((), math.prod(shape[:-1])) if flat else (shape[:-2], shape[-2])
    if not flat:
        a, b = (tuple(np.broadcast_to(t, leading + t.shape[-2:]) for t in operand) for operand in (a, b))
    # ndindex of () yields once, of (0,) never: an empty result needs no call, however many batches it has.
    for i in np.ndindex(leading if rows[0].size else (0,)):
        yield [t[i] for t in a], [t[i] for t in b], m, [None if t is None else t[i] for t in rows]
