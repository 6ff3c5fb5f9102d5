"""Walks a model: its graphs, the tensors it stores, and what its nodes say about themselves."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper

STANDARD: Final = frozenset({"", "ai.onnx"})
"""How the default operator domain is written."""

MICROSOFT: Final = "com.microsoft"
"""The domain of ONNX Runtime's own ops."""

# Looked up once: large models have many attributes, and looking one of these up takes longer than reading one.
_GRAPH: Final = onnx.AttributeProto.GRAPH
_TENSOR: Final = onnx.AttributeProto.TENSOR


def copy_fields(target: Any, origin: Any, skip: Container[str]) -> None:
    """Copies every set field of one protobuf message to another of the same type, except those in `skip`."""
    for descriptor, value in origin.ListFields():
        if descriptor.name in skip:
            continue
        if hasattr(value, "MergeFrom") and not hasattr(value, "DESCRIPTOR"):  # a repeated field
            getattr(target, descriptor.name).MergeFrom(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, descriptor.name).CopyFrom(value)
        else:
            setattr(target, descriptor.name, value)


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Yields (attribute name, graph) for each subgraph a control-flow node holds."""
    for attribute in node.attribute:
        if attribute.type == _GRAPH:
            yield attribute.name, attribute.g
        if attribute.graphs:
            for index, graph in enumerate(attribute.graphs):
                yield f"{attribute.name}[{index}]", graph


def node_label(node: onnx.NodeProto) -> str:
    """Returns what to call a node in messages and paths: its name, or else its first output or its op."""
    return str(node.name or next(iter(node.output), "") or node.op_type)


def iter_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yields `nodes` and those of every subgraph below them."""
    for node in nodes:
        yield node
        if node.attribute:  # most have none, and large models many nodes
            for _, inner in subgraphs(node):
                yield from iter_nodes(inner.node)


FunctionKey = tuple[str, str, str]
"""What tells a local function from others: domain, name, overload."""


def function_key(function: onnx.FunctionProto) -> FunctionKey:
    """Returns the key of a local function."""
    return "" if function.domain in STANDARD else function.domain, function.name, function.overload


def called_function(node: onnx.NodeProto) -> FunctionKey:
    """Returns the key of the local function that `node` calls, if the model has such a function."""
    return "" if node.domain in STANDARD else node.domain, node.op_type, node.overload


def iter_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yields `graph` and every subgraph below it."""
    yield graph
    yield from _inner_graphs(graph.node)


def _inner_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for node in nodes:
        if node.attribute:  # most have none, and large models many nodes
            for _, inner in subgraphs(node):
                yield from iter_graphs(inner)


def iter_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yields every initializer and every tensor attribute of the graph, its subgraphs and the local functions."""
    in_functions: list[onnx.GraphProto] = []
    for function in model.functions:
        yield from _attribute_tensors(function.node, in_functions)
    for graph in (model.graph, *in_functions):
        yield from _tensors_of(graph)


def _tensors_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    inner: list[onnx.GraphProto] = []
    yield from _attribute_tensors(graph.node, inner)
    for below in inner:
        yield from _tensors_of(below)


def _attribute_tensors(nodes: Iterable[onnx.NodeProto], graphs: list[onnx.GraphProto]) -> Iterator[onnx.TensorProto]:
    """Yields the tensors in attributes; the subgraphs there go to `graphs`."""
    for node in nodes:
        for attribute in node.attribute or ():  # most have none, and large models many nodes
            if attribute.type == _TENSOR:
                yield attribute.t
            elif attribute.type == _GRAPH:
                graphs.append(attribute.g)
            if attribute.tensors:
                yield from attribute.tensors
            if attribute.graphs:
                graphs.extend(attribute.graphs)


def stored_in(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Returns the initializers and the values of the Constant nodes of `graph`, by name."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if (
            node.op_type == "Constant"
            and node.domain in STANDARD
            and node.output
            and (tensor := _constant(node)) is not None
        ):
            found[node.output[0]] = tensor
    return found


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Returns the value of a Constant node; None for strings and sparse tensors."""
    for attribute in node.attribute:
        if attribute.name == "value":
            return attribute.t
        if attribute.name in {"value_int", "value_ints", "value_float", "value_floats"}:
            values = np.array(onnx.helper.get_attribute_value(attribute))
            return numpy_helper.from_array(values.astype(np.int64 if "int" in attribute.name else np.float32))
    return None


NAME_SCOPES: Final = "pkg.torch.onnx.name_scopes"
"""Key of the metadata of a node in which torch's exporter records the modules that the node came from."""


def module_path(node: onnx.NodeProto) -> str:
    """Returns the module path that torch's exporter records, such as "model.layers.0.mlp.up_proj"; "" without one."""
    return module_of(next((p.value for p in node.metadata_props if p.key == NAME_SCOPES), ""))


def module_of(name_scopes: str) -> str:
    """Returns the module path in that entry of the metadata; "" if it has none."""
    names = re.findall(r"'([^']*)'", name_scopes)  # the repr of a list: outermost module first, then the fx node
    return names[-2] if len(names) >= 2 else ""
