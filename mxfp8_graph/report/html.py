"""A report as one HTML page: facts, charts, bars, sortable tables. It fetches nothing and is readable without scripts.

Names come from files that anyone may have made: all text is escaped, none of it is part of the script, and the page's
policy lets no other script run. Text has a fixed size and charts have positions in percent, so that a page reads at any
width.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final, NamedTuple

from rich.filesize import decimal as size

from mxfp8_graph import provenance
from mxfp8_graph.naming import printable

_SCRIPT: Final = """
for (const table of document.querySelectorAll("table")) {
  [...table.tHead.rows[0].cells].forEach((head, column, heads) => {
    const value = body => {
      const cell = body.rows[0].cells[column];
      return "sort" in cell.dataset ? Number(cell.dataset.sort) : cell.textContent;
    };
    const sort = () => {
      const up = head.ariaSort !== "ascending";
      heads.forEach(other => { other.ariaSort = null; });
      head.ariaSort = up ? "ascending" : "descending";
      table.append(...[...table.tBodies].sort((a, b) => {
        const [x, y] = up ? [value(a), value(b)] : [value(b), value(a)];
        if (x === "" || y === "") return (value(a) === "") - (value(b) === "");
        return typeof x === "number" && typeof y === "number"
          ? x - y : String(x).localeCompare(String(y), undefined, {numeric: true});
      }));
    };
    head.tabIndex = 0;
    head.addEventListener("click", sort);
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
  });
}
for (const code of document.querySelectorAll("pre")) {
  const button = document.createElement("button");
  button.textContent = "Copy";
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(code);
    document.execCommand("copy");  // navigator.clipboard is absent on pages served without TLS
    button.textContent = "Copied";
  });
  code.before(button);
}
"""

_STYLE: Final = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d2127; --soft: #5d6670; --line: #d9dde2; --box: #f4f6f8;
  --c0: #2f9e6e; --c1: #d98e04; --c2: #c9504a; --c3: #3f74d1; --c4: #8e6bc4; --c5: #8a929c; --c6: #b3b9c1;
  --c7: #3f97a0; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e4e7ea; --soft: #9aa3ad; --line: #343a42;
  --box: #1e2329; --c0: #4fc08d; --c1: #e5a83b; --c2: #e2756f; --c3: #7aa5f0; } }
* { box-sizing: border-box; }
body { background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; max-width: 72rem;
  margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; margin: 0 0 .5rem; }
h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; }
.lead { font-size: 1.05rem; border-left: .25rem solid var(--c3); padding: .1rem .8rem; }
.lead p { margin: .3rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 1rem 0; }
dt, .paler, .note { color: var(--soft); }
dd { margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; }
th { vertical-align: bottom; overflow-wrap: normal; cursor: pointer; }
th:last-child, td:last-child { padding-right: 0; }
thead, tbody { border-bottom: 1px solid var(--line); }
tfoot { font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number, .short { white-space: nowrap; }
.text { min-width: 8rem; }
.note td { font-size: 12px; padding-top: 0; }
.marked { background: color-mix(in srgb, var(--c0) 16%, transparent); }
th[aria-sort=ascending]::after { content: " \\2191"; }
th[aria-sort=descending]::after { content: " \\2193"; }
.bars { display: grid; grid-template-columns: minmax(4rem, max-content) 1fr max-content; gap: .2rem .8rem;
  align-items: center; font-size: 14px; }
.bars > span:first-child { max-width: 40vw; }
.bar { display: flex; height: .9rem; }
COLORS
.chart { height: 26rem; margin: .5rem 1rem 3.2rem 4.2rem; }
svg { width: 100%; height: 100%; overflow: visible; }
text { fill: var(--ink); font-size: 12px; paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
line { stroke: var(--line); }
.edge { stroke: var(--soft); }
.front { stroke: var(--c0); stroke-width: 2; stroke-dasharray: 5 4; }
.limit { stroke: var(--c2); stroke-width: 1.5; stroke-dasharray: 2 3; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; padding: 0; margin: .4rem 0 1rem; list-style: none; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem; }
pre { background: var(--box); padding: .6rem .8rem; margin: .3rem 0; white-space: pre-wrap; font-size: 13px;
  max-height: 20rem; overflow: auto; }
button { float: right; margin: 0 0 .4rem .6rem; font: inherit; font-size: 13px; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); font-size: 13px; }
@media (max-width: 700px) { th, td { padding-right: .5rem; } table, .bars { font-size: 13px; } }
@media print { :root { color-scheme: light; --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --box: #fff; }
  * { print-color-adjust: exact; } body { max-width: none; margin: 0; font-size: 12px; } table { font-size: 11px; }
  .scroll, pre { overflow: visible; max-height: none; } button { display: none; } h2 { break-after: avoid; }
  tbody, .chart, .bars > * { break-inside: avoid; } }
""".replace("COLORS", " ".join(f".c{i} {{ background: var(--c{i}); fill: var(--c{i}); }}" for i in range(8)))

MOST_ROWS: Final = 2000
"""Rows of a table that a page has: browsers and readers get slow beyond."""

_SHORT: Final = 20
"""Characters up to which the cells of a column stay on one line."""

_WIDTH: Final = 460
"""Width of a chart in px in a window of 600 px. In a wider one its points are farther apart, so that labels that do not
overlap in this width overlap in none."""
_HEIGHT: Final = 416
"""Height of a chart in px: 26rem of the style."""
_LINE: Final = 15
_CHARACTER: Final = 6.6
"""Height of a line and mean width of a character of a label, in px."""
_LOGARITHMIC: Final = 10
"""Ratio of the largest to the least height from which on the axis is logarithmic."""

Cell = str | tuple[str, float]
"""Text, or text and the number that it stands for."""
Columns = tuple[tuple[str, ...], Sequence[tuple[Cell, ...]]]
"""Header and rows of a table."""


@dataclass(frozen=True)
class Table:
    """A titled table."""

    heading: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    total: Sequence[Cell] = ()
    """A last row, which stays at the end when the table is sorted."""
    paler: str = ""
    """Rows with a cell of this text are paler than the others."""
    marked: str = ""
    """Rows with a cell of this text are highlighted."""
    notes: Sequence[str] = ()
    """A small text below each row."""

    def without(self, *names: str) -> Table:
        """Returns the table without the columns that have these names."""
        shown = [i for i, name in enumerate(self.header) if name not in names]
        rows = [[row[i] for i in shown] for row in self.rows]
        return replace(self, header=[self.header[i] for i in shown], rows=rows)

    def html(self) -> str:
        """Returns the table, sortable by column: its first `MOST_ROWS` rows, and how many more there are."""
        rows = self.rows[:MOST_ROWS]
        numbers = [any(isinstance(row[i], tuple) for row in rows) for i in range(len(self.header))]
        longest = [max((len(said(row[i])) for row in rows), default=0) for i in range(len(self.header))]
        # Short cells never fold, so that numbers and dtypes stay in one line on a narrow page.
        kinds = [
            "number" if n else "text" if most > _SHORT else "short" for n, most in zip(numbers, longest, strict=True)
        ]
        head = "".join(f'<th class="{kind}">{_text(cell)}</th>' for kind, cell in zip(kinds, self.header, strict=True))
        lines = [
            _heading(self.heading),
            '<div class="scroll"><table>',
            f"<thead><tr>{head}</tr></thead>",
        ]
        # A body for each row, so that sorting moves a row and its note together.
        for row, note in itertools.zip_longest(rows, self.notes[:MOST_ROWS], fillvalue=""):
            marks = [name for name in ("paler", "marked") if getattr(self, name) and getattr(self, name) in row]
            mark = f' class="{marks[-1]}"' if marks else ""
            below = f'<tr class="note"><td colspan="{len(row)}">{_folding(note)}</td></tr>' if note else ""
            lines.append(f"<tbody{mark}><tr>{_cells(kinds, row)}</tr>{below}</tbody>")
        lines += [f"<tfoot><tr>{_cells(kinds, self.total)}</tr></tfoot>"] if self.total else []
        lines.append("</table></div>")
        if more := len(self.rows) - len(rows):
            lines.append(f"<p>The first {len(rows)} rows; {more} more are in the report in JSON.</p>")
        return "\n".join(lines)


class Point(NamedTuple):
    """A dot of a chart."""

    x: float
    y: float
    color: int
    """A key of the legend; of lower numbers the labels are placed first."""
    tooltip: str
    """Text of the tooltip."""
    label: str = ""
    """Text beside the dot."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Dots, of which some have labels; heights are logarithmic if values differ by a factor of 10, as errors do."""

    heading: str
    points: Sequence[Point]
    """Points with finite values; later ones cover earlier ones."""
    axis: str
    """Label of x; the heading names y."""
    legend: Mapping[int, str]
    front: Sequence[tuple[float, float]] = ()
    """Corners (x, y) of a line."""
    limits: Sequence[tuple[str, str, float]] = ()
    """Straight lines: ("x" or "y", label, value)."""

    def html(self) -> str:
        """Returns the chart, with positions in percent; empty without points."""
        if not self.points:
            return ""
        x_limits, y_limits = ([at for axis, _, at in self.limits if axis == name] for name in "xy")
        across = _Axis([*(point.x for point in self.points), *x_limits], math.inf)
        up = _Axis([*(point.y for point in self.points), *y_limits], _LOGARITHMIC)
        lines = [_heading(self.heading), f'<div class="chart"><svg role="img" aria-label="{_text(self.heading)}">']
        for caption, at in up.ticks():
            lines.append(_line("", (0, 100 - at), (100, 100 - at)) + _word(caption, (0, 100 - at), -8, 4, "end"))
        for caption, at in across.ticks():
            lines.append(_line("", (at, 0), (at, 100)) + _word(caption, (at, 100), 0, 18, "middle"))
        lines += [_line("edge", (0, 100), (100, 100)), _line("edge", (0, 0), (0, 100))]
        lines.append(_word(self.axis, (100, 100), 0, 36, "end"))
        corners = [(across.at(x), 100 - up.at(y)) for x, y in self.front]
        lines += [_line("front", *ends) for ends in itertools.pairwise(corners)]
        for axis, caption, value in self.limits:
            x, y = (across.at(value), 0.0) if axis == "x" else (0.0, 100 - up.at(value))
            place = (6, -5, "start") if axis == "y" else (-5, 12, "end") if x > 50 else (5, 12, "start")
            lines.append(_line("limit", (x, y), (x or 100, y or 100)) + _word(caption, (x, y), *place))
        places = [(across.at(point.x), 100 - up.at(point.y)) for point in self.points]
        labels = _labels(self.points, places)
        for number, (point, (x, y)) in enumerate(zip(self.points, places, strict=True)):
            dot = f'<circle class="c{point.color}" r="5"><title>{_text(point.tooltip)}</title></circle>'
            lines.append(f'<svg x="{x:.2f}%" y="{y:.2f}%">{labels.get(number, "")}{dot}</svg>')
        return "\n".join([*lines, "</svg></div>", _legend(self.legend.items())])


class _Axis:
    """Maps values to positions on an axis, in percent."""

    def __init__(self, values: Sequence[float], factor: float) -> None:
        least, most = min(values), max(values)
        self._scaled = math.log10 if least > 0 and most >= factor * least else float
        low, high = self._scaled(least), self._scaled(most)
        # A single value, or 0 alone, has no range of its own.
        margin = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
        self._low, self._span = low - margin, high - low + 2 * margin

    def at(self, value: float) -> float:
        """Returns the place of a value."""
        return 100 * (self._scaled(value) - self._low) / self._span

    def ticks(self) -> list[tuple[str, float]]:
        """Returns (text, place) of round numbers."""
        power = 10.0 ** math.floor(math.log10(self._span / 7))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= self._span / 7)
        first, last = math.floor(self._low), math.ceil(self._low + self._span)
        if self._scaled is float:
            values = [
                n * step for n in range(math.floor(self._low / step), math.ceil((self._low + self._span) / step) + 1)
            ]
        else:
            values = [float(f"{f}e{p}") for p in range(first, last) for f in ((1, 2, 5) if self._span < 3 else (1,))]
        return [(f"{value:.6g}", self.at(value)) for value in values if 0 <= self.at(value) <= 100]


def _labels(points: Sequence[Point], places: Sequence[tuple[float, float]]) -> dict[int, str]:
    """Returns the label of each point that has one and finds room, color by color, from the top to the bottom.

    A label is right or left of its point, or as many lines above or below it as it takes to overlap no other label and
    no other dot; a line leads to it then.
    """
    centers = [(_WIDTH * x / 100, _HEIGHT * y / 100) for x, y in places]
    boxes = [(x - 5, y - 5, x + 5, y + 5) for x, y in centers]
    labels = {}
    # Greedy, color by color: the points that matter have the lower numbers and take the places beside their dots.
    for number in sorted(range(len(points)), key=lambda i: (points[i].color, places[i][1])):
        x, y = centers[number]
        wide = _CHARACTER * len(printable(points[number].label))
        for dy, right in itertools.product(sorted(range(-300, 301, _LINE), key=abs) if wide else (), (True, False)):
            start = x + 9 if right else x - 9 - wide
            box = (start, y + dy - 7, start + wide, y + dy + 7)
            inside = start >= 0 and box[1] >= 0 and box[2] <= _WIDTH + 12 and box[3] <= _HEIGHT
            if inside and not any(_overlap(box, other) for i, other in enumerate(boxes) if i != number):
                dx = 8 if right else -8
                leader = f'<line class="edge" x2="{dx}" y2="{dy}"/>' if dy else ""
                anchor = "start" if right else "end"
                labels[number] = leader + _word(points[number].label, (0, 0), dx + dx // 8, dy + 4, anchor)
                boxes.append(box)
                break
    return labels


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _line(kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line class="{kind}" x1="{x1:.2f}%" y1="{y1:.2f}%" x2="{x2:.2f}%" y2="{y2:.2f}%"/>'


def _word(content: str, at: tuple[float, float], dx: int, dy: int, anchor: str) -> str:
    return f'<text x="{at[0]:.2f}%" y="{at[1]:.2f}%" dx="{dx}" dy="{dy}" text-anchor="{anchor}">{_text(content)}</text>'


def page(title: str, parts: Iterable[str], *, lead: Sequence[str] = (), files: Iterable[str] = ()) -> str:
    """Returns the page with `parts`, each as the functions here make it.

    Args:
        title: heading of the page, such as "Rewrite of model.onnx".
        parts: the sections of the page, as HTML.
        lead: sentences at the top, the most important ones.
        files: paths of the models in the report, which are identified at the end; missing files are left out.
    """
    # The policy allows the script by its hash, so a name that would get past the escaping still could not run code.
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{_text(title)}</h1>"""
    said = [f'<div class="lead">{"".join(f"<p>{_text(line)}</p>" for line in lead)}</div>'] if lead else []
    footer = f"<footer>{facts(provenance.facts(files))}</footer>"
    return "\n".join([head, *said, *parts, footer, f"<script>{_SCRIPT}</script>", "</body>", "</html>", ""])


def number(value: float | None, form: str = ".3g") -> Cell:
    """Returns a cell for a number: empty without one, and as its text alone where it is not finite."""
    return "" if value is None else (format(value, form), float(value)) if math.isfinite(value) else str(value)


def byte_size(count: int | None) -> Cell:
    """Returns a cell for a number of bytes, in words; empty without one."""
    return "" if count is None else (size(count), float(count))


def said(cell: Cell) -> str:
    """Returns the text of a cell."""
    return cell if isinstance(cell, str) else cell[0]


def shape_text(shape: Sequence[int]) -> str:
    """Returns the shape of an array in words: 2 x 16."""
    return " x ".join(map(str, shape)) or "scalar"


def filled(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Columns:
    """Returns a table without its columns that have only empty cells."""
    used = [i for i in range(len(header)) if any(row[i] for row in rows) or not rows]
    return tuple(header[i] for i in used), [tuple(row[i] for i in used) for row in rows]


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns one line per (label, value)."""
    return "<dl>" + "\n".join(f"<dt>{_text(label)}</dt><dd>{_text(value)}</dd>" for label, value in pairs) + "</dl>"


def bars(heading: str, rows: Sequence[tuple[str, Sequence[float], str]], legend: Sequence[str] = ()) -> str:
    """Returns one bar per (label, lengths, value in words), all on one scale.

    Each length has the color of its place in `legend`; without a legend only the first length of a bar is not 0.
    """
    scale = max((sum(lengths) for _, lengths, _ in rows), default=0) or 1
    lines = [_heading(heading), '<div class="bars">']
    for label, lengths, value in rows:
        widths = [f"width:{100 * max(length, 0) / scale:.2f}%" for length in lengths]
        boxes = "".join(f'<i class="c{color}" style="{width}"></i>' for color, width in enumerate(widths))
        lines.append(f'<span>{_folding(label)}</span><span class="bar">{boxes}</span>')
        lines.append(f'<span class="number">{_text(value)}</span>')
    return "\n".join([*lines, "</div>", _legend(enumerate(legend))])


def text(heading: str, content: str) -> str:
    """Returns a block of text with a button that copies it."""
    shown = "\n".join(map(_text, content.rstrip("\n").split("\n")))
    return f"{_heading(heading)}\n<pre>{shown}</pre>"


def _legend(entries: Iterable[tuple[int, str]]) -> str:
    items = "".join(f'<li><i class="c{color}"></i>{_text(name)}</li>' for color, name in entries)
    return f'<ul class="legend">{items}</ul>' if items else ""


_LONG_WORD: Final = re.compile(r"\S{25,}")
_INNER_MARKS: Final = re.compile(r"(?<=\w)[/._:-]+(?=\w)")


def _cells(kinds: Sequence[str], row: Sequence[Cell]) -> str:
    parts = []
    for kind, cell in zip(kinds, row, strict=True):
        sort = f' data-sort="{cell[1]!r}"' if isinstance(cell, tuple) else ""
        shown = _folding(said(cell)) if kind == "text" else _text(said(cell))
        parts.append(f'<td class="{kind}"{sort}>{shown}</td>')
    return "".join(parts)


def _folding(text: str) -> str:
    """Returns `text` with breaks allowed after dots and slashes of long names, and nowhere else inside a word."""
    return _LONG_WORD.sub(lambda word: _INNER_MARKS.sub(r"\g<0><wbr>", word[0]), _text(text))


def _heading(text: str) -> str:
    return f"<h2>{_text(text)}</h2>" if text else ""


def _text(text: str) -> str:
    """Returns `text` escaped for any place in the page."""
    return escape(printable(text))
