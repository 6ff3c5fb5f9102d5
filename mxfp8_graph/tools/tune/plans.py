"""Plans: one treatment for all sites, a better one for the sites that do most damage, and the recipe of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mxfp8_graph.policy.plan import MatMulSite
from mxfp8_graph.policy.plan import plan as decide
from mxfp8_graph.policy.presets import PRESETS
from mxfp8_graph.policy.recipe import Recipe, Rule
from mxfp8_graph.tools.analyze.run import patterns_of
from mxfp8_ops.errors import RecipeError

# The last two have INT8 weights, with a third of the error of E4M3 weights in the same size.
NAMES: Final = {"e4m3": "mxfp8", "int8": "mxint8", "bfloat16": "mxint8-bf16", "weight-only": "mxint8-weight-only"}
"""Treatment -> the preset with its settings."""

TREATMENTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "e4m3": {"weight_format": "e4m3", "activations": "e4m3", "scale_rounding": "ceil"},
    **{treatment: PRESETS[NAMES[treatment]] for treatment in ("int8", "bfloat16", "weight-only")},
}
"""Treatment -> the settings of a recipe for it, which tuning chooses."""

KEPT: Final = "kept"
"""The treatment of a site that is not rewritten."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The treatment of every site that a recipe selects."""

    treatment: str
    better: str = KEPT
    """The treatment of the sites in `worst`."""
    worst: tuple[str, ...] = ()
    """Names of sites."""

    def words(self, sites: int) -> str:
        """Returns the plan in words: 31 int8, 5 kept."""
        rest = f"{sites - len(self.worst)} {self.treatment}"
        return f"{rest}, {len(self.worst)} {self.better}" if self.worst else rest

    def recipe(self, base: Recipe, sites: Sequence[MatMulSite], name: str) -> Recipe:
        """Returns the recipe of the plan; `base` selects the sites of the model.

        Raises:
            RecipeError: no pattern matches one of two sites and not the other.
        """
        patterns = patterns_of(self.worst, sites)
        fields: dict[str, Any] = {**base.model_dump(exclude_unset=True), "name": name, **TREATMENTS[self.treatment]}
        # By default it follows the format of the weights, which the treatment changes.
        if base.convolutions is None and any(site.role == "convolution" for site in sites):
            fields["convolutions"] = base.sets("convolutions")
        # Rules of `base` keep their choice of sites, and lose the settings that tuning chooses.
        settings = set(TREATMENTS[self.treatment])
        rules = [Rule(**rule.model_dump(exclude_unset=True, exclude=settings)) for rule in base.rules]
        if self.better == KEPT:
            fields["exclude"] = (*base.exclude, *patterns)
        else:
            # In front: the first matching rule decides.
            rules = [*(Rule(name=pattern, **TREATMENTS[self.better]) for pattern in patterns), *rules]
        result = Recipe(**{**fields, "rules": tuple(rules)})
        self._check(result, base, sites)
        return result

    def _check(self, recipe: Recipe, base: Recipe, sites: Sequence[MatMulSite]) -> None:
        """Raises RecipeError unless the recipe gives exactly the worst sites the better treatment."""
        for before, after in zip(decide(sites, base), decide(sites, recipe), strict=True):
            if not before.quantize or (before.site.weight is None and not after.quantize):
                continue  # the recipe may keep a product of two activations, which has no weight to quantize alone
            name = before.site.name
            wanted = TREATMENTS.get(self.better if name in self.worst else self.treatment, {}).get("activations")
            if before.site.role == "convolution" and wanted is not None and after.quantize:
                continue  # its activations are quantized or unchanged, never rounded to bfloat16
            if wanted != (after.activations if after.quantize else None):
                what = f"no pattern tells {name!r} from other matmuls by name or module path"
                raise RecipeError(recipe.name, what, expected="names that differ", advice="name the nodes of the model")
