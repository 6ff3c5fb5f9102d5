"""The result of a search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.filesize import decimal as size  # a number of bytes in words

from mxfp8_graph.report.base import Report
from mxfp8_graph.report.section import Cell, Columns, Section, byte_size, filled, number
from mxfp8_graph.tools.tune.budget import Budget
from mxfp8_graph.tools.tune.plans import Unit, Way
from mxfp8_graph.tools.tune.search import Step
from mxfp8_ops.errors import Mxfp8Error

SCHEMA: Final = 1
"""Version of the layout of `Tuning.to_dict`; it grows when a key changes its meaning or goes away."""

SHOWN: Final = 12
"""Steps that a terminal shows unless all are asked for, the last ones."""


@dataclass(frozen=True, kw_only=True)
class Tuning(Report):
    """What `tune` found."""

    TITLE = "Plan for {source}"
    FILES = ("source",)
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

    def answer(self) -> str:
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

    def step_table(self) -> Columns:
        """Returns (header, a row per step)."""
        names = [budget.metric.name for budget in self.budgets]
        others = [name for name in self.chosen.trial.scores if name not in names]
        titles = [f"{'worst' if budget.of_worst else 'mean'} {budget.metric.title}" for budget in self.budgets]
        titles += [f"mean {self.chosen.trial.scores[name].metric.title}" for name in others]
        header = ("", "budget", *titles, "relative L2, estimated", "tensors", "weights", "step")
        return filled(header, [self._row(step, others) for step in self.steps])

    def _row(self, step: Step, others: Sequence[str]) -> tuple[Cell, ...]:
        scores = step.trial.scores
        values = [budget.value(scores[budget.metric.name]) for budget in self.budgets]
        values += [scores[name].mean for name in others]
        return (
            "chosen" if step is self.chosen else "",
            "met" if step.met else "missed",
            *(number(value, ".6g") for value in values),
            number(step.estimate),
            byte_size(step.trial.byte_size),
            step.counts,
            step.what,
        )

    def unit_table(self) -> Columns:
        """Returns (header, a row per weight): its treatment, and the error that it alone does in each way."""
        ways = list(dict.fromkeys(way for unit in self.units for way in unit.damages))
        header = ("weight", "chosen", "bytes", *(f"alone, {way}: relative L2" for way in ways))
        rows = [self._unit_row(*pair, ways) for pair in zip(self.units, self.chosen.plan, strict=True)]
        return filled(header, rows)

    def _unit_row(self, unit: Unit, way: Way, ways: Sequence[Way]) -> tuple[Cell, ...]:
        errors = (number(math.sqrt(unit.damages[other])) if other in unit.damages else "" for other in ways)
        return (unit.label, str(way), byte_size(unit.bytes_before), *errors)

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

    def sections(self) -> Iterator[Section]:
        """Yields the steps, the weights, what there is to know beside them, and the recipe."""
        # The result is the same, so the JSON has nothing of it.
        more = f"{self.resumed} measurements are of a search that did not finish"
        yield Section(facts=[*self.facts(), *([("resumed", more)] if self.resumed else [])])
        yield Section(title="Steps", columns=self.step_table(), bar="tensors", most=SHOWN)
        yield Section(title="Weights", columns=self.unit_table(), detail=True)
        yield Section(title="The recipe", text=self.recipe.to_yaml(), detail=True)


class BudgetNotMetError(Mxfp8Error):
    """No plan that rewrites anything keeps the budget; `best` has what was measured, `best.chosen` the best of it."""

    def __init__(self, best: Tuning, what: str, expected: str) -> None:
        super().__init__(best.source, what, expected=expected, advice="allow more, or run the model as it is")
        self.best = best
