"""What packing a weight does: to the outputs, by a model with switches for each way; and to the time of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.running.samples import Samples
from mxfp8_graph.tools.metrics import METRICS
from mxfp8_graph.tools.switched import open_switchable
from mxfp8_graph.tools.tune.folder import Measurements
from mxfp8_graph.tools.tune.plans import KEPT, Cost, Recipes, Unit, Way, ways_of, wins, with_way
from mxfp8_graph.tools.tune.trials import Ticker, Trial, Trials

MOST_RANKED: Final = 4
"""Samples on which weights are ranked, spread over all of them; plans are measured on all."""
_RELATIVE_L2: Final = METRICS["relative_l2"]
_PER_BYTE: Final = 1e-15
"""Seconds that a byte counts: of two ways that take as long, the smaller one."""


def units_of(decisions: Sequence[Decision], trial: Trial) -> list[Unit]:
    """Returns the weights that are packed, in graph order, without damages; what reads one stored weight is one unit.

    Args:
        decisions: of all sites.
        trial: of the recipe that made them.
    """
    sizes = {one.site: one for one in trial.packed}
    together: dict[str, list[Decision]] = {}
    for decision in decisions:
        if decision.quantize:
            together.setdefault(decision.site.weight or decision.site.name, []).append(decision)
    units = []
    for group in together.values():
        packed = {one.weight: one for one in (sizes[d.site.name] for d in group)}.values()
        units.append(
            Unit(
                sites=tuple(decision.site.name for decision in group),
                label=group[0].site.module or group[0].site.name,
                bytes_before=sum(one.bytes_before for one in packed),
                bytes_after=sum(one.bytes_after for one in packed),
                damages={},
            )
        )
    return units


class Damages:
    """Measures the damage of every unit in every way."""

    def __init__(
        self, model: Any, base: Recipe, samples: Samples, measurements: Measurements, ticker: Ticker, **settings: Any
    ) -> None:
        """`settings` are those of `open_switchable`."""
        every = max(1, -(-len(samples) // MOST_RANKED))
        self.feeds = samples.feeds[::every]
        self._model, self._base = model, base
        self._measurements, self._ticker, self._settings = measurements, ticker, settings

    def of(self, units: Sequence[Unit]) -> list[Unit]:
        """Returns the units, which have none, with their damages."""
        damages: list[dict[Way, float]] = [{} for _ in units]
        ways = ways_of(self._base)
        for way in ways:
            first = ways[0].activations
            wanted = [i for i, unit in enumerate(units) if unit.may_be(way) and _is_worth_it(way, first, damages[i])]
            for index, value in self._alone(units, wanted, way).items():
                damages[index][way] = value
            self._ticker.tick(str(way), (len(units) - len(wanted)) * len(self.feeds))
        return [replace(unit, damages=found) for unit, found in zip(units, damages, strict=True)]

    def _alone(self, units: Sequence[Unit], wanted: Sequence[int], way: Way) -> dict[int, float]:
        """Returns the damage of each unit by its index; those that cannot be switched are left out."""
        keys = {index: f"alone {way}: {' '.join(units[index].sites)}" for index in wanted}
        if not all(key in self._measurements for key in keys.values()):
            with open_switchable(self._model, with_way(self._base, way), progress=None, **self._settings) as model:
                numbers = {site.decision.site.name: number for number, site in enumerate(model.switched)}
                off = [False] * len(numbers)
                expected = [model.run(feeds, off)[0] for feeds in self.feeds]

                def measure(unit: Unit) -> list[float] | None:
                    if not set(unit.sites) <= numbers.keys():
                        return None
                    on = [number in {numbers[site] for site in unit.sites} for number in range(len(off))]
                    errors = []
                    for feeds, reference in zip(self.feeds, expected, strict=True):
                        errors.append(_RELATIVE_L2.of(reference, model.run(feeds, on)[0]))
                        self._ticker.tick(f"{unit.label}: {way}")
                    return errors

                for index, key in keys.items():
                    if key in self._measurements:
                        self._ticker.tick(str(way), len(self.feeds))
                    self._measurements.recall(key, partial(measure, units[index]))
        else:
            self._ticker.tick(str(way), len(keys) * len(self.feeds))
        found = {index: self._measurements[key] for index, key in keys.items()}
        return {index: sum(e * e for e in errors) / len(errors) for index, errors in found.items() if errors}


def _is_worth_it(way: Way, first: str, before: Mapping[Way, float]) -> bool:
    """Whether a way has to be measured: roundings that do not win with quantized activations do not with others."""
    usual, same = Way(first), Way(first, way.scale_rounding)
    return way.activations == first or way.scale_rounding == "ceil" or wins(same, usual, before)


def shapes_of(decisions: Sequence[Decision]) -> dict[str, list[str]]:
    """Returns the names of the eligible sites by shape, dtype and role."""
    found: dict[str, list[str]] = {}
    for decision in decisions:
        if decision.quantize:
            site = decision.site
            found.setdefault(f"{site.role} {site.n} x {site.k} {site.dtype}", []).append(site.name)
    return found


def latency_cost(units: Sequence[Unit], decisions: Sequence[Decision], recipes: Recipes, trials: Trials) -> Cost:
    """Returns the cost in seconds that a unit adds to a run, compared with keeping it: measured, negative if faster."""
    shapes = shapes_of(decisions)
    ways = {site: {way.activations for way in unit.damages} for unit in units for site in unit.sites}
    seconds: dict[tuple[str, str], float] = {}
    for shape, sites in shapes.items():
        for activations in dict.fromkeys(way.activations for unit in units for way in unit.damages):
            timed = [site for site in sites if activations in ways.get(site, ())]
            if not timed:
                continue
            plan = {site: Way(activations) if site in timed else KEPT for site in ways}
            recipe = recipes.recipe(plan, "timing")
            rewritten, original = trials.seconds(recipe, f"latency of {shape}: {Way(activations)}")
            seconds.update({(site, activations): (rewritten - original) / len(timed) for site in timed})
    return lambda unit, way: _cost(unit, way, seconds)


def _cost(unit: Unit, way: Way, seconds: Mapping[tuple[str, str], float]) -> float:
    if way == KEPT:
        return unit.bytes_before * _PER_BYTE
    return sum(seconds[site, way.activations] for site in unit.sites) + unit.bytes_after * _PER_BYTE
