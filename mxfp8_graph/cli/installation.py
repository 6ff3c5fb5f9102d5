"""doctor and library-path: what is installed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mxfp8_graph.cli.arguments import Json
from mxfp8_graph.cli.guard import BAD_INPUT
from mxfp8_graph.terminal import say, show


def doctor(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help="An ONNX model to check too.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Checks the installation; with MODEL, also its dialect and the changes that other tools made to it.

    Exit code 2 if models cannot run, or MODEL is damaged.
    """
    from mxfp8_graph.doctor import diagnose, diagnose_file, healthy, table
    from mxfp8_graph.report.base import json_text

    checks = diagnose()
    file = diagnose_file(model) if model else None
    every = [*checks, *([file] if file else [])]
    if json:
        typer.echo(json_text({"healthy": healthy(checks), "checks": [asdict(check) for check in every]}), nl=False)
    else:
        show(table(every))
    if not healthy(checks):
        say("error: the CPU path does not work here; expected no failed check; follow the advice above")
    if file is not None and file.state != "ok":
        say(f"error: {file.detail}; {file.advice}")
    if not healthy(checks) or (file is not None and file.state != "ok"):
        raise typer.Exit(BAD_INPUT)


def library_path() -> None:
    """Prints the path of the native library.

    RegisterCustomOpsLibrary in C, C++, C# or Rust needs it.
    """
    from mxfp8_ops import cpu

    typer.echo(cpu.library_path())
