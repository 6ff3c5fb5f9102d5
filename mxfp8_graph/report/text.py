"""Reports on a terminal: aligned columns, one line per row and never folded, to read, grep and pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

from mxfp8_graph.naming import printable
from mxfp8_graph.report.section import STYLES, Cell, Section, cell_text


def render(headline: str, sections: Iterable[Section], *, every: bool) -> Text:
    """Returns the headline and the sections; with `every` also details, and the rows that are too many otherwise."""
    parts = [Text(printable(headline))] if headline else []
    # Details first, since the last lines of a terminal are the ones in view.
    for section in sorted(sections, key=lambda section: not section.detail):
        if section.detail and not every:
            continue
        header, rows = section.columns
        most = len(rows) if every or section.most is None else section.most
        if rows:
            parts.append(columns(header, rows[min(most, 0) :][: abs(most)]))
            if (others := len(rows) - abs(most)) > 0:
                before = " before" if most < 0 else ""
                parts.append(Text(f"... and {others} more{before}; --verbose and --json have all"))
            parts.append(Text())
        if section.facts:
            parts.append(columns((), section.facts))
        if section.text:
            shown = "\n".join(map(printable, section.text.rstrip("\n").split("\n")))
            parts.append(Text(f"\n{section.title}:\n\n{shown}"))
    return Text("\n").join(parts)


def columns(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Text:
    """Returns one line per row, in aligned columns, below `header` if there is one."""
    table = [tuple(printable(cell_text(cell)) for cell in row) for row in (header, *rows) if row]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    lines = []
    for number, row in enumerate(table):
        line = Text()
        for cell, width in zip(row, widths, strict=True):
            style = "bold" if header and number == 0 else STYLES.get(cell, "")
            line.append(cell + " " * (width - cell_len(cell) + 2), style=style)
        line.rstrip()  # blanks at line ends show up in diffs
        lines.append(line)
    return Text("\n").join(lines)
