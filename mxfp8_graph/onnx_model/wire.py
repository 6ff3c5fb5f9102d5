"""Models in protobuf's wire format, past protobuf: what is large is never in its memory.

protobuf reads a file from one string and writes one string, each a copy of every weight. So a file is read without its
large raw data, each with a reference in its place, and written piece by piece, as SerializeToString would. Both know
of a message no more than its fields: a tag (number and wire type) and a value, which has its length before it unless
it is a number. Whatever is not as it should be is left to protobuf, which says what is wrong.

Source: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, NamedTuple

import onnx

from mxfp8_graph.onnx_model.walk import copy_fields

MOST_BYTES: Final = 2**31 - 1
"""What a message may have: protobuf reads no more."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED: Final = {_FIXED64: 8, _FIXED32: 4}
_LONGEST_KEY: Final = 20
"""Bytes of a tag and of a number, or a length: two varints."""

_MOST_FIELDS: Final = 5_000_000
"""What is looked at, which takes some ten seconds. Models have a few fields for each node."""

_LAST: Final = 2**29
"""More than the number of any field."""

_Tensor = onnx.TensorProto
_Attribute = onnx.AttributeProto
_INNER: Final[Mapping[type, Mapping[int, type]]] = {
    onnx.ModelProto: {onnx.ModelProto.GRAPH_FIELD_NUMBER: onnx.GraphProto},
    onnx.GraphProto: {
        onnx.GraphProto.NODE_FIELD_NUMBER: onnx.NodeProto,
        onnx.GraphProto.INITIALIZER_FIELD_NUMBER: _Tensor,
    },
    onnx.NodeProto: {onnx.NodeProto.ATTRIBUTE_FIELD_NUMBER: _Attribute},
    _Attribute: {_Attribute.T_FIELD_NUMBER: _Tensor},
}
"""Where large data is looked for: initializers and attributes of the main graph."""

_ONCE: Final = {(onnx.ModelProto, onnx.ModelProto.GRAPH_FIELD_NUMBER), (_Attribute, _Attribute.T_FIELD_NUMBER)}
"""Fields that protobuf merges where there are several."""


class _Field(NamedTuple):
    number: int
    wire_type: int
    start: int
    """Where its tag is, in the file."""
    at: int
    """Where its bytes are, behind their length; else where its value is."""
    end: int
    value: int
    """Value of a varint; else 0."""


class _UnclearError(Exception):
    """These bytes are no message, or one of groups, or they are too many fields to look at."""


@dataclass(frozen=True)
class Range:
    """Bytes that lie in the file."""

    start: int
    end: int

    def __len__(self) -> int:
        """Returns how many."""
        return self.end - self.start


Reference = Callable[[int, int], bytes]
"""(offset in the file, length of raw data) -> the fields of a TensorProto that are to say so."""


def without_data(file: BinaryIO, least: int, reference: Reference) -> bytes:
    """Returns the ONNX model in a file with references in the place of raw data of more than `least` bytes.

    Replaced is the data of initializers and attributes of the main graph, where nothing else says where their data is.
    """
    whole = Range(0, os.fstat(file.fileno()).st_size)
    pieces = _Reader(file, least, reference).message(onnx.ModelProto, whole)
    return b"".join(piece if isinstance(piece, bytes) else _read(file, piece) for piece in pieces)


def _read(file: BinaryIO, piece: Range) -> bytes:
    file.seek(piece.start)
    return file.read(len(piece))


class _Reader:
    def __init__(self, file: BinaryIO, least: int, reference: Reference) -> None:
        self._file = file
        self._least = least
        self._reference = reference
        self._left = _MOST_FIELDS

    def message(self, kind: type, place: Range) -> Sequence[bytes | Range]:
        """Returns the pieces of a message; only the place itself if it stays as it is."""
        inner = _INNER[kind]
        pieces: list[bytes | Range] = []
        kept, seen = place.start, set()
        try:
            for field in self._fields(place):
                if kind is _Attribute and field.number == _Attribute.TYPE_FIELD_NUMBER:
                    if field.value != _Attribute.TENSOR:
                        return [place]  # what the pass takes for no tensor stays one
                    seen.add(field.number)
                if field.number not in inner or field.wire_type != _BYTES:
                    continue
                if (kind, field.number) in _ONCE and field.number in seen:
                    return [place]
                seen.add(field.number)
                found = self._below(inner[field.number], Range(field.at, field.end))
                if found is not None:
                    head = key(field.number, sum(map(len, found)))
                    pieces += [Range(kept, field.start), head, *found]
                    kept = field.end
        except _UnclearError:
            return [place]
        if kind is _Attribute and _Attribute.TYPE_FIELD_NUMBER not in seen:
            return [place]
        return [*pieces, Range(kept, place.end)]

    def _below(self, kind: type, place: Range) -> Sequence[bytes | Range] | None:
        """Returns the pieces of a message in another; None if it stays as it is, as most do, which are small."""
        if len(place) <= self._least:
            return None
        found = self._tensor(place) if kind is _Tensor else self.message(kind, place)
        return found if len(found) > 1 else None

    def _tensor(self, place: Range) -> Sequence[bytes | Range]:
        data = None
        try:
            for field in self._fields(place):
                if field.number == _Tensor.RAW_DATA_FIELD_NUMBER and data is None and field.wire_type == _BYTES:
                    data = field
                elif (
                    field.number in {_Tensor.RAW_DATA_FIELD_NUMBER, _Tensor.EXTERNAL_DATA_FIELD_NUMBER}
                    or (field.number == _Tensor.DATA_LOCATION_FIELD_NUMBER and field.value != _Tensor.DEFAULT)
                    or (field.number == _Tensor.DATA_TYPE_FIELD_NUMBER and field.value == _Tensor.STRING)
                ):
                    return [place]
        except _UnclearError:
            return [place]
        if data is None or data.end - data.at <= self._least:
            return [place]
        reference = self._reference(data.at, data.end - data.at)
        return [Range(place.start, data.start), reference, Range(data.end, place.end)]

    def _fields(self, place: Range) -> Iterator[_Field]:
        """Yields the fields of a message, without reading what they hold."""
        start = place.start
        while start < place.end:
            self._left -= 1
            if self._left < 0:
                raise _UnclearError
            self._file.seek(start)
            head = self._file.read(min(_LONGEST_KEY, place.end - start))
            tag, size = _varint(head, 0)
            number, wire_type = tag >> 3, tag & 7
            value, at, end = 0, start + size, start + size
            if wire_type == _VARINT:
                value, size = _varint(head, size)
                end = start + size
            elif wire_type == _BYTES:
                length, size = _varint(head, size)
                at = start + size
                end = at + length
            elif wire_type in _FIXED:
                end += _FIXED[wire_type]
            else:
                raise _UnclearError
            if not number or end > place.end:
                raise _UnclearError
            yield _Field(number, wire_type, start, at, end, value)
            start = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns (the number at an index: 7 bits to a byte, lowest first, all but the last with the top bit; its end)."""
    value = 0
    for shift, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    raise _UnclearError


def key(number: int, length: int) -> bytes:
    """Returns what stands before the bytes of a field."""
    return _as_varint(number << 3 | _BYTES) + _as_varint(length)


def _as_varint(value: int) -> bytes:
    rest: list[int] = []
    while value > 0x7F:
        rest.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*rest, value])


@dataclass(frozen=True)
class Data:
    """Raw data that a tensor is to have, and that is read only when it is written."""

    length: int
    chunks: Callable[[], Iterable[memoryview]]
    """Returns its bytes; called once."""

    def __len__(self) -> int:
        """Returns how many bytes it has."""
        return self.length


class Serialized:
    """A model as it is in a file, byte for byte what SerializeToString would return.

    Args:
        model: the model, which is not to change meanwhile.
        data: the raw data of initializers of the main graph that have none in `model`, by name.
    """

    def __init__(self, model: onnx.ModelProto, data: Mapping[str, Data]) -> None:
        self._graph, self._data = model.graph, data
        number = onnx.ModelProto.GRAPH_FIELD_NUMBER
        length = sum(map(len, _graph(self._graph, data)))
        self._before = _fields_between(model, 0, number) + key(number, length)
        self._after = _fields_between(model, number, _LAST)
        self.byte_size = len(self._before) + length + len(self._after)

    def pieces(self) -> Iterator[memoryview]:
        """Yields its bytes in order, in pieces of any size."""
        yield memoryview(self._before)
        for piece in _graph(self._graph, self._data):
            if isinstance(piece, bytes):
                yield memoryview(piece)
            else:
                yield from piece.chunks()
        yield memoryview(self._after)


def _graph(graph: onnx.GraphProto, data: Mapping[str, Data]) -> Iterator[bytes | Data]:
    nodes, tensors = onnx.GraphProto.NODE_FIELD_NUMBER, onnx.GraphProto.INITIALIZER_FIELD_NUMBER
    for node in graph.node:
        content = node.SerializeToString()
        yield key(nodes, len(content)) + content
    yield _fields_between(graph, nodes, tensors)
    for tensor in graph.initializer:
        found = [tensor.SerializeToString()] if tensor.name not in data else _tensor(tensor, data[tensor.name])
        yield key(tensors, sum(map(len, found)))
        yield from found
    yield _fields_between(graph, tensors, _LAST)


def _tensor(tensor: onnx.TensorProto, data: Data) -> list[bytes | Data]:
    number = _Tensor.RAW_DATA_FIELD_NUMBER
    before, after = _fields_between(tensor, 0, number), _fields_between(tensor, number, _LAST)
    return [before, key(number, len(data)), data, after]


def _fields_between(message: Any, first: int, last: int) -> bytes:
    """Returns the fields of a message that have these numbers, the ends not included, in their order."""
    part = type(message)()
    others = {field.name for field, _ in message.ListFields() if not first < field.number < last}
    copy_fields(part, message, skip=others)
    return bytes(part.SerializeToString())
