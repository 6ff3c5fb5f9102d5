"""Corrects the mistakes of onnx's opset converter, before and after it runs; refuses a node by name where it cannot.

The converter does not know some old ops, and silently changes the meaning of others. To list them, every old form of
every op was run in ONNX Runtime, before and after the conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import onnx
import onnx_ir as ir
from onnx import version_converter

from mxfp8_graph.naming import reserve_name
from mxfp8_graph.onnx_pass.graph import (
    STANDARD,
    attribute,
    constant,
    dtype_of,
    label,
    name_of,
    opset_of,
    shape_of,
)
from mxfp8_graph.onnx_pass.protos import iter_graphs, subgraphs
from mxfp8_ops.errors import ContractError

_HIDDEN: Final = "mxfp8_graph.hidden"
"""A domain that hides ops from onnx's converter, which refuses unknown ops of the default domain."""

_RUNTIME_OPS: Final = frozenset({"LayerNormalization", "SimplifiedLayerNormalization", "ThresholdedRelu"})
"""Ops that ONNX Runtime has in the default domain at every version; they never changed."""

_LOST: Final = {
    "Scan": (9, "it had a batch axis"),
    "GroupNormalization": (21, "its scale and bias were per group"),
}
"""Op -> the opset in which its meaning changed, and the meaning before."""

_MASKS: Final = 12
"""The opset from which Dropout's mask marks the values that are kept."""


def before(model: ir.Model, target: int) -> None:
    """Removes unused Dropout masks in place, since the converter leaves them with another dtype.

    Raises:
        ContractError: the model's opset has no such op, or the op's meaning changes on the way to `target`.
    """
    opset = opset_of(model)
    for node in _nodes(model):
        if node.domain not in STANDARD or node.op_type in _RUNTIME_OPS:
            continue
        if node.op_type == "Dropout" and opset < _MASKS < target and len(node.outputs) > 1:
            mask = node.outputs[1]
            if mask.uses() or mask.is_graph_output():
                raise _refusal(model, node, opset, _MASKS, "its mask was of zeros when nothing is dropped")
            node.resize_outputs(1)
        if not onnx.defs.has(node.op_type, opset):
            what = f"opset {opset} of the model has no such op, so that it cannot be converted to {target}"
            expected = f"an op of opset {opset}, or opset {target} or above"
            raise _error(model, node, what, expected)
        changed, why = _LOST.get(node.op_type, (0, ""))
        if opset < changed <= target:
            raise _refusal(model, node, opset, changed, why)


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yields the nodes of the graph and of the local functions that they call, which are inlined; no calls."""
    waiting: list[ir.Graph | ir.Function] = [model.graph]
    called = set[ir.OperatorIdentifier]()
    while waiting:
        for node in waiting.pop().all_nodes():
            if (key := node.op_identifier()) not in model.functions:
                yield node
            elif key not in called:
                called.add(key)
                waiting.append(model.functions[key])


def hide_unknown(proto: onnx.ModelProto) -> None:
    """Moves the ops that its opset lacks to a hidden domain, in place; `after` moves them back."""
    opset = next(entry.version for entry in proto.opset_import if entry.domain in STANDARD)
    proto.opset_import.add(domain=_HIDDEN, version=1)
    for node in _protos(proto.graph):
        if node.domain in STANDARD and not onnx.defs.has(node.op_type, opset):
            node.domain = _HIDDEN


def convert(proto: onnx.ModelProto, typed: onnx.ModelProto, target: int) -> onnx.ModelProto:
    """Returns `proto` at opset `target`, with the names, texts and declarations that onnx's converter loses.

    Args:
        proto: without unknown ops.
        typed: the same with inferred types, which the converter reads.
        target: version of the default operator domain.
    """
    result = version_converter.convert_version(typed, target)
    _restore(result.graph, proto.graph, {node.name for node in _protos(proto.graph)})
    return result


def _protos(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    return (node for each in iter_graphs(graph) for node in each.node)


def _restore(graph: onnx.GraphProto, before: onnx.GraphProto, taken: set[str]) -> None:
    """Gives a graph and its nodes the names, texts and declarations of `before`, which was converted to it."""
    _copy_fields(graph, before, "doc_string metadata_props input value_info quantization_annotation")
    origins = {name: node for node in before.node for name in node.output if name}
    for node in graph.node:
        # A node with the outputs of an old node is its new version.
        origin = next((origins[name] for name in node.output if name in origins), None)
        if origin is None:
            if node.name:  # the converter names an added node like the node that needs it
                node.name = reserve_name(node.name, taken)
            continue
        _copy_fields(node, origin, "name metadata_props device_configurations")
        node.doc_string = node.doc_string or origin.doc_string
        texts = {(entry.name, entry.type): entry.doc_string for entry in origin.attribute}
        for entry in node.attribute:
            entry.doc_string = texts.get((entry.name, entry.type), entry.doc_string)
        for (_, inner), (_, old) in zip(subgraphs(node), subgraphs(origin), strict=True):
            _restore(inner, old, taken)


def _copy_fields(message: Any, other: Any, names: str) -> None:
    """Sets fields of a protobuf message to the fields of another."""
    for name in names.split():
        message.ClearField(name)
    message.MergeFrom(type(message)(**{name: getattr(other, name) for name in names.split()}))


def after(model: ir.Model, opset: int) -> list[str]:
    """Corrects in place the nodes that the converter made from a model of `opset`; returns notes for the report.

    Raises:
        ContractError: a node would compute something else now, and has no correction.
    """
    notes = []
    model.opset_imports.pop(_HIDDEN, None)
    for node in model.graph.all_nodes():
        if node.domain == _HIDDEN:
            node.domain = ""
            continue
        since, repair = _REPAIRS.get(node.op_type, (0, None))
        if repair is not None and opset < since and node.domain in STANDARD:
            try:
                notes += repair(node)
            except _ChangedError as error:
                raise _refusal(model, node, opset, since, str(error)) from None
    return notes


class _ChangedError(Exception):
    """Why a node would compute something else now."""


def _limits(node: ir.Node) -> list[str]:
    """Casts the limits of Clip and the value of Pad to the dtype of the data: as attributes they were float32."""
    first, *others = node.inputs
    dtype = 0 if first is None else dtype_of(first)
    for value in others:
        array = None if value is None else constant(value)
        if value is not None and dtype and array is not None and array.dtype == np.float32:
            with np.errstate(over="ignore"):  # the lowest float32 is -inf in float16: no limit, as before
                tensor = ir.tensor(array.astype(ir.DataType(dtype).numpy()), name=value.name)
            if value.is_initializer():
                value.const_value = tensor
            elif (producer := value.producer()) is not None:
                producer.attributes["value"] = ir.AttrTensor("value", tensor)
    return []


def _hardmax(node: ir.Node) -> list[str]:
    """Sets the axis of Hardmax, which covered all axes from its own on and now covers one."""
    shape, axis = shape_of(node.inputs[0]) if node.inputs[0] else None, attribute(node, "axis", 1)
    if axis != -1 and (shape is None or axis != len(shape) - 1):
        raise _ChangedError(f"it was over all axes from {axis} on")
    node.attributes["axis"] = ir.AttrInt64("axis", -1)
    return []


def _prelu(node: ir.Node) -> list[str]:
    """Refuses slopes per channel: PRelu now broadcasts slopes from the last axis on."""
    slope = node.inputs[1]
    shape = None if slope is None else shape_of(slope)
    if shape is None or any(dim != 1 for dim in shape):
        raise _ChangedError("its slopes were per channel")
    return []


def _resize(node: ir.Node) -> list[str]:
    """Sets the modes of Upsample and of Resize of opset 10, which count from the corner."""
    node.attributes["coordinate_transformation_mode"] = ir.AttrString("coordinate_transformation_mode", "asymmetric")
    if attribute(node, "mode", "nearest") != "nearest":
        return []
    value = node.inputs[2] if len(node.inputs) > 2 else None
    scales = None if value is None else constant(value)
    # To enlarge, ONNX Runtime takes the value before a place; to shrink, the next one behind it.
    least, most = (1, 1) if scales is None else (scales.min(initial=1), scales.max(initial=1))
    if least < 1 < most:
        raise _ChangedError("it enlarges one axis and shrinks another, and rounds either its own way")
    node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "ceil" if least < 1 else "floor")
    if scales is not None:
        return []
    return [f"node {label(node)!r} ({node.op_type}) is assumed to enlarge: its scales are computed"]


_REPAIRS: Final[dict[str, tuple[int, Callable[[ir.Node], list[str]]]]] = {
    "Clip": (11, _limits),
    "Hardmax": (13, _hardmax),
    "Pad": (11, _limits),
    "PRelu": (7, _prelu),
    "Resize": (11, _resize),
}
"""Op after the conversion -> the opset in which its meaning changed, and the function that corrects a node."""


def _refusal(model: ir.Model, node: ir.Node, opset: int, needed: int, why: str) -> ContractError:
    what = f"is of opset {opset}, and onnx's converter would change what it computes: {why}"
    return _error(model, node, what, f"opset {needed} or above")


def _error(model: ir.Model, node: ir.Node, what: str, expected: str) -> ContractError:
    where = f"{name_of(model)}: node {label(node)!r} ({node.op_type})"
    return ContractError(where, what, expected=expected, advice="export the model again")
