"""Reads programs from .pt2 files.

torch's own reader does the work. It would run the pickles of a file (weights of subclasses, sample inputs), so it is
called under torch's switch for unpickling tensors and registered classes only. The rest of a .pt2 file is a program:
its names, sizes and guards become Python when torch reads it, see SECURITY.md.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import re
import threading
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch.export import ExportedProgram
from torch.export.pt2_archive._package import load_pt2
from torch.utils import _pytree as pytree

from mxfp8_graph import provenance
from mxfp8_graph.naming import first_line
from mxfp8_graph.torch_pass.checked_program import check_stored, checked
from mxfp8_graph.torch_pass.record import EXTRA_FILE, MODULES_KEY, SAMPLES_KEY
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError, Mxfp8Error

_SWITCH: Final = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_LOCK: Final = threading.Lock()
"""Held while the switch is set: the environment is shared by all threads, and torch reads one program at a time."""

_CODE: Final = {
    "data/constants/opaque_obj_": "a pickled Python object",
    "data/constants/custom_obj_": "an object of a custom class",
    "data/aotinductor/": "a compiled library",
}
"""Starts of the names of records that torch unpickles or loads in spite of the switch."""
_PROGRAM: Final = "models/model.json"

_CACHES: Final = "transformers.cache_utils"
_CACHE_CLASSES: Final = (
    "EncoderDecoderCache",
    *("DynamicCache", "DynamicLayer", "DynamicSlidingWindowLayer"),
    *("StaticCache", "StaticLayer", "StaticSlidingWindowLayer"),
)
"""Classes of `_CACHES` that hold tensors and plain values."""
_NAMED: Final = re.compile(rb'\\"type\\": ?\\"(transformers(?:\.\w+)*)([.:])(\w+)\\"')
"""A class in a tree of containers, which is text inside the JSON of a program."""


def load(path: str | Path) -> ExportedProgram:
    """Returns the program in a .pt2 file; see `mxfp8_graph.load`."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            program = _read(file, path)
    except OSError as error:
        raise ContractError.unreadable(path, error, "a readable .pt2 file") from None
    check_stored(program, path)
    return checked(program)


def _read(file: BinaryIO, path: Path) -> ExportedProgram:
    unknown: list[str] = []
    try:
        reader = torch._C.PyTorchFileReader(file)
        names: list[str] = reader.get_all_records()
        _refuse_code(names, path)
        extra = f"extra/{EXTRA_FILE}"
        entries: dict[str, Any] = json.loads(reader.get_record(extra)) if extra in names else {}
        # Before torch reads the program: its error for ops of a newer contract does not name the version.
        _check_version(entries, path)
        modules: list[str] = entries.get(MODULES_KEY, [])
        unknown += [module for module in modules if module.partition(".")[0] not in {"torch", "transformers"}]
        stored = list(_stored(reader, names))
        _check_values(stored, file, path)
        safe = _register(modules, reader, names, pickles=any(meta["use_pickle"] for *_, meta in stored))
        file.seek(0)  # torch's reader begins at the current position
        with _tensors_only(), torch.serialization.safe_globals(safe):
            program: ExportedProgram | None = load_pt2(file).exported_programs.get("model")
        if program is not None and SAMPLES_KEY in entries:
            leaves, _ = program.example_inputs
            program.example_inputs = pytree.tree_unflatten(leaves, program.call_spec.in_spec)
    except Mxfp8Error:
        raise
    except pickle.UnpicklingError as error:
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        what = f"a pickle in it holds more than tensors ({reason})"
        advice = "import the library that registers its classes first, or export the program again"
        raise ContractError(path, what, expected="tensors in plain containers", advice=advice) from None
    except Exception as error:
        advice = f"import {', '.join(unknown)} first" if unknown else "check the path, or export the program again"
        what = f"torch {torch.__version__} cannot read the program: {first_line(error)}"
        expected = "a complete .pt2 file of this torch or an older one, with ops and containers that are registered"
        raise ContractError(path, what, expected=expected, advice=advice) from None
    if program is None:
        what = "holds no exported program"
        raise ContractError(path, what, expected="one", advice="save it with mxfp8_graph.save")
    return program


def _refuse_code(names: Sequence[str], path: Path) -> None:
    """Raises ContractError if a file has records that torch would run."""
    for name in names:
        for start, what in _CODE.items():
            if name.lower().startswith(start):  # torch's reader ignores case
                expected = "a program of ops and tensors"
                raise ContractError(path, f"{name} is {what}", expected=expected, advice="export it without")


def _check_version(entries: dict[str, Any], path: Path) -> None:
    version = int(entries.get(provenance.CONTRACT_KEY, contract.VERSION))
    if version > contract.VERSION:
        made_by = entries.get(provenance.VERSION_KEY, "a newer mxfp8-graph")
        what = f"node contract {version}, made by mxfp8-graph {made_by}"
        raise ContractError(path, what, expected=f"at most {contract.VERSION}", advice="upgrade mxfp8-graph")


@contextlib.contextmanager
def _tensors_only() -> Iterator[None]:
    """A context in which torch.load unpickles tensors and registered classes only, even if its caller asks for more."""
    with _LOCK:
        before = os.environ.get(_SWITCH)
        os.environ[_SWITCH] = "1"  # torch reads it at each call
        try:
            yield
        finally:
            os.environ.pop(_SWITCH)
            if before is not None:
                os.environ[_SWITCH] = before


def _stored(reader: Any, names: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (name, name of its record, its metadata) of each parameter, buffer and constant."""
    for kind in ("weights", "constants"):
        config = f"data/{kind}/model_{kind}_config.json"
        if config in names:
            for name, meta in json.loads(reader.get_record(config))["config"].items():
                yield name, f"data/{kind}/{meta['path_name']}", meta


def _check_values(stored: Sequence[tuple[str, str, dict[str, Any]]], file: BinaryIO, path: Path) -> None:
    """Raises ContractError if a tensor has no values, as in a program of fake tensors; torch reads it as zeros."""
    file.seek(0)
    empty = {info.filename.partition("/")[2] for info in zipfile.ZipFile(file).infolist() if not info.file_size}
    for name, record, meta in stored:
        if record in empty and meta["tensor_meta"] and all(s["as_int"] for s in meta["tensor_meta"]["sizes"]):
            what = f"tensor {name!r} has a shape and no values"
            advice = "export the model with real tensors, and save it again"
            raise ContractError(path, what, expected="a program that holds its weights", advice=advice)


def _register(modules: Sequence[str], reader: Any, names: Sequence[str], *, pickles: bool) -> list[Any]:
    """Registers the classes that a program needs; returns the classes of caches, which its sample inputs may have.

    torch reads the containers that are registered in pytree: transformers registers its model outputs when their module
    is imported, its caches on request. torchao registers its tensors when it is imported.
    """
    named = set()
    if _PROGRAM in names:
        # A search in the text: torch raises for a class that is not registered before it parses it.
        matches = _NAMED.findall(reader.get_record(_PROGRAM))
        named = {tuple(part.decode() for part in match) for match in matches}
    # A program that needs no cache has to load without transformers, and with any version of it.
    for module in {*modules, *(module for module, _, _ in named)}:
        if module.startswith("transformers."):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    for module, separator, name in sorted(named):
        if module == _CACHES and name in _CACHE_CLASSES:
            with contextlib.suppress(ImportError, AttributeError):
                _register_cache(name, separator)
    if pickles:
        with contextlib.suppress(ImportError):
            importlib.import_module("torchao.prototype.mx_formats")
    if not any(module == _CACHES for module, _, _ in named):
        return []
    caches = importlib.import_module(_CACHES)
    return [getattr(caches, name) for name in _CACHE_CLASSES if hasattr(caches, name)]


def _register_cache(name: str, separator: str) -> None:
    """Registers a cache by the function of transformers that wrote `separator` before the name of its class."""
    cache = getattr(importlib.import_module(_CACHES), name)
    if cache in pytree.SUPPORTED_NODES:
        return
    if separator == ":":
        importlib.import_module("transformers.exporters.exporter_dynamo").register_pytree_node(cache)
    elif name == "DynamicCache":
        importlib.import_module("transformers.integrations.executorch").register_dynamic_cache_export_support()
