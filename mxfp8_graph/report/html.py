"""A report as one HTML page: tables that sort, bars and a plot. Nothing is fetched, and it reads without its script.

Names in it come from files of anybody: all text is escaped, none of it stands in the script, and the page's own policy
lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from mxfp8_graph.naming import printable

_SCRIPT: Final = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const value = row => {
      const cell = row.cells[column];
      return "sort" in cell.dataset ? Number(cell.dataset.sort) : cell.textContent;
    };
    const sort = () => {
      const up = head.ariaSort === "descending" || head.ariaSort === null;
      heads.forEach(other => { other.ariaSort = null; });
      head.ariaSort = up ? "ascending" : "descending";
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = up ? [value(a), value(b)] : [value(b), value(a)];
        if (x === "" || y === "") return (value(a) === "") - (value(b) === "");
        return typeof x === "number" && typeof y === "number"
          ? x - y : String(x).localeCompare(String(y), undefined, {numeric: true});
      });
      table.tBodies[0].append(...rows);
    };
    head.tabIndex = 0;
    head.addEventListener("click", sort);
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
  });
}
"""

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 100rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
h1, dd { overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.5rem; margin: 0; }
dt { opacity: .7; }
dd { margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
.text { min-width: 14rem; }
.short { white-space: nowrap; }
tfoot td { font-weight: 600; border-bottom: 0; }
th[tabindex] { cursor: pointer; }
th[tabindex]:hover { text-decoration: underline; }
th[aria-sort=ascending]::after { content: " \\2191"; }
th[aria-sort=descending]::after { content: " \\2193"; }
.paler { opacity: .7; }
svg { display: block; width: 100%; }
svg text { fill: currentColor; font-size: 14px; }
.bar { height: 1.4rem; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; padding: 0; margin: .4rem 0 1rem; list-style: none; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem; }
"""

_COLORS: Final = ("#2f9e6e", "#d98e04", "#c9504a", "#4f7fd6", "#8e6bc4", "#7d8590", "#a3a9b2", "#5aa9b0")
"""Told apart on white and on black, and in the order of the bar."""

_PLOT_WIDTH: Final = 1000
_PLOT_HEIGHT: Final = 180
_MARGIN: Final = 26
"""Around the dots of a plot, in the same units."""

MOST_ROWS: Final = 2000
"""Rows of a table, and dots of a plot, that a page has: browsers and readers get slow beyond."""

Cell = str | tuple[str, float]
"""Text, or text and the number that it stands for."""


@dataclass(frozen=True)
class Table:
    """A titled table."""

    heading: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    total: Sequence[Cell] = ()
    """A last row, which sorting leaves where it is."""
    paler: str = ""
    """Rows with a cell that says this are paler than the others."""

    def html(self) -> str:
        """Returns the table, sortable by column: its first `MOST_ROWS` rows, and how many more there are."""
        rows = self.rows[:MOST_ROWS]
        numbers = [any(isinstance(row[i], tuple) for row in rows) for i in range(len(self.header))]
        longest = [max((len(_said(row[i])) for row in rows), default=0) for i in range(len(self.header))]
        kinds = [
            "number" if n else "text" if most > _SHORT else "short" for n, most in zip(numbers, longest, strict=True)
        ]
        head = "".join(f'<th class="{kind}">{_text(cell)}</th>' for kind, cell in zip(kinds, self.header, strict=True))
        lines = [
            _heading(self.heading),
            '<div class="scroll"><table class="sortable">',
            f"<thead><tr>{head}</tr></thead>",
        ]
        lines.append("<tbody>")
        for row in rows:
            mark = ' class="paler"' if self.paler and self.paler in row else ""
            lines.append(f"<tr{mark}>{_cells(kinds, row)}</tr>")
        lines.append("</tbody>")
        lines += [f"<tfoot><tr>{_cells(kinds, self.total)}</tr></tfoot>"] if self.total else []
        lines.append("</table></div>")
        if more := len(self.rows) - len(rows):
            lines.append(f"<p>The first {len(rows)} rows; {more} more are in the report in JSON.</p>")
        return "\n".join(lines)


def page(title: str, parts: Iterable[str]) -> str:
    """Returns the page with `parts`, each as the functions here make it."""
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
    return "\n".join([head, *parts, f"<script>{_SCRIPT}</script>", "</body>", "</html>", ""])


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns one line per (label, value)."""
    return "<dl>" + "\n".join(f"<dt>{_text(label)}</dt><dd>{_text(value)}</dd>" for label, value in pairs) + "</dl>"


def bars(heading: str, rows: Sequence[tuple[str, Sequence[float]]], legend: Sequence[str]) -> str:
    """Returns one bar per (label, lengths), all on one scale, each length in the color of its place in `legend`.

    Without a legend each bar has one length.
    """
    scale = max((sum(lengths) for _, lengths in rows), default=0) or 1
    lines = [_heading(heading)]
    for label, lengths in rows:
        start, boxes = 0.0, []
        for length, name, color in zip(lengths, legend or ("",), _COLORS, strict=False):
            width = 100 * length / scale
            box = f'<rect x="{start:.3f}%" width="{width:.3f}%" height="100%" fill="{color}">'
            boxes.append(f"{box}<title>{_text(name)}</title></rect>")
            start += width
        lines.append(f'<div>{_text(label)}</div><svg class="bar" role="img" aria-label="{_text(label)}">')
        lines.append("".join(boxes) + "</svg>")
    return "\n".join([*lines, _legend(zip(legend, _COLORS, strict=False))])


def text(heading: str, content: str, *, code: bool = True) -> str:
    """Returns text: a paragraph, or lines to copy."""
    shown = "\n".join(map(_text, content.rstrip("\n").split("\n")))
    return f"{_heading(heading)}\n" + (f'<pre class="scroll">{shown}</pre>' if code else f"<p>{shown}</p>")


def heat_map(heading: str, rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Returns one row of cells per (label, levels): the higher a level, from 0 to 1, the darker its cell."""
    lines = [_heading(heading)]
    for label, levels in rows:
        width = 100 / max(len(levels), 1)
        lines.append(f'<div>{_text(label)}</div><svg class="bar" role="img" aria-label="{_text(label)}">')
        shades = [round(0.1 + 0.9 * level, 1) for level in levels]
        start = 0
        for shade, same in itertools.groupby(shades):
            count = len(list(same))
            at = f'x="{start * width:.3f}%" width="{count * width:.3f}%" height="100%"'
            lines.append(f'<rect {at} fill="{_COLORS[2]}" opacity="{shade}"/>')
            start += count
        lines.append("</svg>")
    return "\n".join(lines)


def plot(heading: str, points: Sequence[tuple[str, float]], *, unit: str) -> str:
    """Returns dots at the heights of (label, value), left to right, with the labels to hover over.

    Of more than `MOST_ROWS` points, one dot stands for some that follow each other: the lowest of them.
    """
    each = -(-len(points) // MOST_ROWS)
    if each > 1:
        heading = f"{heading}: the lowest of each {each}"
        starts = range(0, len(points), each)
        points = [min(points[start : start + each], key=lambda point: point[1]) for start in starts]
    low, high = min(value for _, value in points), max(value for _, value in points)
    if high - low < 1:  # all but equal values are shown as such
        low, high = (low + high) / 2 - 1, (low + high) / 2 + 1
    left, right = 3 * _MARGIN, _PLOT_WIDTH - _MARGIN
    step = (right - left) / max(len(points) - 1, 1)

    def height(value: float) -> float:
        return _MARGIN + (high - value) / (high - low) * (_PLOT_HEIGHT - 2 * _MARGIN)

    lines = [_heading(heading), f'<div class="scroll"><svg viewBox="0 0 {_PLOT_WIDTH} {_PLOT_HEIGHT}" role="img"']
    lines.append(f' style="min-width:36rem" aria-label="{_text(heading)}">')
    for value in (high, (low + high) / 2, low):
        y = height(value)
        lines.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity=".2"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.1f} {_text(unit)}</text>')
    for number, (label, value) in enumerate(points):
        at = f'cx="{left + number * step:.1f}" cy="{height(value):.1f}"'
        lines.append(f'<circle {at} r="3.5" fill="{_COLORS[0]}"><title>{_text(label)}</title></circle>')
    return "\n".join([*lines, "</svg></div>"])


def scatter(
    heading: str,
    points: Sequence[tuple[str, float, float, int]],
    axes: tuple[str, str],
    legend: Mapping[int, str],
) -> str:
    """Returns dots at (label, x, y, color): in the order of the points, with the labels to hover over.

    Args:
        heading: of the plot.
        points: at least one; each color is a key of `legend`.
        axes: what x and y are.
        legend: what a color means.
    """
    xs, ys = [x for _, x, _, _ in points], [y for _, _, y, _ in points]
    height = 2 * _PLOT_HEIGHT
    spans = [(min(values), (max(values) - min(values)) or 1.0) for values in (xs, ys)]
    left, right, top, bottom = 5 * _MARGIN, _PLOT_WIDTH - _MARGIN, _MARGIN, height - 2 * _MARGIN
    lines = [_heading(heading), f'<div class="scroll"><svg viewBox="0 0 {_PLOT_WIDTH} {height}" role="img"']
    lines.append(f' style="min-width:36rem" aria-label="{_text(heading)}">')
    for part in (0, 0.5, 1):
        (low_x, wide), (low_y, high) = spans
        x, y = left + part * (right - left), bottom - part * (bottom - top)
        lines.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity=".2"/>')
        lines.append(f'<text x="{left - 12}" y="{y + 4:.1f}" text-anchor="end">{low_y + part * high:.5g}</text>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 22}" text-anchor="middle">{low_x + part * wide:.4g}</text>')
    names = " against ".join(_text(axis) for axis in reversed(axes))
    lines.append(f'<text x="{(left + right) / 2}" y="{height - 8}" text-anchor="middle">{names}</text>')
    for label, x, y, color in points:
        at = [(value - low) / span for value, (low, span) in zip((x, y), spans, strict=True)]
        place = f'cx="{left + at[0] * (right - left):.1f}" cy="{bottom - at[1] * (bottom - top):.1f}"'
        lines.append(f'<circle {place} r="5" fill="{_COLORS[color]}"><title>{_text(label)}</title></circle>')
    return "\n".join([*lines, "</svg></div>", _legend((name, _COLORS[color]) for color, name in legend.items())])


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    items = (f'<li><i style="background:{color}"></i>{_text(name)}</li>' for name, color in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


_SHORT: Final = 18
"""Characters up to which the cells of a column stay on one line."""

_LONG_WORD: Final = re.compile(r"\S{25,}")
_INNER_MARKS: Final = re.compile(r"(?<=\w)[/._:-]+(?=\w)")


def _cells(kinds: Sequence[str], row: Sequence[Cell]) -> str:
    parts = []
    for kind, cell in zip(kinds, row, strict=True):
        sort = f' data-sort="{cell[1]!r}"' if isinstance(cell, tuple) else ""
        parts.append(f'<td class="{kind}"{sort}>{_folding(_said(cell)) if kind == "text" else _text(_said(cell))}</td>')
    return "".join(parts)


def _said(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def _folding(text: str) -> str:
    """Returns `text` so that long names fold after their dots and slashes, and nothing else inside a word."""
    return _LONG_WORD.sub(lambda word: _INNER_MARKS.sub(r"\g<0><wbr>", word[0]), _text(text))


def _heading(text: str) -> str:
    return f"<h2>{_text(text)}</h2>" if text else ""


def _text(text: str) -> str:
    """Returns `text` as it may stand anywhere in the page."""
    return escape(printable(text))
