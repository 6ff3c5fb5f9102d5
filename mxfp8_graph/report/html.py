"""A report as one HTML page. It fetches nothing and is readable without its script, which sorts tables.

Names come from files of any origin. So all text is escaped, no text is part of the script, and the page's policy allows
no other script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape
from typing import Final

from mxfp8_graph.naming import printable
from mxfp8_graph.report import origin
from mxfp8_graph.report.scatter import svg
from mxfp8_graph.report.section import STYLES, Cell, Section, cell_text

# Cells that stand for a number have it in `data-sort`: their text may have a unit.
_SCRIPT: Final = """
for (const head of document.querySelectorAll("thead th")) head.onclick = () => {
  const up = head.ariaSort !== "ascending", body = head.closest("table").tBodies[0];
  const value = row => {
    const cell = row.cells[head.cellIndex];
    return "sort" in cell.dataset ? Number(cell.dataset.sort) : cell.textContent;
  };
  for (const other of head.parentNode.cells) other.ariaSort = null;
  head.ariaSort = up ? "ascending" : "descending";
  const order = (x, y) => typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
  body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * order(value(a), value(b))));
};
"""

# Light and dark by the reader's system. A wide table scrolls on its own, its first column stays in view, and a shadow
# shows where columns are hidden.
_STYLE: Final = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d2127; --soft: #5d6670; --line: #d9dde2; --box: #f4f6f8;
  --bar: #bcd3f7; --green: #1f7d55; --yellow: #96620a; --red: #b53a34; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e4e7ea; --soft: #9aa3ad; --line: #343a42;
  --box: #1e2329; --bar: #2b4a7c; --green: #4fc08d; --yellow: #e5a83b; --red: #e2756f; } }
body { background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; max-width: 72rem;
  margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; margin: 0 0 .5rem; }
h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; }
.answer { font-size: 1.15rem; border-left: .25rem solid var(--bar); padding: .3rem .8rem; }
dl { display: grid; grid-template-columns: minmax(5rem, max-content) 1fr; gap: .15rem 1.2rem; margin: 1rem 0; }
dt { color: var(--soft); }
dd { margin: 0; }
.scroll { overflow-x: auto; background: linear-gradient(to left, var(--page) 1rem, transparent 2rem) right / 3rem 100%
  no-repeat local, linear-gradient(to left, var(--line), transparent) right / .8rem 100% no-repeat scroll; }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--page); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; overflow-wrap: normal; cursor: pointer; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number, .short { white-space: nowrap; }
.text { min-width: 8rem; }
.best { font-weight: bold; }
.green { color: var(--green); } .yellow { color: var(--yellow); } .red { color: var(--red); }
th[aria-sort=ascending]::after { content: " \\2191"; }
th[aria-sort=descending]::after { content: " \\2193"; }
svg { width: 100%; max-width: 46rem; font-size: 12px; }
svg path { stroke: var(--soft); fill: none; } svg .grid { stroke: var(--line); }
svg text { fill: var(--ink); stroke: var(--page); stroke-width: 4px; paint-order: stroke; }
svg circle { fill: var(--soft); } svg circle.best { fill: var(--green); }
pre { background: var(--box); padding: .6rem .8rem; margin: .3rem 0; white-space: pre-wrap; font-size: 13px; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); font-size: 13px; }
@media (max-width: 45rem) { table { font-size: 12px; } th, td { padding-right: .5rem; } dl { column-gap: .6rem; }
  td { overflow-wrap: break-word; } .short { white-space: normal; }
  td.text { min-width: 7rem; overflow-wrap: anywhere; } }
@media print { :root { color-scheme: light; --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --box: #fff; }
  * { print-color-adjust: exact; } body { max-width: none; margin: 0; font-size: 12px; } table { font-size: 11px; }
  .scroll { overflow: visible; } h2 { break-after: avoid; } tr { break-inside: avoid; } }
"""


def page(title: str, answer: str, sections: Iterable[Section], files: Iterable[str]) -> str:
    """Returns the page: title, answer, sections, and a footer that identifies the files that exist."""
    # The policy allows the script by its hash: even if a name got through the escaping, its code could not run.
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
    first = [f'<p class="answer">{_text(answer)}</p>'] if answer else []
    footer = f"<footer>{_facts(origin.facts(files))}</footer>"
    script = f"<script>{_SCRIPT}</script>"
    return "\n".join([head, *first, *map(_section, sections), footer, script, "</body>", "</html>", ""])


def _section(section: Section) -> str:
    """Returns a section as HTML; empty if it has nothing to show."""
    parts = []
    if section.facts:
        parts.append(_facts(section.facts))
    if section.text:
        shown = "\n".join(map(_text, section.text.rstrip("\n").split("\n")))
        parts.append(f"<pre>{shown}</pre>")
    if section.scatter and {*section.scatter} <= {*section.columns[0]}:  # `filled` removes empty columns
        parts += _scatter(section, section.scatter)
    if section.columns[1]:
        parts.append(_table(section))
    heading = f"<h2>{_text(section.title)}</h2>" if section.title and parts else ""
    return "\n".join([heading, *parts])


def _scatter(section: Section, titles: tuple[str, str]) -> list[str]:
    """Returns a chart with a point for each row that has both numbers; [] without such a row."""
    across, up = map(section.columns[0].index, titles)
    rows = [(printable(cell_text(row[0])), row[across], row[up]) for row in section.rows]
    points = [(name, x[1], y[1]) for name, x, y in rows if isinstance(x, tuple) and isinstance(y, tuple)]
    return [svg(points, titles, None if section.best is None else rows[0][0])] if points else []


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "\n".join(f"<dt>{_text(label)}</dt><dd>{_text(value)}</dd>" for label, value in pairs) + "</dl>"


def _table(section: Section) -> str:
    """Returns the table, sortable by column."""
    header, rows = section.columns[0], section.rows
    kinds, scales = [], []
    for title, column in zip(header, zip(*rows, strict=True), strict=True):
        numbers = [cell[1] for cell in column if isinstance(cell, tuple)]
        # Short cells never fold on a wide page, so that dtypes stay in one line.
        short = max(len(cell_text(cell)) for cell in column) <= 20
        kinds.append("number" if numbers else "short" if short else "text")
        scales.append(max(numbers, default=0.0) if title == section.bar else 0.0)
    head = "".join(f'<th class="{kind}">{_text(cell)}</th>' for kind, cell in zip(kinds, header, strict=True))
    lines = [f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>']
    for index, row in enumerate(rows):
        best = ' class="best"' if section.best is not None and index == 0 else ""
        lines.append(f"<tr{best}>{''.join(map(_cell, row, kinds, scales))}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def _cell(cell: Cell, kind: str, scale: float) -> str:
    """Returns a cell. With a `scale` above 0 it has a bar, which fills the cell for a number equal to `scale`."""
    sort, style, text = "", "", cell_text(cell)
    if isinstance(cell, tuple):
        sort = f' data-sort="{cell[1]!r}"'
        # A negative number has no bar.
        width = f"{100 * max(cell[1], 0) / scale:.1f}%" if scale > 0 else ""
        style = f' style="background: linear-gradient(to right, var(--bar) {width}, transparent 0)"' if width else ""
    classes = f"{kind} {STYLES.get(text, '')}".rstrip()
    return f'<td class="{classes}"{sort}{style}>{_text(text)}</td>'


def _text(text: str) -> str:
    """Returns `text` escaped for any place in the page."""
    return escape(printable(text))
