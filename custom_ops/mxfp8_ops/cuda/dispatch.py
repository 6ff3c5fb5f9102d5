"""What changes the row of the dispatch table (`planner.routes`): a forced row, and a library that refuses a product.

A library may lack a product that its row names, on some architecture or in some version. It is asked at the first
product of a shape; then the shape takes the next row.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Final

from mxfp8_ops.cuda import planner
from mxfp8_ops.cuda.execution import Device, RefusedError
from mxfp8_ops.cuda.planner import Place
from mxfp8_ops.errors import BackendError

# A stack, because the contexts below may be nested; one per process, because torch runs backward passes on other
# threads.
_chosen: Final[list[dict[str, int]]] = []


def place(gpu: Device, libraries: int) -> Place:
    """Returns the planner's description of a device: its capability, its libraries, and the forced choices."""
    plain = _place(gpu.capability, gpu.processors, libraries)
    # Usually nothing is forced: then the cached Place is used, without a new tuple.
    return plain._replace(**{k: v for fields in _chosen for k, v in fields.items()}) if _chosen else plain


@functools.lru_cache
def _place(capability: tuple[int, int], processors: int, libraries: int) -> Place:
    major, minor = capability
    return Place(10 * major + minor, processors, libraries)


_FP8: Final = planner.CUBLASLT | planner.SCALED_MM
_refused: Final[set[tuple[int, ...]]] = set()
"""(device, codes of x, b and y, N, K) of the products that a library refused; without M, which varies between calls."""
_warned: Final[set[tuple[int, ...]]] = set()


def allowed(libraries: int, gpu: Device, product: tuple[int, ...]) -> int:
    """Returns the libraries without those that refused this product: the codes of x, b and y, N, K."""
    # Usually none has refused any.
    return libraries & ~_FP8 if _refused and (gpu.index, *product) in _refused else libraries


def remember(error: RefusedError, gpu: Device, product: tuple[int, ...]) -> None:
    """Keeps in mind that a library refused a product, and warns once for each device and codes.

    Raises:
        RefusedError: the row is forced, so there is no other.
    """
    key = (gpu.index, *product)
    if any("forced" in fields for fields in _chosen):
        raise error
    _refused.add(key)
    if key[:4] not in _warned:
        _warned.add(key[:4])
        warnings.warn(f"{error}. Such products take the next row of the dispatch table", stacklevel=4)


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
