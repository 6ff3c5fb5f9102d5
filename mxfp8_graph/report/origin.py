"""The origin of a report: command, versions, machine, and names and sizes of files, but not their contents."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from mxfp8_graph._version import __version__, installed
from mxfp8_ops import system

COMMAND: Final[ContextVar[Sequence[str] | None]] = ContextVar("command", default=None)
"""Arguments of the running command; None in a program that calls the Python API."""


def facts(files: Iterable[Path | str]) -> list[tuple[str, str]]:
    """Returns (label, value) pairs: command, versions, processor, date, and path and size of each readable file."""
    arguments = COMMAND.get()
    versions = [f"mxfp8-graph {__version__}", f"Python {platform.python_version()}", platform.machine()]
    versions += [
        f"{name} {version}"
        for name in ("numpy", "onnx", "onnxruntime", "torch")
        if (version := installed(name)) is not None
    ]
    return [
        ("command", "none, Python API" if arguments is None else f"mxfp8-graph {shlex.join(arguments)}"),
        ("versions", ", ".join(versions)),
        ("processor", f"{system.processor()}, {os.cpu_count()} logical processors"),
        ("date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
        *(("file", f"{path}, {Path(path).stat().st_size} bytes") for path in files if Path(path).is_file()),
    ]
