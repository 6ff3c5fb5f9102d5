"""NumPy arrays on their way to the native library: what it cannot read is copied or refused here, by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mxfp8_ops.errors import BackendError, ShapeError
from mxfp8_ops.numerics import Array

_MOST_THREADS: Final = 2**31 - 1
"""What a C int holds; the library takes it for what it has."""


def array(where: str, name: str, x: Any) -> Array:
    """Returns `x`.

    Raises:
        ShapeError: it is no NumPy array, or its bytes are in another order than this machine's.
    """
    if not isinstance(x, np.ndarray):
        what, advice = f"{name} is a {type(x).__name__}", "pass numpy.asarray of it"
        raise ShapeError(where, what, expected="a NumPy array", advice=advice)
    if not x.dtype.isnative:
        raise ShapeError(
            where,
            f"{name} has dtype {x.dtype.str}, in another byte order",
            expected="this machine's",
            advice='pass x.astype(x.dtype.newbyteorder("="))',
        )
    return x


def contiguous(where: str, x: Array) -> Array:
    """Returns `x` as C-contiguous, aligned memory: itself, or a copy.

    Raises:
        BackendError: there is no room for a copy.
    """
    if x.flags.c_contiguous and x.flags.aligned:
        return x
    return _made(where, x.copy, x.shape)


def empty(where: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns a new array.

    Raises:
        BackendError: there is no room for it.
    """
    return _made(where, lambda: np.empty(shape, dtype), shape)


def floats(where: str, name: str, x: Any) -> Array:
    """Returns `x` as contiguous float32.

    Raises:
        ShapeError: it is no array of numbers.
        BackendError: there is no room for a copy.
    """
    if not np.can_cast(array(where, name, x).dtype, np.float32, "same_kind"):
        raise ShapeError(
            where, f"{name} has dtype {x.dtype}", expected="float32, or what NumPy casts to it", advice="cast it first"
        )
    return contiguous(where, _made(where, lambda: np.ascontiguousarray(x, np.float32), x.shape))


def thread_count(where: str, threads: int) -> int:
    """Returns `threads` as the library takes it.

    Raises:
        ShapeError: it is no whole number, or below 0.
    """
    try:
        count = operator.index(threads)
    except TypeError:
        count = -1
    if count < 0:
        raise ShapeError(where, f"threads is {threads!r}", expected="0, for all cores, or more", advice="correct it")
    return min(count, _MOST_THREADS)


def _made(where: str, make: Callable[[], Array], shape: tuple[int, ...]) -> Array:
    try:
        return make()
    except (MemoryError, ValueError) as error:  # ValueError: more bytes than an address counts
        raise BackendError(
            where,
            f"no memory for an array of shape {shape} ({error})",
            expected="room for it",
            advice="use a smaller batch",
        ) from error
