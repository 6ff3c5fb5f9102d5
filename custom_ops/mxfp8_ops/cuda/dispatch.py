"""Which rows of the dispatch table (`planner.routes`, src/cuda_host/routes.cpp) products may, or must, take."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Final

from mxfp8_ops.cuda import planner
from mxfp8_ops.cuda.execution import Device
from mxfp8_ops.cuda.planner import Place
from mxfp8_ops.errors import BackendError

_forced: Final[list[int]] = []
_allowed: Final[list[int]] = []
_cuts: Final[list[tuple[int, int, int, int]]] = []


def place(gpu: Device, libraries: int) -> Place:
    """Returns what the planner has to know besides a product: the device, its libraries, and what was chosen below."""
    plain = _place(gpu.capability, gpu.processors, libraries)
    if not (_forced or _allowed or _cuts):
        return plain
    rows = sum({1 << row for row in _allowed})
    forced, cut = _forced[-1] + 1 if _forced else 0, _cuts[-1] if _cuts else ()
    return Place(*plain[:3], rows, forced, *cut)


@functools.lru_cache
def _place(capability: tuple[int, int], processors: int, libraries: int) -> Place:
    major, minor = capability
    return Place(10 * major + minor, processors, libraries)


@contextlib.contextmanager
def forced_route(kernel: str) -> Iterator[None]:
    """Uses one row of the dispatch table for every product, in the whole process, inside a `with`.

    Raises:
        BackendError: there is no such row.
    """
    _forced.append(_row(kernel))
    try:
        yield
    finally:
        _forced.pop()


@contextlib.contextmanager
def allowed(kernel: str) -> Iterator[None]:
    """Lets products take an opt-in row of the dispatch table where it fits, inside a `with`.

    In the whole process, because torch runs backward passes on threads of its own.

    Raises:
        BackendError: there is no such row.
    """
    row = _row(kernel)
    _allowed.append(row)
    try:
        yield
    finally:
        _allowed.remove(row)


@contextlib.contextmanager
def fixed_cut(*, splits: int = 0, warps: int = 0, blocks: int = 0, parts_bytes: int = 0) -> Iterator[None]:
    """Cuts products up in a fixed way, in the whole process, inside a `with`: for measurements. 0: as planned.

    Args:
        splits: parts of K.
        warps: warps of gemm_skinny that share x.
        blocks: 64-row blocks of the weight that a warpgroup of gemm_fused takes.
        parts_bytes: most bytes of the sums of bfloat16 parts.
    """
    _cuts.append((splits, warps, blocks, parts_bytes))
    try:
        yield
    finally:
        _cuts.pop()


def _row(kernel: str) -> int:
    names = [row.kernel for row in planner.routes()]
    if kernel not in names:
        known = f"one of {', '.join(names)}"
        raise BackendError("cuda", f"route {kernel!r}", expected=known, advice="correct the name")
    return names.index(kernel)
