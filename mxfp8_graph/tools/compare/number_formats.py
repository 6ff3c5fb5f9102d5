"""The number formats that are compared and have no kernels here, as data: one row per format.

A row says how a tensor is rounded: elements, how many values share a scale, and how their largest magnitude becomes
it. `fake_quantize.py` makes standard ONNX ops of that, so every row is emulated: float32 values that the format can
hold, multiplied in float32. E4M3 and E5M2 with E8M0 scales on blocks of 32 are real recipes; see `policy/presets.py`.
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
"""How the largest magnitude (amax) of the values that share a scale becomes it.

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


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """How one operand [..., rows, K] is rounded."""

    element: Minifloat
    rows: int | None = 1
    """Rows that share a scale; None is all of the tensor."""
    columns: int | None
    """Values along K that share a scale; None is all of them."""
    scale: ScaleRule

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale."""
        return SCALE_BYTES.get(self.scale, 4)

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes that a weight [..., N, K] takes: its elements, densely packed, and its scales."""
        *lead, n, k = shape
        stack = math.prod(lead)
        elements = stack * -(-n * k * self.element.bits // 8)
        if self.rows is None:
            return elements + self.scale_bytes
        scales = stack * -(-n // self.rows) * (-(-k // self.columns) if self.columns else 1)
        return elements + scales * self.scale_bytes + (4 if self.scale == "two_level" else 0)

    @property
    def formula(self) -> str:
        """Bytes per weight in words: 4/8 + 1/16."""
        elements = "1" if self.element.bits == 8 else f"{self.element.bits}/8"
        if self.rows is None:
            return f"{elements} + {self.scale_bytes}/tensor"
        shared = (
            "K" if self.columns is None else str(self.columns) if self.rows == 1 else f"({self.rows}*{self.columns})"
        )
        whole = " + 4/tensor" if self.scale == "two_level" else ""
        return f"{elements} + {self.scale_bytes}/{shared}{whole}"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A recipe of others, which is emulated."""

    name: str
    """What `--recipes` calls it."""
    what: str
    """In a line: elements, blocks, scales; whose it is."""
    weights: Quantizer
    activations: Quantizer


def _mx(name: str, element: Minifloat, scale: ScaleRule, what: str, block: int = 32) -> Peer:
    both = Quantizer(element=element, columns=block, scale=scale)
    return Peer(name=name, what=what, weights=both, activations=both)


def _blocks(name: str, scale: ScaleRule, what: str) -> Peer:
    weights = Quantizer(element=E4M3, rows=128, columns=128, scale=scale)
    return Peer(name=name, what=what, weights=weights, activations=Quantizer(element=E4M3, columns=128, scale=scale))


_OCP: Final = "OCP floor scales"
_E4M3_TENSOR: Final = Quantizer(element=E4M3, rows=None, columns=None, scale="divide")
_INT8_CHANNEL: Final = Quantizer(element=INT8, columns=None, scale="integer")

PEERS: Final[Mapping[str, Peer]] = {
    peer.name: peer
    for peer in (
        _mx("mxfp8-block16", E4M3, "ceil", "E4M3, ceil scales, blocks of 16", 16),
        _mx("mxfp8-block32", E4M3, "ceil", "E4M3, ceil scales, blocks of 32: what mxfp8 is, emulated"),
        _mx("mxfp8-block64", E4M3, "ceil", "E4M3, ceil scales, blocks of 64", 64),
        _mx("mxint8-block32", formats.INT8, "floor", f"INT8, {_OCP}, blocks of 32: what mxint8 is, emulated"),
        _mx("mxfp6-e2m3", E2M3, "floor", f"E2M3, {_OCP}, blocks of 32"),
        _mx("mxfp6-e3m2", E3M2, "floor", f"E3M2, {_OCP}, blocks of 32"),
        _mx("mxfp4", E2M1, "floor", f"E2M1, {_OCP}, blocks of 32"),
        _mx("nvfp4", E2M1, "two_level", "E2M1, E4M3 scales on blocks of 16, a float32 scale per tensor: its amax", 16),
        _blocks("float8-block", "divide_pow2", "Float8BlockScaling: E4M3, 1x128 and 128x128, power-of-two scales"),
        _blocks("float8-block-float32", "divide", "Float8BlockScaling: E4M3, 1x128 and 128x128, float32 scales"),
        Peer(
            name="float8-current",
            what="Float8CurrentScaling: E4M3, one float32 scale per tensor, from its amax",
            weights=_E4M3_TENSOR,
            activations=_E4M3_TENSOR,
        ),
        Peer(
            name="float8-delayed",
            what="DelayedScaling: E4M3, one float32 scale per tensor; of activations the largest amax of up to 1024 "
            "samples before, 1 for the first",
            weights=_E4M3_TENSOR,
            activations=Quantizer(element=E4M3, rows=None, columns=None, scale="delayed"),
        ),
        Peer(
            name="int8",
            what="INT8 weights per output channel, UINT8 activations per tensor with a zero point: ONNX Runtime's "
            "quantize_dynamic",
            weights=_INT8_CHANNEL,
            activations=Quantizer(element=INT8, rows=None, columns=None, scale="asymmetric"),
        ),
        Peer(
            name="int8-token",
            what="INT8 weights per output channel, INT8 activations per token",
            weights=_INT8_CHANNEL,
            activations=_INT8_CHANNEL,
        ),
    )
}

HISTORY: Final = 1024
"""Samples that DelayedScaling remembers: TransformerEngine's amax_history_len."""
