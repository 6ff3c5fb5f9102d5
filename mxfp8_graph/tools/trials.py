"""The loop of compare, analyze and tune, which rewrites recipes and runs models on the same samples."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from mxfp8_graph import rewriting
from mxfp8_graph.options import Progress
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import RewriteReport
from mxfp8_graph.running.inputs import Inputs
from mxfp8_graph.running.runner import is_program, open_runnable
from mxfp8_graph.running.samples import SampleOptions, Samples, make_samples
from mxfp8_graph.running.sessions import Execution, Runnable
from mxfp8_graph.tools.metrics import Metric, Score, score
from mxfp8_graph.tools.switchable import refuse_rewritten
from mxfp8_ops import system

_SYNTHESISED: Final = 8
"""Number of synthesised samples, if the user passes none."""
_REPEATS: Final = 0.1
"""Relative difference of two medians that counts as none: on an idle machine they repeat within 10 %."""
SAME_SIZE: Final = 1.01
"""Ratio of two sizes within which they count as equal: scales of an embedding change the size."""
_TURNS: Final = Execution(takes_turns=True)


class Latency(NamedTuple):
    """The latency of a model over several runs."""

    seconds: float
    """The median."""
    spread: float
    """The interquartile range divided by the median."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Latency:
        """Returns the latency of runs that took these seconds."""
        low, middle, high = np.percentile(values, [25, 50, 75])
        return cls(float(middle), float((high - low) / middle))

    def slower(self, other: Latency) -> bool:
        """Whether it is clearly above another: by more than times repeat, and than both spread."""
        return self.seconds > other.seconds * (1 + max(_REPEATS, self.spread, other.spread))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The results of a recipe, rewritten and run on all samples."""

    recipe: Recipe
    report: RewriteReport
    scores: Mapping[str, Score]
    """Scores by the name of the metric."""
    runnable: Runnable
    """The rewritten model."""


@dataclass(kw_only=True)
class Measure:
    """Runs models on samples, and scores their outputs against the outputs of the original."""

    feeds: Sequence[Inputs]
    metrics: Sequence[Metric]
    progress: Progress | None
    expected: list[Inputs] = field(default_factory=list)
    """The outputs of the original, by sample."""
    runs: int = 0
    total: int = 0
    """Expected number of all runs, for the progress."""

    def scores(self, run: Callable[[Inputs], Inputs], what: str) -> dict[str, Score]:
        """Returns the scores of a model, by the name of the metric."""
        results = self.outputs(run, what)
        return {metric.name: score(metric, self.expected, results) for metric in self.metrics}

    def outputs(self, run: Callable[[Inputs], Inputs], what: str) -> list[Inputs]:
        """Returns the outputs of a model, by sample."""
        results = []
        for feeds in self.feeds:
            results.append(run(feeds))
            self.tick(what)
        return results

    def tick(self, what: str) -> None:
        """Reports one more run to `progress`."""
        self.runs += 1
        if self.progress is not None:
            # `total` is an estimate, which the runs may exceed.
            self.progress(what, self.runs, max(self.total, self.runs))


@dataclass(kw_only=True)
class Bench(Measure):
    """A model on which one recipe is tried after another."""

    model: Any
    """The model as `rewrite` takes it; a program is loaded from its file."""
    name: str
    original: Runnable
    samples: Samples
    folder: Path
    """A temporary folder for rewritten models."""
    allow_nonfinite: bool

    @property
    def suffix(self) -> str:
        """The suffix of a file of the model, rewritten or not."""
        return ".pt2" if is_program(self.model) else ".onnx"

    def trial(self, recipe: Recipe, what: str) -> Trial:
        """Returns the results of a recipe, and the rewritten model; raises as `rewrite` and `Runnable.run`."""
        # If the original runs as a float32 copy, the rewritten model must compute in float32, too.
        recipe = recipe.for_cpu() if self.original.note else recipe
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        output = None if is_program(self.model) else folder / "model.mxfp8.onnx"
        model, report = rewriting.rewrite(self.model, recipe, output=output, allow_nonfinite=self.allow_nonfinite)
        _, runnable = open_runnable(model, f"{self.name} as {what}", _TURNS)
        # ONNX Runtime has read or mapped the files. A mapped file that cannot be removed is removed with the bench.
        shutil.rmtree(folder, ignore_errors=True)
        return Trial(recipe=recipe, report=report, scores=self.scores(runnable.run, what), runnable=runnable)

    def seconds(self, runnables: Mapping[str, Runnable], repeat: int) -> dict[str, Latency]:
        """Returns the latency of a run on the largest sample, of models that take turns."""
        latencies: dict[str, list[float]] = {name: [] for name in runnables}
        for _ in range(repeat):
            for name, runnable in runnables.items():
                # `time` does a warm-up first, since the caches hold the model that ran before.
                latencies[name] += runnable.time(self.samples.largest, 1).seconds
                self.tick(f"time of {name}")
        return {name: Latency.of(values) for name, values in latencies.items()}


@contextmanager
def open_bench(
    model: Any,
    options: SampleOptions,
    metrics: Sequence[Metric],
    *,
    progress: Progress | None,
    allow_nonfinite: bool = False,
) -> Iterator[Bench]:
    """Yields a bench for a path, an `onnx.ModelProto` or an `ExportedProgram`.

    Raises:
        ContractError: the model cannot be read, or is rewritten already.
        ShapeError: the samples do not fit.
        BackendError: the model cannot be run.
    """
    source = model
    if is_program(model) and isinstance(model, (str, Path)):
        from mxfp8_graph.torch_pass.load import load  # imports torch

        source = load(model)
    signature, original = open_runnable(source, execution=_TURNS)
    name = str(model) if isinstance(model, (str, Path)) else signature.name
    refuse_rewritten(signature.rewritten, name)
    samples = make_samples(signature, options, count=_SYNTHESISED, run=original.run)
    with system.temporary_folder() as folder:
        bench = Bench(
            model=source,
            name=name,
            original=original,
            samples=samples,
            feeds=samples.feeds,
            metrics=metrics,
            folder=folder,
            progress=progress,
            allow_nonfinite=allow_nonfinite,
        )
        bench.expected = bench.outputs(original.run, "original")
        yield bench
