"""The recipe of a forward pass, and of new layers: `autocast` and `quantized_model_init`. Threads have their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch.utils.checkpoint
from torch import nn

from mxfp8_graph.policy.recipe import MXFP8BlockScaling, Recipe, load_recipe
from mxfp8_graph.te.quantizers import MXFP8Quantizer
from mxfp8_graph.te.recipe import Emulated
from mxfp8_ops import cpu
from mxfp8_ops.cuda.hardware import is_mxfp8_native, native_reason
from mxfp8_ops.errors import BackendError, ContractError, RecipeError

AnyRecipe = Any
"""A recipe of `te.recipe`, or what `rewrite` takes."""

_DEFAULT: Final = MXFP8BlockScaling()
_local: Final = threading.local()


def current_recipe() -> Recipe | Emulated | None:
    """Returns the recipe of the innermost `autocast` of this thread; None outside of one, or if it is disabled."""
    entries: tuple[Any, ...] = getattr(_local, "entries", ())
    return entries[0][1] if entries else None


def current_region() -> object:
    """Returns an object that stands for the outermost `autocast` of this thread; None outside of one."""
    entries: tuple[Any, ...] = getattr(_local, "entries", ())
    return entries[0][2] if entries else None


class autocast:  # noqa: N801
    """Layers of `te` compute by `recipe` inside of this context, as in TransformerEngine."""

    _region: object = None
    """The region to go on with, for `checkpoint`."""

    def __init__(self, enabled: bool = True, *, recipe: AnyRecipe = None) -> None:
        """Takes the recipe: MXFP8BlockScaling() by default.

        Raises:
            RecipeError: a layer cannot compute by the recipe.
        """
        self._recipe = for_layers(recipe) if enabled else None

    def __enter__(self) -> autocast:
        # No state in this object: threads and nested blocks may share it.
        outer = getattr(_local, "entries", ())
        region = outer[0][2] if outer else [] if self._region is None else self._region
        _local.entries = ((self, self._recipe, region), *outer)
        return self

    def __exit__(self, *_: object) -> None:
        # Its own entry, which is not the first one if a generator was left open.
        entries = _local.entries
        at = [owner is self for owner, *_ in entries].index(True)
        _local.entries = entries[:at] + entries[at + 1 :]


def for_layers(recipe: AnyRecipe) -> Recipe | Emulated:
    """Returns the recipe of an argument; RecipeError if it is not one that a layer can train by."""
    if recipe is None:
        return _DEFAULT
    if isinstance(recipe, Emulated):
        return recipe
    loaded: Recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if not loaded.mxfp8():
        what, expected = f"{loaded.name} has other formats than E4M3", "MXFP8 weights and activations"
        raise RecipeError("autocast", what, expected=expected, advice="rewrite an exported program with this recipe")
    if loaded.rules or loaded.include or loaded.exclude:
        what = f"{loaded.name} chooses among layers by name"
        expected, advice = "a recipe without rules, include and exclude", "use nn.Linear for the layers to keep"
        raise RecipeError("autocast", what, expected=expected, advice=advice)
    return loaded


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: AnyRecipe = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Layers of `te` that are made in this context store their weights in MXFP8 only, along rows and columns.

    Args:
        enabled: False: as outside of any such context.
        recipe: MXFP8BlockScaling() by default.
        preserve_high_precision_init_val: whether `weight.get_high_precision_init_val()` returns the value from before
            the quantization, until `weight.clear_high_precision_init_val()`. `master_weights` begins with it.

    Raises:
        RecipeError: the recipe has no stored form here.
    """
    chosen = for_layers(recipe)
    if isinstance(chosen, Emulated):
        what = f"{type(chosen).__name__} has no stored form here"
        advice = "make the model outside of quantized_model_init"
        raise RecipeError("quantized_model_init", what, expected="MXFP8BlockScaling", advice=advice)
    before = getattr(_local, "init", None)
    _local.init = (chosen, preserve_high_precision_init_val) if enabled else None
    try:
        yield
    finally:
        _local.init = before


def stored(weight: Any) -> Any:
    """Returns a new parameter as `quantized_model_init` wants it: in MXFP8, or unchanged."""
    if (wanted := getattr(_local, "init", None)) is None:
        return weight
    quantizer = MXFP8Quantizer(scale_rounding=wanted[0].scale_rounding)
    parameter: Any = nn.Parameter(quantizer(weight.detach()))
    parameter.initial = weight.detach().cpu() if wanted[1] else None
    return parameter


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Returns function(*args), which runs again in the backward pass, under the same recipe, to save memory."""
    if use_reentrant:
        expected = "use_reentrant=False, torch's newer way"
        raise ContractError("checkpoint", "use_reentrant=True", expected=expected, advice="leave it out")
    recipe = current_recipe()
    again = autocast(recipe is not None, recipe=recipe)
    again._region = current_region()
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again), **kwargs
    )


class Availability(NamedTuple):
    """(available, reason). It is true if the format is available, as TransformerEngine's answer is."""

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available


def is_mxfp8_available(return_reason: bool = True) -> Availability:
    """Returns whether layers run in MXFP8 here, and on what. TransformerEngine's is about Blackwell GPUs only."""
    try:
        where = f"CPU kernels ({cpu.isa()}); GPU: {native_reason()}"
    except BackendError as error:
        return Availability(False, str(error))
    return Availability(True, where if is_mxfp8_native() else f"{where}, so products decode it first")


def is_nvfp4_available(return_reason: bool = True) -> Availability:
    """Returns that layers have no NVFP4."""
    return Availability(False, "NVFP4 has no layers here; mxfp8-graph compare emulates it on a model")
