"""Reports on a terminal: tables and lists, as Rich prints them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from textwrap import wrap
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mxfp8_graph.naming import printable
from mxfp8_graph.report.section import STYLES, Cell, Section, cell_text

PIPE_WIDTH: Final = 120
"""Width of a `Fitted` table in a pipe or a file."""


def render(headline: str, sections: Iterable[Section], *, every: bool) -> RenderableType:
    """Returns the headline and the sections; with `every` also details, and the rows that are too many otherwise."""
    parts: list[RenderableType] = [Text(printable(headline))] if headline else []
    for section in sections:
        if section.detail and not every:
            continue
        header, rows = section.columns
        most = len(rows) if every or section.most is None else section.most
        shown = rows[min(most, 0) :][: abs(most)]
        if rows:
            fitted = section.spare is not None
            parts.append(Fitted(header, shown, section.spare or ()) if fitted else grid(header, shown))
            if others := rows[:most] if most < 0 else rows[most:]:
                text = f"... and {len(others)} more{' before' * (most < 0)}{section.rest(others)}"
                parts.append(Text(f"{text}; --verbose and --json have all"))
            parts += [Text()] * fitted
        if section.facts:
            parts.append(lines(section.facts))
        if section.text:
            shown_text = "\n".join(map(printable, section.text.rstrip("\n").split("\n")))
            parts += [Text(f"\n{section.title}:\n"), Text(shown_text)]
    return Group(*parts)


def plain(shown: RenderableType) -> str:
    """Returns what `render` returns as text, for `print` and logs; `PIPE_WIDTH` wide, without blanks at line ends."""
    console = Console(width=PIPE_WIDTH, color_system=None, file=StringIO(), markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def grid(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """Returns a plain table. Long cells fold onto further lines: a name is never cut."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in header:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell), style=STYLES.get(cell, "")) for cell in map(cell_text, row)))
    return table


@dataclass(frozen=True)
class Fitted:
    """A table that fits the terminal, or `PIPE_WIDTH`: its header is wrapped, then columns are left out and named."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    spare: Sequence[str] = ()
    """Titles of the columns to leave out, first to last; after these the ones on the right, but never the first."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yields the table, and a line with what is left out."""
        # In a pipe the console is 10 000 wide, which no reader of a file is.
        width = options.max_width if console.is_terminal else PIPE_WIDTH
        table, left_out = columns(self.header, self.rows), dict[str, None]()
        cells = list(zip(*self.rows, strict=True)) or [()] * len(self.header)
        shown = [(title, _wrapped(title, column), column) for title, column in zip(self.header, cells, strict=True)]
        while max(map(cell_len, table.plain.split("\n"))) > width:
            table = columns([title for _, title, _ in shown], list(zip(*(column for *_, column in shown), strict=True)))
            titles = [title for title, *_ in shown[1:]]
            if max(map(cell_len, table.plain.split("\n"))) <= width or not titles:
                break
            spare = next((title for title in self.spare if title in titles), titles[-1])
            left_out[spare] = None
            shown = [shown[0], *(column for column in shown[1:] if column[0] != spare)]
        yield table
        if left_out:
            yield Text(f"left out for the width, in --json: {'; '.join(left_out)}")


def _wrapped(title: str, cells: Sequence[Cell]) -> str:
    width = max((cell_len(cell_text(cell)) for cell in cells), default=0)
    return "\n".join(wrap(title, max(width, 6), break_long_words=False, break_on_hyphens=False))


def columns(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Text:
    """Returns one line per row, in aligned columns and never folded: for lists to read, grep and pipe."""
    top = list(zip_longest(*(title.split("\n") for title in header), fillvalue=""))
    table = [*top, *(tuple(printable(cell_text(cell)) for cell in row) for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    text = Text(no_wrap=True, overflow="ignore")
    for number, row in enumerate(table):
        # No blanks after the last cell: they show up in diffs.
        last = max((i for i, cell in enumerate(row) if cell), default=0)
        for i, cell in enumerate(row[: last + 1]):
            text.append(cell, style=STYLES.get(cell, "bold" if number < len(top) else ""))
            text.append("\n" if i == last else " " * (widths[i] - cell_len(cell) + 2))
    text.right_crop(1)
    return text


def lines(pairs: Iterable[tuple[str, str]]) -> Table:
    """Returns one line per (label, value)."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for label, value in pairs:
        table.add_row(label, Text(printable(value)))
    return table
