"""Checks of shapes, dtypes and scales that several nodes need, for all backends. Checks of one node are in nodes/.

They take shapes, or arrays of NumPy or CuPy. The torch ops pass shapes, which may be symbolic.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mxfp8_ops.errors import ShapeError
from mxfp8_ops.formats import BLOCK_SIZE, VALUE_DTYPES

Shape = tuple[int, ...]


def scale_count(k: int) -> int:
    """Returns ceil(k / 32), the number of scales of `k` values."""
    return -(-k // BLOCK_SIZE)


def scale_shape(shape: Shape, axis: int) -> Shape:
    """Returns the shape of the scales of elements of shape `shape` in blocks along `axis`, which must exist."""
    # A partial last block has a scale of its own: hence ceil, not floor.
    sizes = [*shape]
    sizes[axis] = scale_count(sizes[axis])
    return tuple(sizes)


def split_at(shape: Shape, axis: int) -> tuple[int, int, int]:
    """Returns (outer, K, inner): the size of `axis` (0..rank-1) and the products of the sizes before and after it."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def normalize_axis(where: str, ndim: int, axis: int) -> int:
    """Returns `axis` counted from the front: 0..ndim-1.

    Raises:
        ShapeError: a tensor of `ndim` axes has no such axis.
    """
    if not -ndim <= axis < ndim:
        raise ShapeError(
            where, f"axis {axis} of a {ndim}-D tensor", expected=f"{-ndim} <= axis < {ndim}", advice="correct the axis"
        )
    return axis % ndim


def dtype_name(dtype: Any) -> str:
    """Returns the plain name of a dtype of NumPy, CuPy or torch, such as "float32"."""
    # By name and not by np.dtype(dtype): that raises for torch's dtypes, and importing torch here would cost seconds.
    return getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")


def check_value_dtype(where: str, dtype: Any) -> None:
    """Raises ShapeError unless `dtype`, of NumPy, CuPy or torch, is one of `formats.VALUE_DTYPES`."""
    if (name := dtype_name(dtype)) not in VALUE_DTYPES:
        raise ShapeError(
            where, f"dtype {name}", expected=f"one of {', '.join(VALUE_DTYPES)}", advice="cast the tensor first"
        )


def check_scales(where: str, elements: Shape, scales: Shape, axis: int) -> None:
    """Raises ShapeError unless shape `scales` has one code per block of shape `elements` along `axis`."""
    expected = scale_shape(elements, axis)
    if scales != expected:
        raise ShapeError(
            where,
            f"scales have shape {scales}",
            expected=f"{expected} for elements {elements} in blocks of {BLOCK_SIZE} along axis {axis % len(elements)}",
            advice="pass the scales that quantize returned",
        )


def check_codes(where: str, elements: Any, scales: Any, axis: int) -> None:
    """Raises ShapeError unless both arrays are uint8 and `scales` has one code per block; see `check_scales`."""
    check_scales(where, elements.shape, scales.shape, axis)
    for name, codes in (("elements", elements), ("scales", scales)):
        if codes.dtype != np.uint8:
            raise ShapeError(
                where, f"{name} have dtype {codes.dtype}", expected="uint8 codes", advice="pass .view(numpy.uint8)"
            )
