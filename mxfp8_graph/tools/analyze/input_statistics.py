"""The activation of a site in numbers: its largest magnitude, outliers in its blocks, and the error of rounding it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.report.base import Data
from mxfp8_graph.running.compare import sqnr
from mxfp8_graph.running.inputs import Array
from mxfp8_ops import cpu
from mxfp8_ops.formats import BLOCK_SIZE
from mxfp8_ops.numerics import value_dtype

OUTLIER: Final = 6.0
"""A block has an outlier if its largest magnitude is above this, in units of the root mean square of the sample."""


@dataclass(frozen=True, kw_only=True)
class InputStatistics(Data):
    """One site's input in the original model, over all samples. NaN where it has a NaN or Inf."""

    amax: float
    """Largest magnitude."""
    outlier_blocks: float
    """Share of the blocks with a value above `OUTLIER` times the root mean square."""
    lost: float
    """Share of the values other than zero that become zero: each is far below the largest of its block."""
    sqnr_db: float | None
    """SQNR of rounding it as the site does, in dB; None if the site does not round it."""


class InputObserver:
    """Adds up the inputs of one site, sample by sample."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision
        self._amax = self._signal = self._noise = 0.0
        self._values = self._lost = self._blocks = self._outliers = 0

    def add(self, x: Array) -> None:
        """Adds the input [..., K] of one sample."""
        values = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = self._rounded(values)
            wide = values.astype(np.float64)
            energy = float(np.sum(wide * wide))
            self._noise += float(np.sum((wide - rounded) ** 2))
        self._signal += energy
        self._values += int(np.count_nonzero(values))
        self._lost += int(np.count_nonzero((values != 0) & (rounded == 0)))
        amax = np.maximum.reduceat(np.abs(wide), range(0, wide.shape[1], BLOCK_SIZE), axis=1) if wide.size else wide
        # NaN counts as the largest value, since max() would return a number or NaN by their order.
        self._amax = max(self._amax, float(amax.max(initial=0)), key=lambda value: (math.isnan(value), value))
        self._blocks += amax.size
        self._outliers += int(np.count_nonzero(amax > OUTLIER * math.sqrt(energy / max(wide.size, 1))))

    def result(self) -> InputStatistics:
        """Returns the statistics over all samples."""
        rounds = self._decision.activations != "unchanged"
        relative = math.sqrt(self._noise / self._signal) if self._noise and self._signal else 0.0
        return InputStatistics(
            amax=self._amax,
            outlier_blocks=self._outliers / max(self._blocks, 1),
            lost=self._lost / max(self._values, 1),
            sqnr_db=sqnr(relative) if rounds else None,
        )

    def _rounded(self, x: Array) -> npt.NDArray[Any]:
        """Returns the values that the site multiplies."""
        if (dtype := self._decision.activation_dtype) is not None:
            return x.astype(value_dtype(dtype)).astype(np.float32)
        if (element_format := self._decision.activation_format) is None:
            return x
        codes = cpu.quantize(x, element_format=element_format, scale_rounding=self._decision.scale_rounding)
        return cpu.dequantize(*codes, element_format=element_format)
