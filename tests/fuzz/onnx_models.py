"""Small ONNX models, and damaged copies of them: fields dropped, doubled, shuffled and overwritten, names exchanged."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, Final

import onnx
from golden.cases import CASES
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from models import matmul_model
from onnx.external_data_helper import set_external_data

import mxfp8_graph

DATA: Final = "model.onnx.data"
"""The file that the model with external data names."""
DATA_BYTES: Final = matmul_model().graph.initializer[0].raw_data

_WIDE: Final = ("output_projections", "routers", "embeddings", "attention_scores", "attention_values", "convolutions")
RECIPE: Final = mxfp8_graph.Recipe(name="everything", min_dim=1, min_channels=1, **dict.fromkeys(_WIDE, True))
"""Reaches as much of the pass as it can."""

_MODELS: Final = (
    *("gemm, transA, transB, alpha, beta", "Split", "experts by Gather", "language model", "attention block", "gated"),
    *("If, views and bias inside", "Loop", "functions that call functions", "opset 7, IR 3", "convolutions"),
)

_NUMBERS: Final = (*range(-1, 30), 64, 99, 255, 2**15, 2**31 - 1, 2**31, 2**33, 2**62, 2**63 - 1, -(2**63))
_TEXTS: Final = (
    *(
        "",
        *"xwyhF",
        "\0",
        "../x",
        "a" * 300,
        "\x1b[31m",
        "ä" * 9,
        "-1",
        "MatMul",
        "Gemm",
        "Conv",
        "Transpose",
        "Reshape",
    ),
    *("If", "Loop", "Scan", "Constant", "Gather", "Softmax", "Upsample", "QuantizeLinear", "MXFP8Gemm", "Nothing"),
)


def seeds() -> list[bytes]:
    """Returns thirteen models that between them have what models have: one external data, one packed weights."""
    models = [CASES[name].build() for name in _MODELS]
    external = matmul_model()
    tensor = external.graph.initializer[0]
    set_external_data(tensor, DATA, offset=0, length=len(DATA_BYTES))
    tensor.ClearField("raw_data")
    rewritten, _ = mxfp8_graph.rewrite(models[_MODELS.index("language model")], RECIPE)
    return [model.SerializeToString() for model in (*models, external, rewritten)]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Returns a model with one to six faults: in the bytes of the file, or in the fields of what it holds."""
    try:
        proto = onnx.ModelProto.FromString(data)
    except DecodeError:
        return _scrambled(data, rng)
    if rng.random() < 0.15:
        return _scrambled(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        messages = list(_messages(proto))
        with contextlib.suppress(ValueError, TypeError, IndexError):  # not every change fits every message
            rng.choice((_repeat, _set))(rng.choice(messages), messages, rng)
    return proto.SerializeToString()


def _scrambled(data: bytes, rng: random.Random) -> bytes:
    """Returns `data` with bytes changed, cut out, doubled or inserted."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 4, 16))
        new = rng.choice((b"", changed[at : at + length] * 2, rng.randbytes(length)))
        changed[at : at + rng.choice((0, length))] = new
    return bytes(changed)


def _messages(message: Message) -> Iterator[Message]:
    """Yields `message` and every message in it."""
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                yield from _messages(inner)


def _repeat(message: Message, messages: list[Message], rng: random.Random) -> None:
    """Drops, repeats or shuffles the entries of a field, or takes them from another message: names, nodes, shapes."""
    field, value = rng.choice(message.ListFields())
    if not field.is_repeated:
        message.ClearField(field.name)
        return
    donor = rng.choice([other for other in messages if other.DESCRIPTOR is message.DESCRIPTOR])
    source = type(message).FromString(rng.choice((message, donor)).SerializeToString())
    entries = list(getattr(source, field.name))
    chosen = rng.choices(entries, k=len(entries) + rng.choice((-1, -1, 0, 1, 20)))
    del value[:]
    value.extend(chosen)


def _set(message: Message, messages: list[Message], rng: random.Random) -> None:
    """Writes a number or a text to any field that takes it, also one that the message has not."""
    field = rng.choice([entry for entry in message.DESCRIPTOR.fields if entry.type != FieldDescriptor.TYPE_MESSAGE])
    value: Any = rng.choice(_TEXTS if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else _NUMBERS)
    value = value.encode() if field.type == FieldDescriptor.TYPE_BYTES else value
    if field.is_repeated:
        values = getattr(message, field.name)
        at = rng.randrange(len(values) + 1)
        values[at : at + rng.choice((0, 1))] = [value]
    else:
        setattr(message, field.name, value)
