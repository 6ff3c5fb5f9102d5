"""The differences of two results. Every number that is reported is defined here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mxfp8_graph.report.base import Data
from mxfp8_graph.report.data import sqnr_db as sqnr

__all__ = ["Difference", "difference", "sameness", "sqnr"]


@dataclass(frozen=True, kw_only=True)
class Difference(Data):
    """`result` against `reference`, over the positions where both are finite.

    Without such a position the three errors are NaN, which no check may count as passed. Two empty results (a batch of
    0) are equal.
    """

    relative_l2: float
    """|result - reference| / |reference|, Euclidean norms; 0 if both are zero, infinite if only the reference is."""
    max_abs: float
    """Largest |result - reference|."""
    cosine: float
    """Cosine of the angle between the two; 1 when both are zero."""
    nonfinite: int
    """Positions where one has a NaN or Inf and the other has another value."""
    compared: int
    """Positions where both are finite."""
    count: int
    """All positions."""


def difference(reference: npt.NDArray[Any], result: npt.NDArray[Any]) -> Difference:
    """Returns the differences of `result` from `reference`, computed in float64; the shapes must be the same."""
    # In float64: the rounding of a float32 sum over a large output would exceed some of the errors.
    a, b = reference.astype(np.float64).ravel(), result.astype(np.float64).ravel()
    # Equal infinities and NaN at the same place are no difference.
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    both = np.isfinite(a) & np.isfinite(b)
    nonfinite = int(np.count_nonzero(~both & ~same))
    a, b = a[both], b[both]
    norm_a, norm_b, distance = (float(np.linalg.norm(v)) for v in (a, b, b - a))
    nonzero = norm_a > 0 and norm_b > 0
    # Rounding can take the cosine of equal vectors past 1.
    cosine = float(np.clip((a / norm_a) @ (b / norm_b), -1, 1)) if nonzero else float(norm_a == norm_b)
    relative = distance / norm_a if norm_a else (math.inf if distance else 0.0)
    largest = float(np.abs(b - a).max(initial=0))
    if same.size and not a.size:
        relative = largest = cosine = math.nan
    return Difference(
        relative_l2=relative, max_abs=largest, cosine=cosine, nonfinite=nonfinite, compared=a.size, count=same.size
    )


def sameness(values: npt.NDArray[Any]) -> str | None:
    """Returns the reason why a comparison with `values` proves little ("zero everywhere"), or None if they vary."""
    if values.size < 2:
        return None
    numbers = values.astype(np.float64)
    if not np.isfinite(numbers).any():
        return "nowhere finite"
    if (numbers == numbers.flat[0]).all():
        return "zero everywhere" if numbers.flat[0] == 0 else "the same value everywhere"
    return None
