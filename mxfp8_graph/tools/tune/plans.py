"""Plans: the treatment of each weight, and the path from the plan that does least damage to the cheapest one.

A move gives one weight the next cheaper way. The path has the moves in the order of the damage that they do for what
they save, which is the best order if errors of weights add up as squares: the lower convex hull of the choices of each
weight, as in the fractional knapsack problem with several choices.

The recipe of a plan is a plain one, from which `rewrite` makes the same model again.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.policy.plan import plan as decide
from mxfp8_graph.policy.recipe import Recipe, Rule
from mxfp8_graph.tools.exclusion import anchored
from mxfp8_ops.errors import RecipeError
from mxfp8_ops.formats import BFLOAT16, E4M3, ELEMENT_FORMATS, INT8, SCALE_ROUNDINGS


@dataclass(frozen=True)
class Way:
    """The treatment of a matmul."""

    activations: str
    """One of `recipe.ACTIVATIONS`; empty: the matmul is kept."""
    scale_rounding: str = "ceil"

    def __str__(self) -> str:
        """Returns it in words: kept, weight-only, bfloat16, e4m3, int8; with scales that are not rounded up as well."""
        words = {"": "kept", "unchanged": "weight-only"}.get(self.activations, self.activations)
        return words if self.scale_rounding == "ceil" else f"{words}, {self.scale_rounding} scales"


KEPT: Final = Way("")

WINS: Final = 0.95
"""Scales are rounded otherwise than up only where that does less than this share of the damage: less is chance. So is a
plan of the same cost that was tried later."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A weight and the matmuls that use it: they are kept or packed together, so that it is stored once."""

    sites: tuple[str, ...]
    """Their names."""
    label: str
    """What to call it."""
    bytes_before: int
    bytes_after: int
    """Bytes of its packed form."""
    damages: Mapping[Way, float]
    """By what it may become, the square of the relative L2 error that it alone does at the outputs."""

    def may_be(self, way: Way) -> bool:
        """Whether it can be packed in a way: a product of two activations has no weight to be quantized alone."""
        return way in self.damages if self.damages else bool(self.bytes_after) or way.activations in ELEMENT_FORMATS

    def damage(self, way: Way) -> float:
        """Returns the square of the relative L2 error; 0 if it is kept."""
        return 0.0 if way == KEPT else self.damages.get(way, math.inf)


Plan = tuple[Way, ...]
"""One way per unit."""
Cost = Callable[[Unit, Way], float]


@dataclass(frozen=True)
class Move:
    """One step of the path."""

    unit: int
    way: Way


def activations_of(base: Recipe) -> tuple[str, ...]:
    """Returns what activations may become, from the cheapest to multiply on hardware that has the format."""
    # INT8 elements are multiplied fast with their own kind alone; E4M3 is the format for weights in E4M3 and E5M2.
    quantized = INT8.name if base.weight_format == INT8.name else E4M3.name
    return quantized, BFLOAT16.name, "unchanged"


def ways_of(base: Recipe) -> tuple[Way, ...]:
    """Returns what a matmul may become: the cheapest first; scales that are rounded up before the others."""
    return tuple(Way(*way) for way in itertools.product(activations_of(base), SCALE_ROUNDINGS))


def size_cost(unit: Unit, way: Way) -> float:
    """Returns bytes: what multiplies the packed weight does not change them."""
    return float(unit.bytes_before if way == KEPT else unit.bytes_after)


def path(units: Sequence[Unit], cost: Cost) -> list[Move]:
    """Returns the moves that lead from everything kept to the cheapest plan, the least damage for its saving first."""
    found: list[tuple[float, int, int, Way]] = []
    for index, unit in enumerate(units):
        for order, (slope, way) in enumerate(_corners(unit, cost)):
            found.append((slope, index, order, way))
    return [Move(unit, way) for _, unit, _, way in sorted(found, key=lambda move: move[:3])]


def _corners(unit: Unit, cost: Cost) -> list[tuple[float, Way]]:
    """Returns the ways on the lower convex hull with what each costs in damage per saving, beginning after KEPT."""
    current, corners = KEPT, list[tuple[float, Way]]()
    choices = [way for way in _sensible(unit.damages) if math.isfinite(unit.damages[way])]
    while True:
        cheaper = [way for way in choices if cost(unit, way) < cost(unit, current)]
        if not cheaper:
            return corners
        slopes = {way: _slope(unit, current, way, cost) for way in cheaper}
        current = min(cheaper, key=lambda way: (slopes[way], cost(unit, way)))
        corners.append((slopes[current], current))


def _sensible(damages: Mapping[Way, float]) -> list[Way]:
    """Returns one way for each kind of activations: with ceil scales, unless others win."""
    found = []
    for activations in dict.fromkeys(way.activations for way in damages):
        usual = Way(activations)
        others = [way for way in damages if way.activations == activations and wins(way, usual, damages)]
        if usual in damages:
            found.append(min(others, key=lambda way: damages[way], default=usual))
    return found


def wins(way: Way, usual: Way, damages: Mapping[Way, float]) -> bool:
    """Whether a way does clearly less damage than the usual one, as far as both are known."""
    return way in damages and usual in damages and damages[way] < WINS**2 * damages[usual]


def _slope(unit: Unit, before: Way, after: Way, cost: Cost) -> float:
    # A way may do less damage than a dearer one by chance: that counts as none.
    return max(unit.damage(after) - unit.damage(before), 0.0) / (cost(unit, before) - cost(unit, after))


def after(units: int, moves: Sequence[Move]) -> Plan:
    """Returns the plan that some moves lead to."""
    plan = [KEPT] * units
    for move in moves:
        plan[move.unit] = move.way
    return tuple(plan)


def estimate(units: Sequence[Unit], plan: Plan) -> float:
    """Returns the relative L2 error that a plan should do, if squares of errors add up."""
    return math.sqrt(sum(unit.damage(way) for unit, way in zip(units, plan, strict=True)))


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
        self._patterns = dict(zip(eligible, anchored(eligible, self._sites), strict=True))

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
        """Raises RecipeError unless the recipe decides what `ways` says."""
        for decision in decide(self._sites, recipe):
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
