"""tune(), step by step: everything in one way, what each weight alone does, the path, the search, the files."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from mxfp8_graph import rewriting
from mxfp8_graph.checking.inputs import Signature
from mxfp8_graph.checking.runner import Model, is_program, open_runnable
from mxfp8_graph.checking.samples import Given, Samples, make_samples
from mxfp8_graph.checking.sessions import Runnable
from mxfp8_graph.evidence.tuning import identity
from mxfp8_graph.evidence.tuning.budget import Budget, all_met, metrics_of, parse
from mxfp8_graph.evidence.tuning.damages import Damages, units_of
from mxfp8_graph.evidence.tuning.latency import latency_cost, shapes_of
from mxfp8_graph.evidence.tuning.notebook import Notebook
from mxfp8_graph.evidence.tuning.place import Place
from mxfp8_graph.evidence.tuning.plans import ACTIVATIONS, KEPT, WAYS, Cost, Unit, Way, path, size_cost
from mxfp8_graph.evidence.tuning.recipes import Recipes, to_yaml, with_way
from mxfp8_graph.evidence.tuning.result import BudgetNotMetError, Tuning
from mxfp8_graph.evidence.tuning.search import Search, Step, most_steps
from mxfp8_graph.evidence.tuning.ticker import Ticker
from mxfp8_graph.evidence.tuning.trials import Trials
from mxfp8_graph.file_writing import write_text
from mxfp8_graph.options import Progress
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.report.data import RewriteReport, write_report
from mxfp8_ops import cpu
from mxfp8_ops.errors import ContractError

OBJECTIVES: Final = ("size", "latency")
SYNTHESISED: Final = 8
"""Samples that are made where none are given."""


class Interrupted(KeyboardInterrupt):
    """A search was interrupted; `best` is the best so far, or None if nothing kept the budget yet."""

    def __init__(self, best: Tuning | None, part: Path | None) -> None:
        super().__init__("interrupted")
        self.best = best
        self.part = part
        """Where it goes on from, and the best so far is."""


def tune(
    model: Model,
    budget: str | Sequence[str],
    *,
    objective: Literal["size", "latency"] = "size",
    recipe: str | Path | Recipe = presets.DEFAULT,
    inputs: Given = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    shapes: Mapping[str, int] | None = None,
    seed: int = 0,
    allow_nonfinite: bool = False,
    trust_pickle: bool = False,
    progress: Progress | None = None,
) -> Tuning:
    """Returns the smallest or fastest plan that keeps a budget, of those that the search tried, with its recipe.

    Each matmul is kept, or packed with its activations in E4M3, in bfloat16 or as they are. Every plan that is tried is
    rewritten for real and run on all samples. Measurements are written down as they are made: after a kill, the same
    call goes on from them.

    Args:
        model: path of an ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`. Not modified.
        budget: "METRIC>=NUMBER" or "METRIC<=NUMBER", of the mean over all samples; "worst_METRIC...", of the worst
            sample; several must all be kept. METRIC: `evidence.metrics.METRICS` or the user's module:function.
        objective: "size" makes bytes small, and of plans of one size takes the one with most matmuls in E4M3;
            "latency" makes the time of a run here small.
        recipe: which matmuls may be packed, and in which weight format; its activations and scale roundings are tuned.
        inputs: samples, see `checking.samples`; synthesised if None, and the result says so.
        output: the folder to write: the model, recipe.yaml, report.html and report.json. Default: MODEL.tuned beside
            a path; nothing is written for a model in memory.
        overwrite: whether files in a folder that exists may be replaced.
        shapes: sizes of free dimensions of synthesised inputs.
        seed: of synthesised inputs.
        allow_nonfinite: pack weights that hold NaN or Inf.
        trust_pickle: let a .pt2 file run code that it brings; see `mxfp8_graph.load`.
        progress: called as progress(what, runs done, runs that it may take at most).

    Raises:
        BudgetNotMetError: no plan keeps the budget; nothing is written.
        Interrupted: a KeyboardInterrupt; the best so far and all measurements are in OUTPUT.part.
        ContractError: a budget is malformed, the model cannot be read or rewritten, the output exists, or what an
            earlier search left there is of another model, recipe, objective, metric or other samples.
        RecipeError: the recipe does not fit the model.
        NothingEligibleError: the recipe rewrites nothing.
        ShapeError: the samples do not fit the model.
        BackendError: the model cannot be run, or the native library is missing.
    """
    budgets = tuple(parse(text) for text in ([budget] if isinstance(budget, str) else budget))
    if not budgets:
        raise ContractError("budget", "none is given", expected="at least one", advice="pass cosine>=0.999")
    if objective not in OBJECTIVES:
        raise ContractError.unknown("objective", objective, OBJECTIVES)
    base = load_recipe(recipe)
    in_memory = not isinstance(model, (str, Path))
    place = None if in_memory and output is None else Place(model, output, overwrite=overwrite)
    with _opened(model, trust_pickle=trust_pickle) as (source, signature, original):
        samples = make_samples(signature, inputs, shapes, seed, count=SYNTHESISED)
        with tempfile.TemporaryDirectory(prefix="mxfp8-tune-") as folder:
            tuner = _Tuner(
                model=model,
                source=source,
                signature=signature,
                original=original,
                samples=samples,
                base=base,
                budgets=budgets,
                objective=objective,
                place=place,
                folder=Path(folder),
                allow_nonfinite=allow_nonfinite,
                ticker=Ticker(progress),
            )
            return tuner.run()


@contextlib.contextmanager
def _opened(model: Model, *, trust_pickle: bool) -> Iterator[tuple[Any, Signature, Runnable]]:
    """Yields (the model as the passes take it, what it takes, the model ready to run); a program is read once."""
    source: Any = model
    if is_program(model) and isinstance(model, (str, Path)):
        from mxfp8_graph.torch_program import load

        source = load(model, trust_pickle=trust_pickle)
    signature, original = open_runnable(source)
    if source is not model:
        signature = replace(signature, name=str(model))
    yield source, signature, original


@dataclass(kw_only=True)
class _Tuner:
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
        self._notebook = Notebook(self.place.part if self.place else None, self._subject())
        self._trials = Trials(
            model=self.source,
            original=self.original,
            samples=self.samples,
            metrics=metrics_of(self.budgets),
            notebook=self._notebook,
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
        recipe = with_way(self.base, WAYS[0])
        _, report = rewriting.rewrite(self.source, recipe, output=path, dry_run=True)
        if report.already_rewritten:
            name, advice = self.signature.name, "name the model it was made from"
            raise ContractError(name, "is rewritten already", expected="the original model", advice=advice)
        return report

    def _subject(self) -> dict[str, str]:
        """Returns what measurements are of; the bounds of the budgets do not matter to them."""
        return {
            "model": identity.of_model(self.model) if self.place else "",
            "samples": identity.of_samples(self.samples),
            "recipe": self.base.model_dump_json(),
            "objective": self.objective,
            "metric": ", ".join(metric.name for metric in metrics_of(self.budgets)),
            "instruction set": cpu.isa(),
        }

    def _count(self, decisions: Sequence[Decision]) -> None:
        units = sum(decision.quantize for decision in decisions)
        plans = len(ACTIVATIONS) + most_steps(units)
        timed = len(shapes_of(decisions)) * len(ACTIVATIONS) + 1 if self.objective == "latency" else 0
        ranked = len(self._damages().feeds) * len(WAYS) * units
        self.ticker.total = len(self.samples) * (plans + 1) + ranked + timed

    def _damages(self) -> Damages:
        settings = {"allow_nonfinite": self.allow_nonfinite, "trust_pickle": False}
        return Damages(self.source, self.base, self.samples, self._notebook, self.ticker, **settings)

    def _try_plans(self, decisions: Sequence[Decision]) -> None:
        """Measures what it takes to choose, and leaves the steps in the search."""
        cheapest = self._trials.trial(with_way(self.base, WAYS[0]), f"everything {WAYS[0]}")
        self._units = units_of(decisions, cheapest)
        if self.objective == "size" and self._everything(WAYS[0], size_cost).met:
            return  # nothing is smaller, and nothing of that size is cheaper to multiply
        self._units = self._damages().of(self._units)
        cost: Cost = size_cost
        if self.objective == "latency":
            cost = latency_cost(self._units, decisions, self._recipes, self._trials)
        for way in map(Way, ACTIVATIONS):
            if any(unit.may_be(way) for unit in self._units):
                self._everything(way, cost)
        self._search.run(self._units, path(self._units, cost), cost)

    def _everything(self, way: Way, cost: Cost) -> Step:
        """Returns the step with every unit packed in one way, where it can be."""
        plan = tuple(way if unit.may_be(way) else KEPT for unit in self._units)
        return self._search.try_plan(self._units, plan, cost, f"everything {way}", ranked=self._ranked)

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
        told = ", ".join(budget.told(scores[budget.metric.name]) for budget in self.budgets)
        if self.place is not None:
            self.place.clear()
        what = f"the best that was reached is {told}, with {best.chosen.counts}"
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
        if place.folder.exists():  # it was to be overwritten; what else is in it stays
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
            resumed=self._notebook.resumed,
            notes=tuple(notes),
        )


def _write_reports(found: Tuning, folder: Path) -> None:
    write_text(folder / "recipe.yaml", to_yaml(found.recipe))
    write_report(folder / "report.json", found)
    write_report(folder / "report.html", found)
