"""Programs in .pt2 files, with a record of the recipe, the tool and the node contract that made them."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import torch
from torch.export import ExportedProgram

from mxfp8_graph import provenance
from mxfp8_graph.files import check_output, output
from mxfp8_graph.naming import first_line
from mxfp8_graph.torch_program import containers, internals, record, serialized
from mxfp8_graph.torch_program.checked_program import CHANGED, check_stored, check_values, checked
from mxfp8_graph.torch_program.serialized import Archive
from mxfp8_ops import (
    contract,
    torch_ops,  # noqa: F401 - registers torch.ops.mxfp8
)
from mxfp8_ops.errors import ContractError, Mxfp8Error

EXTRA_FILE: Final = "mxfp8_graph.json"
"""Name of the extra file in the archive: the record of the rewrite, and the modules that define the containers."""

_MODULES_KEY: Final = "mxfp8_graph.modules"
_SAMPLES_KEY: Final = "mxfp8_graph.samples"
_LEAVES: Final = "leaves"
"""Value of that key if the sample inputs are stored as the leaves of their tree, without its containers."""
_KNOWN_PACKAGES: Final = frozenset({"torch", "transformers"})
"""Packages whose containers are registered by importing them, or by `containers.py`."""


def save(program: ExportedProgram, path: str | Path, *, overwrite: bool = False) -> Path:
    """Returns the .pt2 file a program was written to; see `mxfp8_graph.save`."""
    path = check_target(path, overwrite=overwrite)
    check_values(program, path)
    check_stored(program, path, advice=CHANGED)
    rewrite_record = record.find(program)
    entries: dict[str, Any] = provenance.entries(rewrite_record.recipe if rewrite_record else None)
    entries[_MODULES_KEY] = internals.container_modules(program)
    # Sample inputs with containers of transformers would be pickled by class, and `load` unpickles no classes.
    leaves = internals.sample_leaves(program)
    if leaves is not None:
        entries[_SAMPLES_KEY] = _LEAVES
        program = internals.with_samples(program, (tuple(leaves), {}))
    try:
        # In a thread, where no signal raises: torch's writer ends the process when its file raises something.
        with (
            output(path, overwrite=overwrite) as folder,
            (folder / path.name).open("wb") as file,
            ThreadPoolExecutor(1) as thread,
        ):
            sink: Any = _Sink(file)
            extra = {EXTRA_FILE: json.dumps(entries)}
            thread.submit(torch.export.save, program, sink, extra_files=extra).result()
            if sink.error is not None:
                raise sink.error
    except Mxfp8Error:
        raise
    except Exception as error:
        what = f"torch cannot serialize the program: {first_line(error)}"
        expected = "containers that pytree knows and registered ops"
        raise ContractError(path, what, expected=expected, advice="see the cause above") from error
    return path


class _Sink(io.RawIOBase):
    """A file that stores its first error, and ignores all writes after it."""

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None
        self._file = file

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True  # torch asks, and goes back to the start at the end

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)


def load(path: str | Path, *, trust_pickle: bool = False) -> ExportedProgram:
    """Returns the program in a .pt2 file; see `mxfp8_graph.load`."""
    path = Path(path)
    archive = Archive(path)
    entries = _entries(archive)
    version = _contract_version(path, entries)
    # Before the program is read: ops of a newer contract would fail with an error that says less.
    if version > contract.VERSION:
        made_by = entries.get(provenance.VERSION_KEY, "a newer mxfp8-graph")
        what = f"node contract {version}, made by mxfp8-graph {made_by}"
        raise ContractError(path, what, expected=f"at most {contract.VERSION}", advice="upgrade mxfp8-graph")
    unknown = _import(entries.get(_MODULES_KEY, []), archive)
    try:
        program = internals.load_archive(path) if trust_pickle else serialized.read_program(archive)
        if program is not None and entries.get(_SAMPLES_KEY) == _LEAVES:
            program.example_inputs = internals.samples_of_leaves(program)
    except Mxfp8Error:
        raise
    except Exception as error:
        advice = f"import {', '.join(unknown)} first" if unknown else "see the cause above"
        what = f"torch {torch.__version__} cannot read the program: {first_line(error)}"
        expected = "ops and containers that are registered, and a file of this torch or an older one"
        raise ContractError(path, what, expected=expected, advice=advice) from error
    if program is None:
        what = "holds no exported program (a compiled package?)"
        raise ContractError(path, what, expected="one", advice="save it with mxfp8_graph.save")
    check_stored(program, path)
    return checked(program)


def check_target(path: str | Path, *, overwrite: bool, inputs: Collection[Path] = ()) -> Path:
    """Returns `path` if a program can be written there, which is none of `inputs`. Ask before the work, not after it.

    Raises:
        ContractError: another suffix than .pt2, or as `files.check_output`.
    """
    path = Path(path)
    if path.suffix != ".pt2":
        raise ContractError(path, f"suffix {path.suffix!r}", expected=".pt2", advice="rename it (to_onnx writes ONNX)")
    check_output(path, overwrite=overwrite, inputs=inputs)
    return path


def _entries(archive: Archive) -> Mapping[str, Any]:
    """Returns the record that `save` wrote into a file, empty if another tool wrote the file."""
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
    # Other scripts have decimal digits too, and Python refuses to convert numbers of thousands of digits.
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        what = f"node contract {text[:80]!r} in its {EXTRA_FILE}"
        raise ContractError(path, what, expected="a number", advice="save again")
    return int(text)


def _import(modules: list[str], archive: Archive) -> list[str]:
    """Registers the known containers that a file names; returns the modules of others, which the user must import.

    Only modules that define models and their outputs are imported, never any other.
    """
    containers.import_modules(modules)
    if serialized.PROGRAM in archive.names:
        containers.register_named(archive.read(serialized.PROGRAM))
    return [module for module in modules if module.partition(".")[0] not in _KNOWN_PACKAGES]
