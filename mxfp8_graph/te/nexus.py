"""Nexus's names (`nexus.training.mixed_precision`): `to_mxfp8`, `MXFP8Linear`, `MXFP8Config`, `MXFP8GradientScaler`.

Blocks of 16 and 64 are not MXFP8, which has blocks of 32: they are emulated in float32, with a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mxfp8_graph.policy.recipe import MXFP8BlockScaling, Recipe
from mxfp8_graph.te import state
from mxfp8_graph.te.modules import Linear
from mxfp8_graph.te.quantizers import MXFP8Quantizer, RecipeState
from mxfp8_graph.te.recipe import Emulated
from mxfp8_graph.tools.compare.number_formats import ScaleRule, Tile
from mxfp8_ops.errors import ContractError


@dataclass
class MXFP8Blocks(Emulated):
    """E4M3 elements with E8M0 scales on blocks of another size than 32. Emulated, see `Emulated`."""

    block_size: int = 16
    scale: ClassVar[ScaleRule] = "ceil"

    def tile(self, tensor: str) -> Tile:
        """Returns one row of the block size."""
        return 1, self.block_size


@dataclass(frozen=True)
class MXFP8Config:
    """Block size and element formats of layers."""

    block_size: int = 32
    e4m3_forward: bool = True
    e5m2_backward: bool = True

    def recipe(self) -> Recipe | Emulated:
        """Returns the recipe of these fields; ContractError if a block size or format does not exist."""
        if self.block_size not in {16, 32, 64} or not self.e4m3_forward:
            what, expected = str(self), "block_size 16, 32 or 64, and e4m3_forward"
            raise ContractError("MXFP8Config", what, expected=expected, advice="OCP MX has blocks of 32")
        fp8_format = "HYBRID" if self.e5m2_backward else "E4M3"
        if self.block_size == 32:
            return MXFP8BlockScaling(fp8_format=fp8_format)
        return MXFP8Blocks(fp8_format, block_size=self.block_size)


def to_mxfp8(x: Tensor, block_size: int = 32) -> Tensor:
    """Returns `x` [..., N] in MXFP8, an `MXFP8Tensor`; with other blocks its rounded values, a float32 tensor.

    `dequantize()` of either returns the values.
    """
    recipe = MXFP8Config(block_size).recipe()
    if isinstance(recipe, Recipe):
        return MXFP8Quantizer(columnwise=False)(x)
    (quantizer,) = RecipeState.create(recipe, mode="forward").make_quantizers()
    rounded: Tensor = quantizer(x)
    return rounded


class MXFP8Linear(Linear):
    """A `te.Linear` with a recipe of its own, which needs no autocast."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        """Takes the arguments of `te.Linear`, and `block_size` or `config`."""
        config = options.pop("config", None) or MXFP8Config(options.pop("block_size", 32))
        super().__init__(in_features, out_features, bias, **options)
        self.recipe = config.recipe()

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., out_features] for [..., in_features]."""
        with state.autocast(recipe=self.recipe):
            return super().forward(x)


class MXFP8GradientScaler(torch.amp.GradScaler):
    """torch's GradScaler, off by default: each block of a gradient has a scale, so losses need none.

    `enabled=True` is for models with float16 activations, whose gradients underflow before they are quantized.
    """

    def __init__(self, config: object = None, device: str = "cpu", *, enabled: bool = False, **options: Any) -> None:
        """Takes a config, which has no effect, and the arguments of torch's class."""
        super().__init__(device, enabled=enabled, **options)
