"""Which rows of the dispatch table (`planner.routes`, src/cuda_host/routes.cpp) products may, or must, take.

And which variants of kernels (`planner.variants`) must do, where measurements would choose.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Final

from mxfp8_ops.cuda import planner
from mxfp8_ops.cuda.execution import Device
from mxfp8_ops.cuda.planner import Place, Quantize
from mxfp8_ops.errors import BackendError

# Stacks, because the contexts below may be nested; of the process, because torch runs backward passes on other threads.
_forced: Final[list[int]] = []
_allowed: Final[list[int]] = []
_cuts: Final[list[tuple[int, int, int, int]]] = []
_variants: Final[list[int]] = []


def place(gpu: Device, libraries: int) -> Place:
    """Returns the planner's description of a device: its capability, its libraries, and the choices made below."""
    # The usual case first: nothing is forced, and the cached Place needs no new tuple.
    plain = _place(gpu.capability, gpu.processors, libraries)
    if not (_forced or _allowed or _cuts or _variants):
        return plain
    # A set, because a row may be allowed more than once. The planner counts forced rows from 1, as 0 stands for none.
    rows = sum({1 << row for row in _allowed})
    forced, cut = _forced[-1] + 1 if _forced else 0, _cuts[-1] if _cuts else (0, 0, 0, 0)
    return Place(*plain[:3], rows, forced, *cut, _variant())


def placed(gpu: Device, request: Quantize) -> Quantize:
    """Returns a request as for this device: needed for TRANSPOSED, the only layout with variants to choose from."""
    major, minor = gpu.capability
    return request._replace(capability=10 * major + minor, processors=gpu.processors, variant=_variant())


def _variant() -> int:
    return _variants[-1] + 1 if _variants else 0


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
        # Not pop: two threads may leave their contexts in another order than they entered them.
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


@contextlib.contextmanager
def forced_variant(kernel: str, name: str) -> Iterator[None]:
    """Uses a variant of a kernel wherever it can do the work, in the whole process, inside a `with`.

    Raises:
        BackendError: there is no such variant.
    """
    if (kernel, name) not in planner.variants():
        choices = f"one of {', '.join(' '.join(row) for row in planner.variants())}"
        raise BackendError("cuda", f"variant {kernel} {name}", expected=choices, advice="correct the name")
    _variants.append(planner.variants().index(planner.Variant(kernel, name)))
    try:
        yield
    finally:
        _variants.pop()


def _row(kernel: str) -> int:
    names = [row.kernel for row in planner.routes()]
    if kernel not in names:
        choices = f"one of {', '.join(names)}"
        raise BackendError("cuda", f"route {kernel!r}", expected=choices, advice="correct the name")
    return names.index(kernel)
