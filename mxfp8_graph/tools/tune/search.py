"""The search: how far along the path the budget allows, found by halving, and then what of the rest it allows too.

Every step is a model that was really rewritten and run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.tools.tune.budget import Budget, all_met
from mxfp8_graph.tools.tune.plans import WINS, Cost, Move, Plan, Recipes, Unit, after, estimate
from mxfp8_graph.tools.tune.trials import Trial, Trials

MOST_REFINED: Final = 16
"""Moves beyond the last one that the budget allows which are tried by themselves."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One plan that was tried."""

    what: str
    """How the search came to it."""
    plan: Plan
    recipe: Recipe
    trial: Trial
    met: bool
    """Whether it keeps the budgets."""
    cost: float
    """What the search makes small: bytes, or seconds compared with the model as it is."""
    estimate: float | None
    """Relative L2 error that was to be expected; None before weights were ranked."""

    @property
    def error(self) -> float:
        """Mean relative L2 error, infinite where it is NaN."""
        mean = self.trial.scores["relative_l2"].mean
        return math.inf if math.isnan(mean) else mean

    @property
    def counts(self) -> str:
        """The number of weights with each treatment, in words."""
        return ", ".join(f"{count} {way}" for way, count in Counter(map(str, self.plan)).most_common())


def most_steps(units: int) -> int:
    """Returns how many steps `Search.run` takes at most."""
    return 2 + math.ceil(math.log2(3 * units + 1)) + MOST_REFINED


class Search:
    """Tries plans, and keeps what came of them."""

    def __init__(self, trials: Trials, recipes: Recipes, budgets: Sequence[Budget], name: str) -> None:
        self.steps: list[Step] = []
        self._trials, self._recipes, self._budgets, self._name = trials, recipes, budgets, name

    def run(self, units: Sequence[Unit], moves: Sequence[Move], cost: Cost) -> None:
        """Tries the plans that the path leads to; of those that keep the budgets, `best` has the cheapest."""
        low, high = 0, len(moves)
        if not moves or self._try(units, moves, cost, "all moves"):
            return
        while high - low > 1:
            middle = (low + high) // 2
            if self._try(units, moves[:middle], cost, f"the first {middle} of {len(moves)} moves"):
                low = middle
            else:
                high = middle
        if low == 0 and high == 1:
            self._try(units, moves[:1], cost, "the first move alone")
        self._refine(units, moves, low, cost)

    def best(self) -> Step | None:
        """Returns the cheapest step that keeps the budgets; of those of one cost the first that none clearly beats."""
        met = [step for step in self.steps if step.met]
        cheapest = [step for step in met if step.cost == min(other.cost for other in met)]
        least = min((step.error for step in cheapest), default=0.0)
        return next((step for step in cheapest if WINS * step.error <= least), None)

    def closest(self) -> Step:
        """Returns the step that comes closest to the budgets: that keeps most of them, and of those the best values."""

        def distance(step: Step) -> tuple[int, float]:
            missed = [b for b in self._budgets if not b.met(step.trial.scores[b.metric.name])]
            return len(missed), missed[0].loss(step.trial.scores[missed[0].metric.name]) if missed else 0.0

        return min(self.steps, key=distance)

    def replace(self, step: Step, by: Step) -> None:
        """Puts a step where another was."""
        self.steps[self.steps.index(step)] = by

    def try_plan(self, units: Sequence[Unit], plan: Plan, cost: Cost, what: str, *, ranked: bool = True) -> Step:
        """Returns the step of a plan, having measured it."""
        ways = {site: way for unit, way in zip(units, plan, strict=True) for site in unit.sites}
        recipe = self._recipes.recipe(ways, self._name)
        known = next((step for step in self.steps if step.plan == plan), None)
        trial = known.trial if known else self._trials.trial(recipe, what)
        step = Step(
            what=known.what if known else what,
            plan=plan,
            recipe=recipe,
            trial=trial,
            met=all_met(self._budgets, trial.scores),
            cost=math.fsum(cost(unit, way) for unit, way in zip(units, plan, strict=True)),
            estimate=estimate(units, plan) if ranked else None,
        )
        if known:
            self.replace(known, step)
        else:
            self.steps.append(step)
        return step

    def _try(self, units: Sequence[Unit], moves: Sequence[Move], cost: Cost, what: str) -> bool:
        return self.try_plan(units, after(len(units), moves), cost, what).met

    def _refine(self, units: Sequence[Unit], moves: Sequence[Move], low: int, cost: Cost) -> None:
        """Goes on after the last move that the budgets allow, and leaves out the moves that they do not."""
        made, refused = list(moves[:low]), set[int]()
        tried = 0
        for move in moves[low:]:
            if move.unit in refused:
                continue
            if tried == MOST_REFINED:
                return
            tried += 1
            if self._try(units, [*made, move], cost, f"and {units[move.unit].label}: {move.way}"):
                made.append(move)
            else:
                refused.add(move.unit)
