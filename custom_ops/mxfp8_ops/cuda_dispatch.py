"""Which product kernel runs where: the dispatch table of the CUDA gemms, by architecture, dtype and number of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mxfp8_ops.errors import BackendError

_EXACT: Final = ("bfloat16", "e4m3", "e5m2")
"""What bfloat16 tensor cores multiply exactly, apart from scales that the kernels look out for."""


@dataclass(frozen=True)
class Route:
    """A row of the dispatch table: the product `kernel` for devices and operands that all conditions fit."""

    kernel: str
    capability: tuple[int, int] = (8, 0)
    """Least compute capability."""
    most_rows: int | None = None
    """Greatest M."""
    kinds: tuple[str, ...] = (*_EXACT, "float16", "float32")
    """What x may be."""
    whole_blocks: bool = False
    """Whether K must be a multiple of 32 and both operands aligned to 16 bytes."""


ROUTES: Final = (
    Route("skinny", most_rows=64, kinds=_EXACT, whole_blocks=True),
    Route("large", kinds=_EXACT),
    Route("float32"),
)
"""The dispatch table: the first row that fits wins.

skinny   gemm_skinny.cu: reads the packed weight once, bfloat16 tensor cores; for few rows.
large    dequantize.cu to bfloat16, then cuBLAS; gemm_float32.cu repairs it if bfloat16 could not hold an operand.
float32  gemm_float32.cu: for x that bfloat16 cannot hold, and for anything else.
"""

_forced: list[str] = []


def route(capability: tuple[int, int], kind: str, m: int, k: int, addresses: tuple[int, ...] = ()) -> str:
    """Returns the kernel of the row of `ROUTES` that fits a product, or of the one `forced_route` names.

    Raises:
        BackendError: the device is too old, or the forced row cannot do it.
    """
    whole = k % 32 == 0 and k < 2**25 and not any(address % 16 for address in addresses)
    for row in ROUTES:
        if _forced and row.kernel != _forced[-1]:
            continue
        fits_rows = row.most_rows is None or m <= row.most_rows
        fits = capability >= row.capability and kind in row.kinds and (whole or not row.whole_blocks)
        if fits and fits_rows:
            return row.kernel
    wanted = f"the forced route {_forced[-1]!r} to fit" if _forced else "compute capability 8.0 or later"
    raise BackendError(
        f"cuda: no route for {kind}, M = {m}, K = {k} on compute capability {capability[0]}.{capability[1]}; "
        f"expected {wanted}; use another device or route"
    )


@contextlib.contextmanager
def forced_route(kernel: str) -> Iterator[None]:
    """Uses one row of `ROUTES` for every product, in the whole process, inside a `with`.

    Raises:
        BackendError: there is no such row.
    """
    if kernel not in {row.kernel for row in ROUTES}:
        names = ", ".join(row.kernel for row in ROUTES)
        raise BackendError(f"cuda: route {kernel!r}; expected one of {names}; correct the name")
    _forced.append(kernel)
    try:
        yield
    finally:
        _forced.pop()
