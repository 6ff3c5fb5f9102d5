"""Gives a model float32 values in the place of 16-bit ones, with as few casts as that takes.

    input                -> Cast -> ...            inputs and outputs of the model keep their dtype
    ... -> Cast          -> output
    matrix               -> Cast -> ...            its bytes stay; ONNX Runtime casts it when it loads the model
    Gather(table, ids)   -> Cast -> ...            so that a table stays as small in memory, too
    vector, constant                               stored in float32
    Cast from or to them                           gone, where it has nothing to do any more

Values between nodes have more precision than before: nothing rounds them to 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from mxfp8_graph.naming import take_name
from mxfp8_graph.onnx_model import tensor_data
from mxfp8_graph.onnx_model.open import INLINE_BYTES, OpenedModel
from mxfp8_graph.onnx_model.walk import STANDARD, iter_graphs, iter_nodes, iter_tensors, node_label, subgraphs
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

HALVES: Final[Mapping[int, str]] = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}
"""The 16-bit floats, with what to call them."""

_DTYPES: Final = frozenset({"to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision"})
"""Attributes that say which dtype a node computes in or gives. Not activation_dtype: our kernels round to that."""

_NESTED: Final = {"sequence_type": "elem_type", "optional_type": "elem_type", "map_type": "value_type"}
"""Where types that are no tensors keep the type of what they hold."""


def element_type(value: onnx.ValueInfoProto) -> int:
    """Returns the dtype of a tensor; 0 if the value is none."""
    return int(value.type.tensor_type.elem_type)


def holds_halves(model: onnx.ModelProto) -> bool:
    """Whether a model takes, gives, stores or makes 16-bit floats."""
    if any(element_type(value) in HALVES for value in (*model.graph.input, *model.graph.output)):
        return True
    if any(tensor.data_type in HALVES for tensor in iter_tensors(model)):
        return True
    return any(a.name in _DTYPES and a.i in HALVES for node in _nodes(model) for a in node.attribute)


def to_float32(opened: OpenedModel, dtypes: AbstractSet[int], types: Mapping[str, onnx.ValueInfoProto]) -> set[str]:
    """Gives a model float32 values in the place of those of `dtypes`, in place; returns the names of the new casts.

    Args:
        opened: the model.
        dtypes: keys of `HALVES`.
        types: what is known of the values of the main graph.

    Raises:
        ContractError: an input or output is a sequence of such values, or a BitCast reads or makes their bits.
    """
    graph = opened.proto.graph
    _refuse(opened, dtypes)
    edit = _Edit(opened, dtypes)
    edit.rename(types)
    for node in _nodes(opened.proto):
        retype_node(node, dtypes, opened)
    for value in graph.value_info:
        _retype(value.type, dtypes)
    for tensor in graph.initializer:
        if tensor.name not in edit.kept:
            _store_float32(tensor, dtypes, opened)
    for inner in (below for node in graph.node for _, first in subgraphs(node) for below in iter_graphs(first)):
        for value in (*inner.value_info, *inner.input, *inner.output):
            _retype(value.type, dtypes)
        for tensor in inner.initializer:
            _store_float32(tensor, dtypes, opened)
    return edit.add_casts()


def retype_node(node: onnx.NodeProto, dtypes: AbstractSet[int], opened: OpenedModel | None = None) -> None:
    """Changes what the attributes of a node say of `dtypes` to float32; `opened` has what lies apart."""
    for attribute in node.attribute:
        if attribute.name in _DTYPES and attribute.i in dtypes:
            attribute.i = TensorProto.FLOAT
        elif attribute.type == AttributeProto.TENSOR:
            _store_float32(attribute.t, dtypes, opened)
        elif attribute.type == AttributeProto.TYPE_PROTO:
            _retype(attribute.tp, dtypes)


class _Edit:
    """Where the main graph casts, and what the values there are called."""

    def __init__(self, opened: OpenedModel, dtypes: AbstractSet[int]) -> None:
        self._dtypes = dtypes
        self._graph = graph = opened.proto.graph
        self._taken = {name for inner in iter_graphs(graph) for name in _defined(inner)}
        stored = (t for t in graph.initializer if t.data_type in dtypes and len(t.dims) > 1)
        self._tables = {tensor.name for tensor in stored if tensor_data.byte_length(tensor) > INLINE_BYTES}
        self.kept = self._tables | {value.name for value in graph.input if element_type(value) in dtypes}
        """What keeps its dtype: inputs, and matrices that are not small."""
        made = {name for node in graph.node for name in node.output}
        self._ends = {v.name: element_type(v) for v in graph.output if v.name in made and element_type(v) in dtypes}
        self._names = {name: take_name(f"{name}_f32", self._taken) for name in (*sorted(self.kept), *self._ends)}
        """The float32 value that stands for another."""
        self._casts: set[str] = set()

    def rename(self, types: Mapping[str, onnx.ValueInfoProto]) -> None:
        """Lets nodes read and make the values in float32; removes the casts that would do nothing."""
        nodes: list[onnx.NodeProto] = []
        for node in self._graph.node:
            if self._is_idle(node, types):
                self._names[node.output[0]] = self._names.get(node.input[0], node.input[0])
                continue
            looks_up = node.op_type == "Gather" and node.domain in STANDARD and node.input[0] in self._tables
            table = node.input[0] if looks_up else ""
            self._read(node, self._names)
            node.output[:] = [self._names.get(name, name) for name in node.output]
            nodes.append(node)
            if looks_up:
                result, node.input[0] = node.output[0], table
                node.output[0] = take_name(f"{result}_{table}", self._taken)
                nodes.append(self._cast(node.output[0], result, TensorProto.FLOAT))
        self._put(nodes)
        known = [value for value in self._graph.value_info if value.name not in self._names]
        self._graph.ClearField("value_info")
        self._graph.value_info.extend(known)

    def add_casts(self) -> set[str]:
        """Adds the casts of inputs, matrices and outputs; returns the names of all casts."""
        read = {name for node in iter_nodes(self._graph.node) for name in node.input}
        before = [name for name in sorted(self.kept) if self._names[name] in read]
        first = [self._cast(name, self._names[name], TensorProto.FLOAT) for name in before]
        last = [self._cast(self._names[name], name, dtype) for name, dtype in self._ends.items()]
        self._put([*first, *self._graph.node, *last])
        return self._casts

    def _is_idle(self, node: onnx.NodeProto, types: Mapping[str, onnx.ValueInfoProto]) -> bool:
        """Whether a node casts float32 to float32 once everything is float32; one that makes an output stays."""
        if node.op_type != "Cast" or node.domain not in STANDARD or node.output[0] in self._ends:
            return False
        dtypes = {*self._dtypes, TensorProto.FLOAT}
        before, after = types.get(node.input[0]), types.get(node.output[0])
        ours = before is not None and after is not None and {element_type(before), element_type(after)} <= dtypes
        return ours and node.output[0] not in {value.name for value in self._graph.output}

    def _read(self, node: onnx.NodeProto, names: Mapping[str, str]) -> None:
        """Replaces what a node and its subgraphs read by what stands for it."""
        node.input[:] = [names.get(name, name) for name in node.input]
        for _, inner in subgraphs(node):
            own = set(_defined(inner))
            outer = {name: other for name, other in names.items() if name not in own}
            for below in inner.node:
                self._read(below, outer)

    def _cast(self, value: str, result: str, dtype: int) -> onnx.NodeProto:
        node = helper.make_node("Cast", [value], [result], name=take_name(f"{result}_cast", self._taken), to=dtype)
        self._casts.add(node.name)
        return node

    def _put(self, nodes: Iterable[onnx.NodeProto]) -> None:
        made = onnx.GraphProto(node=nodes)
        self._graph.ClearField("node")
        self._graph.node.extend(made.node)


def _refuse(opened: OpenedModel, dtypes: AbstractSet[int]) -> None:
    """Raises ContractError for what cannot be float32 inside and what it was outside."""
    advice = "leave out --for cpu, and run the model where its dtypes have kernels"
    expected = "tensors at inputs and outputs, and no BitCast"
    for value in (*opened.proto.graph.input, *opened.proto.graph.output):
        changed = onnx.TypeProto()
        changed.CopyFrom(value.type)
        _retype(changed, dtypes)
        if changed != value.type and not value.type.HasField("tensor_type"):
            what = f"{value.name!r} holds 16-bit floats and is no tensor"
            raise ContractError(opened.name, what, expected=expected, advice=advice)
    if node := next((node for node in _nodes(opened.proto) if node.op_type == "BitCast"), None):
        what = f"node {node_label(node)!r} (BitCast) takes values for bits, which float32 would change"
        raise ContractError(opened.name, what, expected=expected, advice=advice)


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yields all nodes but those in the bodies of ours, which round where the kernels do."""
    yield from iter_nodes(model.graph.node)
    for function in model.functions:
        if function.domain != contract.DOMAIN:
            yield from iter_nodes(function.node)


def _defined(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields the names of the values and nodes that a graph defines."""
    for values in (graph.input, graph.initializer):
        yield from (value.name for value in values)
    for node in graph.node:
        yield node.name
        yield from node.output


def _retype(kind: onnx.TypeProto, dtypes: AbstractSet[int]) -> None:
    """Changes `dtypes` in a type to float32."""
    which = kind.WhichOneof("value")
    if which in _NESTED:
        _retype(getattr(getattr(kind, which), _NESTED[which]), dtypes)
    elif which is not None and getattr(kind, which).elem_type in dtypes:
        getattr(kind, which).elem_type = TensorProto.FLOAT


def _store_float32(tensor: TensorProto, dtypes: AbstractSet[int], opened: OpenedModel | None) -> None:
    """Converts a stored tensor of `dtypes`, which is exact."""
    if tensor.data_type not in dtypes:
        return
    apart = opened.tensors.get(tensor.name) if opened else None
    folder, name = (opened.folder, opened.name) if opened else (None, "model")
    values = tensor_data.read(apart or tensor, folder, name).astype(np.float32)
    converted = numpy_helper.from_array(values, tensor.name)
    if opened and apart is not None:
        opened.tensors[tensor.name] = converted
        tensor.data_type = TensorProto.FLOAT
    else:
        tensor.CopyFrom(converted)
