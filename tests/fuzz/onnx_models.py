"""ONNX models, broken in every way: fields dropped, doubled, swapped and retyped, sizes made huge, names cross-wired.

Whatever a file holds, a rewrite either works or says in one of our errors what is wrong with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from builders import attention_model, chain_model, gemm_model, language_model, matmul_model, model, node, weight
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import TensorProto, helper, numpy_helper

import mxfp8_graph
from mxfp8_graph.onnx_model.open import open_model
from mxfp8_graph.onnx_model.tensor_data import is_external
from mxfp8_graph.packed.interchange import contents
from mxfp8_graph.running.inputs import Signature, make_inputs
from mxfp8_ops.errors import Mxfp8Error

F32 = np.float32

DATA: Final = "model.onnx.data"
"""The external file that seeds name; `check` puts it next to the model."""

DATA_BYTES: Final = 64 * 96 * 4

EVERYTHING: Final = mxfp8_graph.Recipe(
    name="everything",
    min_dim=1,
    output_projections=True,
    routers=True,
    embeddings=True,
    attention_scores=True,
    attention_values=True,
)
"""Reaches as much of the pass as it can."""

INTEGERS: Final = (0, 1, -1, 2, 3, 7, 16, 21, 64, 99, 255, 2**15, 2**31 - 1, 2**31, 2**33, 2**62, 2**63 - 1, -(2**63))
STRINGS: Final = (
    "",
    "x",
    "w",
    "y",
    "h",
    "MatMul",
    "Transpose",
    "If",
    "\0",
    "../x",
    "a" * 300,
    "\x1b[31m",
    "ä" * 9,
    "-1",
)


def seeds() -> list[bytes]:
    """Returns small models that between them have what models have."""
    return [build().SerializeToString() for build in _SEEDS]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Returns a model with one to six things wrong with it: bytes of the file, or fields of what it holds."""
    if rng.random() < 0.15:
        return _scrambled(data, rng)
    try:
        proto = onnx.ModelProto.FromString(data)
    except DecodeError:
        return _scrambled(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        messages = list(_messages(proto))
        try:
            rng.choice(_MUTATIONS)(rng.choice(messages), messages, rng)
        except (ValueError, TypeError, AttributeError, IndexError):  # protobuf does not take everything either
            continue
    try:
        return proto.SerializeToString()
    except Exception:
        return _scrambled(data, rng)


def check(data: bytes, folder: Path) -> None:
    """Opens, plans, rewrites and unpacks a model; raises only where one of them fails with no error of ours.

    Args:
        data: the file.
        folder: an empty folder to write to.
    """
    path = folder / "model.onnx"
    path.write_bytes(data)
    external = folder / DATA
    if not external.exists():
        external.write_bytes(np.random.default_rng(0).standard_normal(DATA_BYTES // 4, F32).tobytes())
    for step in (_rewrite, _unpack, _inputs):
        try:
            step(path)
        except Mxfp8Error as error:
            str(error).encode()


def _rewrite(path: Path) -> None:
    report = None
    try:
        _, report = mxfp8_graph.rewrite(path, EVERYTHING, output=path.with_name("out.onnx"), overwrite=True)
    except mxfp8_graph.NothingEligibleError:
        return
    for name in ("report.json", "report.html"):
        report.write(path.with_name(name))


def _unpack(path: Path) -> None:
    for packed in contents(path).weights.values():
        packed.dequantize()


def _inputs(path: Path) -> None:
    signature = Signature.of(open_model(path))
    sizes = ([dim if isinstance(dim, int) else 16.0 for dim in spec.dims] for spec in signature.specs)
    if all(math.prod(dims) < 1e6 for dims in sizes):
        make_inputs(signature)


def _scrambled(data: bytes, rng: random.Random) -> bytes:
    """Returns `data` with bytes changed, cut out, doubled or inserted."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(changed) + 1)
        length = rng.choice((1, 1, 2, 4, 16))
        kind = rng.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] = rng.choice(
                (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256), changed[at] ^ (1 << rng.randrange(8)))
            )
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = changed[at : at + length]
        else:
            changed[at:at] = rng.randbytes(length)
    return bytes(changed)


def _messages(message: Message) -> Iterator[Message]:
    """Yields `message` and every message in it."""
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                yield from _messages(inner)


def _fields(message: Message) -> list[tuple[Any, Any]]:
    return list(message.ListFields())


def _drop(message: Message, messages: list[Message], rng: random.Random) -> None:
    field, value = rng.choice(_fields(message))
    if field.is_repeated and len(value) > 0 and rng.random() < 0.7:
        del value[rng.randrange(len(value))]
    else:
        message.ClearField(field.name)


def _double(message: Message, messages: list[Message], rng: random.Random) -> None:
    field, value = rng.choice([(f, v) for f, v in _fields(message) if f.is_repeated])
    entry = rng.choice(list(value))
    for _ in range(rng.choice((1, 1, 2, 20))):
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            value.add().CopyFrom(entry)
        else:
            value.append(entry)


def _swap(message: Message, messages: list[Message], rng: random.Random) -> None:
    field, value = rng.choice([(f, v) for f, v in _fields(message) if f.is_repeated and len(v) > 1])
    entries = list(value)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        copies = [type(entry).FromString(entry.SerializeToString()) for entry in entries]
        rng.shuffle(copies)
        del value[:]
        value.extend(copies)
    else:
        rng.shuffle(entries)
        value[:] = entries


def _graft(message: Message, messages: list[Message], rng: random.Random) -> None:
    """Replaces a message by another of its type, from elsewhere in the model."""
    alike = [other for other in messages if other.DESCRIPTOR is message.DESCRIPTOR and other is not message]
    message.CopyFrom(type(message).FromString(rng.choice(alike).SerializeToString()))


def _rewire(message: Message, messages: list[Message], rng: random.Random) -> None:
    """Puts a name of the model where another is."""
    nodes = [other for other in messages if isinstance(other, onnx.NodeProto)]
    names = [name for other in nodes for name in (*other.input, *other.output)]
    names += [other.name for other in messages if isinstance(other, onnx.ValueInfoProto | onnx.TensorProto)]
    chosen = rng.choice(nodes)
    ends = rng.choice((chosen.input, chosen.output))
    if rng.random() < 0.25:
        ends.append(rng.choice(names))
    else:
        ends[rng.randrange(len(ends))] = rng.choice(names)


def _number(message: Message, messages: list[Message], rng: random.Random) -> None:
    numbers = FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64
    numeric = [f for f in message.DESCRIPTOR.fields if f.cpp_type in (*numbers, FieldDescriptor.CPPTYPE_ENUM)]
    field, value = rng.choice(numeric), rng.choice((*INTEGERS, rng.randrange(30)))
    if not field.is_repeated:
        setattr(message, field.name, value)
    elif values := getattr(message, field.name):
        values[rng.randrange(len(values))] = value
    else:
        values.append(value)


def _text(message: Message, messages: list[Message], rng: random.Random) -> None:
    texts = FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES
    field, text = rng.choice([f for f in message.DESCRIPTOR.fields if f.type in texts]), rng.choice(STRINGS)
    value = text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if not field.is_repeated:
        setattr(message, field.name, value)
    elif values := getattr(message, field.name):
        values[rng.randrange(len(values))] = value
    else:
        values.append(value)


def _operand(message: Message, messages: list[Message], rng: random.Random) -> None:
    """Changes the values of a small integer tensor: shapes, axes, sizes."""
    tensors = [t for t in messages if isinstance(t, TensorProto)]
    tensor = rng.choice([t for t in tensors if t.data_type == TensorProto.INT64 and not is_external(t)])
    values = [int(v) for v in numpy_helper.to_array(tensor).reshape(-1)]
    count = rng.choice((len(values), len(values), 0, 1, 2, 5))
    values = [rng.choice((*values, *INTEGERS)) if rng.random() < 0.5 else v for v in (values + [0] * count)[:count]]
    tensor.CopyFrom(numpy_helper.from_array(np.array(values, np.int64), tensor.name))


def _op(message: Message, messages: list[Message], rng: random.Random) -> None:
    rng.choice([other for other in messages if isinstance(other, onnx.NodeProto)]).op_type = rng.choice(_OPS)


def _versions(message: Message, messages: list[Message], rng: random.Random) -> None:
    proto = messages[0]
    assert isinstance(proto, onnx.ModelProto)
    rng.choice(list(proto.opset_import)).version = rng.choice((1, 6, 7, 8, 9, 11, 12, 13, 17, 18, 20, 21, 22, 23))


_MUTATIONS: Final = (_drop, _double, _swap, _graft, _rewire, _number, _number, _text, _operand, _op, _versions)

_OPS: Final = (
    *("MatMul", "Gemm", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Split", "Cast", "Identity", "Add"),
    *("If", "Loop", "Scan", "Constant", "Gather", "GatherND", "Concat", "Softmax", "LayerNormalization", "Upsample"),
    *(
        "Shape",
        "Size",
        "EyeLike",
        "DequantizeLinear",
        "QuantizeLinear",
        "OneHot",
        "Expand",
        "MXFP8Gemm",
        "F",
        "Nothing",
    ),
)


def _views() -> onnx.ModelProto:
    """A weight behind every view that the pass looks through."""
    nodes = [
        node("Split", "w sizes", "w0 w1", axis=0),
        node("Slice", "w0 zero end zero", "w2"),
        node("Unsqueeze", "w2 zero", "w3"),
        node("Squeeze", "w3 zero", "w4"),
        node("Reshape", "w4 shape", "w5"),
        node("Cast", "w5", "w6", to=1),
        node("Identity", "w6", "w7"),
        node("Transpose", "w7", "w8", perm=[1, 0]),
        node("MatMul", "x w8", "h", "linear"),
        node("Add", "h b", "y", "bias"),
    ]
    numbers = {"sizes": [40, 24], "zero": [0], "end": [32], "shape": [-1, 48]}
    weights = {"w": weight(64, 48), "b": weight(32), **{k: np.array(v, np.int64) for k, v in numbers.items()}}
    return model(nodes, {"x": (F32, ["n", 48])}, {"y": (F32, ["n", 32])}, weights)


def _graph(nodes: list[onnx.NodeProto], inputs: dict[str, Any], outputs: dict[str, Any], **weights: np.ndarray) -> Any:
    def values(specs: dict[str, Any]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, *spec) for name, spec in specs.items()]

    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    return helper.make_graph(nodes, "inner", values(inputs), values(outputs), stored)


def _if() -> onnx.ModelProto:
    branches = {
        name: _graph(
            [node("MatMul", f"x {name}_w", f"{name}_y")],
            {},
            {f"{name}_y": (1, ["n", 32])},
            **{f"{name}_w": weight(64, 32)},
        )
        for name in ("then_branch", "else_branch")
    }
    nodes = [node("If", "c", "h", "if", **branches), node("Relu", "h", "y")]
    return model(nodes, {"x": (F32, ["n", 64]), "c": (np.bool_, [])}, {"y": (F32, ["n", 32])})


def _loop() -> onnx.ModelProto:
    inner = [node("Identity", "c", "go"), node("MatMul", "v w", "u", "step"), node("Relu", "u", "out")]
    body = _graph(
        inner,
        {"i": (7, []), "c": (9, []), "v": (1, ["n", 64])},
        {"go": (9, []), "out": (1, ["n", 64])},
        w=weight(64, 64),
    )
    nodes = [node("Loop", "count true x", "y", "loop", body=body)]
    stored = {"count": np.array(3), "true": np.array(True)}
    return model(nodes, {"x": (F32, ["n", 64])}, {"y": (F32, ["n", 64])}, stored)


def _scan() -> onnx.ModelProto:
    inner = [node("MatMul", "e w", "u", "step"), node("Add", "s u", "out"), node("Identity", "out", "each")]
    body = _graph(
        inner, {"s": (1, [4, 32]), "e": (1, [4, 64])}, {"out": (1, [4, 32]), "each": (1, [4, 32])}, w=weight(64, 32)
    )
    nodes = [node("Scan", "zero x", "last y", "scan", body=body, num_scan_inputs=1)]
    stored = {"zero": np.zeros((4, 32), F32)}
    return model(nodes, {"x": (F32, [5, 4, 64])}, {"last": (F32, [4, 32]), "y": (F32, [5, 4, 32])}, stored)


def _functions(opset: int = 21) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("f", 1)]
    inner = helper.make_function("f", "G", ["a", "b"], ["c"], [node("MatMul", "a b", "c", "inner")], imports)
    calls = [node("G", "a b", "c", domain="f"), node("Relu", "c", "d")]
    outer = helper.make_function("f", "F", ["a", "b"], ["d"], calls, imports)
    nodes = [node("F", "x w", "h", "call", domain="f"), node("G", "h v", "y", "last", domain="f")]
    proto = model([node("Relu", "x", "y")], {"x": (F32, ["n", 64])}, {"y": (F32, ["n", 64])}, opset=opset)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(numpy_helper.from_array(weight(64, 64, seed=i), name) for i, name in enumerate("wv"))
    proto.functions.extend([inner, outer])
    proto.opset_import.append(imports[1])
    return proto


def _old() -> onnx.ModelProto:
    """Opset 11, weights among the inputs, axes as attributes."""
    nodes = [
        node("Unsqueeze", "x", "x1", axes=[0]),
        node("Squeeze", "x1", "x2", axes=[0]),
        node("Gemm", "x2 w b", "h", "linear", alpha=0.5, transB=1),
        node("Softmax", "h", "y"),
    ]
    stored = {"w": weight(96, 64), "b": weight(96)}
    proto = model(nodes, {"x": (F32, ["n", 64])}, {"y": (F32, ["n", 96])}, stored, opset=11)
    proto.ir_version = 3
    proto.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in proto.graph.initializer
    )
    return proto


def _external() -> onnx.ModelProto:
    proto = matmul_model(64, 96)
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", DATA), ("offset", "0"), ("length", str(DATA_BYTES))):
        tensor.external_data.add(key=key, value=value)
    return proto


def _odd() -> onnx.ModelProto:
    """A sequence, an optional, a string tensor, a Constant of each kind, an unknown domain."""
    nodes = [
        node("Constant", "", "c0", value_ints=[1, 2]),
        node("Constant", "", "c1", value_float=1.5),
        node("Constant", "", "c2", value=numpy_helper.from_array(weight(64, 32), "c")),
        node("SequenceConstruct", "x x", "s"),
        node("Optional", "x", "o"),
        node("MatMul", "x c2", "h", "linear"),
        node("Gelu", "h", "y", domain="com.microsoft"),
    ]
    proto = model([node("Relu", "x", "y")], {"x": (F32, ["n", 64])}, {"y": (F32, ["n", 32])})
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.append(numpy_helper.from_array(np.array(["a", "b"], object), "names"))
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return proto


def _experts() -> onnx.ModelProto:
    """Experts whose weights are gathered while the model runs."""
    nodes = [
        node("Gather", "w i", "wi", axis=0),
        node("MatMul", "x wi", "h", "linear"),
        node("Neg", "h", "y"),
    ]
    inputs = {"x": (F32, ["s", 1, 40]), "i": (np.int64, ["s"])}
    return model(nodes, inputs, {"y": (F32, ["s", 1, 48])}, {"w": weight(3, 40, 48)})


def _rewritten(proto: onnx.ModelProto, recipe: mxfp8_graph.Recipe | str = "mxfp8") -> onnx.ModelProto:
    """Returns the model rewritten; by `EVERYTHING`, it is one that has nothing left to do."""
    result, _ = mxfp8_graph.rewrite(proto, recipe)
    assert isinstance(result, onnx.ModelProto)
    return result


def _packed_table() -> onnx.ModelProto:
    """A table and an output projection that shares it, packed once."""
    return _rewritten(language_model(40, 32, positions=16), EVERYTHING)


_SEEDS: Final[tuple[Callable[[], onnx.ModelProto], ...]] = (
    matmul_model,
    lambda: matmul_model(left=True, bias=True),
    lambda: gemm_model(64, 32, transA=1, transB=1, alpha=0.5, beta=2.0),
    lambda: chain_model((64, 32, 48), opset=12),
    lambda: attention_model(32, 2),
    lambda: language_model(40, 32, positions=16),
    *(_views, _if, _loop, _scan, _functions, lambda: _functions(17), _old, _external, _odd),
    lambda: _rewritten(matmul_model(64, 96)),
    lambda: _rewritten(matmul_model(64, 96, bias=True), "mxfp8-bf16"),
    lambda: _rewritten(attention_model(32, 2), EVERYTHING),
    *(_packed_table, _experts, lambda: _rewritten(_experts()), lambda: _rewritten(_experts(), "mxfp8-weight-only")),
)
