"""A search, step by step: everything in one way, what each weight alone does, the path, the plans, the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from mxfp8_graph import rewriting
from mxfp8_graph._version import __version__
from mxfp8_graph.files import output
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import RewriteReport
from mxfp8_graph.running.inputs import Signature
from mxfp8_graph.running.runner import Model, is_program
from mxfp8_graph.running.samples import Samples
from mxfp8_graph.running.sessions import Runnable
from mxfp8_graph.tools.tune.budget import Budget, all_met, metrics_of
from mxfp8_graph.tools.tune.damages import Damages, latency_cost, shapes_of, units_of
from mxfp8_graph.tools.tune.folder import Measurements, Place, metric_digest, model_digest, samples_digest
from mxfp8_graph.tools.tune.plans import (
    KEPT,
    Cost,
    Recipes,
    Unit,
    Way,
    activations_of,
    path,
    size_cost,
    ways_of,
    with_way,
)
from mxfp8_graph.tools.tune.result import BudgetNotMetError, Tuning
from mxfp8_graph.tools.tune.search import Search, Step, most_steps
from mxfp8_graph.tools.tune.trials import Ticker, Trials
from mxfp8_ops import cpu
from mxfp8_ops.errors import ContractError


class Interrupted(KeyboardInterrupt):
    """A search was interrupted; `best` is the best so far, or None if nothing kept the budget yet."""

    def __init__(self, best: Tuning | None, part: Path | None) -> None:
        super().__init__("interrupted")
        self.best = best
        self.part = part
        """Where it goes on from, and the best so far is."""

    def advice(self) -> str:
        """Returns where the search goes on, and what there is of it."""
        if self.part is None:
            return "nothing was written"
        best = "the best so far is in" if self.best else "no plan keeps the budget so far; the measurements are in"
        return f"{best} {self.part}; the same command goes on from there"


@dataclass(kw_only=True)
class Tuner:
    """One search, from the first rewrite to the files."""

    model: Model
    source: Any
    """The model, a program out of its file."""
    signature: Signature
    original: Runnable
    samples: Samples
    base: Recipe
    budgets: tuple[Budget, ...]
    objective: str
    place: Place | None
    file: BinaryIO | None
    """That of the measurements; None keeps them in memory."""
    folder: Path
    """A temporary one."""
    allow_nonfinite: bool
    ticker: Ticker
    _units: list[Unit] = field(default_factory=list)

    def run(self) -> Tuning:
        """Returns what is found, having written it; errors as `tune`."""
        dry = self._planned()
        decisions = [site.decision for site in dry.sites]
        self._bytes_before = dry.account.bytes_before
        metrics = metrics_of(self.budgets)
        scores = {metric.name: len(self.samples) for metric in metrics}
        self._measurements = Measurements(self.file, self._subject(), scores)
        self._trials = Trials(
            model=self.source,
            original=self.original,
            samples=self.samples,
            metrics=metrics,
            measurements=self._measurements,
            ticker=self.ticker,
            folder=self.folder,
            name=self.signature.name,
            allow_nonfinite=self.allow_nonfinite,
        )
        self._recipes = Recipes(self.base, decisions)
        self._count(decisions)
        name = f"{self.base.name} tuned to {' and '.join(map(str, self.budgets))}"
        self._search = Search(self._trials, self._recipes, self.budgets, name)
        try:
            self._try_plans(decisions)
            return self._finish()
        except KeyboardInterrupt as stop:
            raise Interrupted(self._so_far(), self.place.part if self.place else None) from stop

    def _planned(self) -> RewriteReport:
        """Returns the report of a dry run: every site, and what the recipe does with it."""
        path = self.folder / f"planned.{'pt2' if is_program(self.source) else 'onnx'}"
        recipe = with_way(self.base, ways_of(self.base)[0])
        _, report = rewriting.rewrite(self.source, recipe, output=path, dry_run=True)
        if report.already_rewritten:
            name, advice = self.signature.name, "name the model it was made from"
            raise ContractError(name, "is rewritten already", expected="the original model", advice=advice)
        return report

    def _subject(self) -> dict[str, str]:
        """Returns what measurements are of; the bounds of the budgets do not matter to them."""
        return {
            "version": __version__,
            "model": model_digest(self.model) if self.place else "",
            "samples": samples_digest(self.samples),
            "recipe": self.base.model_dump_json(),
            "objective": self.objective,
            "metric": ", ".join(metric_digest(metric) for metric in metrics_of(self.budgets)),
            "instruction set": cpu.isa(),
        }

    def _count(self, decisions: Sequence[Decision]) -> None:
        units = sum(decision.quantize for decision in decisions)
        kinds = len(activations_of(self.base))
        plans = kinds + most_steps(units)
        timed = len(shapes_of(decisions)) * kinds + 1 if self.objective == "latency" else 0
        ranked = len(self._damages().feeds) * len(ways_of(self.base)) * units
        self.ticker.total = len(self.samples) * (plans + 1) + ranked + timed

    def _damages(self) -> Damages:
        measured, allow = self._measurements, self.allow_nonfinite
        return Damages(self.source, self.base, self.samples, measured, self.ticker, allow_nonfinite=allow)

    def _try_plans(self, decisions: Sequence[Decision]) -> None:
        """Measures what it takes to choose, and leaves the steps in the search."""
        first = ways_of(self.base)[0]
        cheapest = self._trials.trial(with_way(self.base, first), f"everything {first}")
        if not {d.site.name for d in decisions if d.quantize} <= {one.site for one in cheapest.packed}:
            raise self._measurements.damaged()
        self._units = units_of(decisions, cheapest)
        if self.objective == "size" and any(step.met for step in self._uniform(size_cost)):
            return  # nothing is smaller
        self._units = self._damages().of(self._units)
        cost: Cost = size_cost
        if self.objective == "latency":
            cost = latency_cost(self._units, decisions, self._recipes, self._trials)
        self._uniform(cost)
        self._search.run(self._units, path(self._units, cost), cost)

    def _uniform(self, cost: Cost) -> list[Step]:
        """Returns a step for each kind of activations, with every unit packed in that way, where it can be."""
        ways = [way for way in map(Way, activations_of(self.base)) if any(unit.may_be(way) for unit in self._units)]
        plans = {way: tuple(way if unit.may_be(way) else KEPT for unit in self._units) for way in ways}
        return [
            self._search.try_plan(self._units, plan, cost, f"everything {way}", ranked=self._ranked)
            for way, plan in plans.items()
        ]

    @property
    def _ranked(self) -> bool:
        return any(unit.damages for unit in self._units)

    def _finish(self) -> Tuning:
        """Returns the cheapest plan that keeps the budgets, written and measured once more."""
        while (best := self._search.best()) is not None:
            if self.place is None:
                break
            path = self._write_model(self.place.part, best)
            trial = self._trials.written(path, best.trial)
            measured = replace(best, trial=trial, met=all_met(self.budgets, trial.scores))
            self._search.replace(best, measured)
            if measured.met:
                best = measured
                break
        if best is None:
            raise self._not_met()
        latency = self._trials.seconds(best.recipe, "latency of the result") if self.objective == "latency" else None
        found = self._tuning(best, latency=latency, output=self.place.folder if self.place else None)
        if self.place is not None:
            self._put(found, self.place)
        self.ticker.finish()
        return found

    def _not_met(self) -> BudgetNotMetError:
        best = self._tuning(self._search.closest())
        scores = best.chosen.trial.scores
        reached = ", ".join(budget.score_text(scores[budget.metric.name]) for budget in self.budgets)
        if self.place is not None:
            self.place.clear()
        what = f"the best that was reached is {reached}, with {best.chosen.counts}"
        return BudgetNotMetError(best, what, " and ".join(map(str, self.budgets)))

    def _so_far(self) -> Tuning | None:
        """Returns the best so far, having written it beside the state of the search."""
        best = self._search.best()
        if best is None:
            return None
        found = self._tuning(best, finished=False, output=self.place.part if self.place else None)
        if self.place is not None:
            self._write_model(self.place.part, best)
            _write_reports(found, self.place.part)
        return found

    def _put(self, found: Tuning, place: Place) -> None:
        place.check_free()
        if place.folder.exists():  # it is to be overwritten; what else is in it stays
            self._write_model(place.folder, found.chosen)
            _write_reports(found, place.folder)
            place.clear()
            return
        _write_reports(found, place.part)
        place.put()

    def _write_model(self, folder: Path, step: Step) -> Path:
        assert self.place is not None
        path = folder / self.place.model_name
        nonfinite = self.allow_nonfinite
        rewriting.rewrite(self.source, step.recipe, output=path, overwrite=True, allow_nonfinite=nonfinite)
        return path

    def _tuning(
        self,
        chosen: Step,
        *,
        finished: bool = True,
        latency: tuple[float, float] | None = None,
        output: Path | None = None,
    ) -> Tuning:
        notes = ["the inputs are synthesised; other inputs may need another plan"] if self.samples.synthesised else []
        unknown = [unit.label for unit in self._units if self._ranked and not unit.damages]
        if latency is not None and latency[0] > latency[1]:
            notes.append("the model as it is runs faster here than any plan that was tried")
        notes += [f"kept, since it cannot be switched while the model runs: {label}" for label in unknown]
        return Tuning(
            source=self.signature.name,
            objective=self.objective,
            budgets=self.budgets,
            base=self.base.name,
            inputs=str(self.samples),
            samples=len(self.samples),
            synthesised=self.samples.synthesised,
            isa=cpu.isa(),
            units=tuple(self._units),
            steps=tuple(self._search.steps),
            chosen=chosen,
            bytes_before=self._bytes_before,
            latency=latency,
            finished=finished,
            output=None if output is None else str(output),
            resumed=self._measurements.resumed,
            notes=tuple(notes),
        )


def _write_reports(found: Tuning, folder: Path) -> None:
    with output(folder / "recipe.yaml", overwrite=True) as new:
        (new / "recipe.yaml").write_bytes(found.recipe.to_yaml().encode())
    found = replace(found, resumed=0)  # an interrupted search gives the same files
    found.write(folder / "report.json")
    found.write(folder / "report.html")
