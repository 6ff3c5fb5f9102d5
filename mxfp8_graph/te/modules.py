"""The layers: `Linear`, `LayerNormLinear`, `LayerNormMLP`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.te import state
from mxfp8_graph.te.quantizers import EmulatedQuantizer, RecipeState
from mxfp8_graph.te.recipe import Emulated
from mxfp8_graph.te.tensor import DType, MXFP8Tensor
from mxfp8_graph.torch_pass import record
from mxfp8_ops.errors import ContractError, RecipeError

_COUNTS = (("scaling_fwd", "forward", 3), ("scaling_bwd", "backward", 2))
"""TransformerEngine's key of a pass, its mode, its quantizers."""


class Linear(nn.Linear):
    """y = x W^T + b by the recipe of `autocast`; outside of one in the dtypes of its operands, as nn.Linear.

    In MXFP8 it is `torch.ops.mxfp8.linear_train`, bit for bit: fprop, dgrad and wgrad multiply operands that were
    quantized along the axis of the sum. `quantizers` and `fp8_meta` have TransformerEngine's layout. The weight is a
    parameter, or an `MXFP8Tensor` inside of `quantized_model_init`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=params_dtype)
        if init_method is not None:
            with torch.no_grad():
                init_method(self.weight)
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self.fp8_meta: dict[str, Any] = {}
        self.weight = state.stored(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., out_features] for [..., in_features].

        Raises:
            RecipeError: the weight is stored in another recipe ("Recipe mismatch for ..."), or the recipe is emulated
                and the layer is being compiled or exported.
        """
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        recipe = state.current_recipe()
        if recipe is None:
            if isinstance(self.weight, MXFP8Tensor) and torch.compiler.is_exporting():
                raise _refused("export of a weight that is stored in MXFP8", "export it inside of te.autocast")
            return F.linear(x, self.weight, self.bias)
        # A compiler records no bookkeeping.
        if recipe is not self.fp8_meta.get("recipe") and not torch.compiler.is_compiling():
            self._switch(recipe)
        if isinstance(self.weight, MXFP8Tensor):
            _check_stored(self.weight, recipe)
        if isinstance(recipe, Emulated):
            return self._emulated(x, recipe)
        if not torch.compiler.is_exporting():
            return self._mxfp8(x, recipe)  # type: ignore[no-any-return]
        if torch.compiler.is_dynamo_compiling():
            raise _refused("torch.export.export(strict=True), which cannot record the recipe", "pass strict=False")
        with record.traced(recipe, **{record.LAYER_KEY: "te"}):
            return self._mxfp8(x, recipe)  # type: ignore[no-any-return]

    def _mxfp8(self, x: Tensor, recipe: Recipe) -> Any:
        ops, weight, bias = torch.ops.mxfp8, self.weight, self.bias
        is_inference = torch.compiler.is_exporting() or not torch.is_grad_enabled()
        if not isinstance(weight, MXFP8Tensor) or not is_inference:
            return ops.linear_train(x, weight, bias, recipe.fp8_format, recipe.scale_rounding)
        # What `rewrite` writes for a packed weight. Programs are exported for inference if only codes are left.
        x = _autocast(x)
        codes = ops.quantize(x, -1, "e4m3", recipe.scale_rounding)
        full = bias if bias is None or bias.dtype is torch.float32 else bias.float()
        dtype = None if x.dtype is torch.float32 else x.dtype
        return ops.gemm(*codes, weight._mxfp8, weight._mxfp8_scales, full, "e4m3", "e4m3", dtype)

    def _switch(self, recipe: Recipe | Emulated) -> None:
        """Makes quantizers for a recipe that differs from the last one; warns if its kind does."""
        before = self.fp8_meta.get("recipe")
        self.fp8_meta["recipe"] = recipe
        if before == recipe:
            return
        if before is not None and _kind(before) != _kind(recipe):
            text = f"Recipe type changed from {_kind(before)} to {_kind(recipe)}. This may affect model behavior."
            warnings.warn(text, stacklevel=7)
        for key, mode, count in _COUNTS:
            self.fp8_meta[key] = RecipeState.create(recipe, mode=mode, num_quantizers=count, device=self.weight.device)
            self.quantizers[key] = self.fp8_meta[key].make_quantizers()

    def _emulated(self, x: Tensor, recipe: Emulated) -> Tensor:
        if torch.compiler.is_compiling():
            raise _refused(f"{_kind(recipe)}, which is emulated, in a compiler", "compile by MXFP8BlockScaling")
        if recipe.delayed() and getattr(recipe, "reduce_amax", False) and _processes() > 1:
            what, expected = "DelayedScaling with reduce_amax in several processes", "one process"
            raise RecipeError("te.Linear", what, expected=expected, advice="pass reduce_amax=False")
        quantizers = [*self.quantizers["scaling_fwd"][:2], self.quantizers["scaling_bwd"][0]]
        # TransformerEngine updates no scale in an evaluation.
        region = state.current_region() if torch.is_grad_enabled() else None
        apply: Any = _EmulatedLinear.apply
        y: Tensor = apply(_autocast(x), self.weight, self.bias, quantizers, region)
        return y

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.weight, MXFP8Tensor):  # plain tensors, which safetensors takes
            del destination[f"{prefix}weight"]
            destination |= {f"{prefix}weight_{name}": code for name, code in self.weight.state_dict().items()}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if isinstance(self.weight, MXFP8Tensor):
            names = [f"{prefix}weight_{name}" for name in self.weight.state_dict()]
            if all(name in state_dict for name in names):  # else a weight in high precision, which is quantized
                codes = {name.removeprefix(f"{prefix}weight_"): state_dict.pop(name) for name in names}
                state_dict[f"{prefix}weight"] = self.weight.with_codes(codes)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _kind(recipe: object) -> str:
    """Returns TransformerEngine's name of the class of a recipe."""
    return "MXFP8BlockScaling" if isinstance(recipe, Recipe) else type(recipe).__name__


def _check_stored(weight: MXFP8Tensor, recipe: Recipe | Emulated) -> None:
    """Raises RecipeError if the weight is stored in another recipe."""
    asked = getattr(recipe, "scale_rounding", None)
    if weight.fp8_dtype is not DType.kFloat8E4M3 or weight._mxfp8 is None:
        expected, advice = "rowwise codes in E4M3", "make the weight by quantized_model_init"
        raise RecipeError(
            "Recipe mismatch for 'weight'", f"{weight.fp8_dtype.name} codes", expected=expected, advice=advice
        )
    if asked != weight.scale_rounding:
        what = f"stored in MXFP8BlockScaling with {weight.scale_rounding} scales, but the recipe is {_kind(recipe)}"
        what += f" with {asked} scales" if asked else ""
        advice = "use the recipe of quantized_model_init in autocast too"
        raise RecipeError("Recipe mismatch for 'weight'", what, expected="one recipe", advice=advice)


def _refused(what: str, advice: str) -> RuntimeError:
    # Not one of our errors: torch.compile can raise builtin ones only.
    return RuntimeError(f"te.Linear: {what}; {advice}")


def _processes() -> int:
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if known else 1


def _autocast(x: Tensor) -> Tensor:
    """Returns `x` in the dtype that torch.autocast gives the operands of a linear."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return F.linear(a, b, None if bias is None else bias.float()).to(dtype)


class _EmulatedLinear(torch.autograd.Function):
    """The three products of rounded values, in float32."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes no keywords
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, quantizers: list[EmulatedQuantizer], region: object
    ) -> Tensor:
        x_rows, x_columns = quantizers[0].both(x.reshape(-1, weight.shape[1]), region)
        w_rows, w_columns = quantizers[1].both(weight, region)
        ctx.save_for_backward(x_columns, w_columns)
        ctx.quantizer, ctx.region = quantizers[2], region
        ctx.like = x.shape, x.dtype, weight.dtype, None if bias is None else bias.dtype
        return _product(x_rows, w_rows, x.dtype, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x_columns, w_columns), (shape, x_dtype, w_dtype, b_dtype) = ctx.saved_tensors, ctx.like
        dy = grad.reshape(-1, grad.shape[-1])
        rows, columns = ctx.quantizer.both(dy, ctx.region)
        db = None if b_dtype is None else dy.float().sum(0).to(b_dtype)
        return _product(rows, w_columns, x_dtype).view(shape), _product(columns, x_columns, w_dtype), db, None, None


class LayerNormLinear(Linear):
    """A normalization over the last axis, then a `Linear`; the normalization stays in high precision."""

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, bias: bool = True, **options: Any
    ) -> None:
        """Takes normalization="LayerNorm" or "RMSNorm", and the arguments of `Linear`."""
        normalization = options.pop("normalization", "LayerNorm")
        if normalization not in {"LayerNorm", "RMSNorm"}:
            raise ContractError.unknown("normalization", normalization, ("LayerNorm", "RMSNorm"))
        super().__init__(in_features, out_features, bias, **options)
        self.eps, self.normalization = eps, normalization
        ones = torch.ones(in_features, device=self.weight.device, dtype=self.weight.dtype)
        self.layer_norm_weight = nn.Parameter(ones)
        self.layer_norm_bias = nn.Parameter(torch.zeros_like(ones)) if normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., out_features] for [..., in_features]; raises as `Linear.forward`."""
        sizes = (self.in_features,)
        if self.layer_norm_bias is None:
            return self._product(F.rms_norm(x, sizes, self.layer_norm_weight, self.eps))
        return self._product(F.layer_norm(x, sizes, self.layer_norm_weight, self.layer_norm_bias, self.eps))


class LayerNormMLP(nn.Module):
    """A normalization, a linear, an activation of torch.nn.functional, a linear; `fc1` and `fc2` are layers of `te`."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, bias: bool = True, **options: Any
    ) -> None:
        """Takes activation="gelu", and the arguments of `LayerNormLinear`."""
        super().__init__()
        self.activation = options.pop("activation", "gelu")
        self.fc1 = LayerNormLinear(hidden_size, ffn_hidden_size, eps, bias, **options)
        options.pop("normalization", None)
        self.fc2 = Linear(ffn_hidden_size, hidden_size, bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., hidden_size] for [..., hidden_size]; raises as `Linear.forward`."""
        result: Tensor = self.fc2(getattr(F, self.activation)(self.fc1(x)))
        return result
