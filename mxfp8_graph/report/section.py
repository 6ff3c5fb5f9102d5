"""The parts of a report: tables, facts and text to copy. `text.py` and `html.py` show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.filesize import decimal as size  # a number of bytes in words

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
