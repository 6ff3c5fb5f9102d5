"""The result of a comparison: a row per recipe, and the recommended recipe."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml
from rich.filesize import decimal as size  # a number of bytes in words

from mxfp8_graph.policy import presets
from mxfp8_graph.report.base import Data
from mxfp8_graph.report.scatter import Scatter
from mxfp8_graph.report.section import Cell, Columns, Head, Section, Tile, byte_size, change, filled, number
from mxfp8_graph.running.report import Measurement
from mxfp8_graph.tools.metrics import Metric, Score
from mxfp8_graph.tools.trials import SAME_SIZE, Latency

LEGEND: Final = (
    ("recipes", "the rewritten model, in ONNX Runtime with our kernels; its size is the size of the files"),
    (
        "emulated",
        "values are rounded to the format and multiplied in float32, so there is no latency; its size is what the "
        "format would take. The matmuls are those that preset mxfp8 rewrites, and convolutions",
    ),
    ("worst", "of all samples; the JSON says which one it is"),
    ("weight SQNR", "-20 log10 of the relative L2 error of the rewritten weights, a mean over them"),
)


@dataclass(frozen=True, kw_only=True)
class Row(Data):
    """One recipe. None stands for a number that does not apply, or that `problem` explains."""

    KEYS = (
        "recipe=name what emulated scores matmuls=sites weight_sqnr_db=weight_sqnr bytes=byte_size "
        "latency_seconds=seconds latency_spread=spread problem?"
    )

    name: str
    what: str
    """The recipe in words."""
    emulated: bool
    recipe: str = ""
    """The text of a recipe file; empty for formats of other projects."""
    scores: tuple[Score, ...] = ()
    """One per metric."""
    sites: int | None = None
    """Number of matmuls that are rewritten."""
    weight_sqnr: float | None = None
    """SQNR of the rewritten weights, in dB."""
    byte_size: int | None = None
    """Bytes of the model."""
    latency: Latency | None = None
    problem: str = ""
    """The reason why the recipe has no result."""

    @property
    def seconds(self) -> float | None:
        """Median latency."""
        return self.latency and self.latency.seconds

    @property
    def spread(self) -> float | None:
        """Interquartile range of the latency, divided by its median."""
        return self.latency and self.latency.spread

    @property
    def error(self) -> float:
        """Mean error at the outputs by the first metric, as tables show it; NaN if it is not known."""
        return self.scores[0].metric.shown(self.scores[0].mean) if self.scores else math.nan

    @property
    def badness(self) -> float:
        """The same as a number that grows with the error."""
        return self.scores[0].metric.badness(self.scores[0].mean) if self.scores else math.inf

    @property
    def is_preset(self) -> bool:
        """Whether the recipe is a preset without other settings, which `rewrite --recipe` takes by name."""
        return self.name in presets.PRESETS and yaml.safe_load(self.recipe).get("name") == self.name


@dataclass(frozen=True, kw_only=True)
class Comparison(Measurement):
    """All recipes on one model and the same samples."""

    TITLE = "Recipes for {model}"
    FILES = ("model",)
    KEYS = "model inputs latency_inputs=timed synthesised samples=sample_names isa notes recipes=rows"

    model: str
    timed: str
    """The largest sample, on which latencies are measured, in words."""
    synthesised: bool
    sample_names: tuple[str, ...]
    metrics: tuple[Metric, ...]
    rows: tuple[Row, ...]
    """The first is the original model."""

    def facts(self) -> list[tuple[str, str]]:
        """Returns (label, value) pairs beside the table."""
        return [
            ("inputs", self.inputs),
            ("kernels", self.isa),
            ("latency", f"the median of runs on the largest sample, {self.timed}, one model after another in turn"),
            *self._smallest(),
            *(("note", note) for note in self.notes),
            *((f"{row.name}:", row.problem) for row in self.rows if row.problem),
        ]

    def table(self, *, emulated: bool = False) -> Columns:
        """Returns (header, a row per recipe or emulated format), the best first, without columns that are empty."""
        several = len(self.sample_names) > 1
        scores = [m.shown_title for m in self.metrics]
        header = [part for s in scores for part in ((f"{s}: mean", "worst") if several else (s,))]
        rows = [row for row in self.rows if row.emulated == emulated]
        choice = self.recommendation()
        errors = {row.name: row.scores[0].metric.badness(row.scores[0].mean) for row in rows if row.scores}
        rows.sort(key=lambda row: (row is not choice, row is not self.rows[0], errors.get(row.name, math.inf)))
        titles = ("recipe", "size", "latency, ms", *header, "weight SQNR, dB", "matmuls")
        return filled(titles, [self._cells(row, several=several) for row in rows])

    def _cells(self, row: Row, *, several: bool) -> tuple[Cell, ...]:
        values = [(score.metric, value) for score in row.scores for value in (score.mean, score.worst)[: 1 + several]]
        scores = ["NaN or Inf" if math.isnan(value) else number(m.shown(value), ".3g") for m, value in values]
        if row is self.rows[0]:
            best = [(metric, metric.best) for metric in self.metrics for _ in range(1 + several)]
            scores = [number(value if value is None else m.shown(value), ".3g") for m, value in best]
        return (
            row.name,
            byte_size(row.byte_size),
            number(row.seconds and row.seconds * 1e3, ".2f"),
            *(scores or [""] * (1 + several) * len(self.metrics)),
            number(row.weight_sqnr, ".2f"),
            # A column with one number says nothing, and `filled` drops it.
            "" if len({row.sites for row in self.rows if row.sites}) == 1 else number(row.sites, "d"),
        )

    def sections(self) -> Iterator[Section]:
        """Yields the recipes, the facts, the emulated formats, the words, and the recommended recipe."""
        errors = f"{self.metrics[0].shown_title}{': mean' * (len(self.sample_names) > 1)}"
        choice = self.recommendation()
        metric = self.metrics[0]
        higher = metric.higher_is_better and metric.shown_title == metric.title  # a cosine is shown as 1-cosine
        chart = Scatter(across="latency, ms", up=errors, higher_is_better=higher, reference=self.rows[0].name)
        columns = self.table()
        yield Section(title="Recipes", columns=columns, best=0 if choice else None, bar=errors, scatter=chart)
        yield Section(facts=self.facts())
        columns = self.table(emulated=True)
        yield Section(title="Formats of other tools, emulated", columns=columns, bar=errors, folded=True)
        explained = [(row.name, row.what) for row in self.rows if row.what]
        yield Section(title="What the words mean", facts=[*explained, *LEGEND], detail=True)
        if choice:
            yield Section(title=f"The recipe {choice.name}, as a file has it", text=choice.recipe, detail=True)

    def recommendation(self) -> Row | None:
        """Returns the fastest of the rewritten recipes; None if none has a result.

        Among recipes as fast, within the spread of their times, it is the one that `auto` takes on this processor, or
        else the most accurate: two runs on a busy machine must not name two recipes.
        """
        real = self._real()
        first = min(real, key=lambda row: row.latency.seconds if row.latency else math.inf, default=None)
        if first is None or first.latency is None:
            return None
        tied = [row for row in real if row.latency and not row.latency.slower(first.latency)]
        return next((row for row in tied if row.name == presets.best(self.isa)), min(tied, key=lambda row: row.badness))

    def most_accurate(self) -> Row | None:
        """Returns the most accurate of the recipes that are no larger than the recommended one.

        Among recipes as accurate, it is the one that `presets.most_accurate` names, or else the fastest.
        """
        if (choice := self.recommendation()) is None:
            return None
        small = [row for row in self._real() if (row.byte_size or 0) <= SAME_SIZE * (choice.byte_size or 0)]
        least = min(row.badness for row in small)
        good = [row for row in small if row.badness <= least + (presets.SAME - 1) * abs(least)]
        usual = next((row for row in good if row.name == presets.most_accurate(self.isa)), None)
        return usual or min(good, key=lambda row: row.latency.seconds if row.latency else math.inf)

    def head(self) -> Head:
        """Returns size, speed and error of the recommended recipe, and the command that rewrites with it."""
        if (choice := self.recommendation()) is None:
            return Head(verdict="bad")
        original, speed = self.rows[0], self._speed(choice)
        before, after = original.byte_size or 0, choice.byte_size or 0
        old_ms, ms = (1e3 * (row.seconds or math.nan) for row in (original, choice))
        command, verdict = "", "warning" if speed < 1 else "good"
        if choice.is_preset and Path(self.model).suffix:  # else the recipe is at the end of the page
            command = shlex.join(["mxfp8-graph", "rewrite", self.model, "--recipe", choice.name])
        tiles = (
            Tile("size", size(after), size(before), change(before, after)),
            Tile("speed", f"{ms:.3g} ms", f"{old_ms:.3g} ms", change(old_ms, ms, faster=True)),
            Tile("error", f"{choice.error:.3g}", note=f"{self.metrics[0].shown_title}, of {choice.name}"),
        )
        return Head(verdict=verdict, tiles=tiles, command=command)

    def answer(self) -> str:
        """Returns the fastest recipe and the most accurate one of its size, with their speeds and errors."""
        fastest, accurate = self.recommendation(), self.most_accurate()
        if fastest is None or accurate is None:
            return ""
        first, second = ((row.name, presets.Measured(self._speed(row), row.error)) for row in (fastest, accurate))
        return f"{presets.two_answers(first, second, self.metrics[0].shown_title)}."

    def _speed(self, row: Row) -> float:
        """Returns how many times as fast as the original a recipe is."""
        original = self.rows[0].latency
        return original.seconds / row.latency.seconds if original and row.latency else math.nan

    def _smallest(self) -> list[tuple[str, str]]:
        """Returns a recipe that is smaller than the recommended one, as a fact."""
        choice = self.recommendation()
        row = min(self._real(), key=lambda row: row.byte_size or 0, default=None)
        if choice is None or row is None or (row.byte_size or 0) * SAME_SIZE >= (choice.byte_size or 0):
            return []
        numbers = f"{self._speed(row):.2g} times, {self.metrics[0].shown_title} {row.error:.2g}"
        return [("smallest", f"--recipe {row.name}: {size(row.byte_size or 0)}, {numbers}")]

    def _real(self) -> list[Row]:
        """Returns the recipes that were rewritten and run, and whose numbers are all known."""
        return [row for row in self.rows[1:] if not row.emulated and row.latency and math.isfinite(row.badness)]
