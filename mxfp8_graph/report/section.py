"""The parts of a report: tables, facts and text to copy; and how a terminal shows them. `html.py` makes a page.

On a terminal: aligned columns, one line per row and never folded, to read, grep and pipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.filesize import decimal as size  # a number of bytes in words
from rich.text import Text

from mxfp8_graph.naming import printable

Cell = str | tuple[str, float]
"""Text, or text and the number that it stands for."""
Columns = tuple[tuple[str, ...], Sequence[tuple[Cell, ...]]]
"""Header and rows of a table."""

STYLES: Final = {
    "rewritten": "green",
    "chosen": "green",
    "kept": "yellow",
    "ok": "green",
    "failed": "bold red",
    "FAILED": "bold red",
    "missing": "yellow",
    "broken": "red",
}
"""Text of a cell -> its style on a terminal."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table, facts or a text; what is empty is left out."""

    title: str = ""
    """Heading on a page; on a terminal only a text has it."""
    facts: Sequence[tuple[str, str]] = ()
    """(label, value) pairs."""
    text: str = ""
    """A text to copy, such as a recipe."""
    columns: Columns = ((), ())
    """Header and rows of the table."""
    bar: str = ""
    """Title of a column whose cells have bars on a page."""
    most: int | None = None
    """Number of rows that a terminal shows unless all are asked for; negative for the last rows."""
    detail: bool = False
    """Whether a terminal shows it only if all is asked for."""


def number(value: float | None, form: str = ".3g") -> Cell:
    """Returns a cell for a number: empty without one, and as its text alone where it is not finite."""
    return "" if value is None else (format(value, form), float(value)) if math.isfinite(value) else str(value)


def byte_size(count: int | None) -> Cell:
    """Returns a cell for a number of bytes, in words; empty without one."""
    return "" if count is None else (size(count), float(count))


def cell_text(cell: Cell) -> str:
    """Returns the text of a cell."""
    return cell if isinstance(cell, str) else cell[0]


def shape_text(shape: Sequence[int]) -> str:
    """Returns the shape of an array in words: 2 x 16."""
    return " x ".join(map(str, shape)) or "scalar"


def filled(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Columns:
    """Returns a table without its columns that have only empty cells."""
    used = [i for i in range(len(header)) if any(row[i] for row in rows) or not rows]
    return tuple(header[i] for i in used), [tuple(row[i] for i in used) for row in rows]


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
