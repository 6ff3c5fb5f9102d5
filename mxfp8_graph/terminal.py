"""Output of the command line: results on stdout, everything else on stderr, for terminals, pipes and files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from mxfp8_graph.naming import printable
from mxfp8_graph.options import Progress as ProgressCallback


def console(*, stderr: bool = False) -> Console:
    """Returns a console that prints text without markup, and does not fold lines in a pipe or a file."""
    result = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not result.is_terminal:
        result.width = 10_000
    return result


def say(message: str) -> None:
    """Prints a message on stderr without folding lines or interpreting markup."""
    lines = "\n".join(map(printable, message.split("\n")))
    console(stderr=True).print(Text(lines), soft_wrap=True)


MOST_LINES: Final = 2000
"""Lines of a list that a terminal shows."""


def show(result: RenderableType, *, fold: bool = True, stderr: bool = False) -> None:
    """Prints a result on stdout; into a pipe or a file without the blanks that fill up table cells.

    A pipe or a file gets a list whole; a terminal shows its first lines and the number of the others.
    """
    out = console(stderr=stderr)
    if out.is_terminal:
        out.print(_first_lines(result) if isinstance(result, Text) else result, soft_wrap=not fold)
        return
    with out.capture() as captured:
        out.print(result, soft_wrap=not fold)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip(), err=stderr)


def _first_lines(text: Text) -> Text:
    lines = text.plain.split("\n")
    more = len(lines) - MOST_LINES
    if more <= 0:
        return text
    shown = text[: sum(len(line) + 1 for line in lines[:MOST_LINES])]
    return shown.append(f"... and {more} more lines; a pipe or a file gets them all")


@contextlib.contextmanager
def progress_bar(*, steps: bool = False) -> Iterator[ProgressCallback | None]:
    """Yields a callback for progress, which updates a bar on stderr, or None if stderr is no terminal.

    With `steps` it counts steps and not only bytes: a new total restarts the count.
    """
    err = console(stderr=True)
    # No bar in logs: it would be thousands of lines.
    if not err.is_terminal:
        yield None
        return
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        BarColumn(),
        *((TaskProgressColumn(),) if steps else (DownloadColumn(), TransferSpeedColumn())),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, expand=True) as bar:
        task = bar.add_task("planning", total=None)

        def advance(name: str, done: int, total: int) -> None:
            if bar.tasks[0].total not in {None, total}:
                bar.reset(task)  # the time that is left does not follow from what other steps took
            bar.update(task, description=printable(name), completed=done, total=total)

        yield advance
