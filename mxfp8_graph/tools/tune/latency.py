"""What a way costs in time: matmuls of one shape are rewritten together, and timed against the original in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.tools.tune.plans import ACTIVATIONS, KEPT, Cost, Unit, Way
from mxfp8_graph.tools.tune.recipes import Recipes
from mxfp8_graph.tools.tune.trials import Trials

_PER_BYTE: Final = 1e-15
"""Seconds that a byte counts: of two ways that take as long, the smaller one."""


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
        for activations in ACTIVATIONS:
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
