"""Reports on a terminal, as Rich tables and lists of the data in `data` and `account`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mxfp8_graph.naming import printable
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.report import account, data, html
from mxfp8_graph.report.data import SITE_HEADER, RewriteReport

STYLES: Final = {
    "rewritten": "green",
    "kept": "yellow",
    "ok": "green",
    "failed": "bold red",
    "missing": "yellow",
    "broken": "red",
}
"""Text of a cell -> its style."""

PIPE_WIDTH: Final = 120
"""Width of a `Fitted` table in a pipe or a file."""

MOST_REASONS: Final = 20
"""Reasons that the end of a rewrite names; the others are one more row."""


def closing(report: RewriteReport) -> RenderableType:
    """Returns the table that ends a rewrite: sites grouped by reason, then `facts`."""
    if report.already_rewritten:
        return lines(
            (("", data.headline(report)), *(fact for fact in data.facts(report) if fact[0] in {"note", "result"}))
        )
    reasons_found = data.reason_rows(report)
    # Patterns that match single sites make a reason for each; a terminal has no room for hundreds.
    if more := reasons_found[MOST_REASONS:]:
        count = int(sum(count for _, (_, count), _ in more))
        reasons_found = [*reasons_found[:MOST_REASONS], ("...", (str(count), count), f"{len(more)} more reasons")]
    parts = [grid(data.REASON_HEADER, reasons_found)]
    if rows := report.account.rows():
        parts.append(grid(account.HEADER, rows))
    return Group(Text(printable(data.headline(report))), *parts, lines(data.facts(report)))


def tensors(report: RewriteReport) -> Text:
    """Returns one line per tensor that the model or the result stores."""
    return columns(account.TENSOR_HEADER, [tensor.row for tensor in report.account.tensors])


def plan(report: RewriteReport, *, weights: bool = False) -> Text:
    """Returns one line per site; with `weights` also bytes and errors."""
    header = (*SITE_HEADER[:5], *(data.WEIGHT_HEADER if weights else ()), *SITE_HEADER[5:])
    rows = [(*site.row[:5], *(site.weight_row if weights else ()), *site.row[5:]) for site in report.sites]
    return columns(*data.filled(header, rows))


def reasons(decisions: Iterable[Decision]) -> Text:
    """Returns one line per site, with the reason why it is not eligible."""
    rows = [(d.site.name, d.site.module, d.site.op, data.sizes(d.site), d.rule, d.reason) for d in decisions]
    return columns(*data.filled((*SITE_HEADER[:4], "rule", "reason"), rows))


def grid(header: Sequence[str], rows: Iterable[Sequence[html.Cell]]) -> Table:
    """Returns a plain table. Long cells fold onto further lines: a name is never cut."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in header:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell), style=STYLES.get(cell, "")) for cell in map(html.said, row)))
    return table


@dataclass(frozen=True)
class Fitted:
    """A table that fits the terminal, or `PIPE_WIDTH`: its header is wrapped, then columns are left out and named."""

    header: Sequence[str]
    rows: Sequence[Sequence[html.Cell]]
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


def _wrapped(title: str, cells: Sequence[html.Cell]) -> str:
    width = max((cell_len(html.said(cell)) for cell in cells), default=0)
    return "\n".join(wrap(title, max(width, 6), break_long_words=False, break_on_hyphens=False))


def columns(header: Sequence[str], rows: Iterable[Sequence[html.Cell]]) -> Text:
    """Returns one line per row, in aligned columns and never folded: for lists to read, grep and pipe."""
    top = list(zip_longest(*(title.split("\n") for title in header), fillvalue=""))
    table = [*top, *(tuple(printable(html.said(cell)) for cell in row) for row in rows)]
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
