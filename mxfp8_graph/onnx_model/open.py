"""Opens a model as a skeleton: the whole structure, without the data of large initializers.

Large raw data stays in the file: `wire.py` reads the rest of it, with references in its place.

Everything that looks at the structure (function inlining, opset conversion, shape inference, onnx_ir) works on the
skeleton and so costs nothing per byte of weights; `tensor_data.py` reads the data, one tensor at a time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import DecodeError

from mxfp8_graph.file_reading import ModelFolder
from mxfp8_graph.onnx_model.check import validate
from mxfp8_graph.onnx_model.tensor_data import byte_length, is_apart, is_external, refer
from mxfp8_graph.onnx_model.walk import STANDARD, copy_fields, iter_tensors
from mxfp8_graph.onnx_model.wire import without_data
from mxfp8_ops.errors import ContractError

INLINE_BYTES: Final = 4096
"""Initializers up to this size stay in the skeleton: shape inference reads the small integer ones."""

_FROM_HF: Final = "for a folder with MXFP8 weights: mxfp8-graph from-hf FOLDER"

_DATA_FIELDS: Final = frozenset(
    {"raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data", "segment"}
)


@dataclass
class OpenedModel:
    """An opened model.

    Invariant: an initializer of the main graph whose name is in `tensors` has no data in `proto`; the tensor in
    `tensors` has it, or says in which external file it lies, or where in the model's own.
    """

    name: str
    """What to call the model in messages: its path, or "model"."""
    proto: onnx.ModelProto
    """The skeleton; a rewrite edits it in place."""
    tensors: dict[str, onnx.TensorProto]
    """What the skeleton leaves out, by name."""
    folder: ModelFolder | None
    """Where external data is, and the files that were read; None for a model that came without a path."""
    byte_size: int
    """Size of the model, external data included."""
    uses_external_data: bool
    weights_are_inputs: bool
    """The model is older than IR version 4, which lists every initializer among the graph inputs."""
    notes: list[str] = field(default_factory=list)
    """What was done to the model besides the rewrite itself."""

    @property
    def opset(self) -> int:
        """Version of the default operator domain.

        Raises:
            ContractError: the model imports none.
        """
        for entry in self.proto.opset_import:
            if entry.domain in STANDARD:
                return int(entry.version)
        what = "no opset import for the default domain"
        raise ContractError(self.name, what, expected="one", advice="re-export the model with an opset")


def open_model(model: str | Path | onnx.ModelProto) -> OpenedModel:
    """Returns the model in a file or in memory; external data is not read, and a caller's proto is never modified.

    Raises:
        ContractError: the file is missing, unreadable, empty or not an ONNX model.
    """
    if isinstance(model, onnx.ModelProto):
        return _open(model, "model", None, model.ByteSize())
    path = Path(model)
    if os.path.isdir(path):
        advice = "name the .onnx file inside it"
        if (path / "config.json").exists():
            advice += f"; {_FROM_HF}"
        raise ContractError(path, "a directory", expected="an ONNX file", advice=advice)
    try:
        folder = ModelFolder(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = without_data(file, INLINE_BYTES, lambda *place: refer(*place).SerializeToString())
    except OSError as error:
        raise ContractError.unreadable(path, error, "a readable ONNX file") from None
    if not content:
        raise ContractError(path, "the file is empty", expected="an ONNX model", advice="export it again")
    try:
        proto = onnx.ModelProto.FromString(content)
    except DecodeError:
        what, advice = _described(path, size)
        raise ContractError(path, what, expected="an ONNX model", advice=advice) from None
    del content
    return _open(proto, str(path), folder, size)


def _described(path: Path, size: int) -> tuple[str, str]:
    """Returns (what a file is that is no ONNX model, what to do), by its suffix and its bytes."""
    with path.open("rb") as file:
        head = file.read(16)
        file.seek(max(0, size - (1 << 16)))
        names = file.read() if head.startswith(b"PK") else b""  # a ZIP archive ends with the names of its files
    if names and path.suffix == ".whl":
        return "a Python wheel", "unzip it and name the .onnx file in it"
    if b"/archive_format" in names:
        return "a program of torch.export.save", "rename it to end in .pt2"
    if b"/data.pkl" in names or head.startswith(b"\x80\x02"):  # before 1.6, torch.save wrote plain pickles
        how = "load it in PyTorch, torch.export.export(module, inputs), and save that with mxfp8_graph.save as .pt2"
        return "a file of torch.save: weights or a module, without a graph", how
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:  # the length of the header, the header
        return "a safetensors checkpoint: weights without a graph", f"pass it as --weights; {_FROM_HF}"
    return "not a complete ONNX file (protobuf cannot be decoded)", "check that the file is one and was copied whole"


def _open(model: onnx.ModelProto, name: str, folder: ModelFolder | None, size: int) -> OpenedModel:
    if model.ir_version == 1:
        model = _typed(model)
    validate(model, name, folder)
    skeleton = onnx.ModelProto()
    copy_fields(skeleton, model, skip={"graph"})
    copy_fields(skeleton.graph, model.graph, skip={"initializer"})
    tensors: dict[str, onnx.TensorProto] = {}
    for tensor in model.graph.initializer:
        stub = skeleton.graph.initializer.add()
        if not is_apart(tensor) and _is_small(tensor):
            stub.CopyFrom(tensor)
            continue
        copy_fields(stub, tensor, skip=_DATA_FIELDS if is_external(tensor) else _DATA_FIELDS | {"external_data"})
        tensors[tensor.name] = tensor
    external = [t for t in iter_tensors(skeleton) if is_external(t)]
    size += sum(byte_length(t) for t in external)
    return OpenedModel(name, skeleton, tensors, folder, size, bool(external), model.ir_version < 4)


def _is_small(tensor: onnx.TensorProto) -> bool:
    if tensor.HasField("raw_data") and byte_length(tensor) > INLINE_BYTES:
        return False  # ByteSize would copy it
    return tensor.ByteSize() <= INLINE_BYTES


_Attribute = onnx.AttributeProto
_FIELDS: Final = {
    "f": _Attribute.FLOAT,
    "i": _Attribute.INT,
    "s": _Attribute.STRING,
    "t": _Attribute.TENSOR,
    "g": _Attribute.GRAPH,
    "floats": _Attribute.FLOATS,
    "ints": _Attribute.INTS,
    "strings": _Attribute.STRINGS,
}
"""The fields in which an attribute keeps its value, and its kind then."""


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy in which attributes say of which kind they are, as they have to since IR version 2."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graphs = [copy.graph]
    while graphs:
        for attribute in (attribute for node in graphs.pop().node for attribute in node.attribute):
            for descriptor, _ in attribute.ListFields() if not attribute.type else ():
                if kind := _FIELDS.get(descriptor.name):
                    attribute.type = kind
            graphs += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    return copy
