"""doctor and library-path: what is installed."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps

import typer

from mxfp8_graph.cli.arguments import Json
from mxfp8_graph.cli.guard import BAD_INPUT
from mxfp8_graph.terminal import say, show


def doctor(json: Json = False) -> None:
    """Checks the installation. Exit code 2 if models cannot run on the CPU."""
    from mxfp8_graph.doctor import diagnose, healthy, table

    checks = diagnose()
    if json:
        typer.echo(dumps({"healthy": healthy(checks), "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        show(table(checks))
    if not healthy(checks):
        say("error: the CPU path does not work here; expected no failed check; follow the advice above")
        raise typer.Exit(BAD_INPUT)


def library_path() -> None:
    """Prints the path of the native library.

    RegisterCustomOpsLibrary in C, C++, C# or Rust needs it.
    """
    from mxfp8_ops import cpu

    typer.echo(cpu.library_path())
