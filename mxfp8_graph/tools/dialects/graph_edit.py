"""A model whose nodes are replaced one by one, and what a node can see: stored tensors, makers of values, dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from mxfp8_graph.naming import take_name
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.tensor_data import bit_width, raw, read
from mxfp8_graph.onnx_model.walk import STANDARD, iter_graphs, node_label, stored_in, subgraphs
from mxfp8_graph.onnx_pass.prune import keep, prune
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError, Option

Codes = npt.NDArray[np.uint8]
Nodes = list[onnx.NodeProto]
Advice = str | Sequence[str | Option]

_SAME: Final = frozenset({"Identity"})


@dataclass
class Scope:
    """One graph of a model, while its nodes are replaced."""

    edit: Edit
    graph: onnx.GraphProto
    outer: Scope | None = None
    shared: dict[tuple[object, ...], str] = field(default_factory=dict)
    """What a step has made for one node and others can read, by a key of its own."""
    before: Nodes = field(default_factory=list)
    """Nodes that go in front of the replacement that is being made."""

    def __post_init__(self) -> None:
        inputs = {value.name for value in self.graph.input}
        self._stored = {n: t for n, t in stored_in(self.graph).items() if n not in inputs or self.edit.inputs_stored}
        self._makers = {name: node for node in self.graph.node for name in node.output}
        self._inputs = inputs
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.graph.node:
            names = {*node.input, *(name for _, inner in subgraphs(node) for name in _read_below(inner))}
            for name in names:
                self.readers.setdefault(name, []).append(node)
        self.returned = {value.name for value in self.graph.output}

    def tensor(self, name: str) -> onnx.TensorProto | None:
        """Returns the stored tensor of that name, here or around, or None if it is computed or given."""
        if name in self._stored:
            return self._stored[name]
        if name in self._makers or name in self._inputs or self.outer is None:
            return None
        return self.outer.tensor(name)

    def graph_tensor(self, name: str) -> onnx.TensorProto:
        """Returns the tensor of that name that this graph stores."""
        return self._stored[name]

    def maker(self, name: str) -> onnx.NodeProto | None:
        """Returns the node that makes a value, here or around."""
        if name in self._makers or name in self._stored or name in self._inputs or self.outer is None:
            return self._makers.get(name)
        return self.outer.maker(name)

    def source(self, name: str, ops: frozenset[str] = _SAME) -> tuple[str, Nodes]:
        """Returns what a value is a view of, and the views of one input between: the outermost last."""
        views: Nodes = []
        while (node := self.maker(name)) is not None and node.op_type in ops and node.domain in STANDARD:
            views.append(node)
            name = node.input[0]
        return name, views

    def codes(self, tensor: onnx.TensorProto) -> Codes:
        """Returns the values of a tensor of bytes, in its shape; ContractError if its values take another size."""
        if bit_width(tensor.data_type) != 8:
            kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
            where, advice = f"{self.edit.opened.name}: tensor {tensor.name!r}", "export the model again"
            raise ContractError(where, f"is {kind}", expected="elements or scales of 8 bits", advice=advice)
        return np.frombuffer(self.edit.raw(tensor), np.uint8).reshape(tuple(tensor.dims))

    def values(self, tensor: onnx.TensorProto) -> npt.NDArray[Any]:
        """Returns the values of a stored tensor, wherever they lie."""
        opened = self.edit.opened
        return read(opened.tensors.get(tensor.name, tensor), opened.folder, opened.name)

    def store(self, name: str, dtype: int, array: npt.NDArray[Any]) -> str:
        """Adds an initializer beside the tensors of this graph; returns its name."""
        name = self.edit.fresh(name)
        stub = self.graph.initializer.add(name=name, data_type=dtype, dims=array.shape)
        whole = onnx.TensorProto(name=name, data_type=dtype, dims=array.shape, raw_data=array.tobytes())
        if self.outer is None:
            self.edit.opened.tensors[name] = whole
        else:
            stub.CopyFrom(whole)
        self._stored[name] = stub
        return name

    def make(self, op: str, *inputs: str, wanted: str, domain: str = "", **attributes: Any) -> str:
        """Adds a node in front of the replacement that is being made; returns the name of its result."""
        name = self.edit.fresh(wanted)
        self.before.append(helper.make_node(op, inputs, [name], name=name, domain=domain or None, **attributes))
        return name

    def owner(self, name: str) -> Scope:
        """Returns the scope whose initializer or Constant is called `name`."""
        return self if name in self._stored or self.outer is None else self.outer.owner(name)


Step = Callable[[Scope, onnx.NodeProto], "Nodes | None"]
"""Returns the nodes that take the place of one, or None if it stays."""


class Edit:
    """A model while its nodes are replaced."""

    def __init__(self, opened: OpenedModel) -> None:
        self.opened = opened
        self.inputs_stored = opened.weights_are_inputs
        self.dtypes: dict[str, int] = {}
        """onnx.TensorProto.DataType of values, by name, where it is known."""
        self.ranks: dict[str, int] = {}
        """Number of dimensions of values, by name, where it is known."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """How many weights and activations of each dialect were read: (dialect, "weights" or "activations")."""
        self.losses: Counter[str] = Counter()
        """What was allowed to be lost, and how often."""
        self.float_dtypes = _float_dtypes(opened.proto)
        """Dtypes of values that the model takes, gives, stores or casts to, before any was replaced."""
        self._taken = {name for graph in iter_graphs(opened.proto.graph) for name in _names(graph)}

    def fresh(self, wanted: str) -> str:
        """Returns `wanted`, or that with a number, which nothing in the model is called."""
        return take_name(wanted, self._taken)

    def raw(self, tensor: onnx.TensorProto) -> bytes:
        """Returns the bytes of a stored tensor; errors as `tensor_data.read`."""
        stored = self.opened.tensors.get(tensor.name, tensor)
        return raw(stored, self.opened.folder, self.opened.name)

    def refuse(self, node: onnx.NodeProto, what: str, *, expected: str, advice: Advice) -> ContractError:
        """Returns the error for a node that cannot be read or written."""
        where = f"{self.opened.name}: node {node_label(node)!r} ({node.op_type})"
        return ContractError(where, what, expected=expected, advice=advice)

    def each(self, step: Step) -> bool:
        """Replaces nodes of every graph as `step` says, and drops what nothing reads any more; whether any was."""
        suspects: set[str] = set()
        self._graph(Scope(self, self.opened.proto.graph), step, suspects)
        prune(self.opened, suspects, any_op=True)
        return bool(suspects)

    def _graph(self, scope: Scope, step: Step, suspects: set[str]) -> None:
        nodes: Nodes = []
        gone: set[str] = set()
        """Values whose dtype may be another now."""
        for node in scope.graph.node:
            made = step(scope, node)
            nodes += [*scope.before, *([node] if made is None else made)]
            scope.before.clear()
            if made is not None:
                suspects.update(node.input)
                gone.update(node.output)
        if len(nodes) != len(scope.graph.node) or suspects:
            copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
            del scope.graph.node[:]
            scope.graph.node.extend(copies)
            keep(scope.graph.value_info, lambda value: value.name not in gone)
        for node in scope.graph.node:
            for _, inner in subgraphs(node):
                self._graph(Scope(self, inner, scope), step, suspects)


def _float_dtypes(model: onnx.ModelProto) -> set[int]:
    graphs = list(iter_graphs(model.graph))
    found = {tensor.data_type for graph in graphs for tensor in stored_in(graph).values()}
    values = (value for graph in graphs for value in (*graph.input, *graph.output))
    found |= {value.type.tensor_type.elem_type for value in values}
    found |= {attribute(node, "to", 0) for graph in graphs for node in graph.node if node.op_type == "Cast"}
    return found & {*contract.VALUES}


def _read_below(graph: onnx.GraphProto) -> set[str]:
    graphs = list(iter_graphs(graph))
    read = {name for each in graphs for node in each.node for name in node.input}
    return read | {value.name for each in graphs for value in each.output}


def _names(graph: onnx.GraphProto) -> Sequence[str]:
    values = [v.name for part in (graph.input, graph.output, graph.initializer, graph.value_info) for v in part]
    return [*values, *(name for node in graph.node for name in (node.name, *node.input, *node.output))]


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Returns the value of an attribute, text for strings, or `default`."""
    for each in node.attribute:
        if each.name == name:
            value = helper.get_attribute_value(each)
            return value.decode(errors="replace") if isinstance(value, bytes) else value
    return default


def ours(op: contract.Op, inputs: Sequence[str], outputs: Sequence[str], name: str, **settings: Any) -> onnx.NodeProto:
    """Returns a node of the contract, with defaults for attributes that are not given."""
    attributes: dict[str, Any] = {**op.attributes, **settings}
    return helper.make_node(op.name, inputs, outputs, name=name, domain=contract.DOMAIN, **attributes)


def like(node: onnx.NodeProto, made: onnx.NodeProto) -> onnx.NodeProto:
    """Returns `made` with the documentation and metadata of the node whose place it takes."""
    if node.doc_string:  # an empty field is written too
        made.doc_string = node.doc_string
    made.metadata_props.MergeFrom(node.metadata_props)
    return made


def retype(edit: Edit, tensor: onnx.TensorProto, dtype: int) -> None:
    """Says that the bytes of a stored tensor are of another 8-bit dtype."""
    tensor.data_type = dtype
    for value in edit.opened.proto.graph.input:
        if value.name == tensor.name:
            value.type.tensor_type.elem_type = dtype
    if tensor.name in edit.opened.tensors:
        whole = onnx.TensorProto()
        whole.CopyFrom(edit.opened.tensors[tensor.name])  # a caller's proto is never modified
        whole.data_type = dtype
        edit.opened.tensors[tensor.name] = whole
