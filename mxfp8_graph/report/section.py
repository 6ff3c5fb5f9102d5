"""The parts of a report: tiles, tables, facts, texts to copy and pictures; and their form on a terminal.

A result lists its sections with the most important one first. A page (`html.py`) shows them in this order. A terminal
shows them in reverse, because its last lines are in view.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal as size  # a number of bytes in words
from rich.table import Column, Table
from rich.text import Text

from mxfp8_graph.naming import printable
from mxfp8_graph.report.bars import Bars, Depths
from mxfp8_graph.report.scatter import Scatter

Cell = str | tuple[str, float]
"""Text, or (text, its number)."""
Columns = tuple[tuple[str, ...], Sequence[tuple[Cell, ...]]]
"""Header and rows of a table."""

STYLES: Final = {
    **dict.fromkeys(("rewritten", "chosen", "ok", "passed", "met"), "green"),
    **dict.fromkeys(("kept", "missing", "not judged"), "yellow"),
    **dict.fromkeys(("missed", "failed", "broken"), "red"),
}
"""Text of a cell -> its color. "met" and "missed" are about budgets and limits, "kept" about sites."""

WIDTH: Final = 100
"""Width in columns of a text that goes to a file or a pipe."""
_LEAST, _SHORT, _WORD = 9, 20, 44
"""Least width of a title that folds; greatest width of a cell that does not fold, and of a part that stays whole."""
FOLDS: Final = re.compile(r"(?<=[./_])(?=\w)")
"""The places where a long name may fold."""


class Tile(NamedTuple):
    """A number at the top of a page: size, speed or error; `before` is the original's."""

    label: str
    value: str
    before: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Head:
    """The top of a page, below the answer."""

    verdict: str = ""
    """The color of the answer: "good", "warning", "bad", or "" for none."""
    tiles: Sequence[Tile] = ()
    command: str = ""
    """The next command, to copy; "" without one."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table, facts or a text; empty parts are left out.

    A comparison: `Section(columns=(("recipe", "relative L2", "ms"), rows), bar="relative L2",
    scatter=Scatter(across="ms", up="relative L2"), best=2)`, where a row is `("mxint8", number(.0041), number(1.5))`.
    Cells "met" and "missed" are green and red, see `STYLES`.
    """

    title: str = ""
    """Heading."""
    facts: Sequence[tuple[str, str]] = ()
    """(label, value) pairs."""
    text: str = ""
    """A text to copy, such as a recipe."""
    columns: Columns = ((), ())
    """Header and rows of the table. The first column has the names of the rows."""
    best: int | None = None
    """The recommended row of `columns`: it comes first, in bold."""
    bar: str = ""
    """Title of a column whose cells have bars on a page."""
    scatter: Scatter | None = None
    """Chart of `columns` on a page."""
    picture: Bars | Depths | None = None
    most: int | None = None
    """Number of rows that a terminal shows without --verbose; None shows all."""
    detail: bool = False
    """Whether a terminal shows the section only with --verbose, and a page folds it."""
    folded: bool = False
    """Whether a page folds it, though a terminal shows it."""

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """The rows, the best one first."""
        rows = list(self.columns[1])
        return rows if self.best is None else [rows.pop(self.best), *rows]


def number(value: float | None, form: str = ".3g") -> Cell:
    """Returns a cell for a number; an empty one for None."""
    # NaN and infinity have no place in an order or on a chart, so they are text only.
    return "" if value is None else (format(value, form), float(value)) if math.isfinite(value) else str(value)


def byte_size(count: int | None) -> Cell:
    """Returns a cell for a number of bytes, in words; empty without one."""
    return "" if count is None else (size(count), float(count))


def cell_text(cell: Cell) -> str:
    """Returns the text of a cell."""
    return cell if isinstance(cell, str) else cell[0]


def change(before: float, after: float, *, faster: bool = False) -> str:
    """Returns the ratio of two sizes, or with `faster` of two times, in words; "" if there is none."""
    if not (before > 0 and after > 0):
        return ""
    return f"{before / after:.2f} times as fast" if faster else f"{after / before:.0%} of the size"


def shape_text(shape: Sequence[int]) -> str:
    """Returns the shape of an array as text: 2 x 16."""
    return " x ".join(map(str, shape)) or "scalar"


def filled(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Columns:
    """Returns a table without columns of empty cells; a table without rows keeps all columns."""
    used = [i for i in range(len(header)) if any(row[i] for row in rows) or not rows]
    return tuple(header[i] for i in used), [tuple(row[i] for i in used) for row in rows]


def render(sections: Iterable[Section], answer: str, *, every: bool) -> Group:
    """Returns the sections and the answer; with `every`, also details and the rows above a section's `most`."""
    parts: list[RenderableType] = []
    for section in reversed([section for section in sections if every or not section.detail]):
        shown = section.rows if every else section.rows[: section.most]
        if section.title and (shown or section.facts):
            parts += [""] * bool(parts and parts[-1] != "")
            parts.append(Text(printable(section.title), "bold underline"))
        if shown:
            parts.append(table(section.columns[0], shown, best=section.best is not None))
            if others := len(section.rows) - len(shown):
                parts.append(f"... and {others} more; --verbose and --json have all")
            parts.append("")
        if section.facts:
            parts += _facts([(printable(label), printable(value)) for label, value in section.facts])
        if section.text:
            parts.append(_line("\n".join(map(printable, f"{section.title}:\n\n{section.text.rstrip()}\n".split("\n")))))
    return Group(*parts, *([_line(printable(answer))] if answer else []))


def _facts(pairs: Sequence[tuple[str, str]]) -> list[Text]:
    """Returns lines in two columns, folded between words only, so that a path stays whole."""
    width = max(cell_len(label) for label, _ in pairs) + 2
    folded = textwrap.TextWrapper(WIDTH, "", " " * width, break_long_words=False, break_on_hyphens=False)
    return [_line(folded.fill(f"{label:{width}}{value}")) for label, value in pairs]


def _line(text: str) -> Text:
    """Returns a line that only the terminal itself folds, so that a path or a command can be copied."""
    return Text(text, no_wrap=True, overflow="ignore")


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]], *, best: bool = False) -> Group:
    """Returns aligned columns below `header`.

    Columns that do not fit into the width come below the others, again next to the names of the rows.
    """
    columns = [_column(*each) for each in zip(header, zip(*rows, strict=True), strict=True)]
    needs = [(column.min_width or 0) + 2 for column in columns]
    # Column 0, the names of the rows, begins every group.
    groups = [[0]]
    for index in range(1, len(columns)):
        if sum(needs[each] for each in (*groups[-1], index)) > WIDTH + 2:
            groups.append([0])
        groups[-1].append(index)
    tables = []
    for group in groups:
        shown = [columns[index].copy() for index in group]
        _widen(shown)
        tables.append(Table(*shown, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold"))
        for number, row in enumerate(rows):
            texts = [printable(cell_text(row[index])) for index in group]
            texts = [_folded(each, column.width or 0) for each, column in zip(texts, shown, strict=True)]
            cells = (Text(each, STYLES.get(each, "")) for each in texts)
            tables[-1].add_row(*cells, style="bold" * (best and number == 0))
    return Group(*tables)


def _widen(columns: Sequence[Column]) -> None:
    """Sets the widths of columns: what their cells need, then what their titles need, as far as there is room."""
    widths = [column.min_width or 0 for column in columns]
    room = WIDTH + 2 - sum(width + 2 for width in widths)
    for wanted in ([column.max_width or 0 for column in columns], [len(str(column.header)) for column in columns]):
        more = [max(most - width, 0) for most, width in zip(wanted, widths, strict=True)]
        # Those that need little come first, so that names and reasons share what they leave.
        for done, i in enumerate(sorted(range(len(columns)), key=more.__getitem__)):
            widths[i] += (step := min(more[i], room // (len(columns) - done)))
            room -= step
    for column, width in zip(columns, widths, strict=True):
        column.width = width


def _column(title: str, cells: Sequence[Cell]) -> Column:
    """Returns a column without its cells, with its least and its greatest width. Short cells and words stay whole."""
    title, numbers = printable(title), any(isinstance(cell, tuple) for cell in cells)
    widest = max(cell_len(printable(cell_text(cell))) for cell in cells)
    words = (
        cell_len(part) for cell in cells for word in printable(cell_text(cell)).split() for part in FOLDS.split(word)
    )
    least = max(min(max(words, default=0), _WORD), min(len(title), _LEAST), *map(len, title.split()), 0)
    least = max(widest, least) if widest <= _SHORT else least
    justify: Literal["left", "right"] = "right" if numbers else "left"
    return Column(Text(title), justify=justify, overflow="fold", min_width=least, max_width=widest)


def _folded(text: str, width: int) -> str:
    """Returns `text` with each name wider than `width` in lines, which end at a dot, a slash or an underscore."""

    def lines(name: re.Match[str]) -> str:
        folded = [""]
        for part in FOLDS.split(name[0]):
            folded += [""] * (folded[-1] != "" and cell_len(folded[-1] + part) > width)
            folded[-1] += part
        return "\n".join(folded)

    return re.sub(r"\S+", lines, text)


def plain_text(result: RenderableType) -> str:
    """Returns the text that a terminal without colors shows."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(result, crop=False, markup=False, highlight=False, emoji=False)
    # Blanks at line ends show up in diffs.
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))
