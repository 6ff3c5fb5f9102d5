"""The formats that `compare` emulates, since they have no kernels here, as data: one row per format.

E4M3 and E5M2 with E8M0 scales on blocks of 32, and MXINT8, are recipes: see `policy/presets.py`, and `VARIANTS` in
run.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

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
        stack, (rows, columns) = math.prod(lead), self.tile
        # One scale per tile of each matrix; without rows, one for the whole tensor.
        elements = stack * -(-n * k * self.element.bits // 8)
        scales = stack * -(-n // rows) * (-(-k // columns) if columns else 1) if rows else 1
        return elements + scales * SCALE_BYTES.get(self.scale, 4) + 4 * (self.scale == "two_level")


@dataclass(frozen=True)
class Peer:
    """A format of another project, by its name in `--recipes`."""

    name: str
    what: str
    """Its elements, blocks, scales and project, in one line."""
    weights: Quantizer
    activations: Quantizer


def _peer(name: str, what: str, element: Minifloat, scale: ScaleRule, tile: Tile, /, **activations: Any) -> Peer:
    """Returns a format; `activations` are the fields of the quantizer that differ for activations."""
    weights = Quantizer(element, scale, tile)
    return Peer(name, what, weights, replace(weights, **activations))


_TENSOR: Final[Tile] = (None, None)
_ROW: Final[Tile] = (1, None)
_OCP: Final = "OCP floor scales, blocks of 32"
_TE_BLOCKS: Final = "Float8BlockScaling: E4M3, 1x128 and 128x128"
_TWO_LEVEL: Final = "E2M1, E4M3 scales on blocks of 16, a float32 scale per tensor: its amax"
_CURRENT: Final = "Float8CurrentScaling: E4M3, one float32 scale per tensor, from its amax"
_DELAYED: Final = (
    "DelayedScaling: E4M3, one float32 scale per tensor; of activations the largest amax of up to 1024 samples before, "
    "1 for the first"
)
_DYNAMIC: Final = (
    "INT8 weights per output channel, UINT8 activations per tensor with a zero point: ONNX Runtime's quantize_dynamic"
)

PEERS: Final[Mapping[str, Peer]] = {
    peer.name: peer
    for peer in (
        _peer("mxfp8-block16", "E4M3, ceil scales, blocks of 16", E4M3, "ceil", (1, 16)),
        _peer("mxfp8-block32", "E4M3, ceil scales, blocks of 32: what mxfp8 is, emulated", E4M3, "ceil", (1, 32)),
        _peer("mxfp8-block64", "E4M3, ceil scales, blocks of 64", E4M3, "ceil", (1, 64)),
        _peer("mxint8-block32", f"INT8, {_OCP}: what mxint8 is, emulated", formats.INT8, "floor", (1, 32)),
        _peer("mxfp6-e2m3", f"E2M3, {_OCP}", E2M3, "floor", (1, 32)),
        _peer("mxfp6-e3m2", f"E3M2, {_OCP}", E3M2, "floor", (1, 32)),
        _peer("mxfp4", f"E2M1, {_OCP}", E2M1, "floor", (1, 32)),
        _peer("nvfp4", _TWO_LEVEL, E2M1, "two_level", (1, 16)),
        _peer("float8-block", f"{_TE_BLOCKS}, power-of-two scales", E4M3, "divide_pow2", (128, 128), tile=(1, 128)),
        _peer("float8-block-float32", f"{_TE_BLOCKS}, float32 scales", E4M3, "divide", (128, 128), tile=(1, 128)),
        _peer("float8-current", _CURRENT, E4M3, "divide", _TENSOR),
        _peer("float8-delayed", _DELAYED, E4M3, "divide", _TENSOR, scale="delayed"),
        _peer("int8", _DYNAMIC, INT8, "integer", _ROW, scale="asymmetric", tile=_TENSOR),
        _peer("int8-token", "INT8 weights per output channel, INT8 activations per token", INT8, "integer", _ROW),
    )
}
