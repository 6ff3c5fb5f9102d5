"""Writes a model and its tensors: to temporary files, then renamed, so that nobody ever sees half a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, Literal

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import EncodeError

from mxfp8_graph.file_writing import temporary_beside
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.tensor_data import as_bytes, byte_length, fetching, is_external, location, raw
from mxfp8_graph.onnx_model.walk import iter_tensors
from mxfp8_ops.errors import ContractError, Option

INLINE_LIMIT: Final = 1_900_000_000
"""protobuf cannot hold 2^31 bytes; the rest is room for the graph."""

ALIGNMENT: Final = 4096
"""External tensors start at multiples of this: ONNX Runtime can then map them instead of copying."""

_CHUNK: Final = 16 << 20
"""How many bytes are copied from file to file at once."""


class Target:
    """Where one result goes: `store` takes new tensors as they come, `finish` the rest, and renames the files."""

    def __init__(self, opened: OpenedModel, path: Path | None, *, external: bool) -> None:
        self.path = path
        self.byte_size = 0
        self._opened = opened
        self._temporary: dict[Path, Path] = {}
        self._data = self._open(data_path_of(path)) if path is not None and external else None
        """The external file; None if the tensors stay in the proto."""

    def store(self, tensor: onnx.TensorProto, data: npt.NDArray[Any]) -> None:
        """Gives `tensor`, whose name, dims and dtype are set, its data."""
        if self._data is None:
            tensor.raw_data = data.tobytes()
            return
        self._begin(self._data, tensor, data.nbytes)
        self._data.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)

    def finish(self) -> None:
        """Stores the tensors that are still where they were, writes the model and renames the files.

        Raises:
            ContractError: a tensor cannot be read, or the model is too large for one file.
        """
        model = self._opened.proto
        for tensor in model.graph.initializer:
            if stored := self._opened.tensors.get(tensor.name):
                self._transfer(tensor, stored)
        self._transfer_others()
        if self.path is None:
            self.byte_size = model.ByteSize()
            return
        try:
            content = model.SerializeToString()
        except (EncodeError, ValueError):
            raise _too_large(self.path) from None
        with self._open(self.path) as file:
            file.write(content)
        if self._data is not None:
            self._data.close()
        self._put_in_place(self.path)

    def probe(self) -> None:
        """Opens what `finish` would write to: a dry run must tell what cannot be written."""
        if self.path is not None:
            self._open(self.path).close()

    def discard(self) -> None:
        """Removes the temporary files that are left."""
        if self._data is not None:
            self._data.close()
        for temporary in self._temporary.values():
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _transfer(self, tensor: onnx.TensorProto, stored: onnx.TensorProto) -> None:
        """Gives `tensor` the data of `stored` unchanged. Strings stay in the proto: they have no external form."""
        folder, name = self._opened.folder, self._opened.name
        if self._data is None or stored.data_type == onnx.TensorProto.STRING:
            tensor.CopyFrom(stored)
            if is_external(stored):
                tensor.raw_data = raw(stored, folder, name)
                tensor.ClearField("external_data")
                tensor.ClearField("data_location")
        elif not is_external(stored):
            self.store(tensor, np.frombuffer(raw(stored, folder, name), np.uint8))
        else:
            length = byte_length(stored)
            with fetching(as_bytes(stored), folder, name) as fetch:
                self._begin(self._data, tensor, length)
                for start in range(0, length, _CHUNK):
                    self._data.write(fetch(start, min(_CHUNK, length - start)).data)

    def _transfer_others(self) -> None:
        """Moves what subgraphs, functions and Constant nodes keep in external files, and names the final data file."""
        own = data_path_of(self.path) if self.path else None
        written = self._temporary[own].name if own in self._temporary else None
        for tensor in filter(is_external, iter_tensors(self._opened.proto)):
            if location(tensor) != written:
                stored = onnx.TensorProto()
                stored.CopyFrom(tensor)
                self._transfer(tensor, stored)
            for entry in tensor.external_data:
                if own and entry.key == "location":
                    entry.value = own.name

    def _begin(self, file: IO[bytes], tensor: onnx.TensorProto, length: int) -> None:
        """Brings `file` to the next aligned offset and says in `tensor` that its data lies there.

        Until the files are renamed, what this writes lies in the temporary file, whose name no model read can have.
        """
        offset = -(-file.tell() // ALIGNMENT) * ALIGNMENT
        file.truncate(offset)
        file.seek(0, os.SEEK_END)
        for name in ("raw_data", "external_data"):
            tensor.ClearField(name)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", Path(file.name).name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))

    def _open(self, path: Path) -> IO[bytes]:
        self._temporary[path] = temporary_beside(path)
        return self._temporary[path].open("wb")

    def _put_in_place(self, path: Path) -> None:
        self.byte_size = sum(temporary.stat().st_size for temporary in self._temporary.values())
        overwrites = path.exists()
        if self._data is not None:
            path.unlink(missing_ok=True)  # an old model must never be seen beside new data
            self._temporary.pop(data_path_of(path)).replace(data_path_of(path))
        self._temporary.pop(path).replace(path)
        if self._data is None and overwrites:
            data_path_of(path).unlink(missing_ok=True)  # it belongs to the old model


@contextlib.contextmanager
def open_target(opened: OpenedModel, path: Path | None, *, external: bool, overwrite: bool) -> Iterator[Target]:
    """Yields the target of a rewrite; whatever goes wrong inside, no temporary file stays.

    Raises:
        ContractError: the output exists and `overwrite` is false, is the input or its data, or cannot be written.
    """
    if path is not None:
        _check_path(opened, path, external=external, overwrite=overwrite)
    target: Target | None = None
    try:
        target = Target(opened, path, external=external)
        yield target
    except OSError as error:  # reading reports ContractError, so this is about writing
        advice = ("free some space or pass another ", Option("output"))
        raise ContractError.unwritable(path, error, advice) from None
    finally:
        if target is not None:
            target.discard()


def wants_external(
    opened: OpenedModel, byte_size: int, path: Path | None, choice: Literal["auto", "always", "never"]
) -> bool:
    """Returns whether a result of that size goes to an external file: as the model does, or near protobuf's 2 GB.

    Raises:
        ContractError: external data is asked for, and there is no path to put it next to; or it is not, and there is
            too much for one protobuf file.
    """
    if path is None:
        if choice == "always":
            what = "external_data 'always' without an output"
            raise ContractError(
                opened.name, what, expected="a path to put it next to", advice=("pass ", Option("output"))
            )
        return False
    if choice == "never" and byte_size > INLINE_LIMIT:
        raise _too_large(path)
    return choice == "always" or (choice == "auto" and (opened.uses_external_data or byte_size > INLINE_LIMIT))


def _too_large(path: Path) -> ContractError:
    what = "the model does not fit into one protobuf file (2 GB)"
    return ContractError(path, what, expected="external data", advice=("pass ", Option("external_data", "always")))


def data_path_of(path: Path) -> Path:
    """Returns where the external data of a model written to `path` lies."""
    return path.with_name(path.name + ".data")


def _check_path(opened: OpenedModel, path: Path, *, external: bool, overwrite: bool) -> None:
    if path.is_dir():
        inside = ("pass ", Option("output", "DIRECTORY/MODEL.onnx"))
        raise ContractError(path, "a directory", expected="a file name", advice=inside)
    inputs = {Path(opened.name).resolve()} if opened.folder else set()
    if opened.folder is not None:
        for tensor in [*opened.tensors.values(), *iter_tensors(opened.proto)]:
            if is_external(tensor):
                inputs.add((opened.folder.path / location(tensor)).resolve())
    if {path.resolve(), data_path_of(path).resolve()} & inputs:
        another = ("pass another ", Option("output"))
        raise ContractError(path, "is the input or its external data", expected="another file", advice=another)
    for file in (path, data_path_of(path))[: 1 + external]:
        if file.exists() and not overwrite:
            replace = ("pass ", Option("overwrite", True), " or another ", Option("output"))
            raise ContractError(file, "exists already", expected="a new file", advice=replace)
