"""What goes into a site, in numbers: how large, how uneven within a block, and what rounding to MXFP8 leaves of it."""

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
"""A block has an outlier if its largest magnitude is above this, in units of the root mean square of the input."""


@dataclass(frozen=True, kw_only=True)
class InputStatistics(Data):
    """One site's input in the original model, over all samples. NaN where it has a NaN or Inf."""

    amax: float
    """Largest magnitude."""
    outlier_blocks: float
    """Share of the blocks with a value above `OUTLIER` times the root mean square of the sample's input."""
    lost: float
    """Share of the values other than zero that become zero: each is far below the largest of its block."""
    sqnr_db: float | None
    """SQNR of rounding it as the site does, in dB; None if the site takes it as it is."""
    drift: float
    """Relative L2 error that it has where all sites are rewritten: what those before this one did to it."""
    block_amax: tuple[float, ...]
    """Largest magnitude in each block along K."""


class InputObserver:
    """Adds up what one site's inputs are, sample by sample."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision
        self._signal = self._noise = self._drift = 0.0
        self._values = self._lost = self._blocks = self._outliers = 0
        self._amax = np.zeros(0)

    def add(self, x: Array, rewritten: Array) -> None:
        """Takes the input [..., K] of one sample, in the original model and with all sites rewritten."""
        values = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = self._rounded(values)
            wide = values.astype(np.float64)
            self._signal += _energy(wide)
            self._noise += _energy(wide - rounded)
            self._drift += _energy(wide - rewritten.reshape(wide.shape))
        self._values += int(np.count_nonzero(values))
        self._lost += int(np.count_nonzero((values != 0) & (rounded == 0)))
        amax = _block_amax(np.abs(wide))
        limit = OUTLIER * math.sqrt(_energy(wide) / max(wide.size, 1))
        self._blocks += amax.size
        self._outliers += int(np.count_nonzero(amax > limit))
        largest = amax.max(0, initial=0)
        self._amax = np.maximum(self._amax, largest) if self._amax.size else largest

    def result(self) -> InputStatistics:
        """Returns what was seen in all samples."""
        rounds = self._decision.activations != "unchanged"
        return InputStatistics(
            amax=float(self._amax.max(initial=0)),
            outlier_blocks=self._outliers / max(self._blocks, 1),
            lost=self._lost / max(self._values, 1),
            sqnr_db=sqnr(_ratio(self._noise, self._signal)) if rounds else None,
            drift=_ratio(self._drift, self._signal),
            block_amax=tuple(map(float, self._amax)),
        )

    def _rounded(self, x: Array) -> npt.NDArray[Any]:
        """Returns the values that the site multiplies."""
        if (dtype := self._decision.activation_dtype) is not None:
            return x.astype(value_dtype(dtype)).astype(np.float32)
        if (element_format := self._decision.activation_format) is None:
            return x
        codes = cpu.quantize(x, element_format=element_format, scale_rounding=self._decision.scale_rounding)
        return cpu.dequantize(*codes, element_format=element_format)


def _energy(values: npt.NDArray[np.float64]) -> float:
    flat = values.ravel()
    return float(flat @ flat)


def _ratio(error: float, signal: float) -> float:
    """Returns a relative L2 error from sums of squares."""
    if error == 0:
        return 0.0
    return math.sqrt(error / signal) if signal else math.inf


def _block_amax(magnitudes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns the largest of each block of [rows, K], as [rows, ceil(K / 32)]."""
    rows, k = magnitudes.shape
    count = -(-k // BLOCK_SIZE)
    padded = np.zeros((rows, count * BLOCK_SIZE))
    padded[:, :k] = magnitudes
    return np.asarray(padded.reshape(rows, count, BLOCK_SIZE).max(-1, initial=0))
