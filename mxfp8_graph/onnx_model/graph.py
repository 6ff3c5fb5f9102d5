"""The graph of an opened model as an `onnx_ir.Model`: values with their producers and uses, in subgraphs too.

The model keeps the shapes and dtypes that the file declares. Those that onnx infers are in `Value.meta`, where
`dtype_of` and `shape_of` read them: so a saved model declares no more than the original.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy.typing as npt
import onnx
import onnx_ir as ir

from mxfp8_graph.naming import first_line, take_name
from mxfp8_graph.onnx_model import onnx_calls
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.tensor_data import is_apart, read
from mxfp8_graph.onnx_model.walk import STANDARD, copy_fields, iter_graphs, iter_nodes
from mxfp8_ops import contract
from mxfp8_ops.case import Input
from mxfp8_ops.errors import ContractError

Dim = int | str | None
"""A size, the name of a size, or None if nothing is known."""

INFERRED: Final = "inferred"
"""Key of `Value.meta`: the inferred type and shape, as a Value of its own."""

EDITED: Final = "edited"
"""Key of `Function.meta`: whether the function is no longer that of the file."""

FOREIGN: Final = "foreign"
"""Key of `Graph.meta`: declared types that onnx_ir does not have, by the name of the value."""

_DEVICES: Final = "device configurations"
"""Key of `Node.meta`: the device configurations of the node in the file.

onnx_ir cannot write one without a name, and drops the sharding of values that get another producer.
"""

_SPARSE: Final = frozenset({onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.SPARSE_TENSORS})
"""Types of attributes that onnx_ir does not have."""

_OVERRIDABLE: Final = "overridable"
"""Key of `Value.meta`: whether a caller may replace this initializer."""


class LargeTensor(ir.serde.TensorProtoTensor):
    """A stored tensor whose values are not in the skeleton of the model; `numpy` reads them from the file."""

    def __init__(self, opened: OpenedModel, proto: onnx.TensorProto, *, is_stub: bool = True) -> None:
        """`is_stub`: it is an initializer of the main graph; else `proto` itself says where the values are.

        Tensors of subgraphs and attributes can have the name of an initializer of the main graph.
        """
        super().__init__(proto)
        self._opened = opened
        self.is_stub = is_stub

    @classmethod
    def new(cls, opened: OpenedModel, name: str, dtype: int, dims: Sequence[int]) -> LargeTensor:
        """Returns a new initializer of the main graph."""
        return cls(opened, onnx.TensorProto(name=name, data_type=dtype, dims=dims))

    @property
    def source(self) -> onnx.TensorProto:
        """The tensor with its values, or with the file and offset of its values."""
        return self._opened.tensors.get(self.raw.name, self.raw) if self.is_stub else self.raw

    def numpy(self) -> npt.NDArray[Any]:
        """Returns the values; errors as `tensor_data.read`."""
        return read(self.source, self._opened.folder, self._opened.name)


def to_ir(opened: OpenedModel) -> ir.Model:
    """Returns the skeleton of a model, with the types that it declares.

    Raises:
        ContractError: onnx_ir cannot read it.
    """
    for proto in iter_graphs(opened.proto.graph):
        if proto.sparse_initializer:
            what = f"sparse initializer {proto.sparse_initializer[0].values.name!r}, which onnx_ir cannot represent"
            raise ContractError(opened.name, what, expected="dense tensors", advice="store it as a dense initializer")
    model = _deserialized(opened)
    for graph, proto in zip(graphs_of(model.graph), iter_graphs(opened.proto.graph), strict=True):
        graph.meta[FOREIGN] = {info.name: info.type for info in _declarations(proto) if _is_foreign(info.type)}
        _restore_initializers(opened, graph, proto)
        _restore_nodes(opened, graph, proto.node)
    for function, body in zip(model.functions.values(), opened.proto.functions, strict=True):
        _restore_nodes(opened, function, body.node)
    return model


def infer(opened: OpenedModel, model: ir.Model, inferred: onnx.ModelProto | None = None) -> ir.Model:
    """Returns `model` with all types that onnx can infer, which `shape_of` and `dtype_of` read.

    Adds a note to the model if onnx cannot infer shapes.

    Args:
        opened: the model, to which nothing was done since it became `model`.
        model: its graph; edited.
        inferred: a model with the same graphs and the types of their values. Default: what onnx infers. It infers
            nothing behind nodes of ours without their function bodies.

    Raises:
        ContractError: onnx cannot read the model at all, or an op cannot take its inputs.
    """
    inferred = inferred or onnx_calls.infer_shapes(opened.proto, opened.name, opened.notes)
    for graph, typed in zip(graphs_of(model.graph), iter_graphs(inferred.graph), strict=True):
        types = {info.name: info for info in _declarations(typed) if not _is_foreign(info.type)}
        for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
            if (info := types.get(value.name or "")) is not None:
                value.meta[INFERRED] = ir.serde.deserialize_value_info_proto(info, None)
    return model


def declared(opened: OpenedModel) -> ir.Model:
    """Returns the graph of a model to read: with the types that it declares, without its sparse tensors."""
    return to_ir(_without_sparse(opened))


def _without_sparse(opened: OpenedModel) -> OpenedModel:
    """Returns a model without its sparse tensors, which ONNX Runtime runs and onnx_ir does not have."""
    if not any(graph.sparse_initializer for graph in iter_graphs(opened.proto.graph)) and not any(
        attribute.type in _SPARSE for node in _all_nodes(opened.proto) for attribute in node.attribute
    ):
        return opened
    proto = onnx.ModelProto()
    proto.CopyFrom(opened.proto)
    for graph in iter_graphs(proto.graph):
        graph.ClearField("sparse_initializer")
    for node in _all_nodes(proto):
        dense = [attribute for attribute in node.attribute if attribute.type not in _SPARSE]
        if len(dense) < len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(dense)
    return dataclasses.replace(opened, proto=proto)


def _all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    return itertools.chain(iter_nodes(model.graph.node), *(iter_nodes(each.node) for each in model.functions))


def _deserialized(opened: OpenedModel) -> ir.Model:
    # What it warns of, names that nothing defines, is checked where models are opened, and allowed in unused functions.
    logger = logging.getLogger("onnx_ir.serde")
    disabled, logger.disabled = logger.disabled, True
    infos = [info for proto in iter_graphs(opened.proto.graph) for info in _declarations(proto)]
    foreign = [(info, copy.deepcopy(info.type)) for info in infos if _is_foreign(info.type)]
    for info, _ in foreign:
        info.ClearField("type")
    try:
        return ir.from_proto(opened.proto)
    except Exception as error:  # what it raises has no common base; the cause is under messages about where
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        what = f"onnx_ir cannot read it: {first_line(cause)}"
        raise ContractError(opened.name, what, expected="a model that it can", advice="export it again") from None
    finally:
        logger.disabled = disabled
        for info, declared in foreign:
            info.type.CopyFrom(declared)


def _declarations(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    return itertools.chain(graph.input, graph.output, graph.value_info)


def _is_foreign(declared: onnx.TypeProto) -> bool:
    """Whether onnx_ir has no such type: maps, as classifiers of scikit-learn return, and opaque ones."""
    which = declared.WhichOneof("value")
    if which in {"sequence_type", "optional_type"}:
        return _is_foreign(getattr(declared, which).elem_type)
    return which in {"map_type", "opaque_type"}


def _restore_initializers(opened: OpenedModel, graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Makes the initializers of a graph what the file says, where onnx_ir adds a type or drops an entry."""
    declared = {info.name for info in proto.value_info}
    for tensor in proto.initializer:
        value = graph.initializers[tensor.name]
        value.meta[_OVERRIDABLE] = value.is_graph_input() and not opened.weights_are_inputs
        if not (value.is_graph_input() or value.is_graph_output() or tensor.name in declared):
            value.type = value.shape = None  # else the saved model declares the type of each initializer twice
        is_stub = proto is opened.proto.graph and tensor.name in opened.tensors
        if is_apart(tensor) or is_stub:
            value.const_value = LargeTensor(opened, tensor, is_stub=is_stub)
        elif value.const_value is not None:
            value.const_value.metadata_props.clear()  # serialized with the message, and from here once more


def _restore_nodes(opened: OpenedModel, nodes: Iterable[ir.Node], protos: Iterable[onnx.NodeProto]) -> None:
    """Replaces what onnx_ir keeps in part: external tensors in attributes, and device configurations."""
    for node, proto in zip(nodes, protos, strict=True):
        if proto.device_configurations:
            node.meta[_DEVICES], node.device_configurations = tuple(proto.device_configurations), ()
        for attribute in proto.attribute or ():  # most have none, and large models many nodes
            if attribute.type != onnx.AttributeProto.TENSOR or attribute.ref_attr_name:
                continue
            if is_apart(attribute.t):
                tensor = LargeTensor(opened, attribute.t, is_stub=False)
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, tensor)
            elif attribute.t.metadata_props:
                node.attributes[attribute.name].as_tensor().metadata_props.clear()  # as of initializers


def to_proto(opened: OpenedModel, model: ir.Model) -> onnx.ModelProto:
    """Returns the opened model with the graph of `model`."""
    whole = onnx.ModelProto()
    copy_fields(whole, opened.proto, skip={"graph"})
    ir.serde.serialize_graph_into(whole.graph, model.graph)
    for graph, proto in zip(graphs_of(model.graph), iter_graphs(whole.graph), strict=True):
        _declare(proto, graph.meta.get(FOREIGN, {}))
        for node, node_proto in zip(graph, proto.node, strict=True):
            # onnx_ir leaves out absent outputs at the end, which nodes of ours must have.
            node_proto.output.extend([""] * (len(node.outputs) - len(node_proto.output)))
            node_proto.device_configurations.extend(node.meta.get(_DEVICES, ()))
    for function, body in zip(model.functions.values(), whole.functions, strict=True):
        if function.meta.get(EDITED):
            body.CopyFrom(ir.serde.serialize_function(function))
            for node, node_proto in zip(function, body.node, strict=True):
                node_proto.device_configurations.extend(node.meta.get(_DEVICES, ()))
    return whole


def put_graph(opened: OpenedModel, model: ir.Model) -> None:
    """Replaces the graph of an opened model by that of `model`."""
    opened.proto = to_proto(opened, model)
    for name in opened.tensors.keys() - model.graph.initializers.keys():
        del opened.tensors[name]


def _declare(proto: onnx.GraphProto, foreign: Mapping[str, onnx.TypeProto]) -> None:
    """Declares the types that onnx_ir does not have, and no output a second time: it does so for initializers."""
    outputs = {info.name for info in proto.output}
    for index in reversed(range(len(proto.value_info))):
        if proto.value_info[index].name in outputs:
            del proto.value_info[index]
    computed = {name for node in proto.node for name in node.output} - outputs if foreign else set()
    proto.value_info.extend(onnx.ValueInfoProto(name=name) for name in foreign if name in computed)
    for info in _declarations(proto):
        if info.name in foreign:
            info.type.CopyFrom(foreign[info.name])


def graphs_of(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Yields `graph` and every subgraph, each before the subgraphs of its own nodes."""
    yield graph
    for node in graph:
        for inner in subgraphs_of(node):
            yield from graphs_of(inner)


def fresh_names(model: ir.Model) -> Callable[[str], str]:
    """Returns a function that makes a name like the one it takes, which no value or node of the model has yet."""
    taken: set[str] = set()
    for graph in graphs_of(model.graph):
        taken.update(str(value.name) for value in (*graph.inputs, *graph.initializers.values(), *graph.outputs))
        for node in graph:
            taken.add(str(node.name))
            taken.update(str(value.name) for value in (*node.inputs, *node.outputs) if value is not None)
    return lambda wanted: take_name(wanted, taken)


def subgraphs_of(node: ir.Node) -> Iterator[ir.Graph]:
    """Yields the graphs in the attributes of a control-flow node."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def is_op(node: ir.Node | None, *ops: str) -> bool:
    """Whether there is a node, and its op is one of `ops` of the standard domain."""
    return node is not None and node.domain in STANDARD and node.op_type in ops


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """Returns the value of an attribute of a node, or `default` if the node does not have it."""
    entry = node.attributes.get(name)
    return default if entry is None else entry.value


def settings_of(attributes: Mapping[str, Any]) -> list[ir.Attr]:
    """Returns the attributes of a new node, sorted by name."""
    return [
        _setting(name, value)
        if isinstance(value, (int, float, str, tuple))
        else ir.convenience.convert_attribute(name, value)
        for name, value in sorted(attributes.items())
    ]


@functools.lru_cache(maxsize=256, typed=True)  # nearly all nodes have the same, and onnx_ir takes 80 us to make one
def _setting(name: str, value: float | str | tuple[int, ...]) -> ir.Attr:
    return ir.convenience.convert_attribute(name, value)


def dtype_of(value: ir.Value) -> int:
    """Returns the onnx.TensorProto.DataType of a value; 0 if it is unknown or no tensor's."""
    if value.const_value is not None and not is_overridable(value):
        return int(value.const_value.dtype)
    inferred = value.meta.get(INFERRED, value)
    return int(inferred.dtype) if isinstance(inferred.type, ir.TensorType) else 0


def shape_of(value: ir.Value) -> tuple[Dim, ...] | None:
    """Returns the shape of a value: a size, a name or None for each axis; None if even the rank is unknown."""
    if value.const_value is not None and not is_overridable(value):
        return tuple(value.const_value.shape.numpy())
    shape = value.meta.get(INFERRED, value).shape
    return None if shape is None else tuple(dim if isinstance(dim, int) else dim.value for dim in shape)


def facts(value: ir.Value) -> Input:
    """Returns what is known of a value, for the body of a node that reads it."""
    shape = shape_of(value)
    sizes = None if shape is None else [dim if isinstance(dim, int) else None for dim in shape]
    return Input.of(dtype_of(value), sizes, constant=stored(value) is not None)


def facts_of(model: ir.Model) -> dict[str, Input]:
    """Returns what is known of each value that a node of ours reads, by name."""
    nodes = (node for graph in graphs_of(model.graph) for node in graph if node.domain == contract.DOMAIN)
    values = (value for node in nodes for value in node.inputs if value is not None)
    return {str(value.name): facts(value) for value in values if stored(value) is None}


def is_overridable(value: ir.Value) -> bool:
    """Whether a value is an initializer that a caller may replace."""
    return bool(value.meta.get(_OVERRIDABLE))


def proto_of(tensor: ir.TensorProtocol) -> onnx.TensorProto:
    """Returns a stored tensor with its values, or with the file and offset of its values."""
    if isinstance(tensor, LargeTensor):
        return tensor.source
    return tensor.raw if isinstance(tensor, ir.serde.TensorProtoTensor) else ir.serde.serialize_tensor(tensor)


def stored(value: ir.Value) -> ir.TensorProtocol | None:
    """Returns the tensor of an initializer or of a Constant node; None if a caller can replace it, and for strings."""
    if value.is_initializer():
        tensor = None if is_overridable(value) else value.const_value
    else:
        node = value.producer()
        tensor = _tensor_of(node) if node is not None and is_op(node, "Constant") else None
    return None if tensor is None or tensor.dtype == ir.DataType.STRING else tensor


def default(value: ir.Value) -> ir.TensorProtocol | None:
    """Returns the tensor of a value as `stored` does, and of an initializer that a caller may replace its default."""
    return stored(value) if value.const_value is None else value.const_value


def _tensor_of(constant: ir.Node) -> ir.TensorProtocol | None:
    # Not `ir.convenience.get_const_tensor`: it renames the tensor in the attribute.
    for name, attribute in constant.attributes.items():
        if name == "value":
            return attribute.as_tensor()
        if name in {"value_int", "value_ints"}:
            return ir.tensor(attribute.value, ir.DataType.INT64)
        if name in {"value_float", "value_floats"}:
            return ir.tensor(attribute.value, ir.DataType.FLOAT)
    return None


def constant(value: ir.Value) -> npt.NDArray[Any] | None:
    """Returns the value of a small constant; None if it has no constant value, or a large one (above 4 KiB)."""
    tensor = stored(value)
    return None if tensor is None or isinstance(tensor, LargeTensor) else tensor.numpy()


def remove_unused(model: ir.Model, values: Iterable[ir.Value], removable: Callable[[ir.Node], bool]) -> None:
    """Removes those of `values` that nothing uses, and in turn the values that only their producers used.

    Unused code of the original stays: only `values` and their producers are looked at.

    Args:
        model: edited in place.
        values: of whichever graph.
        removable: whether a node may go away.
    """
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        node, graph = value.producer(), value.graph
        if value.uses() or value.is_graph_output() or graph is None:
            continue
        if node is None:
            if value.is_initializer() and not is_overridable(value):
                graph.initializers.pop(str(value.name))
                if value.is_graph_input():  # a model before IR version 4 lists initializers as inputs
                    graph.inputs.remove(value)
        elif removable(node) and not any(output.uses() or output.is_graph_output() for output in node.outputs):
            waiting += remove(node)


def remove(node: ir.Node) -> list[ir.Value]:
    """Removes a node whose outputs nothing uses; returns the values that it and its subgraphs read."""
    read = [value for value in node.inputs if value is not None]
    graph = node.graph
    for inner in subgraphs_of(node):
        for below in reversed(inner):  # so that the values outside lose these uses
            read += remove(below)
    if isinstance(graph, (ir.Graph, ir.Function)):
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)
        graph.remove(node)
    return read


def label(node: ir.Node) -> str:
    """Returns what to call a node in messages: its name, or else its first output or its op."""
    return node.name or next((output.name for output in node.outputs if output.name), node.op_type)


def made_by(value: ir.Value | None, *ops: str) -> ir.Node | None:
    """Returns the node that computes a value, if its op is one of `ops` of the standard domain."""
    node = None if value is None else value.producer()
    return node if is_op(node, *ops) else None


def scalar(value: ir.Value | None) -> float | None:
    """Returns the value of a constant that is one number, of whatever rank; None if it has no such value."""
    array = None if value is None else constant(value)
    return None if array is None or array.size != 1 else float(array.reshape(-1)[0])


def only_used_by(value: ir.Value, nodes: Container[ir.Node]) -> bool:
    """Whether only `nodes` use a value, so that it may go away with them."""
    return not value.is_graph_output() and all(use.node in nodes for use in value.uses())


def with_inner(node: ir.Node) -> Iterator[ir.Node]:
    """Yields a node and those of its subgraphs."""
    yield node
    for inner in subgraphs_of(node):
        for below in inner:
            yield from with_inner(below)
