"""Writes a model and its tensors to drafts, and puts both in place together."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import numpy as np
import numpy.typing as npt
import onnx

from mxfp8_graph.file_reading import is_any_of, is_folder
from mxfp8_graph.files import Drafts, clean_up, data_path_of, write_early
from mxfp8_graph.onnx_model import wire
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.tensor_data import (
    as_bytes,
    byte_length,
    fetching,
    forget_place,
    hold,
    is_apart,
    is_external,
    location,
    raw,
    set_location,
)
from mxfp8_graph.onnx_model.walk import iter_graphs, iter_tensors
from mxfp8_ops.errors import ContractError, Option

INLINE_LIMIT: Final = 1_900_000_000
"""protobuf cannot hold 2^31 bytes; the rest is room for the graph."""

ALIGNMENT: Final = 4096
"""External tensors start at multiples of this: ONNX Runtime can then map them instead of copying."""

_CHUNK: Final = 16 << 20
"""How many bytes are copied from file to file at once."""


class Target:
    """Where one result goes: `store` takes new tensors as they come, `finish` the rest, and puts the files in place."""

    def __init__(
        self, opened: OpenedModel, path: Path | None, drafts: Drafts, *, external: bool, overwrite: bool
    ) -> None:
        self.path = path
        self.byte_size = 0
        self._opened = opened
        self._drafts = drafts
        self._overwrite = overwrite
        self._data = drafts.open(data_path_of(path), "data") if path is not None and external else None
        """The external file; None if the tensors go into the model."""
        self._late: dict[str, wire.Data] = {}
        """Raw data of new initializers, by name. It goes into the model's file, and not through protobuf if it can."""

    def store(self, tensor: onnx.TensorProto, data: npt.NDArray[Any]) -> None:
        """Takes the data of `tensor`, whose name, dims and dtype are set.

        In external data it is written now, and `tensor` says where; else `finish` puts it into the model, by name.
        """
        if self._data is not None:
            self._begin(self._data, tensor, data.nbytes)
            write_early(self._data, _bytes(data))
        else:
            kept = data if data.flags.owndata else data.copy()  # what is mapped may change
            self._late[tensor.name] = wire.Data(data.nbytes, lambda: [_bytes(kept)])

    def finish(self, model: onnx.ModelProto) -> None:
        """Stores the tensors of a model that are still where they were, writes the model and puts the files in place.

        Raises:
            ContractError: a tensor cannot be read, the input changed meanwhile, or the model is too large for one file.
            OSError: the result cannot be written; FileExistsError if there is one by now that must not be replaced.
        """
        self._put_now(model)
        for tensor in model.graph.initializer:
            if stored := self._opened.tensors.get(tensor.name):
                if self.path is not None and self._data is None and is_apart(stored):
                    self._postpone(tensor, stored)
                else:
                    self._transfer(tensor, stored)
        self._transfer_others(model)
        if self.path is None:
            self.byte_size = model.ByteSize()
        elif self._data is None:
            self._finish_one(model, self.path)
        else:
            self._finish_pair(model, self.path, self._data)

    def probe(self) -> None:
        """Opens what `finish` would write to: a dry run must tell what cannot be written."""
        if self.path is not None:
            self._drafts.open(self.path)

    def _finish_one(self, model: onnx.ModelProto, path: Path) -> None:
        overwrites, data_path = path.exists(), data_path_of(path)
        file = self._written(model, path, "new")
        self.byte_size = file.tell()
        self._check_input()
        self._drafts.put(file, path, overwrite=self._overwrite)
        if overwrites and (data_path.is_file() or data_path.is_symlink()):
            data_path.unlink()  # it belongs to the old model

    def _finish_pair(self, model: onnx.ModelProto, path: Path, data: BinaryIO) -> None:
        bridge = self._written(model, path, "bridge")
        for tensor in filter(is_external, iter_tensors(model)):
            set_location(tensor, data_path_of(path).name)
        file = self._written(model, path, "new")
        self.byte_size = data.tell() + file.tell()
        self._check_input()
        self._drafts.put_pair(data, bridge, file, path, overwrite=self._overwrite)

    def _written(self, model: onnx.ModelProto, path: Path, role: Literal["new", "bridge"]) -> BinaryIO:
        """Returns the draft that the model was written to."""
        content = wire.Serialized(model, self._late)
        if content.byte_size > wire.MOST_BYTES:
            raise _too_large(path)
        file = self._drafts.open(path, role)
        for piece in content.pieces():
            write_early(file, piece)
        return file

    def _check_input(self) -> None:
        if self._opened.folder is not None:
            self._opened.folder.files.check()

    def _put_now(self, model: onnx.ModelProto) -> None:
        """Gives new tensors their data where it cannot be given late: in memory, and in subgraphs of a file."""
        main, *inner = iter_graphs(model.graph)
        for graph in inner if self.path is not None else (main, *inner):
            for tensor in graph.initializer:
                if (data := self._late.pop(tensor.name, None)) is not None:
                    tensor.raw_data = b"".join(data.chunks())

    def _postpone(self, tensor: onnx.TensorProto, stored: onnx.TensorProto) -> None:
        """Gives `tensor` the data of `stored`, which is apart, when the model is written."""
        tensor.CopyFrom(stored)
        forget_place(tensor)
        self._late[tensor.name] = wire.Data(byte_length(stored), lambda: self._chunks(stored))

    def _chunks(self, stored: onnx.TensorProto) -> Iterator[memoryview]:
        """Yields the bytes of a tensor that is apart; errors as `tensor_data.read`."""
        length = byte_length(stored)
        with fetching(as_bytes(stored), self._opened.folder, self._opened.name) as fetch:
            for start in range(0, length, _CHUNK):
                yield fetch(start, min(_CHUNK, length - start)).data

    def _transfer(self, tensor: onnx.TensorProto, stored: onnx.TensorProto) -> None:
        """Gives `tensor` the data of `stored` unchanged. Strings stay in the proto: they have no external form."""
        folder, name = self._opened.folder, self._opened.name
        if self._data is None or stored.data_type == onnx.TensorProto.STRING:
            tensor.CopyFrom(stored)
            if is_apart(stored):
                hold(tensor, folder, name)
        elif not is_apart(stored):
            self.store(tensor, np.frombuffer(raw(stored, folder, name), np.uint8))
        else:
            self._begin(self._data, tensor, byte_length(stored))
            for chunk in self._chunks(stored):
                write_early(self._data, chunk)

    def _transfer_others(self, model: onnx.ModelProto) -> None:
        """Moves what subgraphs, functions and Constant nodes keep in files."""
        written = Path(self._data.name).name if self._data is not None else None
        for tensor in filter(is_apart, iter_tensors(model)):
            if location(tensor) != written:
                stored = onnx.TensorProto()
                stored.CopyFrom(tensor)
                self._transfer(tensor, stored)

    def _begin(self, file: BinaryIO, tensor: onnx.TensorProto, length: int) -> None:
        """Brings `file` to the next aligned offset and says in `tensor` that its data lies there.

        Until the files are in place, what this writes lies in the draft, whose name no model read can have.
        """
        offset = -(-file.tell() // ALIGNMENT) * ALIGNMENT
        file.truncate(offset)
        file.seek(0, os.SEEK_END)
        for name in ("raw_data", "external_data"):
            tensor.ClearField(name)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", Path(file.name).name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))


@contextlib.contextmanager
def open_target(opened: OpenedModel, path: Path | None, *, external: bool, overwrite: bool) -> Iterator[Target]:
    """Yields the target of a rewrite; whatever goes wrong inside, no draft stays.

    Raises:
        ContractError: the output exists and `overwrite` is false, is the input or its data, or cannot be written.
    """
    try:
        if path is not None:
            _check_path(opened, path, external=external, overwrite=overwrite)
        with Drafts() as drafts:
            yield Target(opened, path, drafts, external=external, overwrite=overwrite)
    except FileExistsError as error:  # since it was checked
        raise _exists(error.filename) from None
    except OSError as error:  # reading reports ContractError, so this is about writing
        advice = ("free some space or pass another ", Option("output"))
        raise ContractError.unwritable(path, error, advice) from None


def wants_external(
    opened: OpenedModel, byte_size: int, path: Path | None, choice: Literal["auto", "always", "never"]
) -> bool:
    """Returns whether a result of that size goes to an external file: as the model does, or near protobuf's 2 GB.

    Raises:
        ContractError: external data is asked for, and there is no path to put it next to; or it is not, and there is
            too much for one protobuf file.
    """
    if choice not in {"auto", "always", "never"}:
        expected, advice = "auto, always or never", "correct it"
        raise ContractError(opened.name, f"external_data is {choice!r}", expected=expected, advice=advice)
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


def _check_path(opened: OpenedModel, path: Path, *, external: bool, overwrite: bool) -> None:
    if external and path.name != path.name.encode(errors="replace").decode():
        inline = ("pass ", Option("external_data", "never"), " or another ", Option("output"))
        raise ContractError(path, "its name is not UTF-8, as a model names its data", expected="text", advice=inline)
    if "\0" not in str(path) and not path.parent.exists():  # refused now, not after the work
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    clean_up(path.parent)
    for file in (path, data_path_of(path))[: 1 + external]:
        if is_folder(file):
            inside = ("pass ", Option("output", "DIRECTORY/MODEL.onnx"))
            raise ContractError(file, "a directory", expected="a file name", advice=inside)
    inputs = input_files(opened)
    if is_any_of(path, inputs) or is_any_of(data_path_of(path), inputs):
        another = ("pass another ", Option("output"))
        raise ContractError(path, "is the input or its external data", expected="another file", advice=another)
    for file in (path, data_path_of(path))[: 1 + external]:
        if os.path.lexists(file) and not overwrite:
            raise _exists(file)


def input_files(opened: OpenedModel) -> set[Path]:
    """Returns the files that a model and its tensors lie in; none for a model that came without a path."""
    if opened.folder is None:
        return set()
    tensors = [*opened.tensors.values(), *iter_tensors(opened.proto)]
    return {Path(opened.name), *(opened.folder.path / location(tensor) for tensor in tensors if is_external(tensor))}


def _exists(path: Path) -> ContractError:
    replace = ("pass ", Option("overwrite", True), " or another ", Option("output"))
    return ContractError(path, "exists already", expected="a new file", advice=replace)


def _bytes(data: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
