"""Reads tensors from where a model keeps them: in the proto, in its own file, or in an external file beside it."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from mxfp8_graph.file_reading import ModelFolder
from mxfp8_ops.errors import ContractError

Array = npt.NDArray[Any]
Fetch = Callable[[int, int], Array]
"""(index of the first value, count) -> those values, 1-D; valid until the next call."""

_BITS: Final = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}
"""Dtypes that share bytes; all others take whole ones."""

_INSIDE: Final = f"mxfp8-graph:{secrets.token_hex(8)}"
"""Key of the entry of `external_data` that says where in the model's own file the values lie. No model can know it."""


def byte_length(tensor: onnx.TensorProto) -> int:
    """Returns how many bytes the values of `tensor` take as raw data, by its dtype and dims."""
    return -(-math.prod(tensor.dims) * bit_width(tensor.data_type) // 8)


@functools.cache
def bit_width(data_type: int) -> int:
    """Returns how many bits a value of that onnx.TensorProto.DataType takes as raw data."""
    itemsize = int(onnx.helper.tensor_dtype_to_np_dtype(data_type).itemsize)
    return _BITS.get(onnx.TensorProto.DataType.Name(data_type), 8 * itemsize)


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the values lie in an external file."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def is_apart(tensor: onnx.TensorProto) -> bool:
    """Whether the values lie in an external file, or in the model's own but not in the proto."""
    return is_external(tensor) or inside(tensor) is not None


def refer(offset: int, length: int) -> onnx.TensorProto:
    """Returns what a tensor has in the place of its raw data where that stays in the model's own file."""
    place = onnx.StringStringEntryProto(key=_INSIDE, value=f"{offset} {length}")
    return onnx.TensorProto(external_data=[place])


def inside(tensor: onnx.TensorProto) -> tuple[int, int] | None:
    """Returns (offset, length) of raw data that stays in the model's own file; None if it is elsewhere."""
    for entry in tensor.external_data or ():
        if entry.key == _INSIDE:
            offset, length = map(int, entry.value.split())
            return offset, length
    return None


def location(tensor: onnx.TensorProto) -> str:
    """Returns the external file of `tensor` as the model names it."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def set_location(tensor: onnx.TensorProto, name: str) -> None:
    """Names another external file of the same layout."""
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = name


def read(tensor: onnx.TensorProto, folder: ModelFolder | None, model: str) -> Array:
    """Returns the values of a stored tensor.

    Args:
        tensor: with its data, or saying in which external file it lies.
        folder: where external files are; None for a model that came without a path.
        model: the model's path, or what to call a model without one.

    Raises:
        ContractError: the external file is missing, unreadable, too short, outside the model's folder or a link.
    """
    if is_apart(tensor):
        whole = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims)
        whole.raw_data = raw(tensor, folder, model)
        tensor = whole
    return numpy_helper.to_array(tensor)


def raw(tensor: onnx.TensorProto, folder: ModelFolder | None, model: str) -> bytes:
    """Returns the values of a stored tensor as little-endian bytes, in one read of exactly those; errors as `read`."""
    if is_apart(tensor):
        with opened(tensor, folder, model) as (file, offset, length):
            with _reading(tensor, model, file.name):
                file.seek(offset)
                content = file.read(length)
            if len(content) < length:
                raise _shrunk(file, tensor, model)
        return content
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data)


def hold(tensor: onnx.TensorProto, folder: ModelFolder | None, model: str) -> None:
    """Takes the values of a tensor that is apart into the proto; errors as `read`."""
    tensor.raw_data = raw(tensor, folder, model)
    forget_place(tensor)


def forget_place(tensor: onnx.TensorProto) -> None:
    """Removes from a tensor where its values lie."""
    for name in ("external_data", "data_location"):
        tensor.ClearField(name)


@contextlib.contextmanager
def fetching(tensor: onnx.TensorProto, folder: ModelFolder | None, model: str) -> Iterator[Fetch]:
    """Yields a function that reads any run of the values of `tensor` into one buffer; errors as `read`."""
    if not is_apart(tensor) or onnx.TensorProto.DataType.Name(tensor.data_type) in _BITS:
        values = read(tensor, folder, model).reshape(-1)
        yield lambda first, count: values[first : first + count]
        return
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    buffer = np.empty(0, dtype)

    def fetch(first: int, count: int) -> Array:
        nonlocal buffer
        if buffer.size < count:
            buffer = np.empty(count, dtype)
        start, length = base + first * dtype.itemsize, count * dtype.itemsize
        with _reading(tensor, model, file.name):
            got = os.preadv(file.fileno(), [buffer[:count].view(np.uint8).data], start)
            if hasattr(os, "posix_fadvise"):  # let the disk work while this run is packed
                os.posix_fadvise(file.fileno(), start + length, length, os.POSIX_FADV_WILLNEED)
        if got < length:
            raise _shrunk(file, tensor, model)
        return buffer[:count]

    with opened(tensor, folder, model) as (file, base, _):
        yield fetch


@contextlib.contextmanager
def opened(tensor: onnx.TensorProto, folder: ModelFolder | None, model: str) -> Iterator[tuple[BinaryIO, int, int]]:
    """Yields (the file of a tensor that is apart, offset, length), once it is known to have that; errors as `read`."""
    where = f"{model}: {_called(tensor)}"
    name, own = location(tensor), inside(tensor)
    if own is not None and folder is not None:
        with _reading(tensor, model):
            file = folder.model.open("rb")
        with file:
            yield file, *own
        return
    if folder is None:
        what = f"lies in external file {name!r}, and a model in memory has no folder to look in"
        raise ContractError(where, what, expected="a path", advice="pass the model's path instead")
    expected = byte_length(tensor)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", expected))
    except ValueError:
        what = "external offset or length is not a number"
        raise ContractError(where, what, expected="integers", advice="export the model again") from None
    if length != expected:
        fitting = f"{expected} for its shape and dtype"
        raise ContractError(
            where, f"external data of {length} bytes", expected=fitting, advice="export the model again"
        )
    with _reading(tensor, model):
        file = folder.locate(name, where).open("rb")
    with file:
        size = os.fstat(file.fileno()).st_size
        if offset < 0 or offset + length > size:
            what = f"needs bytes {offset} to {offset + length} of {file.name}, which has {size}"
            raise ContractError(where, what, expected="the whole file", advice="copy the external data again")
        yield file, offset, length


def as_bytes(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Returns an external tensor as the uint8 tensor [bytes] that lies in the same place."""
    octets = onnx.TensorProto(name=tensor.name, data_type=onnx.TensorProto.UINT8, dims=[byte_length(tensor)])
    octets.data_location = tensor.data_location
    octets.external_data.extend(tensor.external_data)
    return octets


def _called(tensor: onnx.TensorProto) -> str:
    return f"tensor {tensor.name!r}" if tensor.name else "a tensor without a name"


@contextlib.contextmanager
def _reading(tensor: onnx.TensorProto, model: str, path: str = "") -> Iterator[None]:
    """Reports an OSError while an external file is opened or read as what it means for `tensor`."""
    try:
        yield
    except OSError as error:
        if inside(tensor) is not None:
            expected, advice = "the model, which is read again for each tensor", "leave it where it was"
            what = f"{_called(tensor)}: cannot read it any more: {error.strerror}"
            raise ContractError(model, what, expected=expected, advice=advice) from None
        what = f"{_called(tensor)}: cannot read external file {error.filename or path}: {error.strerror}"
        raise ContractError(model, what, expected="the file next to the model", advice="copy it there") from None


def _shrunk(file: BinaryIO, tensor: onnx.TensorProto, model: str) -> ContractError:
    what = f"{_called(tensor)}: {file.name} became shorter while it was read"
    return ContractError(model, what, expected="the whole file", advice="copy the external data again")
