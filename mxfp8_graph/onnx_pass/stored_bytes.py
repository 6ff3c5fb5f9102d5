"""Counts the bytes of every tensor that a model stores, and says which nodes use it: the ONNX half of `report.account`.

Counted are initializers and the tensors in attributes (those of Constant nodes above all) of every graph and local
function. The function bodies of our own nodes are not part of the model: they say what kernels do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import onnx
from onnx import AttributeProto, TensorProto

from mxfp8_graph.naming import take_name, unique_name
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.tensor_data import bit_width
from mxfp8_graph.onnx_model.walk import node_label, subgraphs
from mxfp8_graph.report.account import Account, StoredTensor, Use
from mxfp8_ops import contract

Key = str
"""What tells a stored tensor from others, see `key_of`."""

_LISTS: Final = {
    "value_float": ("float32", 4),
    "value_floats": ("float32", 4),
    "value_int": ("int64", 8),
    "value_ints": ("int64", 8),
}
"""Attributes of a Constant that are a tensor without being one: dtype, bytes per value."""

_NAMES: Final = {"float": "float32", "double": "float64"}
"""Dtypes that ONNX calls otherwise than NumPy."""


Stored = tuple[str, tuple[int, ...], int]
"""Dtype, shape and bytes of a stored tensor. No class of its own: Python's garbage collector passes over tuples of
constants, and large models have many."""


@dataclass(frozen=True)
class Inventory:
    """What a model stores, at one moment of its rewrite."""

    tensors: Mapping[Key, Stored]
    graphs: Sequence[tuple[str, onnx.GraphProto]]
    """Every graph with its path."""
    functions: Sequence[tuple[str, onnx.FunctionProto]]
    """Every local function, but for our own nodes' bodies, with its path."""

    @functools.cached_property
    def paths(self) -> Mapping[int, str]:
        """The paths of the graphs by their ids."""
        return {id(graph): path for path, graph in self.graphs}


def key_of(path: str, name: str) -> Key:
    """Returns the key of a tensor of the graph or function at `path`; "" is the main graph."""
    return f"{path}\0{name}" if path else name


def inventory(opened: OpenedModel) -> Inventory:
    """Returns what the model stores now."""
    found = _Inventory()
    found.add_graph("", opened.proto.graph, opened.tensors)
    for function in opened.proto.functions:
        if function.domain != contract.DOMAIN:
            path = take_name(f"{function.domain}::{function.name}", found.paths, "#")
            found.functions.append((path, function))
            found.add_nodes(path, function.node)
    return Inventory(found.tensors, found.graphs, found.functions)


def account(
    before: Inventory,
    planned: Inventory,
    found: Mapping[Key, Sequence[Use]],
    after: Inventory,
    made_from: Mapping[str, tuple[int, str]],
) -> Account:
    """Returns where the bytes are.

    Args:
        before: what the model stored when it was opened.
        planned: what it stored when its sites were found: functions inlined, opset converted.
        found: the uses of each tensor at that time.
        after: what the result stores.
        made_from: tensors that the rewrite added, and what each was made of: id of the graph that held it, name.
    """
    paths = planned.paths
    sources = {name: key_of(paths[graph], source) for name, (graph, source) in made_from.items()}
    tensors = before.tensors, planned.tensors, after.tensors
    return Account(functools.partial(_accounted, *tensors, found, sources))


def _accounted(
    before: Mapping[Key, Stored],
    planned: Mapping[Key, Stored],
    after: Mapping[Key, Stored],
    found: Mapping[Key, Sequence[Use]],
    sources: Mapping[str, Key],
) -> Iterator[StoredTensor]:
    """Yields every tensor that the model or the result stores; what was made of one is part of it."""
    made: dict[Key, int] = {}
    parts: set[Key] = set()
    for key, (_, _, size) in after.items():
        source = sources.get(key.rpartition("\0")[2])
        if source is not None and source in planned and key not in before:
            made[source] = made.get(source, 0) + size
            parts.add(key)
    for key in dict.fromkeys((*before, *planned, *after)):
        if key not in parts:
            dtype, shape, _ = before.get(key) or planned.get(key) or after[key]
            yield StoredTensor(
                name=key.replace("\0", "/"),
                dtype=dtype,
                shape=shape,
                bytes_before=before[key][2] if key in before else 0,
                bytes_kept=after[key][2] if key in after else 0,
                bytes_new=made.get(key, 0),
                uses=tuple(found.get(key, ())),
            )


class _Inventory:
    """What `inventory` has found so far."""

    def __init__(self) -> None:
        self.tensors: dict[Key, Stored] = {}
        self.graphs: list[tuple[str, onnx.GraphProto]] = []
        self.functions: list[tuple[str, onnx.FunctionProto]] = []
        self.paths: set[str] = set()

    def add_graph(self, path: str, graph: onnx.GraphProto, elsewhere: Mapping[str, TensorProto]) -> None:
        """Adds what a graph and those below it store; `elsewhere` has data that the skeleton left out."""
        self.graphs.append((path, graph))
        for tensor in graph.initializer:
            self._add(path, tensor.name, tensor, elsewhere)
        for sparse in graph.sparse_initializer:
            self._add(path, sparse.values.name, sparse.values)
            self._add(path, f"{sparse.values.name}.indices", sparse.indices)
        self.add_nodes(path, graph.node)

    def add_nodes(self, path: str, nodes: Iterable[onnx.NodeProto]) -> None:
        """Adds the tensors in attributes of nodes, a Constant's under the name of its output, and what is in graphs."""
        for node in nodes:
            if not node.attribute or node.domain == contract.DOMAIN:  # most have none, and large models many nodes
                continue
            constant = node.op_type == "Constant" and bool(node.output)
            for attribute in node.attribute:
                name = node.output[0] if constant else f"{node_label(node)}.{attribute.name}"
                if attribute.type == AttributeProto.TENSOR:
                    self._add(path, name, attribute.t)
                elif attribute.type == AttributeProto.TENSORS:
                    for tensor in attribute.tensors:
                        self._add(path, name, tensor)
                elif constant and attribute.name in _LISTS:
                    self._put(path, name, _list(attribute))
            for attribute_name, inner in subgraphs(node):
                below = "/".join(filter(None, (path, node_label(node), attribute_name)))
                self.add_graph(take_name(below, self.paths, "#"), inner, {})

    def _add(
        self, path: str, name: str, tensor: TensorProto, elsewhere: Mapping[str, TensorProto] | None = None
    ) -> None:
        code, shape = tensor.data_type, tuple(tensor.dims)
        if code == TensorProto.STRING:
            size = sum(map(len, (elsewhere or {}).get(name, tensor).string_data))
        else:
            size = -(-math.prod(shape) * bit_width(code) // 8)
        self._put(path, name, (_dtype(code), shape, size))

    def _put(self, path: str, name: str, stored: Stored) -> None:
        self.tensors[unique_name(key_of(path, name), self.tensors, "#")] = stored  # two nodes may have one label


def _list(attribute: AttributeProto) -> Stored:
    """Returns the tensor that a Constant has as a number or a list of numbers."""
    dtype, width = _LISTS[attribute.name]
    shape = (len(attribute.floats) + len(attribute.ints),) if attribute.name.endswith("s") else ()
    return dtype, shape, width * math.prod(shape)


@functools.cache
def _dtype(code: int) -> str:
    name = TensorProto.DataType.Name(code).lower()
    return _NAMES.get(name, name)
