"""What a report of a defect needs: the command, the versions, and which files it was about. Nothing they contain."""

from __future__ import annotations

import hashlib
import platform
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from mxfp8_graph._version import __version__, installed
from mxfp8_graph.file_reading import open_regular

_PACKAGES: Final = ("numpy", "onnx", "onnxruntime", "torch")
_LARGEST_HASHED: Final = 2**30
"""Bytes; the hash of more takes longer than people wait for a message."""


def lines(arguments: Sequence[str], files: Iterable[Path]) -> list[str]:
    """Returns how to reproduce what happened, one fact a line.

    Args:
        arguments: of the command, without its name.
        files: those it was given; each is told by size and SHA-256.
    """
    versions = [f"mxfp8-graph {__version__}", f"Python {platform.python_version()}", platform.machine()]
    versions += [f"{name} {version}" for name in _PACKAGES if (version := installed(name)) is not None]
    facts = [f"command: mxfp8-graph {shlex.join(arguments)}", f"versions: {', '.join(versions)}"]
    return facts + [f"file: {path}, {told}" for path in files if (told := _told(path)) is not None]


def _told(path: Path) -> str | None:
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
