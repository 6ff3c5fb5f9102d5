"""Trials: a model rewritten by a recipe, for real, and what it does to the outputs of all samples, and how fast."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from mxfp8_graph import rewriting
from mxfp8_graph.options import Progress
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.running.inputs import Inputs
from mxfp8_graph.running.samples import Samples
from mxfp8_graph.running.sessions import Execution, Runnable, Session
from mxfp8_graph.tools.metrics import Metric, Score, check_measurable
from mxfp8_graph.tools.tune.folder import Measurements

ROUNDS: Final = 9
"""How often a model and the original are timed, in turns."""


class Packed(NamedTuple):
    """The weight of one rewritten site."""

    site: str
    weight: str
    """Name of the packed weight, or of the site if it has none: what shares it is counted once."""
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a recipe does."""

    scores: Mapping[str, Score]
    """By the name of the metric."""
    byte_size: int
    """Bytes of all tensors of the rewritten model."""
    packed: tuple[Packed, ...]

    @property
    def packed_bytes(self) -> int:
        """Bytes that the rewritten weights had, each counted once."""
        return sum({one.weight: one.bytes_before for one in self.packed}.values())


class Ticker:
    """Reports to a progress callback how many runs of the model are done, against how many there are at most."""

    def __init__(self, progress: Progress | None) -> None:
        self.total = 1
        self._progress = progress
        self._done = 0

    def tick(self, what: str, runs: int = 1) -> None:
        """Counts runs that were made, now or by a search before this one, or that are not needed."""
        self._done = min(self._done + runs, self.total)
        if self._progress is not None:
            self._progress(what, self._done, self.total)

    def finish(self) -> None:
        """Counts all runs as done."""
        self.tick("done", self.total)


@dataclass(kw_only=True)
class Trials:
    """Rewrites one model by one recipe after another, and runs what comes of it."""

    model: Any
    """The path of an ONNX model, a ModelProto or an ExportedProgram."""
    original: Runnable
    samples: Samples
    metrics: Sequence[Metric]
    measurements: Measurements
    ticker: Ticker
    folder: Path
    """A temporary one."""
    name: str
    """What to call the model in errors."""
    allow_nonfinite: bool

    def trial(self, recipe: Recipe, what: str) -> Trial:
        """Returns what a recipe does to the outputs; errors as `rewrite` and `Runnable.run`."""
        name = f"trial {_digest(recipe)}"
        # Counted as done if it was measured before; if not, after each run.
        self.ticker.tick(what, len(self.samples) if name in self.measurements else 0)
        found = self.measurements.recall(name, lambda: self._tried(recipe, what))
        packed = tuple(Packed(*row) for row in found["packed"])
        return Trial(scores=self._scores(found["scores"]), byte_size=found["bytes"], packed=packed)

    def written(self, path: Path, trial: Trial) -> Trial:
        """Returns `trial` with what the model that was written to `path` does, measured."""
        return replace(trial, scores=self._scores(self._values(self._runnable(path), "the result")))

    def seconds(self, recipe: Recipe, what: str) -> tuple[float, float]:
        """Returns the median latencies of (the rewritten model, the original) on the largest sample."""
        self.ticker.tick(what, 0)
        name = f"latency {_digest(recipe)}"
        rewritten, original = self.measurements.recall(name, lambda: self._timed(self._rewritten(recipe)[0]))
        self.ticker.tick(what)
        return rewritten, original

    def _tried(self, recipe: Recipe, what: str) -> dict[str, Any]:
        model, report = self._rewritten(recipe)
        packed = [
            Packed(s.decision.site.name, s.packed or s.decision.site.name, s.bytes_before, s.bytes_after)
            for s in report.rewritten
        ]
        values = self._values(self._runnable(model), what)
        return {"scores": values, "bytes": report.account.bytes_after, "packed": packed}

    def _rewritten(self, recipe: Recipe) -> tuple[Any, Any]:
        """Returns (the rewritten model, the report); an ONNX model in a file, which the next one replaces."""
        path = None if self._is_program else self.folder / "trial.onnx"
        nonfinite = self.allow_nonfinite
        return rewriting.rewrite(self.model, recipe, output=path, overwrite=True, allow_nonfinite=nonfinite)

    def _runnable(self, model: Any, *, takes_turns: bool = False) -> Runnable:
        if self._is_program:
            from mxfp8_graph.running.programs import TorchProgram

            return TorchProgram(model)
        return Session(model, kernels=True, where=self.name, execution=Execution(takes_turns=takes_turns), float32=True)

    @property
    def _is_program(self) -> bool:
        return not isinstance(self.original, Session)

    @cached_property
    def _expected(self) -> list[Inputs]:
        expected = [self.original.run(feeds) for feeds in self.samples.feeds]
        for name, outputs in zip(self.samples.names, expected, strict=True):
            check_measurable(name, outputs)  # no plan could keep a budget
        return expected

    def _scores(self, values: Mapping[str, Sequence[float]]) -> dict[str, Score]:
        return {m.name: Score(metric=m, values=tuple(values[m.name])) for m in self.metrics}

    def _values(self, runnable: Runnable, what: str) -> dict[str, list[float]]:
        """Returns one number per sample by the name of the metric."""
        found: dict[str, list[float]] = {metric.name: [] for metric in self.metrics}
        for feeds, expected in zip(self.samples.feeds, self._expected, strict=True):
            outputs = runnable.run(feeds)
            for metric in self.metrics:
                found[metric.name].append(metric.of(expected, outputs))
            self.ticker.tick(what)
        return found

    def _timed(self, model: Any) -> tuple[float, float]:
        feeds = self.samples.largest
        both = self._runnable(model, takes_turns=True), self._runnable(self.model, takes_turns=True)
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(ROUNDS + 1):
            for runnable, found in zip(both, seconds, strict=True):
                start = time.perf_counter()
                runnable.run(feeds)
                if number:  # the first warms up
                    found.append(time.perf_counter() - start)
        return statistics.median(seconds[0]), statistics.median(seconds[1])


def _digest(recipe: Recipe) -> str:
    return hashlib.sha256(recipe.model_dump_json(exclude={"name"}).encode()).hexdigest()
