"""save(): writes a model, perhaps with a data file, and puts both in place together.

Tensors are written one by one: a weight is packed when it is written, and external data is copied from file to file.
"""

from __future__ import annotations

import os
from io import BufferedWriter
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from mxfp8_graph import files
from mxfp8_graph.onnx_pass import single_file
from mxfp8_graph.onnx_pass.graph import initializers_of, is_large, name_of
from mxfp8_graph.onnx_pass.load import external_files, path_of
from mxfp8_graph.onnx_pass.protos import iter_graphs, large_constants, metadata_of, to_proto
from mxfp8_ops.errors import ContractError, Option

INLINE_LIMIT: Final = 1_900_000_000
"""protobuf cannot hold 2^31 bytes; the rest is room for the graph."""

ALIGNMENT: Final = 4096
"""External tensors start at multiples of this: ONNX Runtime can then map them instead of copying."""


def wants_external(model: ir.Model, path: Path | None, choice: str, *, as_source: bool) -> bool:
    """Whether the weights of a result go to an external file: as in the source, or near protobuf's 2 GB.

    Raises:
        ContractError: `choice` is unknown; it is "always" without a path; or it is "never" and the weights are too
            large for one protobuf file.
    """
    if choice not in {"auto", "always", "never"}:
        what = f"external_data is {choice!r}"
        raise ContractError(name_of(model), what, expected="auto, always or never", advice="correct it")
    if path is None:
        if choice == "always":
            what, advice = "external_data 'always' without an output", ("pass ", Option("output"))
            raise ContractError(name_of(model), what, expected="a path to put it next to", advice=advice)
        return False
    tensors = [value.const_value for value in initializers_of(model)]
    # onnx_ir does not know the size of strings.
    size = sum(t.nbytes for t in tensors if t and t.dtype != ir.DataType.STRING) + _bytes_of_constants(model)
    does_not_fit = size > INLINE_LIMIT
    if choice == "never" and does_not_fit:
        what = "the model does not fit into one protobuf file (2 GB)"
        advice = ("pass ", Option("external_data", "always"))
        raise ContractError(path, what, expected="external data", advice=advice)
    return choice == "always" or (choice == "auto" and (as_source or does_not_fit))


def check_output(model: ir.Model, path: Path, *, external: bool, overwrite: bool) -> list[Path]:
    """Returns `replaces` for `save`; ContractError if `save` could not write there. For dry runs."""
    replaces = _data_of(path, external=external) if overwrite else []
    files.check_output(path, overwrite=overwrite, replaces=replaces, **_files_of(model, path, external=external))
    return replaces


def save(model: ir.Model, path: Path, *, external: bool, overwrite: bool, replaces: list[Path] | None = None) -> int:
    """Writes a model; returns the number of bytes written.

    Args:
        model: its large initializers become external tensors of the new file if `external`.
        path: the output.
        external: whether data goes to a file of its own.
        overwrite: whether an old output is replaced.
        replaces: the data file of the old output, from `check_output`.

    Raises:
        ContractError: a tensor cannot be read or packed, the output exists and `overwrite` is false, is the input or
            its data, or cannot be written.
    """
    if replaces is None:
        replaces = _data_of(path, external=external) if overwrite else []
    place = _files_of(model, path, external=external)
    with files.output(path, overwrite=overwrite, replaces=replaces, **place) as folder:
        draft = folder / path.name
        if external:
            # The data first: the model has the offsets of the tensors.
            _write_data(model, folder / files.data_path_of(path).name)
            draft.write_bytes(to_proto(model).SerializeToString())
        else:
            single_file.write(model, draft)
        return sum(file.stat().st_size for file in folder.iterdir())


def _files_of(model: ir.Model, path: Path, *, external: bool) -> dict[str, list[Path]]:
    """Returns the arguments of `files.output` about files: the inputs, and the files beside the output."""
    source = path_of(model)
    return {
        "inputs": [] if source is None else [source, *external_files(model)],
        "beside": [files.data_path_of(path)] if external else [],
    }


def _data_of(path: Path, *, external: bool) -> list[Path]:
    """Returns the data file beside `path` if the old model at `path` names it; else it belongs to another model.

    The old model is not loaded: a model whose data is missing, cut or linked still names it.

    Raises:
        ContractError: the old model cannot be read, and a new data file (`external`) would replace the old one.
    """
    data = files.data_path_of(path)
    if not path.is_file() or not os.path.lexists(data):
        return []
    try:
        proto = onnx.ModelProto.FromString(single_file.skeleton(path))
    except (OSError, DecodeError) as error:
        if not external:
            return []
        why = getattr(error, "strerror", None) or "not a complete ONNX file"
        what = f"exists already, and {path}, whose data it may be, cannot be read: {why}"
        raise ContractError(data, what, expected="no file there", advice="move it away or pass another path") from None
    named = set()
    for graph in iter_graphs(proto.graph):
        constants = (attribute.t for node in graph.node for attribute in node.attribute)
        for tensor in (*graph.initializer, *constants):
            named |= {os.path.normpath(entry.value) for entry in tensor.external_data if entry.key == "location"}
    return [data] if data.name in named else []


def _bytes_of_constants(model: ir.Model) -> int:
    return sum(attribute.as_tensor().nbytes for _, attribute in large_constants(model))


def _write_data(model: ir.Model, data: Path) -> None:
    """Writes the large initializers to `data`, packed weights first, and makes them external tensors of that file.

    Large values of Constant nodes stay in the model if they fit into one protobuf file.

    Not `onnx_ir.external_data`: it writes tensors in the order of their sizes, and a weight whose scales come before
    its elements would be packed twice.
    """
    values = [value for value in initializers_of(model) if value.const_value and is_large(value.const_value)]
    with data.open("wb") as file:
        for value in sorted(values, key=lambda value: not isinstance(value.const_value, ir.LazyTensor)):
            assert value.const_value is not None  # of `values`
            value.const_value = _written(value.const_value, str(value.name), file)
        for node, attribute in large_constants(model) if _bytes_of_constants(model) > INLINE_LIMIT else ():
            tensor = attribute.as_tensor()
            moved = _written(tensor, tensor.name or "", file)
            node.attributes[attribute.name] = ir.AttrTensor(attribute.name, moved, doc_string=attribute.doc_string)


def _written(tensor: ir.TensorProtocol, name: str, file: BufferedWriter) -> ir.ExternalTensor:
    """Returns a tensor as an external tensor of `file`, after writing it there."""
    offset = -(-file.tell() // ALIGNMENT) * ALIGNMENT
    file.write(bytes(offset - file.tell()))
    single_file.write_tensor(tensor, file)
    return ir.ExternalTensor(
        Path(file.name).name,
        offset,
        tensor.nbytes,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=name,
        doc_string=tensor.doc_string,
        metadata_props=metadata_of(tensor),
    )
