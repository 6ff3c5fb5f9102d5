"""The rules of other quantizers, as data: a quantizer that fails may follow one of them.

Each is written out from its published source, named in its row, in NumPy; tests hold those of torchao to the package.
None of them is wrong by itself: OCP MX v1.0 describes one way to make a block, in section 6.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mxfp8_ops import numerics
from mxfp8_ops.formats import BLOCK_SIZE, E4M3, E5M2, ELEMENT_FORMATS, INT8, SCALE_BIAS, SCALE_NAN, ElementFormat

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Exponents = Callable[[Floats, ElementFormat], npt.NDArray[Any]]
"""amax -> exponents of the scales, before they are clamped; -inf or NaN where there is none."""


def _of_bits(increment: Callable[[ElementFormat], int]) -> Exponents:
    """Returns the rule that adds to the bits of amax and takes its exponent field."""

    def exponents(amax: Floats, fmt: ElementFormat) -> npt.NDArray[Any]:
        bits = amax.view(np.uint32).astype(np.int64) + increment(fmt)
        return np.asarray(np.minimum(bits >> 23, 255) - SCALE_BIAS - fmt.emax)

    return exponents


def _log2_of_quotient(amax: Floats, fmt: ElementFormat) -> npt.NDArray[Any]:
    return np.asarray(np.ceil(np.log2(amax / np.float32(fmt.max))))


def _log2(amax: Floats, fmt: ElementFormat) -> npt.NDArray[Any]:
    return np.asarray(np.floor(np.log2(np.where(amax == 0, np.float32(2.0**-126), amax))) - fmt.emax)


def _of_product(amax: Floats, fmt: ElementFormat) -> npt.NDArray[Any]:
    """Returns the exponents of amax times the reciprocal of the maximum, in float32, rounded up."""
    mantissa, exponent = np.frexp(amax * (np.float32(1) / np.float32(fmt.max)))
    return np.where(mantissa == 0, -np.inf, exponent - (mantissa == 0.5))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A quantizer of elements in blocks of 32."""

    name: str
    source: str
    exponents: Exponents
    element_formats: tuple[str, ...] = (E4M3.name, E5M2.name)
    nan: int | None = SCALE_NAN
    """Scale code of a block with a NaN; None: amax is that of the other values."""
    inf: int | None = 254
    """Scale code of a block with an infinity and no NaN; None: the result of the rule."""
    poisons: bool = False
    """Whether scale code 255 makes every element NaN; otherwise values are divided by infinity."""
    least_factor: float = 2.0**127
    """The factor on values where the scale code is 0."""
    ties_away: bool = False
    """Whether a value between two elements goes to the greater; otherwise to the even one."""

    def quantize(self, x: Floats, *, element_format: str, axis: int = -1) -> tuple[Codes, Codes]:
        """Returns elements and scales, with the shapes of `numpy_nodes.quantize`; any NaN is 0x7f."""
        fmt = ELEMENT_FORMATS[element_format]
        values = np.moveaxis(x, axis, -1)
        k = values.shape[-1]
        blocks = np.pad(values, ((0, 0), (0, -k % BLOCK_SIZE))).reshape(len(values), -1, BLOCK_SIZE)
        with np.errstate(all="ignore"):
            scales = self._scales(np.abs(blocks), fmt)
            factor = np.ldexp(np.float32(1), SCALE_BIAS - scales.astype(np.int32)).astype(np.float32)
            # ldexp gives 2^127 for code 0, which some quantizers replace; 255 would give 2^-128, which stands for NaN.
            factor[scales == 0] = self.least_factor
            factor[scales == SCALE_NAN] = np.nan if self.poisons else 0
            scaled = blocks * factor[..., None]
            elements = numerics.encode(_away(scaled, fmt) if self.ties_away else scaled, fmt)
        elements = elements.reshape(len(values), -1)[:, :k]
        return np.moveaxis(elements, -1, axis), np.moveaxis(scales, -1, axis)

    def _scales(self, magnitudes: Floats, fmt: ElementFormat) -> Codes:
        amax = np.nanmax(magnitudes, -1, initial=0) if self.nan is None else magnitudes.max(-1)
        exponents = self.exponents(np.where(np.isnan(amax), 0, amax).astype(np.float32), fmt)
        scales = np.clip(exponents, -SCALE_BIAS, SCALE_BIAS + (self.inf is None)) + SCALE_BIAS
        if self.inf is not None:
            scales = np.where(np.isinf(amax), self.inf, scales)
        return np.where(np.isnan(amax), self.nan or 0, scales).astype(np.uint8)


def _away(scaled: Floats, fmt: ElementFormat) -> Floats:
    """Returns the values rounded to elements, half away from zero."""
    _, exponent = np.frexp(scaled)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, 1 - fmt.bias) - fmt.mantissa_bits)
    rounded = np.copysign(np.floor(np.abs(scaled) / step + np.float32(0.5)) * step, scaled)
    return np.where(np.isfinite(scaled), rounded, scaled).astype(np.float32)


_TORCHAO: Final = "torchao 0.18, mx_tensor.to_mx"
_EXPONENT_BELOW: Final = 2.0**126
"""The least scale of torchao's floor, even and ceil is 2^-126, whatever the code says."""


def _torchao_of_bits(name: str, added: Callable[[ElementFormat], int]) -> Rule:
    """Returns a rule of torchao that adds to the bits of the largest magnitude, and has no code for Inf."""
    rule = f"torchao 0.18 {name}"
    return Rule(name=rule, source=_TORCHAO, exponents=_of_bits(added), inf=None, least_factor=_EXPONENT_BELOW)


RULES: Final = (
    Rule(
        name="TransformerEngine",
        source="transformer_engine/common/util/ptx.cuh: float_to_e8m0, and exp2f_rcp since pull request 2647",
        exponents=_of_product,
        nan=None,
    ),
    Rule(name="torchao 0.18 RCEIL", source=_TORCHAO, exponents=_log2_of_quotient, poisons=True, least_factor=1.0),
    _torchao_of_bits("FLOOR", lambda fmt: 0),
    _torchao_of_bits("EVEN", lambda fmt: 1 << (22 - fmt.mantissa_bits)),
    _torchao_of_bits("CEIL: the least power of two not below amax, over 2^emax", lambda fmt: 0x7FFFFF),
    Rule(
        name="modelopt 0.47",
        source="nvidia-modelopt 0.47, MXFP8QTensor",
        exponents=_log2_of_quotient,
        element_formats=(E4M3.name,),
        nan=0,
    ),
    Rule(
        name="microxcaling",
        source="microsoft/microxcaling, mx_ops._quantize_mx with round='nearest'",
        exponents=_log2,
        element_formats=(E4M3.name, E5M2.name, INT8.name),
        inf=SCALE_NAN,
        poisons=True,
        ties_away=True,
    ),
)
