"""Which rows of the dispatch table (`planner.routes`, src/cuda_host/routes.cpp) products must take.

And how they must be cut up, for measurements.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Final

from mxfp8_ops.cuda import planner
from mxfp8_ops.cuda.execution import Device
from mxfp8_ops.cuda.planner import Place
from mxfp8_ops.errors import BackendError

# Stacks, because the contexts below may be nested; of the process, because torch runs backward passes on other threads.
_forced: Final[list[int]] = []
_cuts: Final[list[tuple[int, int, int]]] = []


def place(gpu: Device, libraries: int) -> Place:
    """Returns the planner's description of a device: its capability, its libraries, and the choices made below."""
    # The usual case first: nothing is forced, and the cached Place needs no new tuple.
    plain = _place(gpu.capability, gpu.processors, libraries)
    if not (_forced or _cuts):
        return plain
    # The planner counts forced rows from 1, as 0 stands for none.
    forced, cut = _forced[-1] + 1 if _forced else 0, _cuts[-1] if _cuts else (0, 0, 0)
    return Place(*plain[:3], forced, *cut)


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
def fixed_cut(*, splits: int = 0, warps: int = 0, parts_bytes: int = 0) -> Iterator[None]:
    """Cuts products up in a fixed way, in the whole process, inside a `with`: for measurements. 0: as planned.

    Args:
        splits: parts of K.
        warps: warps of gemm_skinny that share x.
        parts_bytes: most bytes of the sums of bfloat16 parts.
    """
    _cuts.append((splits, warps, parts_bytes))
    try:
        yield
    finally:
        _cuts.pop()


def _row(kernel: str) -> int:
    names = [row.kernel for row in planner.routes()]
    if kernel not in names:
        choices = f"one of {', '.join(names)}"
        raise BackendError("cuda", f"route {kernel!r}", expected=choices, advice="correct the name")
    return names.index(kernel)
