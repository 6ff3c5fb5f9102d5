"""Gives a model float32 values in the place of 16-bit ones, with few casts.

    input               -> Cast -> ...     inputs and outputs of the model keep their dtype
    ... -> Cast         -> output
    large tensor        -> Cast -> ...     its bytes stay; ONNX Runtime casts them when it loads the model
    Gather(table, ids)  -> Cast -> ...     so that a table takes no more memory than before
    small tensor                           stored in float32
    Cast from or to 16 bits                gone, where it has nothing to do any more

Values between nodes have more precision than before: nothing rounds them to 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from mxfp8_graph.naming import take_name
from mxfp8_graph.onnx_model import onnx_calls
from mxfp8_graph.onnx_model.open import INLINE_BYTES, OpenedModel
from mxfp8_graph.onnx_model.tensor_data import byte_length, read
from mxfp8_graph.onnx_model.walk import iter_graphs, iter_nodes, iter_tensors, node_label, subgraphs
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

HALVES: Final = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
"""The 16-bit floats."""

CAST: Final = "mxfp8_graph.float32."
"""How the names of the casts that are added begin."""

_DTYPES: Final = frozenset({"to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision"})
"""Attributes that say which dtype a node computes in or gives. Not activation_dtype: our kernels round to that."""


def holds_halves(model: onnx.ModelProto) -> bool:
    """Whether a model takes, gives, stores or makes 16-bit floats."""
    ends = (value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output))
    stored = (tensor.data_type for tensor in iter_tensors(model))
    made = (a.i for node in _nodes(model) for a in node.attribute if a.name in _DTYPES)
    return any(dtype in HALVES for dtypes in (ends, stored, made) for dtype in dtypes)


def to_float32(opened: OpenedModel) -> None:
    """Gives a model float32 values in the place of 16-bit ones, in place; data of large initializers is not read.

    Raises:
        ContractError: a node reinterprets the bits of values, which would be others.
    """
    graph = opened.proto.graph
    if node := next((node for node in _nodes(opened.proto) if node.op_type == "BitCast"), None):
        what = f"node {node_label(node)!r} (BitCast) reinterprets the bits of values"
        expected = "no such node, to compute in float32"
        raise ContractError(opened.name, what, expected=expected, advice="leave out runs_on (--for cpu)")
    inferred = onnx_calls.infer_shapes(opened.proto, opened.name, []).graph
    values = (*inferred.value_info, *graph.input, *graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    made = {name for node in graph.node for name in node.output}
    kept = {value.name for value in (*graph.input, *graph.output)} - made  # with initializers that are defaults
    kept |= {t.name for t in graph.initializer if t.name in opened.tensors or byte_length(t) > INLINE_BYTES}
    for node in _nodes(opened.proto):
        _retype(node, opened)
    ends = [value.name for value in graph.output if value.name in made and types[value.name] in HALVES]
    _cast(graph, types, {name for name in kept if types.get(name) in HALVES}, ends)
    for inner in iter_graphs(graph):
        main = inner is graph
        for value in (*inner.value_info, *(() if main else (*inner.input, *inner.output))):
            if value.type.tensor_type.elem_type in HALVES:
                value.type.tensor_type.elem_type = TensorProto.FLOAT
        for tensor in inner.initializer:
            if not main or tensor.name not in kept:
                _store_float32(tensor, opened)


def _cast(graph: onnx.GraphProto, types: Mapping[str, int], kept: AbstractSet[str], ends: Sequence[str]) -> None:
    """Puts casts into a main graph after values that keep their dtype, `kept`, and in front of its results, `ends`."""
    taken = {name for inner in iter_graphs(graph) for name in _defined(inner)}
    names = {name: take_name(f"{name}_f32", taken) for name in (*sorted(kept), *ends)}

    def cast(value: str, result: str, dtype: int = TensorProto.FLOAT) -> onnx.NodeProto:
        return helper.make_node("Cast", [value], [result], take_name(f"{CAST}{value}", taken), to=dtype)

    nodes: list[onnx.NodeProto] = []
    outputs = {value.name for value in graph.output}
    for node in graph.node:
        dtypes = {types.get(name) for name in (*node.input, *node.output)}
        if node.op_type == "Cast" and dtypes <= {*HALVES, TensorProto.FLOAT} and node.output[0] not in outputs:
            names[node.output[0]] = names.get(node.input[0], node.input[0])
            continue
        table = node.input[0] if node.op_type == "Gather" and node.input[0] in kept else ""
        _rename(node, names)
        nodes.append(node)
        if table:
            rows, result = take_name(f"{table}_rows", taken), node.output[0]
            node.input[0], node.output[0] = table, rows
            nodes.append(cast(rows, result))
    read = {name for node in iter_nodes(nodes) for name in node.input}
    first = [cast(name, names[name]) for name in sorted(kept) if names[name] in read]
    last = [cast(names[name], name, types[name]) for name in ends]
    changed = onnx.GraphProto(node=[*first, *nodes, *last])
    changed.value_info.extend(value for value in graph.value_info if value.name not in names)
    for field in ("node", "value_info"):
        graph.ClearField(field)
    graph.MergeFrom(changed)


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Replaces what a node reads and makes, and what its subgraphs read of the graphs around them."""
    for values in (node.input, node.output):
        values[:] = [names.get(name, name) for name in values]
    for _, inner in subgraphs(node):
        own = set(_defined(inner))
        outer = {name: other for name, other in names.items() if name not in own}
        for below in inner.node:
            _rename(below, outer)


def _defined(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields the names of the values and nodes that a graph defines."""
    yield from (value.name for values in (graph.input, graph.initializer) for value in values)
    for node in graph.node:
        yield from (node.name, *node.output)


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yields all nodes but those in the bodies of ours, which round where the kernels do."""
    yield from iter_nodes(model.graph.node)
    for function in model.functions:
        if function.domain != contract.DOMAIN:
            yield from iter_nodes(function.node)


def _retype(node: onnx.NodeProto, opened: OpenedModel) -> None:
    for attribute in node.attribute:
        if attribute.name in _DTYPES and attribute.i in HALVES:
            attribute.i = TensorProto.FLOAT
        elif attribute.type == AttributeProto.TENSOR:
            _store_float32(attribute.t, opened)


def _store_float32(tensor: TensorProto, opened: OpenedModel) -> None:
    if tensor.data_type in HALVES:
        values = read(tensor, opened.folder, opened.name).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
