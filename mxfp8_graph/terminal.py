"""Output of the command line: results on stdout, everything else on stderr, for terminals, pipes and files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from mxfp8_graph.naming import printable
from mxfp8_graph.options import Progress as ProgressCallback


def say(message: str) -> None:
    """Prints a message on stderr."""
    show(Text("\n".join(map(printable, message.split("\n")))), stderr=True)


def show(result: Text, *, stderr: bool = False) -> None:
    """Prints a result on stdout, without folding lines."""
    out = Console(stderr=stderr)
    if out.is_terminal:
        out.print(result, soft_wrap=True)
    else:
        typer.echo(result.plain, err=stderr)


@contextlib.contextmanager
def progress_bar() -> Iterator[ProgressCallback | None]:
    """Yields a callback for progress, which updates a bar on stderr, or None if stderr is no terminal.

    A new total restarts the count.
    """
    err = Console(stderr=True)
    # No bar in logs: it would be thousands of lines.
    if not err.is_terminal:
        yield None
        return
    fits = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    name = TextColumn("{task.description}", markup=False, table_column=fits)
    columns = (name, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, expand=True) as bar:
        task = bar.add_task("planning", total=None)

        def advance(name: str, done: int, total: int) -> None:
            if bar.tasks[0].total not in {None, total}:
                bar.reset(task)  # the time that is left does not follow from what other steps took
            bar.update(task, description=printable(name), completed=done, total=total)

        yield advance
