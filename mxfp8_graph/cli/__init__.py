"""The command line: arguments, progress, exit codes. Each command calls a function of the Python API.

Commands import that function when they run: --help and completion load neither torch nor onnx.

guard.py         the app, progress and results of commands, and the exit codes of errors
arguments.py     arguments of several commands
models.py        rewrite, verify, run, doctor
evidence.py      compare, analyze, tune
other_tools.py   from-hf, convert, export-checkpoint
"""

from __future__ import annotations

import sys

from mxfp8_graph.cli import evidence, models, other_tools
from mxfp8_graph.cli.guard import app

# In the order of the help.
for _command in (
    *(models.rewrite, other_tools.from_hf, models.verify, models.run),
    *(evidence.compare, evidence.analyze, evidence.tune),
    *(other_tools.convert, other_tools.export_checkpoint),
    models.doctor,
):
    app.command()(_command)


def main() -> None:
    """Runs the command line in this process."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names may have characters that the encoding lacks
    app(prog_name="mxfp8-graph")
