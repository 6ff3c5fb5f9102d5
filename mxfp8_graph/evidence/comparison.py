"""What a comparison of recipes found, a row per recipe, and how it is written: as JSON, as a page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

from rich.filesize import decimal as size  # a number of bytes in words

from mxfp8_graph.checking.compare import sqnr
from mxfp8_graph.evidence.metrics import Metric, Score
from mxfp8_graph.report import html
from mxfp8_graph.report.data import filled, write_report
from mxfp8_graph.report.json_text import json_text

_NAN: Final = "NaN or Inf"
"""What a table says of a score without a number."""

LEGEND: Final = (
    (
        "real",
        "the rewritten model, in ONNX Runtime with our kernels; its size is that of the files",
    ),
    (
        "emulated",
        "values are rounded to the format and multiplied in float32, so there is no latency; its size is what the "
        "format would take. The matmuls are those that preset mxfp8 rewrites",
    ),
    ("weight SQNR", "-20 log10 of the relative L2 error of the rewritten weights, a mean over them"),
    ("bytes per weight", "of the rewritten weights: elements + scales; K is a matmul's inner size"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One recipe. What is None does not apply, or could not be found for the reason in `problem`."""

    name: str
    what: str
    """The recipe in words."""
    emulated: bool
    scores: tuple[Score, ...] = ()
    """One per metric."""
    sites: int | None = None
    """How many matmuls are rewritten."""
    weight_sqnr: float | None = None
    """In dB."""
    byte_size: int | None = None
    """Of the model."""
    bytes_per_weight: float | None = None
    formula: str = ""
    """How that comes about."""
    seconds: float | None = None
    """Median latency."""
    problem: str = ""
    """Why the recipe has no result."""

    @property
    def kind(self) -> str:
        """The row's kind in a word."""
        return "emulated" if self.emulated else "real"

    def to_dict(self) -> dict[str, Any]:
        """Returns the row with JSON types only; what is not finite is None."""
        sqnr = self.weight_sqnr
        return {
            "recipe": self.name,
            "what": self.what,
            "emulated": self.emulated,
            "scores": [score.to_dict() for score in self.scores],
            "matmuls": self.sites,
            "weight_sqnr_db": sqnr if sqnr is not None and math.isfinite(sqnr) else None,
            "bytes": self.byte_size,
            "bytes_per_weight": self.bytes_per_weight,
            "bytes_per_weight_formula": self.formula or None,
            "latency_seconds": self.seconds,
            "problem": self.problem or None,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All recipes on one model and the same samples."""

    model: str
    inputs: str
    """The samples in words."""
    timed: str
    """The largest sample, on which latencies are measured, in words."""
    synthesised: bool
    sample_names: tuple[str, ...]
    metrics: tuple[Metric, ...]
    isa: str
    """The instruction set the kernels ran on."""
    rows: tuple[Row, ...]
    """The first is the model as it is."""
    notes: tuple[str, ...] = ()

    def facts(self) -> list[tuple[str, str]]:
        """Returns what stands above the table, as (label, value)."""
        return [
            ("model", self.model),
            ("inputs", self.inputs),
            ("kernels", self.isa),
            ("latency", f"the median of runs on the largest sample, {self.timed}, one model after another in turn"),
            *(("note", note) for note in self.notes),
            *((f"{row.name}:", row.problem) for row in self.rows if row.problem),
        ]

    def table(self) -> tuple[tuple[str, ...], list[tuple[html.Cell, ...]]]:
        """Returns (header, a row per recipe), without columns that are empty."""
        several = len(self.sample_names) > 1
        scores = [m.title for m in self.metrics]
        header = [part for s in scores for part in ((f"{s}: mean", "worst", "of sample") if several else (s,))]
        ends = ("weight SQNR, dB", "bytes per weight", "model", "latency, ms", "matmuls", "what it is")
        return filled(("recipe", "kind", *header, *ends), [self._cells(row, several=several) for row in self.rows])

    def _cells(self, row: Row, *, several: bool) -> tuple[html.Cell, ...]:
        scores: list[html.Cell] = []
        for number in range(len(self.metrics)):
            score = row.scores[number] if row.scores else None
            scores += self._score(score, several=several) if score else [""] * (3 if several else 1)
        return (
            row.name,
            row.kind,
            *scores,
            _number(row.weight_sqnr, "{:.2f}"),
            _number(row.bytes_per_weight, "{:.4g}"),
            "" if row.byte_size is None else (size(row.byte_size), float(row.byte_size)),
            _number(None if row.seconds is None else row.seconds * 1e3, "{:.2f}"),
            "" if row.sites is None else (str(row.sites), float(row.sites)),
            row.what + f"; {row.formula} bytes per weight" * bool(row.formula),
        )

    def _score(self, score: Score, *, several: bool) -> list[html.Cell]:
        if not several:
            return [_number(score.mean, "{:.6g}")]
        worst = PurePath(self.sample_names[score.worst_sample]).name  # its folder is among the facts
        return [_number(score.mean, "{:.6g}"), _number(score.worst, "{:.6g}"), worst]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything with JSON types only."""
        return {
            "model": self.model,
            "inputs": self.inputs,
            "latency_inputs": self.timed,
            "synthesised": self.synthesised,
            "samples": list(self.sample_names),
            "isa": self.isa,
            "notes": list(self.notes),
            "recipes": [row.to_dict() for row in self.rows],
        }

    def to_json(self) -> str:
        """Returns everything as JSON."""
        return json_text(self.to_dict())

    def to_html(self) -> str:
        """Returns everything as a page that fetches nothing."""
        header, rows = self.table()
        parts = [html.facts(self.facts()), html.Table("Recipes", header, rows).html(), self._plot()]
        return html.page(f"Recipes for {self.model}", [*filter(None, parts), html.facts(LEGEND)])

    def _plot(self) -> str:
        """Returns the outputs' SQNR as dots, if it is among the metrics."""
        number = next((i for i, metric in enumerate(self.metrics) if metric.name in {"relative_l2", "sqnr"}), None)
        if number is None:
            return ""
        means = [(row, row.scores[number].mean) for row in self.rows[1:] if row.scores]
        levels = [(row, mean if self.metrics[number].name == "sqnr" else sqnr(mean)) for row, mean in means if mean > 0]
        points = [(f"{row.name} ({row.kind}): {level:.2f} dB", level) for row, level in levels if math.isfinite(level)]
        return html.plot("SQNR at the outputs, in the order of the table", points, unit="dB") if points else ""

    def write(self, path: str | Path) -> Path:
        """Writes the comparison, as .json or .html, and returns the path.

        Raises:
            Mxfp8Error: it cannot be written there.
        """
        return write_report(path, self)


def _number(value: float | None, pattern: str) -> html.Cell:
    if value is None:
        return ""
    if math.isnan(value):
        return (_NAN, math.inf)
    return (pattern.format(value), value if math.isfinite(value) else math.copysign(1e308, value))
