"""Where the result's tensors go as they come: into the proto, or appended to one external file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import onnx

from mxfp8_graph.onnx_model.tensor_data import is_external, locate, raw, reading
from mxfp8_ops.errors import ContractError

Array = npt.NDArray[Any]

ALIGNMENT: Final = 4096
"""External tensors start at multiples of this: ONNX Runtime can then map them instead of copying."""

_CHUNK: Final = 16 << 20


class Sink(Protocol):
    """Takes the data of one tensor after another."""

    def store(self, tensor: onnx.TensorProto, data: Array) -> None:
        """Gives `tensor`, whose name, dims and dtype are set, its data."""

    def transfer(self, tensor: onnx.TensorProto, source: onnx.TensorProto, folder: Path | None, model: str) -> None:
        """Gives `tensor` the data of `source` unchanged."""


class InlineSink:
    """Keeps data in the proto."""

    def store(self, tensor: onnx.TensorProto, data: Array) -> None:
        """See `Sink`."""
        tensor.raw_data = data.tobytes()

    def transfer(self, tensor: onnx.TensorProto, source: onnx.TensorProto, folder: Path | None, model: str) -> None:
        """See `Sink`."""
        tensor.CopyFrom(source)
        if is_external(source):
            tensor.raw_data = raw(source, folder, model)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")


class ExternalSink:
    """Appends data to one external file."""

    def __init__(self, file: IO[bytes], location: str) -> None:
        self._file = file
        self._location = location

    def store(self, tensor: onnx.TensorProto, data: Array) -> None:
        """See `Sink`."""
        self._begin(tensor, data.nbytes)
        self._file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)

    def transfer(self, tensor: onnx.TensorProto, source: onnx.TensorProto, folder: Path | None, model: str) -> None:
        """See `Sink`; copies file to file in chunks. Strings stay in the proto: ONNX has no external form of them."""
        if source.data_type == onnx.TensorProto.STRING:
            tensor.CopyFrom(source)
            return
        if not is_external(source):
            self.store(tensor, np.frombuffer(raw(source, folder, model), np.uint8))
            return
        path, offset, length = locate(source, folder, model)
        self._begin(tensor, length)
        with reading(path, source, model):
            stream = path.open("rb")
        with stream:
            stream.seek(offset)
            while length:
                with reading(path, source, model):
                    chunk = stream.read(min(length, _CHUNK))
                if not chunk:
                    raise ContractError(
                        model,
                        f"tensor {source.name!r}: {path} became shorter while it was read",
                        expected="the whole file",
                        advice="copy the external data again",
                    )
                self._file.write(chunk)
                length -= len(chunk)

    def _begin(self, tensor: onnx.TensorProto, length: int) -> None:
        offset = -(-self._file.tell() // ALIGNMENT) * ALIGNMENT
        self._file.truncate(offset)
        self._file.seek(0, os.SEEK_END)
        for name in ("raw_data", "external_data"):
            tensor.ClearField(name)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", self._location), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
