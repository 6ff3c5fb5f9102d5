"""Programs in .pt2 files, which remember the recipe, the tool and the node contract that made them."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import torch
from torch.export import ExportedProgram

from mxfp8_graph import provenance
from mxfp8_graph.file_locks import uninterrupted
from mxfp8_graph.file_reading import Pins
from mxfp8_graph.file_writing import is_taken, replacing
from mxfp8_graph.torch_program import internals, record, serialized
from mxfp8_graph.torch_program.archive import Archive
from mxfp8_graph.torch_program.stored import check_stored
from mxfp8_ops import (
    contract,
    torch_ops,  # noqa: F401 - registers torch.ops.mxfp8
)
from mxfp8_ops.errors import ContractError, Mxfp8Error, Option

EXTRA_FILE: Final = "mxfp8_graph.json"
"""Name of the extra file in the archive: how the program was made, and which modules define its containers."""

_MODULES_KEY: Final = "mxfp8_graph.modules"
_KNOWN_PACKAGES: Final = frozenset({"torch", "transformers"})
"""Packages that register their containers when they, or what `_DEFINES_CONTAINERS` matches, are imported."""
_DEFINES_CONTAINERS: Final = re.compile(
    r"transformers\.(modeling_\w+|cache_utils|utils\.generic|models(\.[a-z0-9_]+)+\.modeling_\w+)"
)
"""Modules that `load` imports by itself because a file asks for them."""


def save(program: ExportedProgram, path: str | Path, *, overwrite: bool = False) -> Path:
    """Returns the .pt2 file a program was written to; see `mxfp8_graph.save`."""
    path = check_target(path, overwrite=overwrite)
    made = record.find(program)
    entries: dict[str, Any] = provenance.entries(made.recipe if made else None)
    entries[_MODULES_KEY] = internals.container_modules(program)
    try:
        with replacing(path, overwrite=overwrite) as file:
            with uninterrupted() as interrupts:
                sink: Any = _Sink(file, interrupts)
                torch.export.save(program, sink, extra_files={EXTRA_FILE: json.dumps(entries)})
            if sink.error is not None:
                raise sink.error
    except FileExistsError:  # since it was checked
        raise _exists(path) from None
    except OSError as error:
        raise ContractError.unwritable(path, error, "free some space or choose another") from None
    except Exception as error:
        what = f"torch cannot serialize the program: {_first_line(error)}"
        expected = "containers that pytree knows and registered ops"
        raise ContractError(path, what, expected=expected, advice="see the cause above") from error
    return path


class _Sink(io.RawIOBase):
    """A file that keeps its first error for later, and takes no more after it, or after the first of `interrupts`.

    torch's writer ends the process when a file raises something.
    """

    def __init__(self, file: BinaryIO, interrupts: Sequence[Any]) -> None:
        self.error: OSError | None = None
        self._file = file
        self._interrupts = interrupts

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True  # torch asks, and goes back to the start at the end

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def write(self, data: Any) -> int:
        if self.error is None and not self._interrupts:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)


def load(path: str | Path, *, trust_pickle: bool = False) -> ExportedProgram:
    """Returns the program in a .pt2 file; see `mxfp8_graph.load`."""
    path = Path(path)
    pins = Pins()
    archive = Archive(path, pins)
    entries = _entries(archive)
    version = _contract_version(path, entries)
    if version > contract.VERSION:
        made_by = entries.get(provenance.VERSION_KEY, "a newer mxfp8-graph")
        what = f"node contract {version}, made by mxfp8-graph {made_by}"
        raise ContractError(path, what, expected=f"at most {contract.VERSION}", advice="upgrade mxfp8-graph")
    unknown = _import(entries.get(_MODULES_KEY, []))
    try:
        program = internals.load_archive(path) if trust_pickle else serialized.read_program(archive)
    except Mxfp8Error:
        raise
    except Exception as error:
        advice = f"import {', '.join(unknown)} first" if unknown else "see the cause above"
        what = f"torch {torch.__version__} cannot read the program: {_first_line(error)}"
        expected = "ops and containers that are registered, and a file of this torch or an older one"
        raise ContractError(path, what, expected=expected, advice=advice) from error
    pins.check()
    if program is None:
        what = "holds no exported program (a compiled package?)"
        raise ContractError(path, what, expected="one", advice="save it with mxfp8_graph.save")
    check_stored(program, path)
    return program


def check_target(path: str | Path, *, overwrite: bool) -> Path:
    """Returns `path` if a program can be written there. Ask before the work, not after it.

    Raises:
        ContractError: another suffix than .pt2, no such folder, or the file exists and `overwrite` is false.
    """
    path = Path(path)
    if path.suffix != ".pt2":
        raise ContractError(path, f"suffix {path.suffix!r}", expected=".pt2", advice="rename it (to_onnx writes ONNX)")
    if path.is_dir() or not path.parent.is_dir():
        what = "a directory" if path.is_dir() else f"no folder {path.parent}"
        raise ContractError(path, what, expected="a file in an existing folder", advice="correct the path")
    if not overwrite and is_taken(path):
        raise _exists(path)
    return path


def _exists(path: Path) -> ContractError:
    advice = ("pass ", Option("overwrite", True), " or another path")
    return ContractError(path, "exists already", expected="a new file", advice=advice)


def _entries(archive: Archive) -> Mapping[str, Any]:
    """Returns what `save` recorded in a file, empty if something else wrote it."""
    name = f"extra/{EXTRA_FILE}"
    entries = archive.json(name) if name in archive.names else {}
    modules = entries.get(_MODULES_KEY, []) if isinstance(entries, dict) else None
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        what = f"its {EXTRA_FILE} is of another kind"
        raise ContractError(archive.path, what, expected="what mxfp8_graph.save writes", advice="save again")
    return cast(Mapping[str, Any], entries)


def _contract_version(path: Path, entries: Mapping[str, Any]) -> int:
    version = entries.get(provenance.CONTRACT_KEY, contract.VERSION)
    text = str(version)
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        what = f"node contract {text[:80]!r} in its {EXTRA_FILE}"
        raise ContractError(path, what, expected="a number", advice="save again")
    return int(text)


def _import(modules: list[str]) -> list[str]:
    """Imports the modules that register known containers; returns those that the user must import.

    A file names them, so only modules that define models and their outputs are imported, never any other.
    """
    unknown = []
    for module in modules:
        if _DEFINES_CONTAINERS.fullmatch(module):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        elif module.partition(".")[0] not in _KNOWN_PACKAGES:
            unknown.append(module)
    return unknown


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
