"""Writes the folder that a host loads a rewritten model from."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import onnx_ir as ir

from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.onnx_pass import record
from mxfp8_graph.onnx_pass.graph import name_of
from mxfp8_graph.onnx_pass.load import external_files, load, path_of
from mxfp8_graph.tools.hosts import HOSTS
from mxfp8_graph.tools.hosts.layout import Request
from mxfp8_ops import native
from mxfp8_ops.errors import ContractError, Option


def package(
    model: str | Path,
    host: str,
    output: str | Path,
    *,
    config: str | Path | None = None,
    root: str | Path | None = None,
) -> Path:
    """Returns `output`, a new folder that a host loads a rewritten model from.

    Files are copied, the model's external data too. The folder is put in place whole; if the process is killed on the
    way, a folder `.mxfp8-graph-RANDOM` stays beside it.

    Args:
        model: an ONNX file that `rewrite` made.
        host: one of `HOSTS`. triton: a model of onnxruntime's backend, to lie in a model repository; genai:
            onnxruntime-genai; sentence-transformers and optimum: their ONNX backends, whose caller registers the
            library with `mxfp8_ops.ort.register`.
        output: the folder; its name is the model's in Triton.
        config: the folder that describes the model: what the Hugging Face hub or sentence-transformers has beside the
            weights, or for genai what its model builder wrote. All hosts but triton need one.
        root: where the host will see the folder, if that is elsewhere, as in a container. Absolute. For triton only,
            whose configuration has the absolute path of the library.

    Raises:
        ContractError: the model is not one that `rewrite` made, `config` lacks something or does not fit the model, or
            the folder exists or cannot be written.
        BackendError: the native library is missing.
    """
    if host not in HOSTS:
        raise ContractError.unknown("host", host, HOSTS)
    if root is not None and (host != "triton" or not Path(root).is_absolute()):
        expected, advice = "an absolute path, for triton", "correct it or leave it out"
        raise ContractError("root", f"{os.fspath(root)!r} for {host}", expected=expected, advice=advice)
    if config is not None and host == "triton":
        what, expected = "a description for triton", "none, since the configuration follows from the model"
        raise ContractError("config", what, expected=expected, advice="leave it out")
    loaded, target = _rewritten(model), Path(os.path.abspath(output))  # noqa: PTH100 - resolve() follows a link there
    require_new(target)
    library = native.library_path()
    request = Request(
        graph=loaded.graph,
        name=name_of(loaded),
        folder_name=target.name,
        library=library.name,
        config=None if config is None else Path(config),
        root=PurePosixPath(root or target),
    )
    module, function = HOSTS[host].split(":")
    layout = getattr(importlib.import_module(module), function)(request)
    with whole_folder(target) as folder:
        write_files(folder, layout.files)
        if layout.library is not None:
            _copy(library, folder, layout.library)
        _copy_model(folder, layout.model, loaded)
    return target


def require_new(target: Path) -> None:
    """Raises ContractError if there is something at `target`."""
    # lexists: a dangling link is in the way of the rename too.
    if os.path.lexists(target):
        raise _exists(target)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yields a folder to fill, which is put at `target` at the end, or removed after an error.

    Raises:
        ContractError: there is something at `target`, or it cannot be written.
    """
    require_new(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".mxfp8-graph-", dir=target.parent) as around:
            folder = Path(around, target.name)
            folder.mkdir()
            yield folder
            require_new(target)  # once more: something may have come since
            folder.rename(target)
    except OSError as error:
        raise ContractError.unwritable(target, error, ("pass another ", Option("output"))) from None


def write_files(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    """Writes files below a folder: their content, or a copy of the file at a path."""
    for name, content in files.items():
        if isinstance(content, bytes):
            with _new_file(folder, name) as file:
                file.write(content)
        else:
            _copy(content, folder, name)


def _rewritten(model: Any) -> ir.Model:
    if kind_of(model) is not Kind.ONNX_FILE:
        advice = "write a program with mxfp8_graph.to_onnx, a model in memory with onnx.save"
        raise ContractError(str(model)[:80], "is not an ONNX file", expected="one", advice=advice)
    loaded = load(model)
    if record.find(loaded) is None:
        what, expected = "has no MXFP8 nodes", "a rewritten model"
        raise ContractError(name_of(loaded), what, expected=expected, advice="rewrite it first")
    return loaded


def _copy_model(folder: Path, name: str, model: ir.Model) -> None:
    """Copies a model and its external data, which keeps its place relative to the model."""
    path = path_of(model)
    assert path is not None  # it came from a file
    _copy(path, folder, name)
    for data in sorted(external_files(model)):
        place = data.relative_to(os.path.abspath(path.parent))  # noqa: PTH100 - as `load` names it
        _copy(data, folder, str(PurePosixPath(name).parent / place.as_posix()))


def _copy(path: Path, folder: Path, name: str) -> None:
    """Copies a file to a new one below `folder`."""
    try:
        original = path.open("rb")
    except OSError as error:
        raise ContractError.unreadable(path, error, "a readable file") from None
    with original, _new_file(folder, name) as file:
        shutil.copyfileobj(original, file)


@contextlib.contextmanager
def _new_file(folder: Path, name: str) -> Iterator[BinaryIO]:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("xb")
    except FileExistsError:
        what, expected = f"two files called {name!r}", "external data of another name"
        raise ContractError(folder.name, what, expected=expected, advice="rewrite to a file of another name") from None
    with file:
        yield file
        # On the disk before the folder gets its name: after a crash there is no folder with half of a file.
        file.flush()
        os.fsync(file.fileno())


def _exists(path: Path) -> ContractError:
    advice = ("pass another ", Option("output"), ", or remove it")
    return ContractError(path, "exists already", expected="a new folder", advice=advice)
