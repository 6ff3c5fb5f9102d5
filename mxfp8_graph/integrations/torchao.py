"""torchao: `torchao.quantization.quantize_(model, MXConfig("mxint8"), filter_fn)`.

torchao chooses the modules, all linears by default, and hands over each without its name. Each is packed in place.
"""

from __future__ import annotations

import contextlib

from torch import nn

from mxfp8_graph.eager import quantize_
from mxfp8_graph.policy.plan import NothingEligibleError
from mxfp8_graph.policy.recipe import load_recipe
from mxfp8_graph.rewriting import AnyRecipe
from mxfp8_ops.errors import BackendError, RecipeError

try:
    from torchao.core.config import AOBaseConfig
    from torchao.quantization.transform_module import register_quantize_module_handler
except ModuleNotFoundError as error:
    what, expected = "not installed, or too old", "torchao >= 0.17"
    raise BackendError("torchao", what, expected=expected, advice="pip install -U torchao") from error


class MXConfig(AOBaseConfig):
    """A recipe for torchao's `quantize_`, and for the TorchAoConfig of transformers and diffusers.

    It is not among the classes that torchao reads from a saved folder: `integrations.transformers` saves models.
    """

    def __init__(self, recipe: AnyRecipe = "mxfp8") -> None:
        """Loads the recipe.

        Args:
            recipe: a preset, a recipe file or a `Recipe`, without patterns and rules.

        Raises:
            RecipeError: as `load_recipe`; or it has include, exclude or rules.
        """
        # torchao writes attributes as JSON, but not those with an underscore.
        self._recipe = load_recipe(recipe)
        self.recipe = self._recipe.name
        if fields := [name for name in ("include", "exclude", "rules") if getattr(self._recipe, name)]:
            what = f"it has {', '.join(fields)}, but torchao hands over modules without their names"
            advice = "call mxfp8_graph.quantize_, or choose modules by the filter_fn of torchao"
            raise RecipeError(f"MXConfig: recipe {self.recipe!r}", what, expected="none", advice=advice)

    def __repr__(self) -> str:
        return f"MXConfig({self.recipe!r})"


@register_quantize_module_handler(MXConfig)
def _pack(module: nn.Module, config: MXConfig) -> nn.Module:
    """Packs a module in place; one that is too small, or no plain linear, stays."""
    with contextlib.suppress(NothingEligibleError):
        quantize_(module, config._recipe)
    return module
