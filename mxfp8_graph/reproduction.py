"""Facts to reproduce a result: command, versions, machine and input files, but no contents of files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from mxfp8_graph._version import __version__, installed
from mxfp8_graph.file_reading import open_regular

_PACKAGES: Final = ("numpy", "onnx", "onnxruntime", "torch")
_LARGEST_HASHED: Final = 2**30
"""Bytes of a file that is hashed; the hash of a larger one would delay a message for seconds."""

COMMAND: Final[ContextVar[Sequence[str] | None]] = ContextVar("command", default=None)
"""Arguments of the running command; None in a program that calls the Python API."""


def facts(files: Iterable[Path | str]) -> list[tuple[str, str]]:
    """Returns (label, value) pairs: command, versions, processor, date and files.

    Args:
        files: its inputs; each readable one is identified by size and SHA-256.
    """
    arguments = COMMAND.get()
    versions = [f"mxfp8-graph {__version__}", f"Python {platform.python_version()}", platform.machine()]
    versions += [f"{name} {version}" for name in _PACKAGES if (version := installed(name)) is not None]
    descriptions = [(path, _digest(Path(path))) for path in files]
    return [
        ("command", "none, Python API" if arguments is None else f"mxfp8-graph {shlex.join(arguments)}"),
        ("versions", ", ".join(versions)),
        ("processor", f"{processor()}, {os.cpu_count()} logical processors"),
        ("date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
        *(("file", f"{path}, {what}") for path, what in descriptions if what is not None),
    ]


def processor() -> str:
    """Returns the name of the processor, or of its architecture if the system does not name it."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M):
            return match[1]
    return platform.processor() or platform.machine()


def _digest(path: Path) -> str | None:
    """Returns size and hash of a file, or None if it cannot be read."""
    try:
        with open_regular(path) as file:
            size = path.stat().st_size
            if size > _LARGEST_HASHED:
                return f"{size} bytes"
            digest = hashlib.sha256()
            while piece := file.read(2**20):
                digest.update(piece)
            return f"{size} bytes, SHA-256 {digest.hexdigest()}"
    except OSError:
        return None
