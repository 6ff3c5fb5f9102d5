"""The recipe of a plan: a plain one, from which `rewrite` makes the same model again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mxfp8_graph.policy.plan import Decision, plan
from mxfp8_graph.policy.recipe import Recipe, Rule
from mxfp8_graph.tools.exclusion import anchored
from mxfp8_graph.tools.tune.plans import KEPT, Way
from mxfp8_ops.errors import RecipeError

_TUNED: Final = ("activations", "scale_rounding")
"""What tuning decides, whatever the recipe it starts from says."""


def with_way(base: Recipe, way: Way) -> Recipe:
    """Returns the recipe that rewrites all that `base` rewrites in one way."""
    settings = {"activations": way.activations, "scale_rounding": way.scale_rounding}
    rules = tuple(_without_settings(rule) for rule in base.rules)
    return _changed(base, name=f"{base.name}: {way}", rules=rules, **settings)


class Recipes:
    """Makes recipes of plans for one model."""

    def __init__(self, base: Recipe, decisions: Sequence[Decision]) -> None:
        """`decisions` are those of `with_way(base, ...)` for every site of the model."""
        self._base = base
        self._decisions = {decision.site.name: decision for decision in decisions}
        self._sites = [decision.site for decision in decisions]
        eligible = [decision.site.name for decision in decisions if decision.quantize]
        self._patterns = dict(zip(eligible, anchored(eligible, self._sites, base), strict=True))

    def recipe(self, ways: Mapping[str, Way], name: str) -> Recipe:
        """Returns the recipe that does with each eligible site, by name, what `ways` says.

        Raises:
            RecipeError: no pattern matches one of two sites and not the other.
        """
        packed = {site: way for site, way in ways.items() if way != KEPT}
        common = Counter(packed.values()).most_common(1)[0][0]
        own = {site: way for site, way in packed.items() if way != common}
        rules = [self._rule(site, way, common) for site, way in own.items()]
        left = {self._decisions[site].rule for site, way in packed.items() if site not in own}
        left |= {decision.rule for decision in self._decisions.values() if not decision.quantize}
        rules += [_without_settings(rule) for i, rule in enumerate(self._base.rules) if f"rules.{i}" in left]
        kept = [self._patterns[site] for site, way in ways.items() if way == KEPT]
        result = _changed(
            self._base,
            name=name,
            activations=common.activations,
            scale_rounding=common.scale_rounding,
            exclude=(*self._base.exclude, *kept),
            rules=tuple(rules),
        )
        self._check(result, ways)
        return result

    def _rule(self, site: str, way: Way, common: Way) -> Rule:
        decision = self._decisions[site]
        settings: dict[str, Any] = {
            name: getattr(way, name) for name in _TUNED if getattr(way, name) != getattr(common, name)
        }
        if decision.weight_format != self._base.weight_format:
            settings["weight_format"] = decision.weight_format
        return Rule(name=self._patterns[site], **settings)

    def _check(self, recipe: Recipe, ways: Mapping[str, Way]) -> None:
        """Asks the plan itself what the recipe does."""
        for decision in plan(self._sites, recipe):
            name = decision.site.name
            if name not in ways:
                continue
            found = Way(decision.activations, decision.scale_rounding) if decision.quantize else KEPT
            if found != ways[name]:
                what = f"no pattern tells {name!r} from other matmuls by name or module path"
                raise RecipeError(recipe.name, what, expected="names that differ", advice="name the nodes of the model")


def _without_settings(rule: Rule) -> Rule:
    return Rule(**rule.model_dump(exclude_unset=True, exclude=set(_TUNED)))


def _changed(base: Recipe, **fields: Any) -> Recipe:
    return Recipe(**{**base.model_dump(exclude_unset=True), **fields})
