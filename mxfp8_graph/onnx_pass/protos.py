"""Converts between protobuf and `ir.Model`, and keeps the parts of a model that onnx_ir loses or refuses.

Every conversion of a model goes through this module: elsewhere these parts would be lost.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnx_ir as ir

from mxfp8_graph.naming import first_line
from mxfp8_graph.onnx_pass.graph import is_large, is_op, label, name_of, subgraphs_of
from mxfp8_ops.errors import ContractError

FOREIGN: Final = "types that onnx_ir does not have"
"""Key of `Graph.meta`: declared map and opaque types, by name. Classifiers of scikit-learn return maps."""

_DEVICES: Final = "device configurations"
"""Key of `Node.meta`: onnx_ir cannot write a configuration without a name, and drops the sharding of values."""

_PARTS: Final = "parts of the model"
"""Key of `Model.meta`: training_info, which onnx_ir does not have, and configurations, which it may leave out."""

EXTRAS: Final = "extra declarations"
"""Key of `Graph.meta`: what onnx_ir does not read, as a GraphProto: see `_extras`."""

ANNOTATION: Final = "quant_parameter_tensor_names"
"""Key of `Value.meta`, onnx_ir's own: the parameters of the quantization annotation of a tensor."""


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Yields (attribute name, graph) for each subgraph of a control-flow node."""
    for attribute in node.attribute or ():  # fast for nodes without attributes, of which large models have many
        if attribute.ref_attr_name:
            continue
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
    for part, message in _pairs(model, proto):
        if isinstance(message, onnx.GraphProto):
            infos = [*message.input, *message.output, *message.value_info]
            part.meta[FOREIGN] = {info.name: foreign[id(info)][1] for info in infos if id(info) in foreign}
            for value in part.initializers.values():
                _written_once(value.const_value)
        part.meta[EXTRAS] = _extras(message, proto.ir_version)
        for node, each in zip(part, message.node, strict=True):
            for attribute in node.attributes.values():
                if not attribute.is_ref() and attribute.type in {ir.AttributeType.TENSOR, ir.AttributeType.TENSORS}:
                    single = attribute.type == ir.AttributeType.TENSOR
                    for tensor in [attribute.as_tensor()] if single else attribute.as_tensors():
                        _written_once(tensor)
            if each.device_configurations:
                node.meta[_DEVICES], node.device_configurations = tuple(each.device_configurations), ()
    model.meta[_PARTS] = onnx.ModelProto(training_info=proto.training_info, configuration=proto.configuration)
    model.device_configurations = ()
    return model


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Returns a graph as a proto, with the parts that onnx_ir leaves out. Each weight is packed, once."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.LazyTensor):  # onnx_ir would read it twice, and wrap its errors
                value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=value.name)
    for node, attribute in large_constants(model):
        tensor = attribute.as_tensor()
        # One that `save` wrote is in a file beside the model, under a relative path.
        if isinstance(tensor, ir.ExternalTensor) and Path(tensor.location).is_absolute():
            node.attributes["value"] = ir.AttrTensor("value", in_memory(tensor), doc_string=attribute.doc_string)
    try:
        with _quiet():
            proto = ir.to_proto(model)
    except ir.serde.SerdeError as error:  # texts that are no UTF-8
        raise _refusal(name_of(model), "write", error) from None
    proto.MergeFrom(model.meta.get(_PARTS, onnx.ModelProto()))
    for part, message in _pairs(model, proto):
        for node, each in zip(part, message.node, strict=True):
            # Absent outputs at the end: a function body has them, and ONNX Runtime refuses the call without.
            each.output.extend([""] * (len(node.outputs) - len(each.output)))
            each.device_configurations.extend(node.meta.get(_DEVICES, ()))
        if isinstance(message, onnx.GraphProto):
            _declare(message, part.meta.get(FOREIGN, {}), part.meta.get(EXTRAS, onnx.GraphProto()))
        elif EXTRAS in part.meta:
            message.value_info.extend(part.meta[EXTRAS].value_info)
    return proto


def in_memory(tensor: ir.ExternalTensor) -> ir.Tensor[Any]:
    """Returns an external tensor with its values, name and texts in memory."""
    return ir.Tensor(
        np.array(tensor.numpy()),
        dtype=tensor.dtype,
        name=tensor.name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


def metadata_of(tensor: ir.TensorProtocol) -> dict[str, str]:
    """Returns the metadata of a tensor, which one that is still a message has there."""
    message = tensor.raw if isinstance(tensor, ir.serde.TensorProtoTensor) else None
    entries = () if message is None else message.metadata_props
    return {**{entry.key: entry.value for entry in entries}, **tensor.metadata_props}


def described(model: ir.Model) -> dict[str, list[str]]:
    """Returns what the model says by name about tensors and nodes that a rewrite may remove: kind -> their names."""
    nodes = list(model.graph.all_nodes())
    outputs = (value for node in nodes for value in node.outputs)
    stored = (value for graph in model.graphs() for value in (*graph.inputs, *graph.initializers.values()))
    annotated = dict.fromkeys(str(value.name) for value in (*stored, *outputs) if value.meta.get(ANNOTATION))
    devices = [label(node) for node in nodes if node.meta.get(_DEVICES)]
    return {"quantization annotations of tensors": list(annotated), "device configurations of nodes": devices}


def training_graphs(model: ir.Model) -> bool:
    """Whether the model has training_info, which no step changes."""
    return bool(model.meta[_PARTS].training_info)


@contextlib.contextmanager
def proto_without_data(model: ir.Model, *, main_only: bool = False) -> Iterator[onnx.ModelProto]:
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


def large_constants(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Attr]]:
    """Yields each node for which `large_constant` has an attribute, and that."""
    found = ((node, large_constant(node)) for node in model.graph.all_nodes())
    return ((node, attribute) for node, attribute in found if attribute is not None)


def _stub(tensor: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    stub = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())
    if tensor.doc_string:
        stub.doc_string = tensor.doc_string
    onnx.helper.set_metadata_props(stub, metadata_of(tensor))
    result = ir.serde.TensorProtoTensor(stub)
    _written_once(result)
    return result


def _written_once(tensor: Any) -> None:
    """Leaves the metadata of a tensor in its message alone: onnx_ir writes the message, and then the metadata."""
    if isinstance(tensor, ir.serde.TensorProtoTensor) and tensor.raw.metadata_props:
        tensor.metadata_props.clear()


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


def _pairs(model: ir.Model, proto: onnx.ModelProto) -> Iterator[tuple[Any, Any]]:
    """Yields each graph and function with its message, those inside before those behind."""
    yield from _below(model.graph, proto.graph)
    for function, body in zip(model.functions.values(), proto.functions, strict=True):
        yield from _below(function, body)


def _below(part: ir.Graph | ir.Function, message: Any) -> Iterator[tuple[Any, Any]]:
    yield part, message
    for node, each in zip(part, message.node, strict=True):
        if inner := list(subgraphs(each)):
            for graph, (_, below) in zip(subgraphs_of(node), inner, strict=True):
                yield from _below(graph, below)


def _extras(part: Any, ir_version: int) -> onnx.GraphProto:
    """Returns the declarations that onnx_ir loses: of inputs and outputs, twice, or of names that nothing has."""
    if isinstance(part, onnx.FunctionProto):
        outputs = {name for node in part.node for name in node.output}
        return onnx.GraphProto(value_info=[info for info in part.value_info if info.name not in outputs])
    names = _names(part)
    ends = {info.name for info in (*part.input, *part.output)}
    infos = (info for info in part.value_info if info.name in ends or info.name not in names)
    annotations = (
        each
        for each in part.quantization_annotation
        if each.tensor_name not in names or not each.quant_parameter_tensor_names
    )
    # Before IR version 10, torch declared values of functions so; onnx_ir reads them.
    kept = [info for info in infos if ir_version >= 10 or "::" not in str(info.name)]
    return onnx.GraphProto(value_info=kept, quantization_annotation=annotations)


def _names(graph: onnx.GraphProto) -> set[str]:
    inputs, stored = (info.name for info in graph.input), (tensor.name for tensor in graph.initializer)
    return {*inputs, *stored}.union(*(node.output for node in graph.node))


def _declare(graph: onnx.GraphProto, foreign: dict[str, onnx.TypeProto], extras: onnx.GraphProto) -> None:
    """Declares the types that onnx_ir lacks, and what it lost; removes the outputs that it adds for initializers."""
    outputs = {info.name for info in graph.output}
    for index in reversed(range(len(graph.value_info))):
        if graph.value_info[index].name in outputs:
            del graph.value_info[index]
    names, ends = _names(graph), outputs.union(info.name for info in graph.input)
    # A new value may have a name that the original only declared.
    graph.value_info.extend(i for i in extras.value_info if i.name in ends or i.name not in names)
    graph.quantization_annotation.extend(extras.quantization_annotation)
    if not foreign:
        return
    computed = {name for node in graph.node for name in node.output} - outputs
    declared = {info.name for info in graph.value_info}
    graph.value_info.extend(onnx.ValueInfoProto(name=name) for name in foreign if name in computed - declared)
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.name in foreign:
            info.type.CopyFrom(foreign[info.name])
