"""What a conversion of ours took apart is put together again, where it is still the same.

A node that becomes the standard ops of its body leaves a mark on the one that makes its first output: the op, its
attributes and name (`taken_apart`). A mark alone counts for nothing: `restore` writes the body anew and compares the
graph with it, op by op and constant by constant. What a tool has changed since stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import onnx
from onnx import helper

from mxfp8_graph.onnx_model.walk import iter_graphs
from mxfp8_graph.onnx_pass.fuse.attention import is_circular, unneeded
from mxfp8_graph.onnx_pass.fuse.graph_view import GraphView
from mxfp8_graph.onnx_pass.fuse.replacement import Replacement
from mxfp8_graph.onnx_pass.fuse.run import apply
from mxfp8_graph.tools.dialects.body_match import BodyMatch
from mxfp8_graph.tools.dialects.graph_edit import Edit, Nodes, Scope
from mxfp8_ops import contract
from mxfp8_ops.formats import BLOCK_SIZE
from mxfp8_ops.standard_ops import body_of, in_place_of, settings_of

_MARK: Final = "mxfp8_graph.body_of."
"""Start of the metadata key of a mark; the op follows."""

_ABSENT: Final[Mapping[str, Sequence[float]]] = {"attn_mask": [0], "past_key": [], "past_value": []}
"""What stands for an input that is not there: vectors; a mask of False would hide everything, so a Boolean is True."""


def taken_apart(scope: Scope, node: onnx.NodeProto) -> Nodes:
    """Returns the ops of a node's body in its place, marked; inputs that change nothing are left out."""
    plain = onnx.NodeProto()
    plain.CopyFrom(node)
    absent: dict[str, tuple[str, int]] = {}
    for at, port in enumerate(contract.OPS[node.op_type].inputs[: len(node.input)]):
        stored = scope.tensor(node.input[at]) if port.name in _ABSENT else None
        if stored is not None and _is_absent(scope, port.name, stored):
            plain.input[at], absent[port.name] = "", (node.input[at], stored.data_type)
    try:
        made = in_place_of(plain, scope.edit.fresh)
    except (ValueError, TypeError, OverflowError, LookupError) as error:
        advice = "rewrite the original model again"
        expected = "attributes of the contract"
        raise scope.edit.refuse(node, f"an attribute is {error}", expected=expected, advice=advice) from None
    first = next(name for name in node.output if name)
    for each in made:
        if each.domain == contract.DOMAIN:
            each.metadata_props.MergeFrom(node.metadata_props)
            if node.doc_string:
                each.doc_string = node.doc_string
        if first in each.output:
            if each.domain != contract.DOMAIN:
                each.metadata_props.MergeFrom(node.metadata_props)
            mark = {"name": node.name, "attributes": settings_of(node), "absent": absent}
            each.metadata_props.add(key=_MARK + node.op_type, value=json.dumps(mark))
    return made


def _is_absent(scope: Scope, port: str, stored: onnx.TensorProto) -> bool:
    """Whether a stored tensor is what the contract has for an input that is not there."""
    if list(stored.dims) != [len(_ABSENT[port])]:
        return False
    return not stored.dims or stored.dims[0] == 0 or scope.values(stored).item() == (stored.data_type == contract.BOOL)


def restore(edit: Edit) -> int:
    """Puts every marked node together that is still its body; returns how many."""
    count = 0
    while found := apply(edit.opened, {}, edit.fresh, [_restored], any_op=True):  # one may be inside another
        count += len(found)
    return count


def is_marked(node: onnx.NodeProto) -> bool:
    """Whether a node makes the first output of one that was taken apart."""
    return any(entry.key.startswith(_MARK) for entry in node.metadata_props)


def forget(model: onnx.ModelProto) -> None:
    """Removes the marks that are left: of nodes that something has changed."""
    for graph in iter_graphs(model.graph):
        for node in graph.node:
            if node.metadata_props:
                kept = [entry for entry in node.metadata_props if not entry.key.startswith(_MARK)]
                del node.metadata_props[:]
                node.metadata_props.extend(kept)


def _restored(view: GraphView, node: onnx.NodeProto) -> Replacement | None:
    """Returns the node whose first output `node` makes, if it is marked and the graph is still that node's body."""
    for entry in node.metadata_props:
        if entry.key.startswith(_MARK):
            op, mark = contract.OPS.get(entry.key.removeprefix(_MARK)), _mark(entry.value)
            if op is not None and mark is not None and (found := _whole(view, node, op, mark)) is not None:
                return found
    return None


def _mark(text: str) -> dict[str, Any] | None:
    """Returns what a mark says, or None if it is none of ours."""
    try:
        mark = json.loads(text)
    except (ValueError, RecursionError):
        return None
    kinds = {"name": str, "attributes": dict, "absent": dict}
    if not isinstance(mark, dict) or not all(isinstance(mark.get(key), kind) for key, kind in kinds.items()):
        return None
    known = (contract.BOOL, *contract.VALUES)
    for each in mark["absent"].values():
        if not isinstance(each, list) or len(each) != 2 or not isinstance(each[0], str) or each[1] not in known:
            return None
    return mark


def _whole(view: GraphView, node: onnx.NodeProto, op: contract.Op, mark: dict[str, Any]) -> Replacement | None:
    settings, absent = mark["attributes"], mark["absent"]
    same = {key: type(value) for key, value in settings.items()} == {k: type(v) for k, v in op.attributes.items()}
    ports = {port.name for port in op.inputs if port.optional or port.name in _ABSENT}
    if not same or settings.get("block_size", BLOCK_SIZE) != BLOCK_SIZE or not absent.keys() <= ports:
        return None
    left_out = {port.name for port in op.inputs if port.optional} | absent.keys()
    for without in (absent.keys(), left_out):
        try:
            match = BodyMatch(view, op, body_of(op, settings, without))
        except (ValueError, TypeError, OverflowError, LookupError):  # attributes of values that there are not
            return None
        outputs = match.outputs(node)
        if outputs is not None and {p.name for p in op.inputs} - match.inputs.keys() <= {*without}:
            return _replacement(view, node, op, mark, (match, outputs))
    return None


def _replacement(
    view: GraphView,
    node: onnx.NodeProto,
    op: contract.Op,
    mark: dict[str, Any],
    found: tuple[BodyMatch, dict[str, onnx.NodeProto]],
) -> Replacement | None:
    match, makers = found
    before: Nodes = []
    inputs = []
    for port in op.inputs:
        name = match.inputs.get(port.name, "")
        if port.name in mark["absent"]:
            name, constant = _constant(view, port.name, *mark["absent"][port.name])
            before.append(constant)
        inputs.append(name)
    while inputs and not inputs[-1]:
        inputs.pop()
    outputs = [match.bound[port.name] if port.name in makers else "" for port in op.outputs]
    gone = unneeded(view, {*outputs} - {""}, {*inputs})
    others = makers.keys() - {op.outputs[0].name}
    apart = {*inputs} - match.behind_all(others)  # what is behind an output cannot be made of it
    if is_circular(view, {match.bound[name] for name in others}, apart, gone):
        return None
    for at, port in enumerate(op.outputs):
        if port.optional and outputs[at] and view.is_between(outputs[at], *gone.values()):
            outputs[at] = ""
    attributes = mark["attributes"]
    made = helper.make_node(op.name, inputs, outputs, name=mark["name"], domain=contract.DOMAIN, **attributes)
    if node.doc_string:
        made.doc_string = node.doc_string
    made.metadata_props.extend(entry for entry in node.metadata_props if entry.key != _MARK + op.name)
    return Replacement(kind=op.name, node=made, gone=tuple(gone.values()), before=tuple(before))


def _constant(view: GraphView, port: str, name: str, dtype: int) -> tuple[str, onnx.NodeProto]:
    """Returns the vector that stands for an input that is not there, and the node that makes it."""
    name = view.fresh(name)
    values = [dtype == contract.BOOL] * len(_ABSENT[port])
    tensor = helper.make_tensor(name, dtype, [len(values)], values)
    return name, helper.make_node("Constant", [], [name], name=name, value=tensor)
