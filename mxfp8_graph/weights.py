"""Streams weights from where they lie to packed form and into the result, one tensor at a time.

Nothing here keeps a tensor: at any moment there is one source tensor and its packed copy in memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError

Array = npt.NDArray[Any]

ALIGNMENT: Final = 4096
"""External tensors start at multiples of this: ONNX Runtime can then map them instead of copying."""

_CHUNK: Final = 16 << 20


@dataclass(frozen=True)
class Packed:
    """A weight as [..., N, K] elements and [..., N, ceil(K / 32)] scales, and what packing it cost."""

    elements: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    signal: float
    """Sum of w^2."""
    noise: float
    """Sum of (w - dequantized)^2."""

    @property
    def relative_l2(self) -> float:
        """|w - dequantized| / |w|; 0 for an all-zero weight."""
        return float((self.noise / self.signal) ** 0.5) if self.signal else 0.0


class NonFiniteError(ContractError):
    """A weight holds a NaN or Inf."""


def pack(
    weight: Array,
    *,
    transposed: bool,
    element_format: str = "e4m3",
    scale_rounding: str = "ceil",
    name: str = "weight",
    allow_nonfinite: bool = False,
) -> Packed:
    """Returns `weight` quantized along K and laid out with K last.

    Args:
        weight: [..., N, K], or [..., K, N] if `transposed`; float32, float16 or bfloat16.
        transposed: whether K is the last axis but one.
        element_format: "e4m3" or "e5m2".
        scale_rounding: "ceil", "floor" or "even".
        name: what to call the weight in errors.
        allow_nonfinite: whether to pack a NaN or Inf (its block becomes NaN) instead of refusing it.

    Raises:
        NonFiniteError: the weight holds a NaN or Inf and `allow_nonfinite` is false.
    """
    from mxfp8_ops import cpu

    lead = weight.shape[:-2]
    n, k = weight.shape[:-3:-1] if transposed else weight.shape[-2:]
    elements = np.empty((*lead, n, k), np.uint8)
    scales = np.empty((*lead, n, -(-k // formats.BLOCK_SIZE)), np.uint8)
    signal = noise = 0.0
    for at in np.ndindex(*lead):
        matrix, flipped = weight[at], transposed
        if not matrix.flags.c_contiguous and matrix.T.flags.c_contiguous:
            matrix, flipped = matrix.T, not flipped
        part = cpu.pack(
            np.ascontiguousarray(matrix),
            transposed=flipped,
            element_format=element_format,
            scale_rounding=scale_rounding,
        )
        if part.first_nonfinite is not None and not allow_nonfinite:
            index = part.first_nonfinite if flipped == transposed else part.first_nonfinite[::-1]
            value = weight[at][index]
            raise NonFiniteError(
                f"weight {name!r}: {value} at index {[*at, *map(int, index)]}; expected finite values; "
                "repair the checkpoint, or pass --allow-nonfinite to let its block become NaN"
            )
        elements[at], scales[at] = part.elements, part.scales
        signal += part.signal
        noise += part.noise
    return Packed(elements, scales, signal, noise)


def read(tensor: onnx.TensorProto, folder: Path | None, model: str) -> Array:
    """Returns the values of a stored tensor; one read of exactly its bytes if they lie in an external file.

    Raises:
        ContractError: the external file is missing, unreadable, too short, or outside the model's folder.
    """
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    path, offset, length = locate(tensor, folder, model)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    with _reading(path, tensor, model):
        data = np.fromfile(path, np.uint8, count=length, offset=offset)
    return data.view(dtype).reshape(tuple(tensor.dims))


def locate(tensor: onnx.TensorProto, folder: Path | None, model: str) -> tuple[Path, int, int]:
    """Returns (file, offset, length) of an external tensor, having checked that the file holds that much.

    Raises:
        ContractError: see `read`.
    """
    where = f"{model}: tensor {tensor.name!r}"
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ContractError(
            f"{where}: lies in external file {location!r}, and a model in memory has no folder to look in; "
            "expected a path; pass the model's path instead"
        )
    path = (folder / location).resolve()
    if not location or not path.is_relative_to(folder.resolve()):
        raise ContractError(
            f"{where}: external file {location!r}; expected a file inside {folder}; move the data next to the model"
        )
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    expected = int(np.prod(tensor.dims, dtype=np.int64)) * dtype.itemsize
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", expected))
    except ValueError:
        raise ContractError(
            f"{where}: external offset or length is not a number; expected integers; export the model again"
        ) from None
    if length != expected:
        raise ContractError(
            f"{where}: external data of {length} bytes; expected {expected} for its shape and dtype; "
            "export the model again"
        )
    with _reading(path, tensor, model):
        size = path.stat().st_size
    if offset < 0 or offset + length > size:
        raise ContractError(
            f"{where}: needs bytes {offset} to {offset + length} of {path}, which has {size}; expected the whole file; "
            "copy the external data again"
        )
    return path, offset, length


@contextlib.contextmanager
def _reading(path: Path, tensor: onnx.TensorProto, model: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ContractError(
            f"{model}: tensor {tensor.name!r}: cannot read external file {path}: {error.strerror}; expected the file "
            "next to the model; copy it there"
        ) from None


class Sink(Protocol):
    """Where the data of the result goes: into the proto, or into an external file."""

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
        if source.data_location == onnx.TensorProto.EXTERNAL:
            tensor.raw_data = read(source, folder, model).tobytes()
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
        """See `Sink`; copies file to file in chunks."""
        if source.data_location != onnx.TensorProto.EXTERNAL:
            if source.raw_data:
                self.store(tensor, np.frombuffer(source.raw_data, np.uint8))
            else:
                self.store(tensor, numpy_helper.to_array(source))
            return
        path, offset, length = locate(source, folder, model)
        self._begin(tensor, length)
        with _reading(path, source, model):
            stream = path.open("rb")
        with stream:
            stream.seek(offset)
            while length:
                with _reading(path, source, model):
                    chunk = stream.read(min(length, _CHUNK))
                if not chunk:
                    raise ContractError(f"{model}: {path} became shorter while it was read; copy it again")
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
