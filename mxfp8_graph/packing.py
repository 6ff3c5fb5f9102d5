"""Packs weights in slices of rows, so that a weight need not be in memory as a whole. Knows no graph library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mxfp8_graph.policy.checkpoint_weights import StoredWeight
from mxfp8_ops import cpu
from mxfp8_ops.checks import scale_count
from mxfp8_ops.errors import ContractError, Option
from mxfp8_ops.formats import BLOCK_SIZE, element_format

Array = npt.NDArray[Any]

SLICE_BYTES: Final = 32 << 20
"""Bytes of a weight, as float32, that are read at once."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as [..., N, K] elements and [..., N, ceil(K / 32)] scales, with its quantization error."""

    elements: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    signal: float
    """Sum of w^2."""
    noise: float
    """Sum of (w - dequantized)^2."""

    @property
    def byte_size(self) -> int:
        """Bytes of elements and scales."""
        return self.elements.nbytes + self.scales.nbytes

    @property
    def relative_l2(self) -> float:
        """|w - dequantized| / |w|; 0 for an all-zero weight."""
        return float((self.noise / self.signal) ** 0.5) if self.signal else 0.0


def checked_codes(weight: StoredWeight, *, allow_nonfinite: bool) -> QuantizedWeight:
    """Returns the bytes of a packed weight, with an unknown error (NaN).

    Raises:
        NonFiniteError: an element or a scale is NaN or Inf, and `allow_nonfinite` is false.
    """
    packed = QuantizedWeight(weight.elements, weight.scales, math.nan, math.nan)
    if not allow_nonfinite:
        fmt = element_format(weight.element_format)
        # Every INT8 code is a number. In the other formats, the codes above `max_code`, without the sign, are not.
        largest, magnitude = (0xFF, 0xFF) if fmt.twos_complement else (fmt.max_code, 0x7F)
        checks = (("scale", packed.scales, 254, 0xFF), ("element", packed.elements, largest, magnitude))
        for what, codes, most, mask in checks:
            if codes.size and int((codes & np.uint8(mask)).max()) > most:
                problem = f"a {what} that is NaN or Inf"
                advice = ("repair the checkpoint, or pass ", Option("allow_nonfinite", True), " to keep it")
                raise NonFiniteError(f"weight {weight.name!r}", problem, expected="finite values", advice=advice)
    return packed


class NonFiniteError(ContractError):
    """A weight holds a NaN or Inf."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A stack of matrices [..., R, C] that can be read row by row."""

    shape: tuple[int, ...]
    name: str = "weight"
    """Name in errors."""
    read: Callable[[tuple[int, ...], int, int], Array] | None = None
    """(index of the matrix, first row, last row + 1) -> rows, valid until the next call. None if there are only sizes,
    as on a dry run."""
    index: Callable[[tuple[int, ...]], list[int]] = list
    """Maps an index of the stack to the index of the same value in the stored tensor."""


def packed_bytes(shape: Sequence[int], *, transposed: bool) -> int:
    """Returns the number of bytes of elements and scales of a weight [..., N, K], or [..., K, N] if `transposed`."""
    *lead, height, width = shape
    n, k = (width, height) if transposed else (height, width)
    return math.prod(lead) * n * (k + scale_count(k))


def pack(
    rows: Rows,
    *,
    transposed: bool,
    factor: float | Array = 1.0,
    element_format: str = "e4m3",
    scale_rounding: str = "ceil",
    allow_nonfinite: bool = False,
) -> QuantizedWeight:
    """Returns `factor` times a weight, quantized along K and laid out with K last.

    Args:
        rows: [..., N, K], or [..., K, N] if `transposed`; float32, float16 or bfloat16. Without values the result has
            sizes only, and takes no memory.
        transposed: whether K is the last axis but one.
        factor: multiplied in float32 before rounding: a number, or float32 [R] for the rows of a matrix.
        element_format: a name of `formats.ELEMENT_FORMATS`.
        scale_rounding: one of `formats.SCALE_ROUNDINGS`.
        allow_nonfinite: whether a block with NaN or Inf becomes NaN, instead of raising NonFiniteError.
    """
    *lead, height, width = rows.shape
    n, k = (width, height) if transposed else (height, width)
    elements = np.empty((*lead, n, k), np.uint8)
    scales = np.empty((*lead, n, scale_count(k)), np.uint8)
    # A dry run has sizes only; np.empty does not touch its memory, so the system never provides it.
    if rows.read is None:
        return QuantizedWeight(elements, scales, math.nan, math.nan)
    signal = noise = 0.0
    # If the rows lie along K, a slice must hold whole blocks. The widest value has 4 bytes.
    step = -(-SLICE_BYTES // (4 * width * BLOCK_SIZE)) * BLOCK_SIZE
    for at in np.ndindex(*lead):
        for start in range(0, height, step):
            stop = min(start + step, height)
            matrix = rows.read(at, start, stop)
            # In float32 and before rounding, so that the values are rounded once.
            if not isinstance(factor, float):
                matrix = matrix.astype(np.float32) * factor[start:stop, None]
            elif factor != 1.0:
                matrix = matrix.astype(np.float32) * np.float32(factor)
            part = cpu.pack(matrix, transposed=transposed, element_format=element_format, scale_rounding=scale_rounding)
            if part.first_nonfinite is not None and not allow_nonfinite:
                row, column = part.first_nonfinite
                allow = Option("allow_nonfinite", True)
                what = f"{matrix[row, column]} at index {rows.index((*at, start + row, column))}"
                advice = ("repair the checkpoint, or pass ", allow, " to let its block become NaN")
                raise NonFiniteError(f"weight {rows.name!r}", what, expected="finite values", advice=advice)
            if transposed:
                blocks = slice(start // BLOCK_SIZE, scale_count(stop))
                elements[at][:, start:stop], scales[at][:, blocks] = part.elements, part.scales
            else:
                elements[at][start:stop], scales[at][start:stop] = part.elements, part.scales
            signal += part.signal
            noise += part.noise
    return QuantizedWeight(elements, scales, signal, noise)


def unswizzled(stored: npt.NDArray[np.uint8], rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Returns [rows, columns] scales from the tiles of NVIDIA's block-scaled matmuls.

    Rows are in tiles of 128 and scales in tiles of 4, zero-padded, with 32 x 4 x 4 values to a tile:

        stored[row tile, column tile, i, j, k] = scale[128 * row tile + 32 * j + i, 4 * column tile + k]
    """
    down, across = swizzled_tiles(rows, columns)
    tiles = stored.reshape(down, across, 32, 4, 4)
    flat = tiles.transpose(0, 3, 2, 1, 4).reshape(down * 128, across * 4)
    return np.ascontiguousarray(flat[:rows, :columns])


def swizzled_tiles(rows: int, columns: int) -> tuple[int, int]:
    """Returns (tiles down, tiles across) of [rows, columns] scales, in tiles of 128 x 4 values."""
    return -(-rows // 128), -(-columns // 4)
