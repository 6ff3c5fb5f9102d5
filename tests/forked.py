"""Commands in fresh processes that start at once: forks of a process that has imported torch, which takes seconds, and
nothing of ours.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["torch._export.serde.serialize", "torch.export._trace", "torch._inductor.utils", "networkx"]
)

MOST_SECONDS = 1800
"""The longest command takes half a minute on an idle machine."""


def run(arguments: Sequence[str], folder: Path) -> tuple[int, str]:
    """Runs `mxfp8-graph ...` or `python SCRIPT ...` in a folder; returns the exit code and what was printed."""
    with tempfile.NamedTemporaryFile() as log:
        process = PROCESSES.Process(target=_command, args=(list(arguments), folder, log.name))
        process.start()
        process.join(MOST_SECONDS)
        printed = Path(log.name).read_text(errors="replace")
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{arguments} takes more than {MOST_SECONDS} s\n{printed}")
        return process.exitcode, printed


def _command(arguments: list[str], folder: Path, log: str) -> None:
    """The function that the new process runs."""
    printed = os.open(log, os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.chdir(folder)
    program, *rest = arguments
    if program == "mxfp8-graph":
        from mxfp8_graph import cli

        sys.argv = arguments
        cli.main()
    else:
        script = Path(rest[0]).resolve()
        sys.argv = rest
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
