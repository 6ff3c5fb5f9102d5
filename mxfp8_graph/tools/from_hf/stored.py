"""Turns the parameters of a graph into external data in the files of the checkpoint, without reading it.

A safetensors file is what ONNX calls external data: an offset and a length. So tensors in high precision are copied
from file to file, as they are, and MXFP8 weights become stubs in the graph that the pass fills with their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

from mxfp8_graph.file_reading import ModelFolder
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.walk import iter_graphs
from mxfp8_graph.packed.checkpoint import Checkpoint, listed
from mxfp8_graph.packed.safetensors import DTYPES, Stored
from mxfp8_ops.errors import ContractError

_FLOATS: Final = ("F32", "F16", "BF16", "F64")
"""Dtypes of parameters, in the words of safetensors."""


def opened(proto: onnx.ModelProto, checkpoint: Checkpoint, inputs: Sequence[str], names: Names) -> OpenedModel:
    """Returns the model with its parameters from a checkpoint, as the pass takes it.

    Args:
        proto: the graph, whose inputs are `inputs` and parameters.
        checkpoint: where values are.
        inputs: the names of the inputs of a run.
        names: finds the checkpoint's name of a parameter; see `check`.

    Raises:
        ContractError: the files of the checkpoint are in several folders.
    """
    graph = proto.graph
    parameters = [value for value in graph.input if value.name not in inputs]
    model_inputs = [value for value in graph.input if value.name in inputs]
    shards = _CheckpointFolder(checkpoint)
    tensors: dict[str, TensorProto] = {}
    casts: dict[str, int] = {}
    size = 0
    renamed: dict[str, str] = {}
    for value in parameters:
        shape = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        dtype = value.type.tensor_type.elem_type
        name = names.of(value.name)
        assert name is not None  # `check` found it
        renamed[value.name] = name
        stored = checkpoint.others.get(name)
        stub = graph.initializer.add(name=name, dims=shape, data_type=dtype)
        if stored is not None:
            stub.data_type = helper.np_dtype_to_tensor_dtype(DTYPES[stored.dtype])
            # The bytes of the file stay as they are, so nodes that compute in another dtype need a cast.
            if stub.data_type != dtype:
                casts[name] = dtype
            tensors[name] = shards.tensor(name, stub.data_type, stored)
        size += math.prod(shape) * int(helper.tensor_dtype_to_np_dtype(stub.data_type).itemsize)
    # Parameters were inputs for the export only; from here on they are initializers.
    del graph.input[:]
    graph.input.extend(model_inputs)
    _rename(graph, renamed)
    if casts:
        _cast(graph, casts)
    opened = OpenedModel(
        str(checkpoint.path), proto, tensors, shards.folder, 0, uses_external_data=True, weights_are_inputs=False
    )
    opened.byte_size = size + proto.ByteSize()
    return opened


def check(shapes: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint, names: Names) -> None:
    """Raises ContractError if a checkpoint lacks parameters of these shapes, by name, and lists them all."""
    problems = []
    for parameter, shape in shapes.items():
        if (name := names.of(parameter)) is None:
            problems.append(f"no {parameter!r} {list(shape)}")
            continue
        stored = checkpoint.others.get(name)
        stored_shape = checkpoint.weights[name].shape if stored is None else stored.shape
        if stored_shape != shape:
            problems.append(f"{name!r} is {list(stored_shape)}, not {list(shape)}")
        elif stored is not None and stored.dtype not in _FLOATS:
            problems.append(f"{name!r} is {stored.dtype}, not one of {', '.join(_FLOATS)}")
    if problems:
        expected = "a value for each parameter that its config.json asks for"
        raise ContractError(checkpoint.path, listed(problems), expected=expected, advice="check that it is complete")


class Names:
    """Maps the parameters of a model to names in a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, tied: Mapping[str, Sequence[str]]) -> None:
        """`prefix`: prefix of names in models with a head, not without; `tied`: name -> all names of a tensor."""
        self._known = checkpoint.weights.keys() | checkpoint.others.keys()
        self._prefix = f"{prefix}." if prefix else ""
        self._tied = tied
        self.used: set[str] = set()

    def of(self, parameter: str) -> str | None:
        """Returns the checkpoint's name of a parameter, or None if it has none."""
        for name in (parameter, *self._tied.get(parameter, ())):
            for candidate in (name, f"{self._prefix}{name}", name.removeprefix(self._prefix)):
                if candidate in self._known:
                    self.used.add(candidate)
                    return candidate
        return None


class _CheckpointFolder:
    """The folder of the files of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder: ModelFolder | None = None
        self._checkpoint = checkpoint

    def tensor(self, name: str, dtype: int, stored: Stored) -> TensorProto:
        """Returns a tensor whose external data is in a file of the checkpoint."""
        if self.folder is None:
            self.folder = ModelFolder(stored.path)
            self.folder.files = stored.files
        if stored.path.parent != self.folder.path:
            what = f"{stored.path} and others are in several folders"
            raise ContractError(self._checkpoint.path, what, expected="shards in one folder", advice="move them there")
        tensor = TensorProto(name=name, data_type=dtype, dims=stored.shape, data_location=TensorProto.EXTERNAL)
        entries = {"location": stored.path.name, "offset": stored.offset, "length": stored.byte_size}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Renames the parameters in the nodes' inputs to their names in the checkpoint."""
    for inner in iter_graphs(graph):
        for node in inner.node:
            node.input[:] = [names.get(name, name) for name in node.input]


def _cast(graph: onnx.GraphProto, casts: Mapping[str, int]) -> None:
    """Adds casts of tensors that are stored in another dtype than the graph computes in.

    Rows of a table are cast after the Gather: a cast of the table would convert all of it in every run.
    """
    nodes: list[NodeProto] = []
    names: dict[str, str] = {}
    for name, dtype in casts.items():
        names[name] = f"{name}_{np.dtype(helper.tensor_dtype_to_np_dtype(dtype)).name}"
        nodes.append(helper.make_node("Cast", [name], [names[name]], name=f"{names[name]}_cast", to=dtype))
    for node in graph.node:
        picks = node.op_type == "Gather" and not node.domain and node.input[0] in casts
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        if picks and axis == 0:
            result, dtype = node.output[0], casts[node.input[0]]
            node.output[0] = f"{result}_stored"
            nodes += [node, helper.make_node("Cast", [node.output[0]], [result], name=f"{result}_cast", to=dtype)]
            continue
        nodes.append(node)
        for graph_node in _with_inner(node):
            graph_node.input[:] = [names.get(name, name) for name in graph_node.input]
    read = {name for node in nodes for inner in _with_inner(node) for name in inner.input}
    nodes = [
        node for node in nodes if not (node.op_type == "Cast" and node.input[0] in casts and node.output[0] not in read)
    ]
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _with_inner(node: NodeProto) -> list[NodeProto]:
    """Returns a node and those of its subgraphs."""
    inner = [g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH for g in iter_graphs(a.g)]
    return [node, *(each for graph in inner for each in graph.node)]
