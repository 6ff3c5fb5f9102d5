"""Which product kernel runs where: the dispatch table of the CUDA gemms, by architecture, dtype and number of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from mxfp8_ops.cuda.skinny import PARTS
from mxfp8_ops.errors import BackendError

_EXACT: Final = ("bfloat16", "e4m3", "e5m2")
"""What bfloat16 tensor cores multiply exactly, apart from scales that the kernels look out for."""


@dataclass(frozen=True)
class Route:
    """A row of the dispatch table: the product `kernel` for devices and operands that all conditions fit."""

    kernel: str
    capability: tuple[int, int] = (8, 0)
    """Least compute capability."""
    alone: bool = False
    """Whether no later one will do: the kernel has instructions that only this one knows."""
    most_rows: int | None = None
    """Greatest M; of float32 (float16) x, whose rows are three (two) of bfloat16, a third (half) of it."""
    kinds: tuple[str, ...] = (*_EXACT, "float16", "float32")
    """What x may be."""
    b_kinds: tuple[str, ...] = ("e4m3", "e5m2")
    """What b may be."""
    whole_blocks: bool = False
    """Whether K must be a multiple of 32 and both operands aligned to 16 bytes."""
    n_multiple: int = 1
    """What N must be a multiple of."""
    library: bool = False
    """Whether it is a product of a library that the caller has to bring."""
    opt_in: bool = False
    """Whether it is taken only when asked for, by `allowed` or `forced_route`."""
    packed: bool = False
    """Whether it is taken for a weight that is kept in bfloat16 too only when `forced_route` says so."""


ROUTES: Final = (
    Route("skinny", most_rows=64, whole_blocks=True),
    Route(
        "block_scaled", (10, 0), kinds=("e4m3", "e5m2"), b_kinds=("e4m3",), whole_blocks=True, n_multiple=16,
        library=True,
    ),
    Route(
        "fold", (8, 9), kinds=("e4m3",), b_kinds=("e4m3",), whole_blocks=True, n_multiple=16, library=True, opt_in=True
    ),
    Route("fused", (9, 0), alone=True, most_rows=2048, kinds=_EXACT, whole_blocks=True, opt_in=True, packed=True),
    Route("large", kinds=_EXACT),
    Route("parts", kinds=("float16", "float32")),
    Route("float32"),
)  # fmt: skip
"""The dispatch table: the first row that fits wins.

skinny        gemm_skinny.cu: reads the packed weight once, bfloat16 tensor cores; for few rows.
block_scaled  the MXFP8 product of Blackwell's tensor cores: torch's scaled_mm, or cuBLASLt through nvmath-python;
              swizzle_scales.cu lays out the scales.
fold          fold.cu, then an FP8 product with one scale per row, by the same libraries.
              Not exact (`folding.fold_error`), so only where `allowed("fold")` says so; gemm's `fast_accumulate` does.
fused         gemm_fused.cu: decodes the packed weight on its way to Hopper's tensor cores; exact. Where `large` has no
              bfloat16 weight at hand, and up to where dequantizing it costs less than it does here. Has not run on a
              GPU yet, so only where `allowed("fused")` says so.
large         dequantize.cu to bfloat16, then cuBLAS; gemm_float32.cu repairs it if bfloat16 could not hold an operand.
parts         bfloat16_parts.cu: a float32 is the sum of three bfloat16 values, a float16 of two; a row above multiplies
              them, as so many times M rows, and finish.cu adds up. gemm_float32.cu repairs what is not finite.
              For few rows, `skinny` does all of that itself.
float32       gemm_float32.cu: ordinary cores, anything else.
"""

_forced: list[str] = []
_allowed: list[str] = []


def route(
    capability: tuple[int, int],
    kind: str,
    m: int,
    k: int,
    addresses: tuple[int, ...] = (),
    *,
    n: int = 0,
    b_kind: str = "e4m3",
    libraries: Collection[str] = (),
    forced: bool = True,
    kept: bool = False,
) -> str:
    """Returns the kernel of the row of `ROUTES` that fits a product, or of the one `forced_route` names.

    Args:
        capability: compute capability of the device.
        kind: dtype or element format of x.
        m: rows of x.
        k: length of the sums.
        addresses: of x and b, for their alignment.
        n: rows of b.
        b_kind: element format of b.
        libraries: the library rows that the caller can do.
        forced: whether `forced_route` decides.
        kept: whether b is kept in bfloat16 too.

    Raises:
        BackendError: the device is too old, or the forced row cannot do it.
    """
    whole = k % 32 == 0 and k < 2**25 and not any(address % 16 for address in addresses)
    wanted_row = _forced[-1] if _forced and forced else None
    for row in ROUTES:
        if wanted_row not in (None, row.kernel):
            continue
        if row.opt_in and not (wanted_row or row.kernel in _allowed):
            continue
        if row.packed and kept and not wanted_row:
            continue
        fits_shape = (row.most_rows is None or m * PARTS.get(kind, 1) <= row.most_rows) and n % row.n_multiple == 0
        fits_kinds = kind in row.kinds and b_kind in row.b_kinds
        device = capability == row.capability if row.alone else capability >= row.capability
        here = device and (row.kernel in libraries or not row.library)
        if here and fits_kinds and fits_shape and (whole or not row.whole_blocks):
            return row.kernel
    wanted = f"the forced route {wanted_row!r} to fit" if wanted_row else "compute capability 8.0 or later"
    raise BackendError(
        "cuda",
        f"no route for {kind} times {b_kind}, M = {m}, N = {n}, K = {k} on compute capability "
        f"{capability[0]}.{capability[1]}",
        expected=str(wanted),
        advice="use another device or route",
    )


@contextlib.contextmanager
def forced_route(kernel: str) -> Iterator[None]:
    """Uses one row of `ROUTES` for every product, in the whole process, inside a `with`.

    Raises:
        BackendError: there is no such row.
    """
    _check_name(kernel)
    _forced.append(kernel)
    try:
        yield
    finally:
        _forced.pop()


@contextlib.contextmanager
def allowed(kernel: str) -> Iterator[None]:
    """Lets products take an opt-in row of `ROUTES` where it fits, inside a `with`.

    In the whole process, because torch runs backward passes on threads of its own.

    Raises:
        BackendError: there is no such row.
    """
    _check_name(kernel)
    _allowed.append(kernel)
    try:
        yield
    finally:
        _allowed.remove(kernel)


def _check_name(kernel: str) -> None:
    if kernel not in {row.kernel for row in ROUTES}:
        known = ", ".join(row.kernel for row in ROUTES)
        raise BackendError("cuda", f"route {kernel!r}", expected=f"one of {known}", advice="correct the name")
