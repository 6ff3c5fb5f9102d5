"""TransformerEngine's `common.recipe`: MXFP8BlockScaling, and the FP8 recipes, which are emulated here."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from mxfp8_graph.policy.kind import Kind
from mxfp8_graph.policy.recipe import MXFP8BlockScaling
from mxfp8_graph.tools.compare.number_formats import Quantizer, ScaleRule, Tile
from mxfp8_ops import formats
from mxfp8_ops.errors import RecipeError

__all__ = ["DelayedScaling", "Emulated", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MXFP8BlockScaling"]


class _Max(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(str, enum.Enum):
    """Element formats of the forward and the backward pass. A member equals its name, which our recipes store."""

    E4M3 = "E4M3", formats.E4M3.max, formats.E4M3.max
    E5M2 = "E5M2", formats.E5M2.max, formats.E5M2.max
    HYBRID = "HYBRID", formats.E4M3.max, formats.E5M2.max

    def __new__(cls, text: str, max_fwd: float, max_bwd: float) -> Format:  # noqa: D102
        self = str.__new__(cls, text)
        self._value_ = _Max(max_fwd, max_bwd)
        return self


@dataclass
class Emulated(Kind):
    """A recipe without kernels here: layers multiply, in float32, values that were rounded as it says.

    The quantizers are those of `mxfp8-graph compare`. It is for comparisons: slower than float32, and neither
    torch.compile nor torch.export takes it.
    """

    fp8_format: str = Format.HYBRID
    scale: ClassVar[ScaleRule] = "divide"
    """How a scale follows from amax."""

    def __post_init__(self) -> None:
        """Raises RecipeError for a format that is neither E4M3 nor HYBRID."""
        if self.fp8_format not in {"E4M3", "HYBRID"}:
            where, what = type(self).__name__, f"fp8_format: {self.fp8_format}"
            raise RecipeError(where, what, expected="E4M3 or HYBRID", advice="pass one of them")

    def rounding(self, tensor: str) -> Quantizer:
        """Returns how "input", "weight" or "grad_output" is rounded."""
        is_wide = tensor == "grad_output" and self.fp8_format == "HYBRID"
        return Quantizer(formats.E5M2 if is_wide else formats.E4M3, self.scale, self.tile(tensor))

    def tile(self, tensor: str) -> Tile:
        """Returns (rows, columns) that share a scale; None is all of them."""
        return None, None


class Float8CurrentScaling(Emulated):
    """FP8 with one float32 scale per tensor, from its own amax. Emulated, see `Emulated`."""

    def float8_current_scaling(self) -> bool:
        """Returns True."""
        return True


@dataclass
class DelayedScaling(Emulated):
    """FP8 with one float32 scale per tensor, from the amax of earlier calls. Emulated, see `Emulated`.

    Fields as in TransformerEngine. Each process has a history of its own: in several, `reduce_amax` has to be False.
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    scale: ClassVar[ScaleRule] = "delayed"

    def delayed(self) -> bool:
        """Returns True."""
        return True


@dataclass
class Float8BlockScaling(Emulated):
    """FP8 with a power-of-two scale per 128 values, or 128 x 128 of a weight. Emulated, see `Emulated`."""

    fp8_format: str = Format.E4M3
    scale: ClassVar[ScaleRule] = "divide_pow2"

    def float8_block_scaling(self) -> bool:
        """Returns True."""
        return True

    def tile(self, tensor: str) -> Tile:
        """Returns 1 x 128, for weights 128 x 128."""
        return (128 if tensor == "weight" else 1), 128
