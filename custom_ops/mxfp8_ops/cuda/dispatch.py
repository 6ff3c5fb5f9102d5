"""What changes the row of the dispatch table (`planner.routes`) for tests and measurements: a forced row or cut."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Final

from mxfp8_ops.cuda import planner
from mxfp8_ops.cuda.execution import Device
from mxfp8_ops.cuda.planner import Place
from mxfp8_ops.errors import BackendError

# A stack, because the contexts below may be nested; one per process, because torch runs backward passes on other
# threads.
_chosen: Final[list[dict[str, int]]] = []


def place(gpu: Device, cublaslt: int = planner.BFLOAT16_PRODUCTS | planner.BLOCK_SCALED_PRODUCTS) -> Place:
    """Returns the planner's description of a device: capability, products that cuBLASLt may do, forced choices."""
    plain = _place(gpu.capability, gpu.processors, cublaslt)
    # Usually nothing is forced: then the cached Place is used, without a new tuple.
    return plain._replace(**{k: v for fields in _chosen for k, v in fields.items()}) if _chosen else plain


@functools.lru_cache
def _place(capability: tuple[int, int], processors: int, cublaslt: int) -> Place:
    major, minor = capability
    return Place(10 * major + minor, processors, cublaslt)


@contextlib.contextmanager
def _choose(**fields: int) -> Iterator[None]:
    _chosen.append(fields)
    try:
        yield
    finally:
        _chosen.pop()


def forced_route(kernel: str) -> contextlib.AbstractContextManager[None]:
    """Uses one row of the dispatch table for every product, in the whole process, inside a `with`.

    Raises:
        BackendError: the table has no such row.
    """
    names = [row.kernel for row in planner.routes()]
    if kernel not in names:
        choices = f"one of {', '.join(names)}"
        raise BackendError("cuda", f"route {kernel!r}", expected=choices, advice="correct the name")
    return _choose(forced=names.index(kernel) + 1)  # the planner counts from 1; 0 means that no row is forced


def fixed_cut(*, splits: int = 0, warps: int = 0, parts_bytes: int = 0) -> contextlib.AbstractContextManager[None]:
    """Splits all products in the given way, in the whole process, inside a `with`; see `mxfp8_cuda_place`."""
    return _choose(splits=splits, warps=warps, parts_bytes=parts_bytes)
