"""Folding in NumPy: MXFP8 elements re-expressed with one scale a row, and its error. The reference for fold.cu.

FP8 tensor cores before Blackwell know no scale per block, only one per row (cuBLASLt's "outer vector"). A power of two
is an exponent, so most of it fits into the elements' own: a block whose scale is 2^d below the largest of its row gets
its elements multiplied by 2^-d. Elements below E4M3's normal range (2^-6) are rounded, which is the only error:
blocks with small values in rows with large ones lose bits which the sum over the row mostly does not see.

`fold_error` says how much it is for a weight or an activation. It does not include what FP8 tensor cores do next: those
of Hopper keep about 14 bits of a sum while they accumulate (DeepSeek-V3 technical report, section 3.5.2), which
usually is the larger error, and cannot be computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mxfp8_ops import formats, numerics, numpy_nodes
from mxfp8_ops.checks import check_scales, normalize_axis
from mxfp8_ops.formats import BLOCK_SIZE, ELEMENT_NAN, SCALE_NAN
from mxfp8_ops.numerics import Codes

_LARGEST_SHIFT = 32
"""448 * 2^-32 rounds to zero, so no larger shift makes a difference."""


@dataclass(frozen=True)
class FoldError:
    """The error of folding one operand of a product."""

    relative: float
    """||folded - exact|| / ||exact||, in the 2-norm, over the blocks that are finite."""
    changed: float
    """Fraction of the elements whose value changed."""
    largest_shift: int
    """Largest d of any block: its scale lies 2^d below the largest of its row."""

    def __str__(self) -> str:
        return (
            f"folding: relative error {self.relative:.2e}, {100 * self.changed:.3f}% of the elements changed, "
            f"largest shift 2^-{self.largest_shift}"
        )


def fold(elements: Codes, scales: Codes) -> tuple[Codes, Codes]:
    """Returns (elements, row scales): E4M3 elements whose rows have one scale each.

    The row's scale is the largest code of its blocks, NaN blocks aside (0 if there is no other). An element is its old
    value times 2^(old code - row's code), rounded to nearest even; nothing saturates. A NaN block becomes 32 NaN
    elements.

    Args:
        elements: uint8 [..., K], E4M3, blocked along the last axis.
        scales: uint8 [..., ceil(K / 32)].

    Returns:
        elements: uint8 [..., K].
        row scales: uint8 [...], E8M0 codes.

    Raises:
        ShapeError: the scales do not fit the elements.
    """
    axis = normalize_axis("fold", elements.ndim, -1)
    check_scales("fold", elements.shape, scales.shape, axis)
    k = elements.shape[axis]
    # A NaN block, code 255, would otherwise be the largest of its row and shift all others to zero.
    row_scales = np.where(scales == SCALE_NAN, 0, scales).max(-1, initial=0).astype(np.uint8)
    shifts = np.minimum(row_scales[..., None].astype(np.int64) - scales, _LARGEST_SHIFT)
    # NaN blocks have negative shifts: their elements are replaced below.
    factors = np.ldexp(np.float32(1), -np.maximum(shifts, 0)).astype(np.float32)
    values = numerics.decode(elements, formats.E4M3) * np.repeat(factors, BLOCK_SIZE, -1)[..., :k]
    folded = numerics.encode(values, formats.E4M3)
    folded[np.repeat(scales == SCALE_NAN, BLOCK_SIZE, -1)[..., :k]] = ELEMENT_NAN
    return folded, row_scales


def fold_error(elements: Codes, scales: Codes) -> FoldError:
    """Returns how much of a quantized weight or activation `fold` loses; see the module for what is not in it.

    Args:
        elements: uint8 [..., K], E4M3, blocked along the last axis. NumPy arrays: tensor.cpu().numpy().
        scales: uint8 [..., ceil(K / 32)].

    Raises:
        ShapeError: the scales do not fit the elements.
    """
    folded, row_scales = fold(elements, scales)
    # In float64: the norms are of many values, and their difference is small.
    exact = numpy_nodes.dequantize(elements, scales).astype(np.float64)
    approximate = numerics.decode(folded, formats.E4M3) * numerics.decode_scale(row_scales)[..., None].astype(
        np.float64
    )
    # NaN blocks stay NaN: there is no error to measure.
    finite = np.isfinite(exact)
    exact, approximate = exact[finite], approximate[finite]
    norm = np.linalg.norm(exact)
    shifts = (row_scales[..., None].astype(np.int64) - scales)[scales != SCALE_NAN]
    return FoldError(
        relative=float(np.linalg.norm(approximate - exact) / norm) if norm else 0.0,
        changed=float((approximate != exact).mean()) if exact.size else 0.0,
        largest_shift=int(shifts.max(initial=0)),
    )
