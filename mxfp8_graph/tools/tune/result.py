"""The result of tuning."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rich.filesize import decimal as size  # a number of bytes in words

from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.base import Data
from mxfp8_graph.report.scatter import Scatter
from mxfp8_graph.report.section import Columns, Head, Section, Tile, byte_size, change, filled, number
from mxfp8_graph.running.report import Measurement
from mxfp8_graph.tools.metrics import Score
from mxfp8_graph.tools.trials import Latency
from mxfp8_graph.tools.tune.budget import Budget
from mxfp8_graph.tools.tune.plans import NAMES, Plan
from mxfp8_ops.errors import Mxfp8Error

ORIGINAL: Final = "original"
"""Name of the row of the original."""


@dataclass(frozen=True, kw_only=True)
class Step(Data):
    """The results of one plan, rewritten and run."""

    KEYS = "plan=what met bytes=byte_size seconds speed scores"

    plan: Plan
    what: str
    """The plan in words."""
    recipe: Recipe
    scores: Mapping[str, Score]
    """Scores by the name of the metric."""
    byte_size: int
    """Bytes of the model's tensors."""
    met: bool
    """Whether it meets the budgets."""
    latencies: tuple[Latency, Latency] | None = None
    """Latencies of the plan and of the original, in turns; None if they were not measured."""

    @property
    def seconds(self) -> tuple[float, float] | None:
        """Median latencies of the plan and of the original; None if they were not measured."""
        return (self.latencies[0].seconds, self.latencies[1].seconds) if self.latencies else None

    @property
    def preset(self) -> str:
        """The preset whose formats all sites have; "" if they differ."""
        return "" if self.plan.worst else NAMES[self.plan.treatment]

    def slower(self, other: Step) -> bool:
        """Whether it is clearly slower than another: their originals, timed in turns, make them comparable."""
        if self.latencies is None or other.latencies is None:
            return False
        spread = max(latency.spread for latency in (*self.latencies, *other.latencies))
        return Latency(1 / self.speed, spread).slower(Latency(1 / other.speed, spread))

    @property
    def speed(self) -> float:
        """Latency of the original divided by the plan's; 0 if it was not measured."""
        return self.seconds[1] / self.seconds[0] if self.seconds else 0.0

    @property
    def error(self) -> float:
        """Mean relative L2 error, infinite where it is NaN."""
        score = self.scores["relative_l2"]
        return score.metric.badness(score.mean)


@dataclass(frozen=True, kw_only=True)
class Tuning(Measurement):
    """The plan that meets a budget."""

    TITLE = "Plan for {source}"
    FILES = ("source",)
    KEYS = (
        "schema source objective budgets budgets_met=chosen.met base_recipe=base recipe=recipe_fields inputs samples "
        "synthesised isa bytes_before notes chosen steps"
    )
    schema: ClassVar[int] = 2
    """Version of the layout of the JSON; it grows when a key changes its meaning or goes away."""

    source: str
    objective: str
    budgets: tuple[Budget, ...]
    base: str
    """Name of the recipe that selects the matmuls."""
    samples: int
    synthesised: bool
    steps: tuple[Step, ...]
    """All plans that were tried, in order."""
    chosen: Step
    """The best step that meets the budgets, or the closest step if none does."""
    bytes_before: int
    """Bytes of the original's tensors."""
    output: str | None = None
    """The folder with the result; None if nothing was written."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the chosen plan, for `rewrite`."""
        return self.chosen.recipe

    @property
    def recipe_fields(self) -> dict[str, Any]:
        """The fields of the recipe that differ from the defaults."""
        return self.recipe.model_dump(mode="json", exclude_defaults=True)

    @property
    def reached(self) -> str:
        """The values of the budgets' metrics in words."""
        scores = self.chosen.scores
        return ", ".join(f"{budget.title} {budget.value(scores[budget.metric.name]):.6g}" for budget in self.budgets)

    def answer(self) -> str:
        """Returns a sentence with the chosen plan, its budgets, size and speed."""
        bounds = " and ".join(map(str, self.budgets))
        if not self.chosen.met:
            return f"No plan meets {bounds}: the closest, {self.chosen.what}, has {self.reached}."
        ratio = self.bytes_before / self.chosen.byte_size if self.chosen.byte_size else math.inf
        fast = f", {self.chosen.speed:.2f} times as fast" * bool(self.chosen.seconds)
        where = f"{self.output}/recipe.yaml" if self.output else "the recipe"
        same = f", as --recipe {self.chosen.preset}" if self.chosen.preset else ""
        met = f"{self.reached} meets {bounds}"
        return f"Take {where} ({self.chosen.what}{same}): {met}, {ratio:.2f} times smaller{fast}."

    def head(self) -> Head:
        """Returns size, speed, the metrics of the budgets, and the command that rewrites with the chosen recipe."""
        before, after, command = self.bytes_before, self.chosen.byte_size, ""
        tiles = [Tile("size", size(after), size(before), change(before, after))]
        if self.chosen.seconds:
            ms, old = (f"{seconds * 1e3:.3g} ms" for seconds in self.chosen.seconds)
            tiles.append(Tile("speed", ms, old, change(*self.chosen.seconds[::-1], faster=True)))
        for budget in self.budgets:
            value = budget.value(self.chosen.scores[budget.metric.name])
            tiles.append(Tile(budget.title, f"{value:.5g}", note=f"budget {budget}"))
        if self.output and self.chosen.met:
            command = shlex.join(["mxfp8-graph", "rewrite", self.source, "--recipe", f"{self.output}/recipe.yaml"])
        slower = self.chosen.seconds and self.chosen.speed < 1
        verdict = "bad" if not self.chosen.met else "warning" if slower else "good"
        return Head(verdict=verdict, tiles=tiles, command=command)

    def sections(self) -> Iterator[Section]:
        """Yields the plans, the facts and the recipe."""
        scatter = Scatter(across="latency, ms", up="mean relative L2", reference=ORIGINAL)
        yield Section(facts=self.facts())
        best = self.steps.index(self.chosen)
        yield Section(title="Plans", columns=self.table(), best=best, scatter=scatter, bar=scatter.up)
        yield Section(title="The recipe", text=self.recipe.to_yaml(), detail=True)

    def facts(self) -> list[tuple[str, str]]:
        """Returns (label, value) pairs beside the plans."""
        lines = [("inputs", self.inputs), ("kernels", self.isa), ("objective", self.objective)]
        lines.append(("size", f"{size(self.bytes_before)} -> {size(self.chosen.byte_size)}"))
        if self.chosen.seconds:
            after, before = self.chosen.seconds
            lines.append(("latency", f"{before * 1e3:.2f} ms -> {after * 1e3:.2f} ms"))
        met = sum(step.met for step in self.steps)
        lines.append(("search", f"{len(self.steps)} plans rewritten and run; {met} meet the budget"))
        lines += [("note", note) for note in self.notes]
        return lines + ([("result", self.output)] if self.output else [])

    def table(self) -> Columns:
        """Returns (header, a row per plan, and one of the original)."""
        others = [name for name in self.chosen.scores if name not in {budget.metric.name for budget in self.budgets}]
        titles = [b.title for b in self.budgets] + [f"mean {self.chosen.scores[n].metric.title}" for n in others]
        rows = []
        for step in self.steps:
            values = [b.value(step.scores[b.metric.name]) for b in self.budgets]
            values += [step.scores[name].mean for name in others]
            cells = (number(value, ".6g") for value in values)
            latency = number(step.seconds and step.seconds[0] * 1e3, ".2f")
            rows.append((step.what, "met" if step.met else "missed", *cells, byte_size(step.byte_size), latency))
        if self.chosen.seconds:
            metrics = [b.metric for b in self.budgets] + [self.chosen.scores[name].metric for name in others]
            latency = number(self.chosen.seconds[1] * 1e3, ".2f")
            rows.append(
                (ORIGINAL, "", *(number(m.best, ".6g") for m in metrics), byte_size(self.bytes_before), latency)
            )
        return filled(("plan", "budget", *titles, "tensors", "latency, ms"), rows)


class BudgetNotMetError(Mxfp8Error):
    """No plan that rewrites anything meets the budget; `best` has the measurements of all plans."""

    def __init__(self, best: Tuning) -> None:
        expected = " and ".join(map(str, best.budgets))
        what = f"the best that was reached is {best.reached}, with {best.chosen.what}"
        super().__init__(best.source, what, expected=expected, advice="allow more, or run the model as it is")
        self.best = best
