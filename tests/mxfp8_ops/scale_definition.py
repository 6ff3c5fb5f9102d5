"""Quantization of blocks, from the definitions in docs/numerics.md, in exact arithmetic.

float64 holds every float32, every product of one with a power of two, and every bound below without rounding: nothing
here looks at bits, as `numpy_nodes.quantize` does.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from mxfp8_ops.formats import INT8, ElementFormat

FIRST_NORMAL = 0x00800000
INFINITY = 0x7F800000


def near(center: int, reach: int, step: int = 1) -> npt.NDArray[np.int64]:
    """Returns the bit patterns from `center` - `reach` to `center` + `reach`, without those below 0."""
    patterns = np.arange(center - reach, center + reach + 1, step)
    return patterns[patterns >= 0]


@functools.cache
def boundary_values() -> npt.NDArray[np.float32]:
    """Returns float32 values at and beside every amax where a scale code steps, NaN and infinity, of both signs.

    Their number is a multiple of 64.
    """
    mantissas = [0, 0x400000, 0x600000, 0x780000, 0x7C0000, 0x7E0000, 0x7F0000, 0x7F8000]
    steps = [near((exponent << 23) + mantissa, 2) for exponent in range(256) for mantissa in mantissas]
    below = [near(FIRST_NORMAL >> shift, 2) for shift in range(24)]
    # The last subnormals and the first normal numbers: there INT8's scale codes become 1.
    between = near(FIRST_NORMAL, 0x30000, 0x2F)
    bits = np.unique(np.concatenate([*steps, *below, between]))
    bits = bits[bits <= INFINITY + 2]
    bits = np.pad(bits, (0, -len(bits) % 64))
    signs = np.random.default_rng(0).choice([0, 1 << 31], len(bits))
    return (bits | signs).astype(np.uint32).view(np.float32)


def scale_by_definition(amax: npt.NDArray[np.float64], fmt: ElementFormat, scale_rounding: str) -> npt.NDArray[np.intp]:
    """Returns the scale codes of blocks with these finite largest magnitudes."""
    if scale_rounding == "ceil":
        largest = fmt.max * 2.0 ** (np.arange(255) - 127)  # that each scale code holds
        return np.minimum(np.searchsorted(largest, amax, side="left"), 254)
    if scale_rounding == "even":
        mantissa, exponent = np.frexp(amax)
        unit = 2.0 ** -(fmt.mantissa_bits + 1)  # a mantissa of frexp is half that of a float
        amax = np.ldexp(np.floor(mantissa / unit + 0.5) * unit, exponent)
    _, exponent = np.frexp(amax)  # floor(log2(amax)) + 1
    return np.where(amax == 0, 0, np.clip(exponent - 1 - fmt.emax + 127, 0, 254))


def codes_by_definition(
    x: npt.NDArray[np.float32], fmt: ElementFormat, scale_rounding: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Returns the elements [n, size] and scales [n, 1] of blocks; a block with a NaN or an infinity is all NaN."""
    finite = np.isfinite(x).all(-1, keepdims=True)
    values = np.where(finite, x, 0).astype(np.float64)
    scales = scale_by_definition(abs(values).max(-1, keepdims=True), fmt, scale_rounding)
    scaled = np.clip(np.ldexp(values, 127 - scales), -fmt.max, fmt.max)
    if fmt is INT8:
        codes = np.rint(scaled * 64).astype(np.int8).view(np.uint8)
    else:
        codes = scaled.astype(np.float32).astype(fmt.numpy_name).view(np.uint8)
    return np.where(finite, codes, 0x7F).astype(np.uint8), np.where(finite, scales, 255).astype(np.uint8)
