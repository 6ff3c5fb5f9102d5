"""Programs in .pt2 files, which remember the recipe, the tool and the node contract that made them."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch.export import ExportedProgram

from mxfp8_graph import provenance
from mxfp8_graph.file_locks import uninterrupted
from mxfp8_graph.file_reading import Pins
from mxfp8_graph.file_writing import is_taken, replacing
from mxfp8_graph.torch_program import internals, record
from mxfp8_ops import (
    contract,
    torch_ops,  # noqa: F401 - registers torch.ops.mxfp8
)
from mxfp8_ops.errors import ContractError, Option

EXTRA_FILE: Final = "mxfp8_graph.json"
"""Name of the extra file in the archive: how the program was made, and which modules define its containers."""

_MODULES_KEY: Final = "mxfp8_graph.modules"
_KNOWN_PACKAGES: Final = frozenset({"torch", "transformers"})
"""Packages whose modules `load` imports by itself because a file asks for them."""


def save(program: ExportedProgram, path: str | Path, *, overwrite: bool = False) -> Path:
    """Returns the .pt2 file a program was written to; `mxfp8_graph.load` reads it, in any process.

    After an error an existing file is as it was, and there is no half of a new one.

    Args:
        program: rewritten or not.
        path: ends in .pt2.
        overwrite: whether an existing file may be replaced.

    Raises:
        ContractError: another suffix, the file exists, it cannot be written, or torch cannot serialize the program.
    """
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


def load(path: str | Path) -> ExportedProgram:
    """Returns the program in a .pt2 file, rewritten or not. Nothing else needs to be imported first.

    torch reads such files with pickle: load only files you trust.

    Raises:
        ContractError: the file is missing, not a .pt2, cut short, of a newer contract, or torch cannot read it.
    """
    path = Path(path)
    pins = Pins()
    entries = _entries(path, pins)
    version = int(entries.get(provenance.CONTRACT_KEY, contract.VERSION))
    if version > contract.VERSION:
        made_by = entries.get(provenance.VERSION_KEY, "a newer mxfp8-graph")
        what = f"node contract {version}, made by mxfp8-graph {made_by}"
        raise ContractError(path, what, expected=f"at most {contract.VERSION}", advice="upgrade mxfp8-graph")
    unknown = _import(entries.get(_MODULES_KEY, []))
    try:
        program, _ = internals.load_archive(path)
    except Exception as error:
        advice = f"import {', '.join(unknown)} first" if unknown else "see the cause above"
        what = f"torch {torch.__version__} cannot read the program: {_first_line(error)}"
        expected = "ops and containers that are registered, and a file of this torch or an older one"
        raise ContractError(path, what, expected=expected, advice=advice) from error
    pins.check()
    if program is None:
        what = "holds no exported program (a compiled package?)"
        raise ContractError(path, what, expected="one", advice="save it with mxfp8_graph.save")
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


def _entries(path: Path, pins: Pins) -> Mapping[str, Any]:
    """Returns what `save` recorded in a file, empty if something else wrote it."""
    if path.is_dir():
        raise ContractError(path, "a directory", expected="a .pt2 file", advice="name the file inside it")
    try:
        with pins.open(path) as file:
            start = file.read(4)
    except OSError as error:
        raise ContractError.unreadable(path, error, "a readable .pt2 file") from None
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((n for n in archive.namelist() if n.endswith(f"/extra/{EXTRA_FILE}")), None)
            entries = json.loads(archive.read(name)) if name else {}
    except (zipfile.BadZipFile, EOFError):
        if start == b"PK\x03\x04":
            raise ContractError(path, "cut short", expected="a whole .pt2 file", advice="copy it again") from None
        expected = "what mxfp8_graph.save or torch.export.save writes"
        raise ContractError(path, "not a .pt2 file", expected=expected, advice="check the path") from None
    except ValueError as error:
        what = f"its {EXTRA_FILE} is not JSON ({error})"
        raise ContractError(path, what, expected="it whole", advice="save again") from None
    return entries if isinstance(entries, dict) else {}


def _import(modules: list[str]) -> list[str]:
    """Imports the modules of known packages, which register their containers; returns the other ones."""
    unknown = []
    for module in modules:
        if module.partition(".")[0] in _KNOWN_PACKAGES:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        else:
            unknown.append(module)
    return unknown


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
