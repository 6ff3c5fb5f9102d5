"""What a comparison of recipes found, a row per recipe, and how it is written: as JSON, as a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.filesize import decimal as size  # a number of bytes in words

from mxfp8_graph.evidence.metrics import Metric, Score, shown_less_is_better
from mxfp8_graph.policy import presets
from mxfp8_graph.report import html
from mxfp8_graph.report.data import filled, write_report
from mxfp8_graph.report.json_text import json_text

_NAN: Final = "NaN or Inf"
"""What a table says of a score without a number."""

_SAME: Final = (0.01, 0.02, 0.1)
"""Shares by which sizes, errors and times may differ and still be called the same: times repeat within 10 %."""

LEGEND: Final = (
    (
        "real",
        "the rewritten model, in ONNX Runtime with our kernels; its size is that of the files. Latency: the median of "
        "runs on the first sample, one model after another in turn",
    ),
    (
        "emulated",
        "values are rounded to the format and multiplied in float32, so there is no latency; its size is what the "
        "format would take. The matmuls are those that preset mxfp8 rewrites",
    ),
    ("worst", "of all samples; in brackets which one it is"),
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
    recipe: str = ""
    """As a recipe file has it; of formats of others nothing."""
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

    @property
    def explained(self) -> str:
        """The recipe in words, with the formula of its bytes."""
        return self.what + f"; {self.formula} bytes per weight" * bool(self.formula)

    def place(self, what: str) -> tuple[float, float]:
        """Returns (size in MB or time in ms, error at the outputs); NaN for what is not known."""
        x = math.nan if self.byte_size is None else self.byte_size / 1e6
        if what == "time":
            x = math.nan if self.seconds is None else self.seconds * 1e3
        return x, self.scores[0].metric.shown(self.scores[0].mean) if self.scores else math.nan

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
            *(("note", note) for note in self.notes),
            *((f"{row.name}:", row.problem) for row in self.rows if row.problem),
        ]

    def table(self) -> tuple[tuple[str, ...], list[tuple[html.Cell, ...]]]:
        """Returns (header, a row per recipe), without columns that are empty."""
        several = len(self.sample_names) > 1
        scores = [m.shown_title for m in self.metrics]
        header = [part for s in scores for part in ((f"{s}: mean", "worst") if several else (s,))]
        ends = ("weight SQNR, dB", "bytes per weight", "model", "latency, ms", "matmuls", "what it is")
        return filled(("recipe", "kind", *header, *ends), [self._cells(row, several=several) for row in self.rows])

    def _cells(self, row: Row, *, several: bool) -> tuple[html.Cell, ...]:
        scores: list[html.Cell] = []
        for number in range(len(self.metrics)):
            score = row.scores[number] if row.scores else None
            scores += self._score(score, several=several) if score else [""] * (2 if several else 1)
        return (
            row.name,
            row.kind,
            *scores,
            _number(row.weight_sqnr, "{:.2f}"),
            _number(row.bytes_per_weight, "{:.4g}"),
            "" if row.byte_size is None else (size(row.byte_size), float(row.byte_size)),
            _number(None if row.seconds is None else row.seconds * 1e3, "{:.2f}"),
            "" if row.sites is None else (str(row.sites), float(row.sites)),
            row.explained,
        )

    def _score(self, score: Score, *, several: bool) -> list[html.Cell]:
        form = "{:.3g}" if shown_less_is_better(score.metric) else "{:.5g}"  # 99.95 and 99.99 % of agreement differ
        mean = _number(score.metric.shown(score.mean), form)
        worst = _number(score.metric.shown(score.worst), f"{form} ({score.worst_sample + 1})")
        return [mean, worst] if several else [mean]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything with JSON types only."""
        return {
            "model": self.model,
            "inputs": self.inputs,
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
        taken, header, rows = self.taken(), *self.table()
        shown = [i for i, name in enumerate(header) if name not in {"kind", "weight SQNR, dB", "bytes per weight", "matmuls", "what it is"}]
        table = html.Table(
            "Recipes",
            [header[i] for i in shown],
            [[row[i] for i in shown] for row in rows],
            marked=taken.name if taken else "",
            paler="emulated",
            notes=[f"{row.kind}: {row.explained}" for row in self.rows],
        )
        parts = [*self._charts(), table.html()]
        if taken:
            parts.append(html.text(f"The recipe {taken.name}, as a file has it", taken.recipe))
        parts.append(html.facts((*self.facts()[1:], *LEGEND[:3])))
        return html.page(f"Recipes for {self.model}", parts, lead=self.advice(), files=[self.model])

    def taken(self) -> Row | None:
        """Returns the recipe to take, of those that were rewritten and run; None if none has a result.

        It is the default one, or the most accurate of those that are better than it in size, error or time and worse
        in none of them.
        """
        real = self._real()
        usual = real.get(presets.DEFAULT) or next(iter(real.values()), None)
        if usual is None:
            return None
        better = [one for one in real.values() if one.better(usual) and not usual.better(one)]
        return min((usual, *better), key=lambda one: one.numbers[1]).row

    def advice(self) -> list[str]:
        """Returns which recipe to take, and what it, the smallest, the most accurate and the fastest one give."""
        taken, real, own = self.taken(), self._real(), self.rows[0]
        if taken is None:
            return []
        best = real[taken.name]
        told = [f"Take {taken.name}: {', '.join(map(''.join, best.words))}."]
        if own.byte_size is not None and own.seconds is not None:
            told[0] += f" The model as it is: {size(own.byte_size)}, {own.seconds * 1e3:.3g} ms."
        why: dict[str, list[str]] = {}
        for i, word in enumerate(("smallest", "most accurate", "fastest")):
            first = min(real.values(), key=lambda one, i=i: one.numbers[i])
            if i in first.better(best):
                why.setdefault(first.row.name, []).append(word)
        if (usual := real.get(presets.DEFAULT)) and usual is not best:
            told.append(f"Compared with {usual.row.name}, the default: {best.against(usual)}.")
        others = ((" and ".join(words).capitalize(), name) for name, words in why.items())
        return told + [f"{words}: {name}, with {real[name].against(best)}." for words, name in others]

    def _real(self) -> dict[str, _Measured]:
        measured = ((row.name, _Measured.of(row)) for row in self.rows[1:] if not row.emulated)
        return {name: one for name, one in measured if one is not None}

    def _charts(self) -> Iterator[str]:
        """Yields the error of each recipe against its size, and against its time."""
        taken, metric, own = self.taken(), self.metrics[0], self.rows[0]
        colors = {0: "to take", 3: "real", 5: "emulated"}
        for what, unit in (("size", "MB"), ("time", "ms")):
            points = []
            for row in self.rows[1:]:
                x, y = row.place(what)
                if math.isfinite(x) and math.isfinite(y):
                    color = 0 if row is taken else 5 if row.emulated else 3
                    told = f"{row.name} ({row.kind}): {metric.shown_title} {y:.4g}, {x:.4g} {unit}"
                    points.append(html.Point(x, y, color, told, row.name))
            if points:
                points.sort(key=lambda point: -point.color)  # what is drawn last is on top
                at = own.place(what)[0]
                yield html.Chart(
                    heading=f"Mean {metric.shown_title} at the outputs against {what}",
                    points=points,
                    axis=f"{what}, {unit}",
                    legend={color: name for color, name in colors.items() if any(p.color == color for p in points)},
                    front=_front([(p.x, p.y) for p in points if p.color != 5], 1 if shown_less_is_better(metric) else -1),
                    limits=(("x", f"the model as it is: {at:.3g} {unit}", at),) if math.isfinite(at) else (),
                ).html()

    def write(self, path: str | Path) -> Path:
        """Writes the comparison, as .json or .html, and returns the path.

        Raises:
            Mxfp8Error: it cannot be written there.
        """
        return write_report(path, self)


class _Measured(NamedTuple):
    """Size, error and time of a recipe that was rewritten and run: the less, the better."""

    row: Row
    numbers: tuple[float, float, float]
    words: tuple[tuple[str, str], ...]
    """Of each number what it is, where its unit does not say so, and the number."""

    @classmethod
    def of(cls, row: Row) -> _Measured | None:
        """Returns them, or None if one of them is not known."""
        (bytes_, error), (seconds, _) = row.place("size"), row.place("time")
        if not all(map(math.isfinite, (bytes_, error, seconds))):
            return None
        metric = row.scores[0].metric
        title = f"{metric.shown_title} "
        words = ("", size(row.byte_size or 0)), (title, f"{error:.3g}"), ("", f"{seconds:.3g} ms")
        return cls(row, (bytes_, error if shown_less_is_better(metric) else -error, seconds), words)

    def better(self, other: _Measured) -> set[int]:
        """Returns which of the numbers are clearly better."""
        pairs = enumerate(zip(self.numbers, other.numbers, _SAME, strict=True))
        return {i for i, (mine, its, share) in pairs if mine < its - share * abs(its)}

    def against(self, other: _Measured) -> str:
        """Returns the numbers in words, beside those of another one where they differ."""
        clear = self.better(other) | other.better(self)
        both = enumerate(zip(self.words, other.words, ("size", "error", "time"), strict=True))
        told = (f"{''.join(mine)} instead of {its[1]}" if i in clear else f"same {name}" for i, (mine, its, name) in both)
        return ", ".join(told)


def _front(points: Iterable[tuple[float, float]], sign: int) -> list[tuple[float, float]]:
    """Returns the points that no other one beats in both: from the least x on, each with a better y."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], sign * point[1])):
        if not front or sign * y < sign * front[-1][1]:
            front.append((x, y))
    return front


def _number(value: float | None, pattern: str) -> html.Cell:
    if value is None:
        return ""
    if math.isnan(value):
        return (_NAN, math.inf)
    return (pattern.format(value), value if math.isfinite(value) else math.copysign(1e308, value))
