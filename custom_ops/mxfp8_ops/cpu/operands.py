"""Calls of the native library with NumPy arrays. Arrays that it cannot read are copied or refused here."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mxfp8_ops import contract, formats, native
from mxfp8_ops.errors import BackendError, ShapeError
from mxfp8_ops.numerics import Array

_CODES: Final = {
    **{name: row.onnx_dtype for name, row in formats.DTYPES.items()},
    **{name: code for names in (formats.SCALE_ROUNDINGS, contract.EPILOGUES) for code, name in enumerate(names)},
}
"""The numbers in mxfp8_ops.h of dtypes, formats, scale roundings and epilogues, by name."""


def call(where: str, function: str, *arguments: Any, threads: int) -> None:
    """Calls a function of the C ABI. It passes arrays as addresses, and dtypes and names as their numbers.

    Raises:
        ShapeError: the library refuses an argument, or `threads` is no number of threads.
        BackendError: the library fails, or is missing.
    """
    count = thread_count(where, threads)
    native.check(where, getattr(native.load(), function)(*map(_argument, arguments), count))


def _argument(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.ctypes.data
    return _CODES[str(x)] if isinstance(x, (str, np.dtype)) else x


def array(where: str, name: str, x: Any) -> Array:
    """Returns `x`; raises ShapeError if it is no NumPy array, or its byte order is not this machine's."""
    if not isinstance(x, np.ndarray):
        what, advice = f"{name} is a {type(x).__name__}", "pass numpy.asarray of it"
        raise ShapeError(where, what, expected="a NumPy array", advice=advice)
    # The library gets an address and a dtype code: it would read the bytes in the wrong order, without an error.
    if not x.dtype.isnative:
        raise ShapeError(
            where,
            f"{name} has dtype {x.dtype.str}, in another byte order",
            expected="this machine's",
            advice='pass x.astype(x.dtype.newbyteorder("="))',
        )
    return x


def contiguous(where: str, x: Array) -> Array:
    """Returns `x`, or a copy of it that is C-contiguous and aligned; raises BackendError if there is no memory."""
    # A view of bytes, such as np.frombuffer with an offset, may be unaligned; the C ABI refuses its address.
    if x.flags.c_contiguous and x.flags.aligned:
        return x
    return _allocated(where, x.copy, x.shape)


def empty(where: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns a new array without values; raises BackendError if there is no memory for it."""
    return _allocated(where, lambda: np.empty(shape, dtype), shape)


def floats(where: str, name: str, x: Any) -> Array:
    """Returns `x` as contiguous float32; raises ShapeError if it is no array of real numbers."""
    if not np.can_cast(array(where, name, x).dtype, np.float32, "same_kind"):
        raise ShapeError(
            where,
            f"{name} has dtype {x.dtype}",
            expected="float32, or a dtype that NumPy casts to it",
            advice="cast it first",
        )
    return contiguous(where, _allocated(where, lambda: np.ascontiguousarray(x, np.float32), x.shape))


def thread_count(where: str, threads: int) -> int:
    """Returns `threads` as a C int; raises ShapeError if it is no integer, or negative."""
    # operator.index takes NumPy's integers and refuses floats: 2.0 is more likely a mistake than a count.
    try:
        count = operator.index(threads)
    except TypeError:
        count = -1
    if count < 0:
        raise ShapeError(where, f"threads is {threads!r}", expected="0 (all processors) or more", advice="correct it")
    return min(count, 2**31 - 1)  # the largest C int; the library itself lowers a number that is too large


def _allocated(where: str, make: Callable[[], Array], shape: tuple[int, ...]) -> Array:
    # The library allocates no results, so a size that is too large fails here, before the call.
    try:
        return make()
    except (MemoryError, ValueError) as error:  # ValueError: more bytes than an address counts
        raise BackendError(
            where,
            f"no memory for an array of shape {shape} ({error})",
            expected="enough memory",
            advice="use a smaller batch",
        ) from error
