"""tune(): the smallest or fastest plan that meets a budget, and its recipe.

First every site gets the same treatment, one treatment after another. If none meets the budget, the sites are ranked by
the damage that each does alone, and bisection finds the fewest of the worst sites that need a better treatment. Every
plan is rewritten and run on all samples.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from mxfp8_graph import files, rewriting
from mxfp8_graph.onnx_pass.blame import blame_models_if_checker_complains
from mxfp8_graph.options import Progress, Unpack, check_options
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.plan import MatMulSite
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.running.runner import Model
from mxfp8_graph.running.samples import SampleOptions
from mxfp8_graph.running.sessions import Runnable
from mxfp8_graph.tools.analyze.run import damages_alone
from mxfp8_graph.tools.metrics import RELATIVE_L2, check_measurable
from mxfp8_graph.tools.switches import open_switchable
from mxfp8_graph.tools.trials import SAME_SIZE, Bench, Measure, open_bench
from mxfp8_graph.tools.tune.budget import Budget, parse
from mxfp8_graph.tools.tune.plans import KEPT, TREATMENTS, Plan
from mxfp8_graph.tools.tune.result import BudgetNotMetError, Step, Tuning
from mxfp8_ops import cpu
from mxfp8_ops.errors import ContractError, Option

OBJECTIVES: Final = ("size", "latency")
_ROUNDS: Final = 7
"""Number of runs; a latency is their median."""
_RANKED: Final = 4
"""Number of samples for the ranking of sites, spread over all samples; plans are measured on all."""
_SAME_TIME: Final = 1.1
"""Ratio of two times within which they count as equal: times repeat within 10 %."""


class TuneOptions(SampleOptions, total=False):
    """The options of `tune` besides the goal."""

    overwrite: bool
    """Whether files in a folder that exists may be replaced. Default: False."""
    allow_nonfinite: bool
    """Whether to pack weights that hold NaN or Inf. Default: False."""
    progress: Progress | None
    """Called as progress(what, runs done, runs that it may take). Default: None."""


@blame_models_if_checker_complains("model")
def tune(
    model: Model,
    budget: str | Sequence[str],
    *,
    objective: Literal["size", "latency"] = "size",
    recipe: str | Path | Recipe = presets.DEFAULT,
    output: str | Path | None = None,
    **options: Unpack[TuneOptions],
) -> Tuning:
    """Returns the smallest or fastest of the tried plans that meet a budget, with its recipe.

    Each matmul is kept, or packed with E4M3 or INT8 activations and weights, or with INT8 weights and bfloat16 or
    unchanged activations.

    Args:
        model: path of an ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`. Not modified.
        budget: "METRIC>=NUMBER" or "METRIC<=NUMBER", of the mean over all samples; "worst_METRIC...", of the worst
            sample; several must all be met. METRIC: `tools.metrics.METRICS` or the user's module:function.
        objective: "size" takes the smallest plans, and the fastest of these; "latency" takes the plan with the fastest
            run on this machine. Among plans as fast, within the spread of their times, both take the preset that `auto`
            takes here, or else the most accurate plan.
        recipe: selects the matmuls that may be packed; tuning chooses formats, activations and scale roundings.
        output: the folder to write: the model, recipe.yaml, report.html and report.json. Default: MODEL.tuned beside
            a path; nothing is written for a model in memory.
        **options: see `TuneOptions` and `running.samples.SampleOptions`.

    Raises:
        BudgetNotMetError: no plan meets the budget; nothing is written.
        ContractError: a budget is malformed, the model cannot be read or rewritten, or the output exists.
        RecipeError: the recipe does not fit the model.
        NothingEligibleError: the recipe rewrites nothing.
        ShapeError: the samples do not fit the model.
        BackendError: the model cannot be run, or the native library is missing.
    """
    check_options("tune", options, TuneOptions)
    budgets = tuple(parse(text) for text in ([budget] if isinstance(budget, str) else budget))
    if not budgets:
        raise ContractError("budget", "none is given", expected="at least one", advice="pass cosine>=0.999")
    if objective not in OBJECTIVES:
        raise ContractError.unknown("objective", objective, OBJECTIVES)
    base, overwrite = load_recipe(recipe), options.get("overwrite", False)
    folder = _folder(model, output, overwrite=overwrite)
    metrics = list({metric.name: metric for metric in (*(b.metric for b in budgets), RELATIVE_L2)}.values())
    progress, allow_nonfinite = options.get("progress"), options.get("allow_nonfinite", False)
    with open_bench(model, options, metrics, progress=progress, allow_nonfinite=allow_nonfinite) as bench:
        check_measurable(bench.samples.names, bench.expected)  # else no plan could meet a budget
        search = _Search(bench=bench, base=base, budgets=budgets, latency=objective == "latency")
        search.run()
        best = search.best()
        result = Tuning(
            source=bench.name,
            objective=objective,
            budgets=budgets,
            base=base.name,
            inputs=str(bench.samples),
            samples=len(bench.samples),
            synthesised=bench.samples.synthesised,
            isa=cpu.isa(),
            steps=tuple(search.steps),
            chosen=best or search.closest(),
            bytes_before=search.bytes_before,
            notes=tuple(search.notes()),
        )
        if best is None:
            raise BudgetNotMetError(result)
        return result if folder is None else _written(result, bench, folder)


@dataclass(kw_only=True)
class _Search:
    """Tries plans, and keeps their results."""

    bench: Bench
    base: Recipe
    budgets: tuple[Budget, ...]
    latency: bool
    """Whether the objective is latency; else it is size."""
    steps: list[Step] = field(default_factory=list)
    bytes_before: int = 0
    _sites: list[MatMulSite] = field(default_factory=list)

    def run(self) -> None:
        """Tries plans with one treatment, then plans with two; `best` chooses among the steps."""
        # A plan takes as many runs as there are samples; about 8 plans with two treatments follow.
        self.bench.total = len(self.bench.samples) * (len(TREATMENTS) + 9) + _ROUNDS * 2 * len(TREATMENTS)
        # A dry run lists the sites of the model.
        path = self.bench.folder / f"planned{self.bench.suffix}"
        _, report = rewriting.rewrite(self.bench.model, self.base, output=path, dry_run=True)
        self._sites = [site.decision.site for site in report.sites]
        self.bytes_before = report.account.bytes_before
        for treatment in TREATMENTS:
            # Timed at once, so that only one of the rewritten models is in memory.
            self._time(self._try(Plan(treatment=treatment)), -1)
        uniform = list(self.steps)
        if met := [step for step in uniform if step.met]:
            # All have one size. A faster treatment that misses the budget may meet it with its worst sites treated
            # better.
            fastest = max(met, key=lambda step: step.speed)
            faster = [step for step in uniform if not step.met and step.speed > _SAME_TIME * fastest.speed]
            if faster:
                self._bisect(min(faster, key=self._loss).plan.treatment, fastest.plan.treatment)
            return
        # The most accurate treatment needs the fewest matmuls kept; the fastest may still be faster with more.
        chosen = [min(uniform, key=self._loss), *([max(uniform, key=lambda step: step.speed)] * self.latency)]
        for treatment in dict.fromkeys(step.plan.treatment for step in chosen):
            self._bisect(treatment, KEPT)

    def best(self) -> Step | None:
        """Returns the step to take of those that meet the budgets, or None."""
        met = [step for step in self.steps if step.met]
        if met and not self.latency:
            least = min(step.byte_size for step in met)
            met = [step for step in met if step.byte_size <= SAME_SIZE * least]
        timed = [step for step in met if step.latencies]
        if not timed:
            return min(met, key=lambda step: step.error, default=None)
        fastest = max(timed, key=lambda step: step.speed)
        tied = [step for step in timed if not step.slower(fastest)]
        # Two runs on a busy machine must not name two recipes.
        usual = next((step for step in tied if step.preset == presets.best(cpu.isa())), None)
        return usual or min(tied, key=lambda step: step.error)

    def closest(self) -> Step:
        """Returns the step that misses the fewest budgets, and of those the one that misses them least."""
        return min(self.steps, key=self._loss)

    def notes(self) -> list[str]:
        """Returns notes on the result for the user."""
        notes = ["the inputs are synthesised; other inputs may need another plan"] * self.bench.samples.synthesised
        if (best := self.best()) and best.speed < 1:
            notes.append("the original runs faster here than any plan that was tried")
        return [*notes, *filter(None, [self.bench.original.note])]

    def _loss(self, step: Step) -> tuple[float, ...]:
        missed = [b for b in self.budgets if not b.met(step.scores[b.metric.name])]
        values = [b.metric.badness(b.value(step.scores[b.metric.name])) for b in missed or self.budgets[:1]]
        return (len(missed), *values)

    def _time(self, runnable: Runnable, index: int) -> None:
        """Measures the latency of a step, whose model takes turns with the original."""
        models = {"original": self.bench.original, self.steps[index].plan.treatment: runnable}
        original, value = self.bench.seconds(models, _ROUNDS).values()
        self.steps[index] = replace(self.steps[index], latencies=(value, original))

    def _bisect(self, treatment: str, better: str) -> None:
        """Finds the fewest of the worst sites that need a better treatment."""
        ranking = self._ranking(treatment)
        # A plan with 0 better groups misses the budget; a plan with all of them rewrites nothing, or was tried before.
        low, high, best, at = 0, len(ranking), None, 0
        while high - low > 1:
            middle = (low + high) // 2
            worst = tuple(site for group in ranking[:middle] for site in group)
            runnable = self._try(Plan(treatment=treatment, better=better, worst=worst))
            if self.steps[-1].met:
                high, best, at = middle, runnable, len(self.steps) - 1
            else:
                low = middle
        # Of the plans that meet the budget, only the last is timed: it treats the fewest sites better.
        if best is not None:
            self._time(best, at)

    def _try(self, plan: Plan) -> Runnable:
        """Adds the step of a plan, and returns its model."""
        name = f"{self.base.name} tuned to {' and '.join(map(str, self.budgets))}"
        recipe = plan.recipe(self.base, self._sites, name)
        trial = self.bench.trial(recipe, plan.treatment)
        step = Step(
            plan=plan,
            what=plan.words(len(trial.report.rewritten) + len(plan.worst) * (plan.better == KEPT)),
            recipe=trial.recipe,
            scores=trial.scores,
            byte_size=trial.report.account.bytes_after,
            met=all(budget.met(trial.scores[budget.metric.name]) for budget in self.budgets),
        )
        self.steps.append(step)
        return trial.runnable

    def _ranking(self, treatment: str) -> list[tuple[str, ...]]:
        """Returns the names of the sites, the worst first; sites of one weight together, so that it is stored once."""
        recipe = Plan(treatment=treatment).recipe(self.base, self._sites, treatment)
        every = max(1, -(-len(self.bench.samples) // _RANKED))
        feeds, allow = self.bench.samples.feeds[::every], self.bench.allow_nonfinite
        measure = Measure(feeds=feeds, metrics=[RELATIVE_L2], progress=self.bench.progress, runs=self.bench.runs)
        measure.total = self.bench.total
        squares: dict[str, float] = defaultdict(float)
        names: dict[str, tuple[str, ...]] = defaultdict(tuple)
        keys: dict[str, str] = {}
        with open_switchable(self.bench.model, recipe, allow_nonfinite=allow) as switchable:
            off = [False] * len(switchable.switched)
            measure.expected = measure.outputs(lambda feeds: switchable.run(feeds, off), "original")
            for report, scores in zip(switchable.switched, damages_alone(switchable, measure), strict=True):
                site = report.decision.site
                # Graphs beside each other may use one name for two weights. A packed weight has one name.
                key = f"{site.subgraph}/{site.weight or site.name}"
                key = keys.setdefault(report.packed or key, key)
                squares[key] += RELATIVE_L2.badness(scores[RELATIVE_L2.name].mean) ** 2
                names[key] += (site.name,)
        self.bench.runs = measure.runs
        return [names[key] for key in sorted(squares, key=lambda key: -squares[key])]


def _folder(model: Any, output: str | Path | None, *, overwrite: bool) -> Path | None:
    """Returns the folder of the result, checked before the work; None for a model in memory without an output."""
    if output is None and not isinstance(model, (str, Path)):
        return None
    folder = Path(output) if output else Path(model).with_name(f"{Path(model).stem}.tuned")
    another: tuple[str | Option, ...] = ("pass another ", Option("output"))
    if folder.name in {"", ".."} or (os.path.lexists(folder) and not folder.is_dir()):
        raise ContractError(folder, "not a folder", expected="a folder for the result", advice=another)
    if folder.is_dir() and not overwrite:
        advice = (*another, ", or ", Option("overwrite"))
        raise ContractError(folder, "exists already", expected="a new folder", advice=advice)
    if not os.path.isdir(folder.parent):
        what = f"no folder {folder.parent}"
        raise ContractError(folder, what, expected="a folder for it", advice="correct the output")
    return folder


def _written(result: Tuning, bench: Bench, folder: Path) -> Tuning:
    """Writes the model, the recipe and the reports; returns the result with its folder."""
    folder.mkdir(exist_ok=True)
    path, allow = result.recipe.output_for(folder / Path(bench.name).name, bench.suffix[1:]), bench.allow_nonfinite
    # Written again, since the trials removed their files.
    rewriting.rewrite(bench.model, result.recipe, output=path, overwrite=True, allow_nonfinite=allow)
    with files.output(folder / "recipe.yaml", overwrite=True) as new:
        (new / "recipe.yaml").write_bytes(result.recipe.to_yaml().encode())
    result = replace(result, output=str(folder))
    result.write(folder / "report.json")
    result.write(folder / "report.html")
    return result
