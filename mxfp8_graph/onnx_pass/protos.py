"""Converts between protobuf and `ir.Model`, and keeps the parts of a model that onnx_ir loses or refuses.

Every conversion of a model goes through this module: elsewhere these parts would be lost.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import onnx
import onnx_ir as ir

from mxfp8_graph.naming import first_line
from mxfp8_graph.onnx_pass.graph import is_large, is_op, name_of
from mxfp8_ops.errors import ContractError

FOREIGN: Final = "types that onnx_ir does not have"
"""Key of `Graph.meta`: declared map and opaque types, by name. Classifiers of scikit-learn return maps."""

_DEVICES: Final = "device configurations"
"""Key of `Node.meta`: onnx_ir cannot write a configuration without a name, and drops the sharding of values."""

_TRAINING: Final = "training_info"
"""Key of `Model.meta`: the field of the model that onnx_ir does not have."""


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Yields (attribute name, graph) for each subgraph of a control-flow node."""
    for attribute in node.attribute or ():  # fast for nodes without attributes, of which large models have many
        for inner in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs:
            yield attribute.name, inner


def iter_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yields a graph and every subgraph below it, in the order of `ir.Model.graphs`."""
    yield graph
    for node in graph.node:
        for _, inner in subgraphs(node):
            yield from iter_graphs(inner)


def from_proto(proto: onnx.ModelProto, name: str) -> ir.Model:
    """Returns the graph of a proto. It refers to the proto's tensors; the proto is unchanged afterwards.

    Raises:
        ContractError: onnx_ir cannot represent it, or would lose values of it.
    """
    for graph in iter_graphs(proto.graph):
        if graph.sparse_initializer:
            what = f"sparse initializer {graph.sparse_initializer[0].values.name!r}, which onnx_ir cannot represent"
            raise ContractError(name, what, expected="dense tensors", advice="store it as a dense initializer")
    infos = [info for graph in iter_graphs(proto.graph) for info in (*graph.input, *graph.output, *graph.value_info)]
    foreign = {
        id(info): (info, onnx.TypeProto.FromString(info.type.SerializeToString()))
        for info in infos
        if is_foreign(info.type)
    }
    # onnx_ir refuses these types. It reads the values without a type, and the proto gets the types back below.
    for info, _ in foreign.values():
        info.ClearField("type")
    try:
        with _quiet():
            model = ir.from_proto(proto)
    except MemoryError:
        raise
    except Exception as error:  # onnx_ir's exceptions have no common base
        raise _refusal(name, "read", error) from None
    finally:
        for info, declared in foreign.values():
            info.type.CopyFrom(declared)
    for part, message in zip(model.graphs(), iter_graphs(proto.graph), strict=True):
        if foreign:
            infos = [*message.input, *message.output, *message.value_info]
            part.meta[FOREIGN] = {info.name: foreign[id(info)][1] for info in infos if id(info) in foreign}
        for value in part.initializers.values():
            if isinstance(value.const_value, ir.serde.TensorProtoTensor):
                value.const_value.metadata_props.clear()  # else written twice: with the message, and from here
        _keep_devices(part, message.node)
    for function, body in zip(model.functions.values(), proto.functions, strict=True):
        _keep_devices(function, body.node)
    model.meta[_TRAINING] = onnx.ModelProto(training_info=proto.training_info)
    return model


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Returns a graph as a proto, with the parts that onnx_ir leaves out. Each weight is packed, once."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.LazyTensor):  # onnx_ir would read it twice, and wrap its errors
                value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=value.name)
    for node in model.graph.all_nodes():
        attribute = large_constant(node)
        if attribute is not None and isinstance(tensor := attribute.as_tensor(), ir.ExternalTensor):
            dense = ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=tensor.name)
            node.attributes["value"] = ir.AttrTensor("value", dense)
    try:
        with _quiet():
            proto = ir.to_proto(model)
    except ir.serde.SerdeError as error:  # texts that are no UTF-8
        raise _refusal(name_of(model), "write", error) from None
    proto.MergeFrom(model.meta.get(_TRAINING, onnx.ModelProto()))
    for graph, message in zip(model.graphs(), iter_graphs(proto.graph), strict=True):
        _complete(graph, message.node)
        _declare(message, graph.meta.get(FOREIGN, {}))
    for function, body in zip(model.functions.values(), proto.functions, strict=True):
        _complete(function, body.node)
    return proto


@contextlib.contextmanager
def lent(model: ir.Model, *, main_only: bool = False) -> Iterator[onnx.ModelProto]:
    """Yields the model as a proto whose large tensors have name, dtype and dims, but no data.

    Large tensors are initializers and values of Constant nodes; with `main_only`, initializers of the main graph only.

    Not `onnx_ir.passes.common._c_api_utils.call_onnx_api`: that turns initializers into graph inputs, of the main graph
    only, sets types, and leaves the model broken if it cannot be serialized.
    """
    weights: list[tuple[ir.Value, ir.TensorProtocol]] = []
    constants: list[tuple[ir.Node, ir.Attr]] = []
    try:
        for graph in [model.graph] if main_only else model.graphs():
            for value in graph.initializers.values():
                tensor = value.const_value
                if tensor is None or not is_large(tensor):
                    continue
                weights.append((value, tensor))
                value.const_value = _stub(tensor, value.name)
            for node in () if main_only else graph:
                if (attribute := large_constant(node)) is not None:
                    constants.append((node, attribute))
                    node.attributes["value"] = ir.AttrTensor("value", _stub(attribute.as_tensor(), ""))
        yield to_proto(model)
    finally:
        for node, attribute in constants:
            node.attributes["value"] = attribute
        for value, tensor in weights:
            value.const_value = tensor


def large_constant(node: ir.Node) -> ir.Attr | None:
    """Returns the attribute of a Constant node that holds a large tensor, or None."""
    attribute = node.attributes.get("value") if is_op(node, "Constant") else None
    is_tensor = attribute is not None and attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref()
    return attribute if attribute is not None and is_tensor and is_large(attribute.as_tensor()) else None


def _stub(tensor: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    dims = tensor.shape.numpy()
    return ir.serde.TensorProtoTensor(onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=dims))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences onnx_ir: `check.py` checks what its warnings are about, or they are about allowed unknown types."""
    logger = logging.getLogger("onnx_ir.serde")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def _refusal(name: str, verb: str, error: BaseException) -> ContractError:
    """Returns the error for a model that onnx_ir refuses."""
    # The innermost exception has the cause. The outer ones only name the place.
    while error.__cause__ is not None:
        error = error.__cause__
    what = f"onnx_ir cannot {verb} it: {first_line(error)}"
    return ContractError(name, what, expected="a model that it can", advice="export it again")


def is_foreign(declared: onnx.TypeProto) -> bool:
    """Whether onnx_ir lacks a type: a map, as classifiers of scikit-learn return, or an opaque type."""
    while (which := declared.WhichOneof("value")) in {"sequence_type", "optional_type"}:
        declared = getattr(declared, which).elem_type
    return which in {"map_type", "opaque_type"}


def _keep_devices(nodes: ir.Graph | ir.Function, messages: Any) -> None:
    for node, message in zip(nodes, messages, strict=True):
        if message.device_configurations:
            node.meta[_DEVICES], node.device_configurations = tuple(message.device_configurations), ()


def _complete(nodes: ir.Graph | ir.Function, messages: Any) -> None:
    for node, message in zip(nodes, messages, strict=True):
        # Absent outputs at the end: a function body has them, and ONNX Runtime refuses the call without.
        message.output.extend([""] * (len(node.outputs) - len(message.output)))
        message.device_configurations.extend(node.meta.get(_DEVICES, ()))


def _declare(graph: onnx.GraphProto, foreign: dict[str, onnx.TypeProto]) -> None:
    """Declares the types that onnx_ir lacks; removes second declarations of outputs, which it adds for initializers."""
    outputs = {info.name for info in graph.output}
    for index in reversed(range(len(graph.value_info))):
        if graph.value_info[index].name in outputs:
            del graph.value_info[index]
    if not foreign:
        return
    computed = {name for node in graph.node for name in node.output} - outputs
    declared = {info.name for info in graph.value_info}
    graph.value_info.extend(onnx.ValueInfoProto(name=name) for name in foreign if name in computed - declared)
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.name in foreign:
            info.type.CopyFrom(foreign[info.name])
