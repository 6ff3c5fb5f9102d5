"""load(): reads an ONNX file or a proto as an `ir.Model` whose large weights stay where they are.

Large raw data of the file itself becomes external data of that file, so every large weight has one form.
"""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from mxfp8_graph.file_reading import locate
from mxfp8_graph.onnx_pass import check
from mxfp8_graph.onnx_pass.graph import INLINE_BYTES, OVERRIDABLE, STANDARD, initializers_of
from mxfp8_graph.onnx_pass.protos import from_proto, in_memory, large_constant
from mxfp8_graph.onnx_pass.single_file import skeleton
from mxfp8_ops.errors import ContractError

_SOURCE: Final = "source"
"""Key of `Model.meta`: the path of the model; None for a proto."""

_FILES: Final = "files"
"""Key of `Model.meta`: the files with external data, without the model's own file."""

_SIZE: Final = "size"
"""Key of `Model.meta`: bytes of the model, its external data included."""

_FROM_HF: Final = "for a folder with MXFP8 weights: mxfp8-graph from-hf FOLDER"


def load(model: str | Path | onnx.ModelProto) -> ir.Model:
    """Returns the model in a file or in memory; a caller's proto is not changed, and external data is not read.

    Args:
        model: a path, or a proto whose tensors the graph refers to.

    Raises:
        ContractError: the file cannot be read, is damaged or is not an ONNX model, or onnx_ir cannot represent it.
    """
    if isinstance(model, onnx.ModelProto):
        return _graph(model, None, model.ByteSize())
    path = Path(model)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            advice = "name the .onnx file inside it"
            if (path / "config.json").exists():
                advice += f"; {_FROM_HF}"
            raise ContractError(path, "a directory", expected="an ONNX file", advice=advice)
        if not stat.S_ISREG(mode):  # a FIFO or a device could block, or never end
            raise ContractError(path, "not a regular file", expected="an ONNX file", advice="name one")
        size, content = path.stat().st_size, skeleton(path)
    except OSError as error:
        if error.errno == errno.ENOMEM:  # the file is not to blame
            raise MemoryError from error
        raise ContractError.unreadable(path, error, "a readable ONNX file") from None
    if not content:
        raise ContractError(path, "the file is empty", expected="an ONNX model", advice="export it again")
    try:
        proto = onnx.ModelProto.FromString(content)
    except DecodeError:
        what, advice = _described(path, size)
        raise ContractError(path, what, expected="an ONNX model", advice=advice) from None
    return _graph(proto, path, size)


def path_of(model: ir.Model) -> Path | None:
    """Returns the path that a model was loaded from; None for a proto."""
    return model.meta.get(_SOURCE)


def bytes_of(model: ir.Model) -> int:
    """Returns the bytes of the model as it was loaded, its external data included."""
    return int(model.meta[_SIZE])


def external_files(model: ir.Model) -> set[Path]:
    """Returns the files with external data of a model when it was loaded, without the model's own file."""
    return set(model.meta.get(_FILES, ()))


def _graph(proto: onnx.ModelProto, path: Path | None, size: int) -> ir.Model:
    name = "model" if path is None else str(path)
    check.fields(proto, name)
    model = from_proto(proto, name)
    model.meta.update({"name": name, _SOURCE: path})
    for imports in (model.opset_imports, *(function.opset_imports for function in model.functions.values())):
        if imports.keys() >= STANDARD:  # a conversion would raise one of the two only
            del imports["ai.onnx"]
    files: set[Path] = set()
    for value in initializers_of(model):
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            size += _resolve_external(tensor, path, name)
            files.add(Path(tensor.path))
            if tensor.nbytes <= INLINE_BYTES:  # steps and onnx's passes read sizes, axes and scalars
                value.const_value = in_memory(tensor)
    inner = {node for function in model.functions.values() for node in function.all_nodes()}
    for node in (*model.graph.all_nodes(), *inner):
        for key, attribute in list(node.attributes.items()):
            if not isinstance(tensor := attribute.value, ir.ExternalTensor):
                continue
            size += _resolve_external(tensor, path, name)
            files.add(Path(tensor.path))
            # The large value of a Constant may be packed; else `to_proto` reads it.
            if node in inner or not large_constant(node) or tensor.nbytes <= INLINE_BYTES:
                node.attributes[key] = ir.AttrTensor(key, in_memory(tensor), doc_string=attribute.doc_string)
    model.meta[_FILES] = files - {path and path.absolute()}
    model.meta[_SIZE] = size
    for graph, message in zip(model.graphs(), check.names(proto, name), strict=True):
        declared = {info.name for info in message.value_info}
        for value in graph.initializers.values():
            # Before IR version 4, every initializer is listed as an input.
            value.meta[OVERRIDABLE] = value.is_graph_input() and model.ir_version >= 4
            if not (value.is_graph_input() or value.is_graph_output() or value.name in declared):
                value.type = value.shape = None  # else the saved model declares each initializer's type twice
    check.nodes(model)
    return model


def _resolve_external(tensor: ir.ExternalTensor, path: Path | None, model: str) -> int:
    """Sets the path of a tensor's file; returns the bytes that the tensor has outside of the model's own file.

    Raises:
        ContractError: it lies outside the model's folder, or does not have the bytes of the tensor.
    """
    where = f"{model}: tensor {tensor.name!r}"
    if path is None:
        what = f"lies in external file {str(tensor.location)!r}, and a model in memory has no folder to look in"
        raise ContractError(where, what, expected="a path", advice="pass the model's path instead")
    location, is_own = str(tensor.location), tensor.location == path.name
    try:
        file = path if is_own else locate(path, location, where)
        state = file.stat()
    except OSError as error:
        what = f"cannot read external file {error.filename}: {error.strerror}"
        advice = "copy it there"
        raise ContractError(where, what, expected="the file next to the model", advice=advice) from None
    # Absolute: the path that was checked. onnx_ir's own check would refuse links to the model's own file.
    tensor.base_dir, tensor._location = "", str(file.absolute())
    if state.st_nlink > 1 and not is_own:  # it may be a file of another folder
        what = f"external file {location!r} has {state.st_nlink} hard links"
        raise ContractError(where, what, expected="a file with one name, as onnx does", advice="put a copy there")
    start, length, size = tensor.offset or 0, tensor.nbytes, state.st_size
    if tensor.length not in {None, length}:
        what, expected = f"external data of {tensor.length} bytes", f"{length} for its shape and dtype"
        raise ContractError(where, what, expected=expected, advice="export the model again")
    if not 0 <= start <= size - length:
        what = f"needs bytes {start} to {start + length} of {tensor.path}, which has {size}"
        raise ContractError(where, what, expected="the whole file", advice="copy the external data again")
    return 0 if is_own else length


def _described(path: Path, size: int) -> tuple[str, str]:
    """Returns (description, advice) for a file that is not an ONNX model, by its suffix and its bytes."""
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
