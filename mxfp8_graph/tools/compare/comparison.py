"""The result of a comparison: a row per recipe, and the recommended recipe."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from mxfp8_graph.policy import presets
from mxfp8_graph.report.base import Data
from mxfp8_graph.report.scatter import Scatter
from mxfp8_graph.report.section import Cell, Columns, Head, Section, Tile, byte_size, change, filled, number
from mxfp8_graph.running.report import Measurement
from mxfp8_graph.tools.metrics import Metric, Score

_SAME: Final = (0.01, 0.02, 0.1)
"""Relative differences of sizes, errors and times that count as none: times repeat within 10 %."""

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
        "latency_seconds=seconds problem?"
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
    seconds: float | None = None
    """Median latency."""
    problem: str = ""
    """The reason why the recipe has no result."""

    @property
    def is_preset(self) -> bool:
        """Whether the recipe is a preset without other settings, which `rewrite --recipe` takes by name."""
        return self.name in presets.PRESETS and yaml.safe_load(self.recipe).get("name") == self.name

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Size in MB, mean error at the outputs by the first metric, latency in ms; NaN for an unknown number."""
        error = self.scores[0].metric.shown(self.scores[0].mean) if self.scores else math.nan
        return (self.byte_size or math.nan) / 1e6, error, (self.seconds or math.nan) * 1e3


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
            *self._alternatives(),
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
        chart = Scatter(across="latency, ms", up=errors, higher_is_better=self._sign < 0, reference=self.rows[0].name)
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
        """Returns the recommended recipe among the rewritten ones; None if none has a result.

        It is the most accurate of the recipes that are not clearly worse than the default in size, error or time.
        """
        real = self._real()
        # Without the default among the recipes, the first one takes its place.
        usual = [row for row in real if row.name == presets.DEFAULT] or real
        good = [row for row in real if not self._worse(row, usual[0])]
        return min(good, key=lambda row: self._sign * row.numbers[1], default=None)

    def head(self) -> Head:
        """Returns size, speed and error of the recommended recipe, and the command that rewrites with it."""
        if (choice := self.recommendation()) is None:
            return Head(verdict="bad")
        (size, error, ms), (old_size, _, old_ms) = choice.numbers, self.rows[0].numbers
        command, verdict = "", "warning" if ms > old_ms else "good"
        if choice.is_preset and Path(self.model).suffix:  # else the recipe is at the end of the page
            command = shlex.join(["mxfp8-graph", "rewrite", self.model, "--recipe", choice.name])
        tiles = (
            Tile("size", f"{size:.3g} MB", f"{old_size:.3g} MB", change(old_size, size)),
            Tile("speed", f"{ms:.3g} ms", f"{old_ms:.3g} ms", change(old_ms, ms, faster=True)),
            Tile("error", f"{error:.3g}", note=f"{self.metrics[0].shown_title}, of {choice.name}"),
        )
        return Head(verdict=verdict, tiles=tiles, command=command)

    def answer(self) -> str:
        """Returns a sentence with the recommended recipe, and its numbers beside the original's."""
        choice = self.recommendation()
        return f"Take {choice.name}: {self._against(choice, self.rows[0])}." if choice else ""

    def _alternatives(self) -> list[tuple[str, str]]:
        """Returns the recommended recipe beside the default, and other recipes that are smaller, better or faster."""
        choice, real = self.recommendation(), self._real()
        if choice is None:
            return []
        usual = [row for row in real if row.name == presets.DEFAULT != choice.name]
        text = [("against the default", self._against(choice, row)) for row in usual]
        for i, (word, sign) in enumerate((("smallest", 1), ("most accurate", self._sign), ("fastest", 1))):
            numbers = [sign * row.numbers[i] for row in real]
            best = real[numbers.index(min(numbers))]
            if i in self._worse(choice, best):
                text.append((word, f"{best.name}: {self._against(best, choice)}"))
        return text

    def _real(self) -> list[Row]:
        """Returns the recipes that were rewritten and run, and whose numbers are all known."""
        return [row for row in self.rows[1:] if not row.emulated and all(map(math.isfinite, row.numbers))]

    @property
    def _sign(self) -> int:
        """-1 if a higher number of the first metric is better in tables, which show a cosine as 1-cosine; else 1."""
        return -1 if self.metrics[0].higher_is_better and self.metrics[0].shown_title == self.metrics[0].title else 1

    def _worse(self, row: Row, other: Row) -> list[int]:
        """Returns the indices of the numbers of a recipe that are clearly worse than the numbers of another one."""
        numbers = zip((1, self._sign, 1), row.numbers, other.numbers, _SAME, strict=True)
        return [i for i, (sign, mine, its, same) in enumerate(numbers) if sign * (mine - its) > same * abs(its)]

    def _against(self, row: Row, other: Row) -> str:
        """Returns the numbers of a recipe in words, beside the numbers of another one that differ."""
        differ = {*self._worse(row, other), *self._worse(other, row)}
        forms = (("{:.3g} MB", "size"), (f"{self.metrics[0].shown_title} {{:.3g}}", "error"), ("{:.3g} ms", "time"))
        text = []
        for i, (form, name) in enumerate(forms):
            instead = f" instead of {other.numbers[i]:.3g}" * math.isfinite(other.numbers[i])
            text.append(f"same {name}" if instead and i not in differ else form.format(row.numbers[i]) + instead)
        return ", ".join(text)
