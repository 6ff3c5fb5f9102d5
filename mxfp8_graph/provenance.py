"""Records the origin of a result.

A model has the record of its rewrite, under the same keys in ONNX metadata and in .pt2 programs. A report has the
command, versions, machine, and names and sizes of files, but not their contents.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from mxfp8_graph._version import __version__, installed
from mxfp8_ops import node, system

RECIPE_KEY: Final = "mxfp8_graph.recipe"
VERSION_KEY: Final = "mxfp8_graph.version"
CONTRACT_KEY: Final = "mxfp8_graph.contract_version"
DIALECT_KEY: Final = "mxfp8_graph.dialect"
"""Dialect of an ONNX file: "mxfp8" is our nodes with their function bodies; see `mxfp8_graph.convert`."""
BODIES_KEY: Final = "mxfp8_graph.bodies"
"""The option `bodies` of the rewrite, "small" or "none"; absent for the default."""
LOST_KEY: Final = "mxfp8_graph.lost"
"""Losses of conversions after the rewrite; absent if there are none."""


@dataclass(frozen=True, kw_only=True)
class RewriteRecord:
    """The record of a rewritten model."""

    node: str
    """Name of the first rewritten node."""
    recipe: str | None
    """The recipe as JSON, or None if it is not recorded."""
    packed: bool = True
    """Whether weights are packed; otherwise the model was prepared for training."""
    training: bool = False
    """Whether gradients pass through the packed weights, which are frozen, to train other parameters."""


def entries(recipe: str | None, dialect: str | None = None) -> dict[str, str]:
    """Returns the record as key -> text: the recipe (JSON) and dialect, if known, and versions of tool and nodes."""
    values = {VERSION_KEY: __version__, CONTRACT_KEY: str(node.VERSION)}
    if dialect is not None:
        values[DIALECT_KEY] = dialect
    return values if recipe is None else {RECIPE_KEY: recipe, **values}


def recipe_name(recorded: str | None) -> str:
    """Returns the name of a recorded recipe, for messages."""
    # A later version may have written the record, with fields that this one does not know.
    try:
        fields = json.loads(recorded or "")
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return "an unrecorded recipe"
    return str(fields.get("name", "a recipe this version cannot read"))


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
