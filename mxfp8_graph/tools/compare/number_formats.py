"""The formats that are compared and have no kernels here, as data: one row per format, all of them emulated.

E4M3 and E5M2 with E8M0 scales on blocks of 32, and MXINT8, are real recipes: see `policy/presets.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from mxfp8_ops import formats
from mxfp8_ops.formats import E4M3, Minifloat

E3M2: Final = Minifloat(name="e3m2", exponent_bits=3, mantissa_bits=2, bias=3, max_code=0x1F)  # 28
E2M3: Final = Minifloat(name="e2m3", exponent_bits=2, mantissa_bits=3, bias=1, max_code=0x1F)  # 7.5
E2M1: Final = Minifloat(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max_code=0x07)  # 6
INT8: Final = Minifloat(name="int8", exponent_bits=1, mantissa_bits=6, bias=-5, max_code=127)

ScaleRule = Literal["ceil", "floor", "even", "divide", "divide_pow2", "integer", "two_level", "delayed", "asymmetric"]
"""How the scale follows from amax, the largest magnitude of the values that share it.

ceil, floor, even  E8M0, as `mxfp8_ops.formats.SCALE_ROUNDINGS` says
divide             float32, max / amax in float32, multiplied by; 1 where amax is 0 (TransformerEngine)
divide_pow2        the same with its mantissa cleared (TransformerEngine's power-of-two scales)
integer            float32, amax / max, divided by
two_level          E4M3, of amax / max over a float32 scale for the whole tensor, which is its amax / (448 * max)
delayed            as divide, with the largest amax of earlier samples
asymmetric         uint8 with a zero point, from the least and largest value, as ONNX's DynamicQuantizeLinear
"""

SCALE_BYTES: Final[Mapping[str, int]] = {"ceil": 1, "floor": 1, "even": 1, "two_level": 1, "asymmetric": 5}
"""Bytes of one scale, zero point included; float32 has 4."""

HISTORY: Final = 1024
"""Samples that DelayedScaling remembers: TransformerEngine's amax_history_len."""

Tile = tuple[int | None, int | None]
"""(rows, columns along K) of an operand [..., rows, K] that share a scale; None is all of them."""


@dataclass(frozen=True)
class Quantizer:
    """How one operand is rounded."""

    element: Minifloat
    scale: ScaleRule
    tile: Tile

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes that a weight [..., N, K] takes: its elements, densely packed, and its scales."""
        *lead, n, k = shape
        stack, size = math.prod(lead), SCALE_BYTES.get(self.scale, 4)
        rows, columns = self.tile
        elements = stack * -(-n * k * self.element.bits // 8)
        if rows is None:
            return elements + size
        scales = stack * -(-n // rows) * (-(-k // columns) if columns else 1)
        return elements + scales * size + (4 if self.scale == "two_level" else 0)


@dataclass(frozen=True)
class Peer:
    """A format of others, as `--recipes` calls it."""

    name: str
    what: str
    """In a line: elements, blocks, scales; whose it is."""
    weights: Quantizer
    activations: Quantizer


def _both(name: str, what: str, element: Minifloat, scale: ScaleRule, tile: Tile) -> Peer:
    return Peer(name, what, Quantizer(element, scale, tile), Quantizer(element, scale, tile))


def _rows_by_name(*rows: Peer) -> Mapping[str, Peer]:
    return {row.name: row for row in rows}


_TENSOR: Final[Tile] = (None, None)
_ROW: Final[Tile] = (1, None)
_E4M3_WEIGHTS: Final = Quantizer(E4M3, "divide", _TENSOR)
_INT8_WEIGHTS: Final = Quantizer(INT8, "integer", _ROW)
_OCP: Final = "OCP floor scales, blocks of 32"
_TE_BLOCKS: Final = "Float8BlockScaling: E4M3, 1x128 and 128x128"

PEERS: Final = _rows_by_name(
    _both("mxfp8-block16", "E4M3, ceil scales, blocks of 16", E4M3, "ceil", (1, 16)),
    _both("mxfp8-block32", "E4M3, ceil scales, blocks of 32: what mxfp8 is, emulated", E4M3, "ceil", (1, 32)),
    _both("mxfp8-block64", "E4M3, ceil scales, blocks of 64", E4M3, "ceil", (1, 64)),
    _both("mxint8-block32", f"INT8, {_OCP}: what mxint8 is, emulated", formats.INT8, "floor", (1, 32)),
    _both("mxfp6-e2m3", f"E2M3, {_OCP}", E2M3, "floor", (1, 32)),
    _both("mxfp6-e3m2", f"E3M2, {_OCP}", E3M2, "floor", (1, 32)),
    _both("mxfp4", f"E2M1, {_OCP}", E2M1, "floor", (1, 32)),
    _both(
        "nvfp4", "E2M1, E4M3 scales on blocks of 16, a float32 scale per tensor: its amax", E2M1, "two_level", (1, 16)
    ),
    Peer(
        "float8-block",
        f"{_TE_BLOCKS}, power-of-two scales",
        Quantizer(E4M3, "divide_pow2", (128, 128)),
        Quantizer(E4M3, "divide_pow2", (1, 128)),
    ),
    Peer(
        "float8-block-float32",
        f"{_TE_BLOCKS}, float32 scales",
        Quantizer(E4M3, "divide", (128, 128)),
        Quantizer(E4M3, "divide", (1, 128)),
    ),
    Peer(
        "float8-current",
        "Float8CurrentScaling: E4M3, one float32 scale per tensor, from its amax",
        _E4M3_WEIGHTS,
        Quantizer(E4M3, "divide", _TENSOR),
    ),
    Peer(
        "float8-delayed",
        "DelayedScaling: E4M3, one float32 scale per tensor; of activations the largest amax of up to 1024 samples "
        "before, 1 for the first",
        _E4M3_WEIGHTS,
        Quantizer(E4M3, "delayed", _TENSOR),
    ),
    Peer(
        "int8",
        "INT8 weights per output channel, UINT8 activations per tensor with a zero point: ONNX Runtime's "
        "quantize_dynamic",
        _INT8_WEIGHTS,
        Quantizer(INT8, "asymmetric", _TENSOR),
    ),
    _both("int8-token", "INT8 weights per output channel, INT8 activations per token", INT8, "integer", _ROW),
)
