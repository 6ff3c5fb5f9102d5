"""A report as one HTML page. It fetches nothing, and is readable without its script, which sorts tables and copies.

Names come from files of any origin. So all text is escaped, no text is part of the script, and the page's policy allows
no other script.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from html import escape
from typing import Final

from mxfp8_graph.naming import printable
from mxfp8_graph.report import origin
from mxfp8_graph.report.scatter import Scatter
from mxfp8_graph.report.section import FOLDS, STYLES, Cell, Head, Section, Tile, cell_text

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
for (const text of document.querySelectorAll("pre")) {
  const button = document.createElement("button");
  button.textContent = "Copy";
  button.onclick = () => {
    getSelection().selectAllChildren(text);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  };
  text.before(button);
}
"""

# Light and dark by the reader's system. A wide table scrolls on its own, its first column stays in view, and a shadow
# shows where columns are hidden. Bars are below their numbers.
_STYLE: Final = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d2127; --soft: #5d6670; --line: #d9dde2; --box: #f4f6f8;
  --bar: #7ea6e8; --green: #1f7d55; --yellow: #96620a; --red: #b53a34; --good: #e9f6ef; --warning: #fdf4e2;
  --bad: #fdeceb; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e4e7ea; --soft: #9aa3ad; --line: #343a42;
  --box: #1e2329; --bar: #4a78bd; --green: #4fc08d; --yellow: #e5a83b; --red: #e2756f; --good: #16281f;
  --warning: #2b2413; --bad: #301c1b; } }
* { box-sizing: border-box; }
body { background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; max-width: 72rem;
  margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.35rem; margin: 0 0 .8rem; }
h2, summary { font-size: 1.05rem; font-weight: bold; margin: 2rem 0 .6rem; }
summary { cursor: pointer; margin: 1.2rem 0 .6rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .8rem; margin: 1rem 0; }
.tile { background: var(--box); border-radius: .5rem; padding: .7rem .9rem; min-width: 0; }
.tile b { display: block; font-size: 1.5rem; line-height: 1.3; }
.tile span { color: var(--soft); font-size: 13px; }
.answer { font-size: 1.1rem; border-left: .3rem solid var(--bar); border-radius: .3rem; background: var(--box);
  padding: .6rem .9rem; margin: 1rem 0; }
.answer.good { border-color: var(--green); background: var(--good); }
.answer.warning { border-color: var(--yellow); background: var(--warning); }
.answer.bad { border-color: var(--red); background: var(--bad); }
.good::before { content: "\\2713\\a0"; color: var(--green); font-weight: bold; }
.warning::before { content: "!\\a0"; color: var(--yellow); font-weight: bold; }
.bad::before { content: "\\2717\\a0"; color: var(--red); font-weight: bold; }
dl { display: grid; grid-template-columns: minmax(5rem, max-content) minmax(0, 1fr); gap: .15rem 1.2rem;
  margin: 1rem 0; }
dt { color: var(--soft); }
dd { margin: 0; }
.scroll { overflow-x: auto; background: linear-gradient(to left, var(--page) 1rem, transparent 2rem) right / 3rem 100%
  no-repeat local, linear-gradient(to left, var(--line), transparent) right / .8rem 100% no-repeat scroll; }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--page); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; cursor: pointer; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number, .short { white-space: nowrap; }
.text { min-width: 8rem; }
td.bar { background: linear-gradient(var(--bar), var(--bar)) left bottom / var(--part) 3px no-repeat; }
tr.best { font-weight: bold; color: var(--green); }
.green { color: var(--green); } .yellow { color: var(--yellow); } .red { color: var(--red); }
th[aria-sort=ascending]::after { content: " \\2191"; }
th[aria-sort=descending]::after { content: " \\2193"; }
svg { display: block; width: 100%; max-width: 46rem; font-size: 12px; margin: .6rem 0; }
svg path { stroke: var(--soft); fill: none; } svg .grid { stroke: var(--line); }
svg .pareto { stroke: var(--green); stroke-dasharray: 4 4; }
svg text { fill: var(--ink); stroke: var(--page); stroke-width: 3px; paint-order: stroke; }
svg text.best { font-weight: bold; fill: var(--green); }
svg circle { fill: var(--bar); } svg circle.best { fill: var(--green); }
svg circle.reference { fill: var(--page); stroke: var(--ink); stroke-width: 2px; }
svg rect { fill: var(--bar); } svg .other { fill: var(--soft); opacity: .6; }
code, pre { font-size: .9em; background: var(--box); border-radius: .3rem; }
code { padding: .1rem .25rem; }
pre { padding: .7rem .9rem; margin: .3rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
button { float: right; margin: .35rem .4rem; font: 12px system-ui, sans-serif; color: var(--ink); cursor: pointer;
  background: var(--page); border: 1px solid var(--line); border-radius: .3rem; padding: .25rem .6rem; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); font-size: 13px; }
@media (max-width: 45rem) { table { font-size: 12px; } th, td { padding-right: .5rem; } dl { column-gap: .6rem; }
  .tile b { font-size: 1.25rem; } td.text { min-width: 7rem; } }
@media print { :root { color-scheme: light; --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --box: #fff; }
  * { print-color-adjust: exact; } body { max-width: none; margin: 0; font-size: 12px; } table { font-size: 11px; }
  .scroll { overflow: visible; } button { display: none; } h2 { break-after: avoid; } tr { break-inside: avoid; } }
"""


_LONG: Final = 16
"""Letters of a name that may fold."""


def page(title: str, answer: str, head: Head, sections: Iterable[Section], files: Iterable[str]) -> str:
    """Returns the page: title, answer, head, sections, and a footer that identifies the files that exist."""
    # The policy allows the script by its hash: even if a name got through the escaping, its code could not run.
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    start = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(printable(title))}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{_text(title)}</h1>"""
    footer = f"<footer>{_facts(origin.facts(files))}</footer>"
    script = f"<script>{_SCRIPT}</script>"
    return "\n".join([start, *_head(answer, head), *map(_section, sections), footer, script, "</body>", "</html>", ""])


def _head(answer: str, head: Head) -> Iterator[str]:
    """Yields the parts of the head that there are."""
    if answer:
        # The command stands below.
        answer = answer.replace(f"`{head.command}`", "the command below") if head.command else answer
        yield f'<p class="{f"answer {head.verdict}".rstrip()}">{_marked(answer)}</p>'
    if head.tiles:
        yield f'<div class="tiles">{"".join(map(_tile, head.tiles))}</div>'
    if head.command:
        yield f"<pre>{escape(printable(head.command))}</pre>"


def _tile(tile: Tile) -> str:
    before = f"<span>{_text(tile.before)} &rarr;</span>" if tile.before else ""
    note = f"<span>{_text(tile.note)}</span>" if tile.note else ""
    return f'<div class="tile"><span>{_text(tile.label)}</span><br>{before}<b>{_text(tile.value)}</b>{note}</div>'


def _section(section: Section) -> str:
    """Returns a section as HTML; empty if it has nothing to show."""
    parts = []
    if section.facts:
        parts.append(_facts(section.facts))
    if section.text:
        shown = "\n".join(escape(printable(line)) for line in section.text.rstrip("\n").split("\n"))
        parts.append(f"<pre>{shown}</pre>")
    if section.picture:
        parts.append(section.picture.svg())
    if section.scatter and {section.scatter.across, section.scatter.up} <= {*section.columns[0]}:
        parts += _scatter(section, section.scatter)  # `filled` removes empty columns
    if section.columns[1]:
        parts.append(_table(section))
    if section.title and parts and (section.detail or section.folded):
        return "\n".join([f"<details><summary>{_text(section.title)}</summary>", *parts, "</details>"])
    heading = f"<h2>{_text(section.title)}</h2>" if section.title and parts else ""
    return "\n".join([heading, *parts])


def _scatter(section: Section, chart: Scatter) -> list[str]:
    """Returns a chart with a point for each row that has both numbers; [] without such a row."""
    across, up = map(section.columns[0].index, (chart.across, chart.up))
    rows = [(printable(cell_text(row[0])), row[across], row[up]) for row in section.rows]
    points = [(name, x[1], y[1]) for name, x, y in rows if isinstance(x, tuple) and isinstance(y, tuple)]
    return [chart.svg(points, None if section.best is None else rows[0][0])] if points else []


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "\n".join(f"<dt>{_text(label)}</dt><dd>{_marked(value)}</dd>" for label, value in pairs) + "</dl>"


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
        if scale > 0:  # a negative number has no bar
            style, kind = f' style="--part: {100 * max(cell[1], 0) / scale:.1f}%"', f"{kind} bar"
    classes = f"{kind} {STYLES.get(text, '')}".rstrip()
    return f'<td class="{classes}"{sort}{style}>{_text(text)}</td>'


def _text(text: str) -> str:
    """Returns `text` escaped for any place in the page but its title; long names fold at their dots."""
    # A name is escaped word by word, so that the places to fold are not inside of an entity.
    words = re.split(r"(\s+)", printable(text))
    parts = ([word] if len(word) < _LONG else FOLDS.split(word) for word in words)
    return "".join("<wbr>".join(map(escape, part)) for part in parts)


def _marked(text: str) -> str:
    """Returns `text` escaped, with what is between backticks as code."""
    return "".join(f"<code>{_text(part)}</code>" if i % 2 else _text(part) for i, part in enumerate(text.split("`")))
