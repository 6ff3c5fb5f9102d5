"""Writes the man page from what the commands say with --help: `python custom_ops/man_page.py mxfp8-graph.1`.

The build of a wheel runs this on the sources, with typer and rich alone, and installs the page in share/man/man1.
(click-man knows click's own options only, and newer versions of typer bring a copy of click.)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from mxfp8_graph import __version__  # noqa: E402 - nothing is installed yet
from mxfp8_graph.cli import app  # noqa: E402

EXIT_CODES = {
    0: "done",
    1: "verification failed, or a budget that no plan keeps",
    2: "usage or bad input",
    3: "nothing eligible",
    70: "a defect of ours: please report it",
    130: "interrupted",
    143: "terminated",
}


def page() -> str:
    """Returns the man page."""
    root = typer.main.get_command(app)
    context = root.make_context("mxfp8-graph", ["doctor"], resilient_parsing=True)
    lines = [
        f'.TH MXFP8-GRAPH 1 "" "mxfp8-graph {__version__}" "User Commands"',
        *(".SH NAME", rf"mxfp8-graph \- {_text(root.help).rstrip('.')}"),
        *(".SH SYNOPSIS", r"\fBmxfp8\-graph\fR [OPTIONS] COMMAND [ARGS]..."),
        *(".SH OPTIONS", *_options(root, context)),
        ".SH COMMANDS",
    ]
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        lines += [f".SS {_text(name)} {_text(' '.join(command.collect_usage_pieces(context)))}"]
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            lines += [".PP", _text(paragraph)]
        lines += _options(command, context)
    lines.append(".SH EXIT STATUS")
    for code, meaning in EXIT_CODES.items():
        lines += [".TP", rf"\fB{code}\fR", _text(meaning)]
    return "\n".join(lines) + "\n"


def _options(command: Any, context: Any) -> Iterator[str]:
    """Yields a tagged paragraph for each argument and option that has help."""
    for parameter in command.params:
        if record := parameter.get_help_record(context):
            yield from (".TP", rf"\fB{_text(record[0])}\fR", _text(record[1]))


def _text(text: str | None) -> str:
    """Returns text on one line, with what roff would read as its own escaped."""
    plain = " ".join((text or "").split()).replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{plain}" if plain.startswith((".", "'")) else plain


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
