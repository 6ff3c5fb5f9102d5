"""Reads and writes a model of one file without its large initializers in protobuf.

skeleton    file -> protobuf, with their raw data as external data of that file
write       graph -> file, with their raw data written one by one
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import onnx
import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import INLINE_BYTES, is_large
from mxfp8_graph.onnx_pass.protos import in_memory, proto_without_data

_GRAPH: Final = 7  # ModelProto.graph
_INITIALIZER: Final = 5  # GraphProto.initializer
_RAW_DATA: Final = 9  # TensorProto.raw_data
_NODE: Final = 1  # GraphProto.node
_ATTRIBUTE: Final = 5  # NodeProto.attribute
_TENSOR: Final = 5  # AttributeProto.t

Tree = dict[int, "Tree"]
_TENSORS: Final[Tree] = {_GRAPH: {_INITIALIZER: {}, _NODE: {_ATTRIBUTE: {_TENSOR: {}}}}}
"""The fields that lead from a model to the tensors of its main graph."""

_LENGTH: Final = 2  # wire type of messages, strings and bytes


def skeleton(path: Path) -> bytes:
    """Returns the model as protobuf, with large raw data as external data of the file itself.

    A file that is not protobuf is returned as it is, and protobuf's parser refuses it.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return b"".join(_message(content, 0, len(content), _TENSORS, path.name))
        except (ValueError, IndexError):
            file.seek(0)
            return file.read()


def write(model: ir.Model, path: Path) -> None:
    """Writes a model. Large initializers of the main graph are written one by one, each where its raw data belongs."""
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None and is_large(tensor)}
    # Tensors of subgraphs go through protobuf. One file has no external data, so these tensors are read here.
    for graph in model.graph.subgraphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = in_memory(value.const_value)
    with proto_without_data(model, main_only=True) as proto:
        content = proto.SerializeToString()
    del proto
    with path.open("wb") as file:
        for number, head, start, stop in _fields(content, 0, len(content)):
            if number != _GRAPH:
                file.write(content[head:stop])
                continue
            pieces: list[tuple[bytes, ir.TensorProtocol | None]] = []
            for field, place, begin, end in _fields(content, start, stop):
                tensor = None
                if field == _INITIALIZER:
                    tensor = tensors.get(onnx.TensorProto.FromString(content[begin:end]).name)
                if tensor is None:
                    pieces.append((content[place:end], None))
                else:
                    raw = _head(_RAW_DATA, tensor.nbytes)
                    size = end - begin + len(raw) + tensor.nbytes
                    pieces.append((_head(_INITIALIZER, size) + content[begin:end] + raw, tensor))
            file.write(_head(_GRAPH, sum(len(piece) + (t.nbytes if t else 0) for piece, t in pieces)))
            for piece, tensor in pieces:
                file.write(piece)
                if tensor is not None:
                    write_tensor(tensor, file)


def write_tensor(tensor: ir.TensorProtocol, file: BinaryIO) -> None:
    """Writes the bytes of a tensor; external data goes from file to file."""
    if isinstance(tensor, ir.ExternalTensor):
        tensor.tofile(file)
    elif isinstance(tensor, ir.LazyTensor):  # without a copy; NumPy's own `tofile` hides why it fails
        file.write(np.ascontiguousarray(tensor.numpy()).view(np.uint8).data)
    else:
        file.write(tensor.tobytes())


def _message(content: mmap.mmap | bytes, start: int, stop: int, tree: Tree, name: str) -> Iterator[bytes]:
    """Yields a message in which large raw data of the tensors that `tree` leads to is external data of the file."""
    external = b""
    for number, head, begin, end in _fields(content, start, stop):
        is_large = end - begin > INLINE_BYTES
        if is_large and number in tree:
            yield _tagged(number, b"".join(_message(content, begin, end, tree[number], name)))
        elif is_large and number == _RAW_DATA and not tree:
            tensor = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
            for key, value in (("location", name), ("offset", str(begin)), ("length", str(end - begin))):
                tensor.external_data.add(key=key, value=value)
            external = tensor.SerializeToString()
        else:
            yield content[head:end]
    yield external  # last: of several data_location fields protobuf takes the last


def _fields(content: mmap.mmap | bytes, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (number, where the field begins, where its value begins, where it ends)."""
    at = start
    while at < stop:
        head = at
        tag, at = _varint(content, at)
        kind, value = tag & 7, at
        if kind == _LENGTH:
            size, value = _varint(content, at)
            at = value + size
        elif kind == 0:  # a varint; 1 and 5 are numbers of 8 and 4 bytes
            _, at = _varint(content, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError("a group")
        if at > stop:
            raise ValueError("beyond the message")
        yield tag >> 3, head, value, at


def _varint(content: mmap.mmap | bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = content[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, at
        shift += 7
        if shift > 63:  # 10 bytes of 7 bits hold the largest number
            raise ValueError("too long")


def _tagged(number: int, content: bytes) -> bytes:
    return _head(number, len(content)) + content


def _head(number: int, size: int) -> bytes:
    head = bytearray([number << 3 | _LENGTH])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    head.append(size)
    return bytes(head)
