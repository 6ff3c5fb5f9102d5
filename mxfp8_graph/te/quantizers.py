"""TransformerEngine's quantizers and recipe states."""

from __future__ import annotations

import functools
import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.te.recipe import Emulated
from mxfp8_graph.te.tensor import DType, MXFP8Tensor, quantized, straight_through
from mxfp8_graph.tools.compare.number_formats import Quantizer
from mxfp8_ops.errors import ContractError
from mxfp8_ops.formats import BLOCK_SIZE

_TENSORS: Final = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}
_NEW: Final = object()


class MXFP8Quantizer:
    """Makes MXFP8 tensors. It has no state: a scale follows from the 32 values that share it."""

    def __init__(
        self, fp8_dtype: Any = "e4m3", rowwise: bool = True, columnwise: bool = True, scale_rounding: str = "ceil"
    ) -> None:
        """Takes the element format, as `DType.cast` does, and the directions to quantize along."""
        self.dtype, self.scale_rounding = DType.cast(fp8_dtype), scale_rounding
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def __call__(self, x: Tensor) -> MXFP8Tensor:
        """Returns `x` [..., N] in MXFP8, of any size, float32, float16 or bfloat16; gradients pass through."""
        usage: Any = self.get_usages()
        make: Any = functools.partial(quantized, fp8_dtype=self.dtype, scale_rounding=self.scale_rounding, **usage)
        result: Any = straight_through(x, make) if x.requires_grad and torch.is_grad_enabled() else make(x)
        return result  # type: ignore[no-any-return]

    quantize = __call__

    def update_quantized(self, src: Tensor, dst: MXFP8Tensor) -> MXFP8Tensor:
        """Quantizes `src` into the codes that `dst` has, and returns `dst`; ContractError if it does not fit."""
        if not isinstance(dst, MXFP8Tensor) or (dst.fp8_dtype, dst.shape) != (self.dtype, src.shape):
            what, expected = (
                f"{type(dst).__name__} {list(dst.shape)}",
                f"an MXFP8Tensor {self.dtype.name} {list(src.shape)}",
            )
            raise ContractError("update_quantized", what, expected=expected, advice="make it with make_empty")
        return dst.quantize_(src)

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
    ) -> MXFP8Tensor:
        """Returns a tensor of zeros to quantize into."""
        result = self(torch.zeros(*shape, dtype=dtype, device=device))
        result.requires_grad_(requires_grad)
        return result

    def is_quantizable(self, x: Tensor) -> bool:
        """Returns whether TransformerEngine quantizes `x`: both sizes are multiples of 32. Here any size works."""
        return x.dim() > 1 and not x.shape[-1] % BLOCK_SIZE and not math.prod(x.shape[:-1]) % BLOCK_SIZE

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Sets the directions to quantize along; None keeps one."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def get_usages(self) -> dict[str, bool]:
        """Returns {"rowwise": ..., "columnwise": ...}."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def __repr__(self) -> str:
        return f"MXFP8Quantizer({self.dtype.name}, rowwise={self.rowwise_usage}, columnwise={self.columnwise_usage})"


class EmulatedQuantizer:
    """Rounds values as a recipe of TransformerEngine does; the result is float32, not codes."""

    def __init__(self, recipe: Any, tensor: str) -> None:
        """Takes the recipe, and "input", "weight" or "grad_output"."""
        self.rounding = recipe.rounding(tensor)
        self.dtype = DType.cast(self.rounding.element.name)

    def both(self, x: Tensor, region: object = None) -> tuple[Tensor, Tensor]:
        """Returns a matrix rounded along its rows, and its transpose rounded along the columns of the matrix."""
        rows = self(x, region)
        return rows, rows.mT if self.rounding.tile == (None, None) else self(x.mT, region)

    def __call__(self, x: Tensor, region: object = None) -> Tensor:
        """Returns `x` [M, K] rounded, float32. `region` is for `Float8Quantizer`."""
        return self._rounded(x)

    def _rounded(self, x: Tensor, *amax: float) -> Tensor:
        return torch.from_numpy(_fake(self.rounding)(x.detach().float().cpu().numpy(), *amax)).to(x.device)


class Float8CurrentScalingQuantizer(EmulatedQuantizer):
    """The quantizer of Float8CurrentScaling, emulated."""


class Float8BlockQuantizer(EmulatedQuantizer):
    """The quantizer of Float8BlockScaling, emulated."""


class Float8Quantizer(EmulatedQuantizer):
    """The quantizer of DelayedScaling, emulated: the scale of a region follows from the amax of earlier regions.

    A region is an outermost `autocast`, as in TransformerEngine, which updates scales when it ends.
    """

    def __init__(self, recipe: Any, tensor: str) -> None:
        """Takes the recipe, and "input", "weight" or "grad_output"."""
        super().__init__(recipe, tensor)
        self.margin, self._amax, self._region = recipe.margin, 0.0, object()
        self.amax_history = deque[float](
            maxlen=1 if recipe.amax_compute_algo == "most_recent" else recipe.amax_history_len
        )

    @property
    def scale(self) -> float:
        """The factor of the next region: the greatest element over the amax of earlier ones; 1 before the first."""
        amax = self._next()
        return float(self.rounding.element.max) / amax / 2.0**self.margin if amax else 1.0

    def _next(self) -> float:
        # As in TransformerEngine: no scale follows from 0, inf or NaN, so the last one stays.
        most = max(self.amax_history, default=0.0)
        return most if 0 < most < math.inf else self._amax

    def __call__(self, x: Tensor, region: object = _NEW) -> Tensor:
        """Returns `x` [M, K] rounded, float32, and keeps its amax; in region None, an evaluation, it does not."""
        region = object() if region is _NEW else region
        if region is None:
            return self._rounded(x, self._next() * 2.0**self.margin)
        if region is not self._region:
            self._region, self._amax = region, self._next()
            self.amax_history.append(0.0)
        self.amax_history[-1] = max(self.amax_history[-1], float(x.detach().abs().max()) if x.numel() else 0.0)
        return self._rounded(x, self._amax * 2.0**self.margin)


_QUANTIZERS: Final[dict[str, Callable[..., EmulatedQuantizer]]] = {
    "DelayedScaling": Float8Quantizer,
    "Float8CurrentScaling": Float8CurrentScalingQuantizer,
    "Float8BlockScaling": Float8BlockQuantizer,
}


@functools.cache
def _fake(rounding: Quantizer) -> Callable[..., Any]:
    """Returns the function that rounds arrays: one session for each rounding, which several threads may use."""
    from mxfp8_graph.tools.compare.fake_quantize import fake_quantizer  # imports ONNX Runtime; MXFP8 needs none

    return fake_quantizer(rounding)


@functools.cache
def _say_emulated(kind: str) -> None:
    warnings.warn(f"{kind} is emulated in float32: it shows the error of a recipe, not its speed", stacklevel=4)


class RecipeState:
    """The quantizers of a layer in one pass, by TransformerEngine's names."""

    def __init__(self, recipe: Recipe | Emulated, *, mode: str, num_quantizers: int = 1, device: Any = None) -> None:
        """Takes the arguments of `create`."""
        if mode not in _TENSORS:
            raise ContractError.unknown("mode", mode, _TENSORS)
        self.recipe, self.mode, self.num_quantizers, self.device = recipe, mode, num_quantizers, device
        self.dtype = DType.cast("e5m2" if mode == "backward" and recipe.fp8_format == "HYBRID" else "e4m3")

    @staticmethod
    def create(recipe: Recipe | Emulated, **options: Any) -> RecipeState:
        """Returns the state for a recipe, with mode="forward" or "backward", num_quantizers=1, device=None."""
        return (MXFP8BlockScalingRecipeState if isinstance(recipe, Recipe) else RecipeState)(recipe, **options)

    def make_quantizers(self) -> list[Any]:
        """Returns the quantizers, in the order input, weight, output or grad_output, grad_input."""
        kind, names = type(self.recipe).__name__, _TENSORS[self.mode]
        _say_emulated(kind)
        make = _QUANTIZERS.get(kind, EmulatedQuantizer)
        return [make(self.recipe, names[at % len(names)]) for at in range(self.num_quantizers)]


class MXFP8BlockScalingRecipeState(RecipeState):
    """The state of MXFP8: none, its quantizers need no earlier values."""

    def make_quantizers(self) -> list[Any]:
        """Returns the quantizers, one like the other."""
        rounding = getattr(self.recipe, "scale_rounding", "ceil")
        return [MXFP8Quantizer(self.dtype, scale_rounding=rounding) for _ in range(self.num_quantizers)]
