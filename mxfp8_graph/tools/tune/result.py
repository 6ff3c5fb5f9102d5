"""What a search found, as data, as JSON and as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.filesize import decimal as size  # a number of bytes in words
from rich.text import Text

from mxfp8_graph.naming import printable
from mxfp8_graph.report import html, text
from mxfp8_graph.report.base import Report
from mxfp8_graph.tools.tune.budget import Budget
from mxfp8_graph.tools.tune.plans import Unit, Way
from mxfp8_graph.tools.tune.search import Step
from mxfp8_ops.errors import Mxfp8Error

SCHEMA: Final = 1
"""Version of the layout of `Tuning.to_dict`; it grows when a key changes its meaning or goes away."""

SHOWN: Final = 12
"""Steps that a terminal shows unless all are asked for, the last ones."""

SPARE: Final = ("relative L2, estimated", "step")
"""Columns to leave out of a narrow table, in this order."""


@dataclass(frozen=True, kw_only=True)
class Tuning(Report):
    """What `tune` found."""

    FOLDS = False

    source: str
    objective: str
    budgets: tuple[Budget, ...]
    base: str
    """Name of the recipe that says which matmuls there are."""
    inputs: str
    """The samples in words."""
    samples: int
    synthesised: bool
    isa: str
    """The instruction set the kernels ran on."""
    units: tuple[Unit, ...]
    """The weights, with what each alone does in each way, if that was needed."""
    steps: tuple[Step, ...]
    """All that were tried, in order."""
    chosen: Step
    """The cheapest that keeps the budgets, or if none does, the closest; what it does was measured again on the model
    that was written."""
    bytes_before: int
    """Bytes of the model's tensors."""
    latency: tuple[float, float] | None
    """Median seconds of (the chosen model, the original), where that is the objective."""
    finished: bool
    """False if the search was interrupted: `chosen` is the best so far."""
    output: str | None = None
    """The folder with the result; None if nothing was written."""
    resumed: int = 0
    """How many measurements came from an earlier search that did not finish."""
    notes: tuple[str, ...] = ()

    @property
    def recipe(self) -> Any:
        """The chosen recipe; `rewrite` with it makes the model."""
        return self.chosen.recipe

    @property
    def packed_share(self) -> float:
        """Share of the bytes of the eligible weights that the chosen plan packs."""
        every = sum(unit.bytes_before for unit in self.units)
        return self.chosen.trial.packed_bytes / every if every else 0.0

    def headline(self) -> str:
        """Returns the outcome in one line."""
        kept = "kept" if self.chosen.met else "NOT kept"
        said = "" if self.finished else ", interrupted: the best so far"
        return f"budget {' and '.join(map(str, self.budgets))} {kept}{said}: {self.chosen.counts}"

    def facts(self) -> list[tuple[str, str]]:
        """Returns what there is to know beside the steps."""
        scores = self.chosen.trial.scores
        ratio = self.bytes_before / self.chosen.trial.byte_size if self.chosen.trial.byte_size else math.inf
        lines = [("inputs", self.inputs), ("kernels", self.isa), ("objective", self.objective)]
        lines += [
            (str(budget), f"{budget.score_text(scores[budget.metric.name])}, measured") for budget in self.budgets
        ]
        lines += [
            ("size", f"{size(self.bytes_before)} -> {size(self.chosen.trial.byte_size)} ({ratio:.2f}x smaller)"),
            ("packed", f"{self.packed_share:.1%} of the bytes of the weights that recipe {self.base} packs"),
        ]
        if self.latency is not None:
            new, old = self.latency
            lines.append(("latency", f"{old * 1e3:.2f} ms -> {new * 1e3:.2f} ms ({old / new:.2f}x as fast), median"))
        equal = sum(step.met and step.cost == self.chosen.cost for step in self.steps)
        if equal > 1:
            text = f"the most accurate, within 5 %, of {equal} plans of one {self.objective} that keep the budget"
            lines.append(("chosen", text))
        met = sum(step.met for step in self.steps)
        text = f"{len(self.steps)} plans rewritten and run on {self.samples} samples; {met} keep the budget"
        lines.append(("search", text))
        lines += [("note", note) for note in self.notes]
        return lines + ([("result", self.output)] if self.output else [])

    def step_table(self) -> html.Columns:
        """Returns (header, a row per step)."""
        names = [budget.metric.name for budget in self.budgets]
        others = [name for name in self.chosen.trial.scores if name not in names]
        titles = [f"{'worst' if budget.of_worst else 'mean'} {budget.metric.title}" for budget in self.budgets]
        titles += [f"mean {self.chosen.trial.scores[name].metric.title}" for name in others]
        header = ("", "budget", *titles, "relative L2, estimated", "tensors", "weights", "step")
        return html.filled(header, [self._row(step, others) for step in self.steps])

    def _row(self, step: Step, others: Sequence[str]) -> tuple[html.Cell, ...]:
        scores = step.trial.scores
        values = [budget.value(scores[budget.metric.name]) for budget in self.budgets]
        values += [scores[name].mean for name in others]
        return (
            "chosen" if step is self.chosen else "",
            "kept" if step.met else "not kept",
            *(html.number(value, ".6g") for value in values),
            html.number(step.estimate),
            html.byte_size(step.trial.byte_size),
            step.counts,
            step.what,
        )

    def unit_table(self) -> html.Columns:
        """Returns (header, a row per weight): its treatment, and the error that it alone does in each way."""
        ways = list(dict.fromkeys(way for unit in self.units for way in unit.damages))
        header = ("weight", "chosen", "bytes", *(f"alone, {way}: relative L2" for way in ways))
        rows = [self._unit_row(*pair, ways) for pair in zip(self.units, self.chosen.plan, strict=True)]
        return html.filled(header, rows)

    def _unit_row(self, unit: Unit, way: Way, ways: Sequence[Way]) -> tuple[html.Cell, ...]:
        errors = (html.number(math.sqrt(unit.damages[other])) if other in unit.damages else "" for other in ways)
        return (unit.label, str(way), html.byte_size(unit.bytes_before), *errors)

    def content(self) -> dict[str, Any]:
        """Returns what the JSON has."""
        latency = self.latency and dict(zip(("chosen", "original"), self.latency, strict=True))
        return {
            "schema": SCHEMA,
            "source": self.source,
            "objective": self.objective,
            "budgets": self.budgets,
            "budgets_kept": self.chosen.met,
            "finished": self.finished,
            "base_recipe": self.base,
            "recipe": self.recipe.model_dump(mode="json", exclude_defaults=True),
            **{key: getattr(self, key) for key in ("inputs", "samples", "synthesised", "isa", "bytes_before")},
            "packed_share": self.packed_share,
            "latency_seconds": latency,
            "notes": self.notes,
            "chosen": self._step_dict(self.chosen),
            "steps": [self._step_dict(step) for step in self.steps],
            "weights": [
                {
                    "sites": unit.sites,
                    "chosen": way,
                    "bytes": unit.bytes_before,
                    "alone_relative_l2": {way: math.sqrt(damage) for way, damage in unit.damages.items()},
                }
                for unit, way in zip(self.units, self.chosen.plan, strict=True)
            ],
        }

    def _step_dict(self, step: Step) -> dict[str, Any]:
        return {
            "step": step.what,
            "chosen": step is self.chosen,
            "met": step.met,
            "weights": step.counts,
            "bytes": step.trial.byte_size,
            "estimated_relative_l2": step.estimate,
            "scores": step.trial.scores,
        }

    def to_text(self, *, every: bool = False) -> RenderableType:
        """Returns the steps, with `every` also the weights, and what there is to know beside them."""
        header, rows = self.step_table()
        shown = rows if every else rows[-SHOWN:]
        more = f"{len(rows) - len(shown)} steps before; --verbose shows them" if len(rows) > len(shown) else ""
        parts: list[RenderableType] = [Text(printable(self.headline())), Text(more), text.Fitted(header, shown, SPARE)]
        if every:
            parts += [Text(), text.Fitted(*self.unit_table())]
        facts = self.facts()
        if self.resumed:  # the result is the same: only here is it said
            facts.append(("resumed", f"{self.resumed} measurements are of a search that did not finish"))
        return Group(*parts, Text(), text.lines(facts))

    def to_html(self) -> str:
        """Returns one self-contained page: the path of the search, error against size, and what was chosen."""
        notes = [f"{step.what}: {step.counts}" for step in self.steps]
        steps = html.Table("Steps", *self.step_table(), paler="not kept", marked="chosen", notes=notes)
        weights = html.Table("Weights", *self.unit_table(), paler="kept")
        other_scales = [name for name in weights.header if "scales" in name]  # JSON has them
        tables = [steps.without("weights", "step").html(), weights.without(*other_scales).html()]
        first = {"size", "chosen", "search"}
        lead = [f"{key.capitalize()}: {text}." for key, text in self.facts() if key in first]
        parts = [html.facts(fact for fact in self.facts() if fact[0] not in first), self._chart()]
        parts += [html.text("The recipe", self.recipe.to_yaml()), *tables]
        lead = [f"The {self.headline()}.", *lead]
        return html.page(f"Plan for {self.source}", parts, lead=lead, files=[self.source])

    def _chart(self) -> str:
        """Returns the error of each plan against its size; where all have one size, along the search."""
        budget, sizes = self.budgets[0], [step.trial.byte_size for step in self.steps]
        one_size = max(sizes) <= 1.001 * min(sizes)
        points = []
        for number, step in enumerate(self.steps, 1):
            value = budget.value(step.trial.scores[budget.metric.name])
            if math.isfinite(value):
                color = 0 if step is self.chosen else 3 if step.met else 2
                text = f"{number}. {step.what}: {budget.score_text(step.trial.scores[budget.metric.name])}"
                x = number if one_size else step.trial.byte_size / 1e6
                label = "chosen" if step is self.chosen else ""
                points.append(html.Point(x, value, color, f"{text}, {size(step.trial.byte_size)}", label))
        if not points:
            return ""
        against = "in the order of the search" if one_size else "against the size of the tensors"
        return html.Chart(
            heading=f"Each plan: {budget.metric.title} {against}",
            points=sorted(points, key=lambda point: not point.color),  # the chosen one on top
            axis=f"step; all plans take {size(self.chosen.trial.byte_size)}" if one_size else "MB",
            legend={0: "chosen", 3: "keeps the budget", 2: "does not"},
            limits=[("y", str(budget), budget.bound)],
        ).html()


class BudgetNotMetError(Mxfp8Error):
    """No plan that rewrites anything keeps the budget; `best` has what was measured, `best.chosen` the best of it."""

    def __init__(self, best: Tuning, what: str, expected: str) -> None:
        super().__init__(best.source, what, expected=expected, advice="allow more, or run the model as it is")
        self.best = best
