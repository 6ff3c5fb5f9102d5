"""Writes a model and its tensors to a temporary folder, from which both are put in place together."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError

from mxfp8_graph.files import check_output, data_path_of, output
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

    def __init__(self, opened: OpenedModel, path: Path | None, folder: Path, data: BinaryIO | None) -> None:
        self.path = path
        self.byte_size = 0
        self._opened = opened
        self._folder = folder
        self._data = data
        """The external file; None if the tensors go into the model."""
        self._late: dict[str, wire.Data] = {}
        """Raw data of new initializers, by name. It goes into the model's file, and not through protobuf if it can."""

    def store(self, tensor: onnx.TensorProto, data: npt.NDArray[Any]) -> None:
        """Takes the data of `tensor`, whose name, dims and dtype are set.

        In external data it is written now, and `tensor` says where; else `finish` puts it into the model, by name.
        """
        if self._data is not None:
            self._begin(self._data, tensor, data.nbytes)
            self._data.write(_bytes(data))
        else:
            kept = data if data.flags.owndata else data.copy()  # what is mapped may change
            self._late[tensor.name] = wire.Data(data.nbytes, lambda: [_bytes(kept)])

    def finish(self, model: onnx.ModelProto) -> None:
        """Stores the tensors of a model that are still where they were, and writes the model.

        Raises:
            ContractError: a tensor cannot be read, or the model is too large for one file.
            OSError: the result cannot be written.
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
            self._write(model, self.path)
        else:
            self.byte_size = self._data.tell()
            self._data.close()
            Path(self._data.name).rename(self._folder / data_path_of(self.path).name)
            for tensor in filter(is_external, iter_tensors(model)):
                set_location(tensor, data_path_of(self.path).name)
            self._write(model, self.path)

    def discard(self) -> None:
        """Removes what was written: a dry run replaces nothing."""
        if self._data is not None:
            self._data.close()
            Path(self._data.name).unlink()

    def _write(self, model: onnx.ModelProto, path: Path) -> None:
        content = wire.Serialized(model, self._late)
        if content.byte_size > wire.MOST_BYTES:
            raise _too_large(path)
        with (self._folder / path.name).open("xb") as file:
            file.writelines(content.pieces())
            self.byte_size += file.tell()

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
                self._data.write(chunk)

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

        Until `finish`, that is a file whose name no model read can have.
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
    """Yields the target of a rewrite; at its end the files that `finish` wrote are put in place.

    Raises:
        ContractError: the output exists and `overwrite` is false, is the input or its data, or cannot be written.
    """
    if path is None:
        yield Target(opened, None, Path(), None)
        return
    if external and path.name != path.name.encode(errors="replace").decode():
        inline = ("pass ", Option("external_data", "never"), " or another ", Option("output"))
        raise ContractError(path, "its name is not UTF-8, as a model names its data", expected="text", advice=inline)
    inputs, old = input_files(opened), _old_data(path) if overwrite else []
    check_output(
        path, overwrite=overwrite, inputs=inputs, replaces=old, beside=[data_path_of(path)] if external else []
    )
    with output(path, overwrite=overwrite, inputs=inputs, replaces=old) as folder:
        draft = folder / secrets.token_hex(8)
        with draft.open("xb") if external else contextlib.nullcontext() as data:
            yield Target(opened, path, folder, data)


def _old_data(path: Path) -> list[Path]:
    """Returns the file of external data that belongs to the model at `path`, and is removed with it."""
    data = data_path_of(path)
    if not os.path.lexists(data):
        return []
    try:
        old = onnx.ModelProto.FromString(path.read_bytes())
    except (OSError, DecodeError):
        return []
    return [data] if any(location(tensor) == data.name for tensor in filter(is_external, iter_tensors(old))) else []


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


def input_files(opened: OpenedModel) -> set[Path]:
    """Returns the files that a model and its tensors lie in; none for a model that came without a path."""
    if opened.folder is None:
        return set()
    tensors = [*opened.tensors.values(), *iter_tensors(opened.proto)]
    return {Path(opened.name), *(opened.folder.path / location(tensor) for tensor in tensors if is_external(tensor))}


def _bytes(data: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
