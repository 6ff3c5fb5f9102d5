"""Writes mxfp8_ops/conformance/vectors.npz from the NumPy reference; run it after you add a case to the numerics.

The file is in git and in the wheel, so that other projects can test against it without our code. test_conformance.py
compares it with the reference. docs/numerics.md describes the groups and the layout.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mxfp8_ops import formats, numerics, numpy_nodes
from mxfp8_ops.conformance import PATH
from mxfp8_ops.formats import BLOCK_SIZE, ElementFormat

Floats = npt.NDArray[np.float32]
Vectors = dict[str, npt.NDArray[np.generic]]

FLT_MAX = float(np.finfo(np.float32).max)
TINY = 2.0**-149


def vectors() -> Vectors:
    """Returns all arrays of the file by name; a name is KIND/GROUP/SETTINGS/ARRAY."""
    arrays: Vectors = {}
    for group, x in inputs().items():
        arrays[f"quantize/{group}/x"] = x
        for element_format in formats.ELEMENT_FORMATS:
            for rounding in formats.SCALE_ROUNDINGS:
                axis, at = 0 if group == "columnwise" else -1, f"quantize/{group}/{element_format}-{rounding}"
                codes = numpy_nodes.quantize(x, axis=axis, element_format=element_format, scale_rounding=rounding)
                arrays[f"{at}/elements"], arrays[f"{at}/scales"] = codes
    # All 256 elements with the smallest scales, the scales around 1, and the largest, NaN among them.
    scales = np.array([*range(14), *range(120, 136), *range(236, 256)], np.uint8)
    elements = np.tile(np.arange(256, dtype=np.uint8), (scales.size, 1))
    blocks = np.repeat(scales[:, None], 256 // BLOCK_SIZE, axis=1)
    for fmt in formats.ELEMENT_FORMATS:
        for group, codes in (("codes", (elements, blocks)), ("partial", (elements[:, :45], blocks[:, :2]))):
            values, at = numpy_nodes.dequantize(*codes, element_format=fmt), f"dequantize/{group}/{fmt}"
            arrays |= {f"{at}/elements": codes[0], f"{at}/scales": codes[1], f"{at}/values": values}
    for b_format in formats.ELEMENT_FORMATS:
        for a_format in formats.ELEMENT_FORMATS:
            for group, operands in gemm_operands(a_format, b_format):
                arrays |= product(f"gemm/{group}/{a_format}-{b_format}", operands, a_format, b_format)
    return arrays


def inputs() -> dict[str, Floats]:
    """Returns the values to quantize, float32 [rows, K], by group; blocks run along K, in `columnwise` along rows."""
    return {
        "patterns": (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).reshape(-1, 1),
        "binades": binades(),
        "boundaries": boundaries(),
        "special": special(),
        "ties": np.concatenate([ties(fmt) for fmt in formats.ELEMENT_FORMATS.values()]),
        "partial": random_values(1, 6, 47) * np.where(np.arange(47) < 32, 1, 2.0**-9).astype(np.float32),
        "columnwise": random_values(2, 70, 5),
        "random": random_values(3, 24, 64),
    }


def binades() -> Floats:
    """Returns each magnitude whose low 16 bits are 0, once; a block has 16 binades, two mantissas and both signs."""
    base, low, exponent, high = np.meshgrid(
        np.arange(0, 256, 16), np.arange(64), np.arange(16), np.arange(2), indexing="ij"
    )
    upper = (exponent ^ high) % 2 << 15 | (base + exponent) << 7 | high << 6 | low
    return (upper.astype(np.uint32) << 16).view(np.float32).reshape(-1, BLOCK_SIZE)


def boundaries() -> Floats:
    """Returns rows [n, 3] with an amax at each step of a scale rounding, one bit below it and one bit above it.

    Every binade has the steps of all roundings: at the mantissas 1 (floor), 1.75 (ceil, both formats), 1.875 and 1.9375
    (even, E5M2 and E4M3). The two values after the amax round or saturate differently with each scale.
    """
    at = np.array([m * 2.0**e for m in (1, 1.75, 1.875, 1.9375) for e in range(-149, 128)], np.float32)
    at = np.unique(at[at > 0])
    amax = np.stack([np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(np.inf))], axis=1).reshape(-1)
    amax = amax[np.isfinite(amax)]
    return np.stack([amax, -amax * np.float32(0.90625), amax * np.float32(2.0**-15)], axis=1)


def special() -> Floats:
    """Returns blocks [n, 32] that contain zeros, NaN, infinities or subnormals."""
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF8ABCDE, 0x7FFFFFFF, 0x7F800000, 0xFF800000], np.uint32)
    bad = bits.view(np.float32)
    rows = [block(), block(*[-0.0] * 32), block(0.0, -0.0, 0.0, -0.0), block(-0.0, 1), block(1, -0.0, -TINY)]
    rows += [block(value, 1, -2, 448) for value in bad]  # first, last, alone, and all
    rows += [block(*range(1, 32), value) for value in bad]
    rows += [block(value) for value in bad] + [block(*[value] * 32) for value in bad]
    rows += [block(np.inf, np.nan), block(np.inf, -np.inf), block(FLT_MAX, -1e38, 1), block(-FLT_MAX, np.inf)]
    rows += [block(TINY), block(-TINY, TINY), block(2.0**-126, TINY), block(2.0**-126 - TINY, -(2.0**-127))]
    rows += [block(*(TINY * np.arange(1, 33))), block(448 * 2.0**-127, 2.0**-120, 2.0**-126, 2.0**-136, 3 * TINY)]
    rows += [block(57344 * 2.0**-127, 2.0**-120, 2.0**-126, 2.0**-143, 3 * TINY), block(2.0**127, 2.0**118, 2.0**95)]
    rows += [block(1.75 * 2.0**127, -(2.0**127), 2.0**100), block(*(2.0 ** np.arange(8, -24.0, -1)))]
    return np.stack(rows)


def block(*values: float) -> Floats:
    """Returns a block of 32: these values, then zeros."""
    x = np.zeros(BLOCK_SIZE, np.float32)
    # Copied as bits, so that NaNs keep theirs.
    for at, value in enumerate(values):
        x.view(np.uint32)[at] = np.asarray(value, np.float32).view(np.uint32)
    return x


def ties(fmt: ElementFormat) -> Floats:
    """Returns blocks with each midpoint of two neighboring elements, and one bit below and above, of both signs.

    The scale code of each block is 127, so elements are the values themselves.
    """
    codes = np.arange(1 << 7, dtype=np.uint8)[: fmt.max_code]
    halves = (numerics.decode(codes, fmt) + numerics.decode(codes + np.uint8(1), fmt)) / np.float32(2)
    halves = halves[halves < 2.0**fmt.emax]
    x = np.concatenate([halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, np.float32(np.inf))])
    x = np.concatenate([x, -x])
    rows = np.zeros((-(-x.size // (BLOCK_SIZE - 1)), BLOCK_SIZE), np.float32)
    rows[:, 0] = 2.0**fmt.emax  # the amax of each block: it gives scale code 127 under all three roundings
    rows[:, 1:].flat[: x.size] = x
    return rows


def random_values(seed: int, *shape: int) -> Floats:
    """Returns normally distributed values times powers of two, so that mantissas use all bits and scales vary."""
    rng = np.random.default_rng(seed)
    powers = rng.integers(-4, 5, shape) + rng.integers(-40, 40, (*shape[:-1], 1))
    return np.ldexp(rng.standard_normal(shape), powers).astype(np.float32)


def gemm_operands(a_format: str, b_format: str) -> Iterator[tuple[str, Vectors]]:
    """Yields the name of a group and its operands: A [M, K] and B [N, K] quantized along K; in some a bias [N]."""
    rng = np.random.default_rng(4)

    def whole(*shape: int) -> Floats:  # small whole numbers with few bits: every sum of their products is exact
        return (rng.integers(-4, 5, shape) * 2.0 ** rng.integers(0, 4, shape)).astype(np.float32)

    def quantized(a: Floats, b: Floats) -> Vectors:
        codes = (numpy_nodes.quantize(x, element_format=fmt) for x, fmt in ((a, a_format), (b, b_format)))
        return dict(zip(("a", "a_scales", "b", "b_scales"), (each for pair in codes for each in pair), strict=True))

    yield "exact", quantized(whole(5, 96), whole(7, 96))
    if (a_format, b_format) != ("e4m3", "e4m3"):
        return
    yield "exact-row", quantized(whole(1, 128), whole(9, 128))
    yield "exact-partial", quantized(whole(3, 45), whole(4, 45)) | {"bias": whole(4)}
    halves = (rng.integers(-3, 4, (7, 64)) * 2.0**-1).astype(np.float32)  # at most 1.5: finite when times 2^127
    # Scale 0 meets 254 in every product, so the products are ordinary numbers while the operands are extreme.
    elements, middle = numerics.encode(halves, formats.E4M3), [[0, 254], [254, 0]]
    scales = [np.tile(np.array(row, np.uint8), (len(elements), 1)) for row in middle]
    yield "exact-scales", {"a": elements[:3], "a_scales": scales[0][:3], "b": elements[3:], "b_scales": scales[1][3:]}
    bad = quantized(whole(4, 64), whole(5, 64))
    bad["a_scales"][1, 1], bad["b_scales"][3, 0], bad["a"][2, 7] = 255, 255, 0x7F
    yield "nan", bad
    yield "long", quantized(random_values(5, 3, 2080), random_values(6, 4, 2080)) | {"bias": random_values(7, 4)}


def product(at: str, operands: Vectors, a_format: str, b_format: str) -> Vectors:
    """Returns a gemm's operands, its result y in float64, and the error bound of float32 accumulation for each y."""
    pairs = ((operands[name], operands[f"{name}_scales"], fmt) for name, fmt in (("a", a_format), ("b", b_format)))
    x, w = (numpy_nodes.dequantize(*codes, element_format=fmt).astype(np.float64) for *codes, fmt in pairs)
    bias = operands.get("bias", np.zeros(len(w), np.float32)).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        y, bound = x @ w.T + bias, numpy_nodes.gemm_error_bound(x, w, "float32", bias)
    # Sums of the other groups are exact in float32, in any order: no error is allowed there.
    arrays = {**operands, "y": y, "bound": bound if "/long/" in at else np.zeros_like(bound)}
    return {f"{at}/{name}": array for name, array in arrays.items()}


if __name__ == "__main__":
    np.savez_compressed(PATH, **vectors())
