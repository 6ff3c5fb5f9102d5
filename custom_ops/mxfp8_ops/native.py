"""Loads libmxfp8_ops through ctypes on first use, and selects the instruction set of its kernels.

It is the best one of this processor, unless the environment variable MXFP8_ISA or `forced_isa` names another.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Structure, c_double, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Final

import mxfp8_ops
from mxfp8_ops import c_abi, contract, system
from mxfp8_ops.errors import BackendError, ShapeError

PREPACK: Final = ("auto", "never")
"""The copy of a constant weight that the library keeps beside it.

auto   its codes in the layout of the kernel: 1.03 bytes a value; a small weight in float32, if the kernel multiplies
       float32.
never  none.
"""

_REINSTALL: Final = "reinstall the project"
_ERROR_FIELDS: Final = (1, 2, 3)
"""MXFP8_PROBLEM, MXFP8_EXPECTED and MXFP8_ADVICE of mxfp8_ops.h."""
_BAD_ARGUMENT: Final = -1
"""MXFP8_BAD_ARGUMENT of mxfp8_ops.h; any other error status is a fault of the library or the machine."""


class AttentionArguments(Structure):
    """The C struct `mxfp8_attention_arguments`."""

    _fields_ = (
        *((name, c_int) for name in ("dtype", "mask_dtype", "activation_dtype", "causal", "nan_guard")),
        ("scale", c_float),
        *((name, c_int64) for name in ("batch", "rows", "keys", "past", "q_heads", "kv_heads", "d", "dv")),
        ("mask_sizes", c_int64 * 4),
        *((name, c_void_p) for name in ("q", "k", "v", "mask", "past_key", "past_value")),
        *((name, c_void_p) for name in ("y", "present_key", "present_value")),
    )


class PackStats(Structure):
    """The C struct `mxfp8_pack_stats`."""

    _fields_ = (("signal", c_double), ("noise", c_double), ("first_nonfinite", c_int64))


def check_prepack(prepack: str) -> None:
    """Raises BackendError unless `prepack` is one of `PREPACK`."""
    if prepack not in PREPACK:
        raise BackendError(f"prepack {prepack!r}", expected=f"one of {', '.join(PREPACK)}", advice="correct the name")


class ConstantWeight:
    """A copy of a constant weight [N, K] in the layout of the kernel that multiplies it; see mxfp8_ops.h.

    The first gemm that gets this object makes the copy, or shares the copy of an equal weight. Keep the weight's
    elements and scales, and do not change them, while the object lives.
    """

    number: Final[int]
    """The weight in calls of the C ABI."""

    def __init__(self) -> None:
        number = c_int64()
        check("weight", load().mxfp8_weight_new(ctypes.byref(number)))
        self.number = number.value
        weakref.finalize(self, load().mxfp8_weight_free, self.number)


def library_path() -> Path:
    """Returns the path of libmxfp8_ops in the installed package.

    Raises:
        BackendError: the library is not there.
    """
    # An editable install keeps the sources in the checkout and the built library in site-packages: look in both.
    folders = [Path(folder) for folder in mxfp8_ops.__path__]
    folders += [Path(entry) / "mxfp8_ops" for entry in sys.path]
    for folder in folders:
        if (folder / system.LIBRARY).is_file():
            return (folder / system.LIBRARY).resolve()
    raise BackendError(
        "mxfp8_ops",
        f"no {system.LIBRARY} in {', '.join(map(str, mxfp8_ops.__path__))}",
        expected="the native library there",
        advice="install the project with pip (pip install -e . in a checkout)",
    )


def use_openmp(*, on: bool) -> None:
    """Makes calls with a number of threads run on the process's OpenMP threads, or on the library's own threads.

    torch's OpenMP threads keep their processors busy while they wait for work. On threads of its own, beside them, a
    gemm between torch ops takes up to 1.4 times as long.

    Args:
        on: use the OpenMP runtime; a process without one keeps the library's own threads.
    """
    # CDLL(None) looks in the whole process. GOMP_parallel is there if libgomp is loaded; torch loads it.
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None) if on and sys.platform == "linux" else None
    load().mxfp8_use_openmp(ctypes.cast(parallel, c_void_p) if parallel else None)


@functools.cache
def load() -> ctypes.CDLL:
    """Returns the native library, with the types of its functions set.

    Raises:
        BackendError: the library is missing, cannot be loaded, or implements another node contract.
    """
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(
            path,
            f"cannot be loaded ({error})",
            expected="a library built for this machine",
            advice=_REINSTALL,
        ) from error
    # Without types ctypes passes every integer as a C int, which cuts addresses and sizes to 32 bits.
    for name, (result, arguments) in c_abi.SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise BackendError(path, f"has no {name}", expected="the library of this version", advice=_REINSTALL)
        function.restype, function.argtypes = result, arguments
    # The node contract is checked too: a library of another version may have the same functions.
    version = library.mxfp8_contract_version()
    if version != contract.VERSION:
        raise BackendError(
            path, f"implements node contract {version}", expected=str(contract.VERSION), advice=_REINSTALL
        )
    return library


def available_isas() -> tuple[str, ...]:
    """Returns the instruction sets this machine can run, best first: "amx_bf16", "avx512_bf16", ..., "portable"."""
    names: bytes = load().mxfp8_isa_available()
    return tuple(names.decode().split(","))


def isa() -> str:
    """Returns the instruction set in use.

    Raises:
        BackendError: MXFP8_ISA names one that this machine does not have.
    """
    # NULL: MXFP8_ISA names an instruction set that has no kernels here.
    name: bytes | None = load().mxfp8_isa()
    if name is None:
        raise _no_such_isa("MXFP8_ISA", os.environ.get("MXFP8_ISA", ""))
    return name.decode()


def force_isa(name: str) -> None:
    """Makes `name` the instruction set in use, in the whole process.

    Raises:
        BackendError: this machine does not have it.
    """
    if name not in available_isas() or load().mxfp8_isa_force(name.encode()) != 0:
        raise _no_such_isa("isa", name)


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Uses the instruction set `name`, in the whole process, inside a `with`.

    Raises:
        BackendError: this machine does not have it.
    """
    # In the whole process, because the library has one table of kernels in use.
    before = isa()
    force_isa(name)
    try:
        yield
    finally:
        force_isa(before)


def check(where: str, status: int) -> None:
    """Raises the last error of the library if `status` is not 0. Call it on the thread that received the status.

    Raises:
        ShapeError: an argument was refused.
        BackendError: out of memory, no such instruction set, no route, or another failure.
    """
    if status == 0:
        return
    last_error = load().mxfp8_last_error
    what, expected, advice = (last_error(field).decode(errors="replace") for field in _ERROR_FIELDS)
    error = ShapeError if status == _BAD_ARGUMENT else BackendError
    raise error(where, what, expected=expected, advice=advice)


def _no_such_isa(where: str, name: str) -> BackendError:
    return BackendError(
        where,
        f"{name!r}",
        expected=f"one of {', '.join(available_isas())}",
        advice="name an instruction set of this machine",
    )
