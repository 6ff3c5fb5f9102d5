"""What a conversion of ours took apart is put together again, where it is still the same.

A node that becomes the standard ops of its body leaves a mark on the one that makes its first output: the op, its
attributes and name (`taken_apart`). A mark alone counts for nothing: `restore` writes the body anew and compares the
graph with it, op by op and constant by constant. What a tool has changed since stays as it is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import onnx
import onnx_ir as ir

from mxfp8_graph.onnx_model.graph import only_used_by, put_graph, to_ir
from mxfp8_graph.onnx_model.walk import iter_graphs
from mxfp8_graph.onnx_pass.fuse.attention import is_circular, unneeded
from mxfp8_graph.onnx_pass.fuse.replacement import Replacement, fused_node, heir
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
    model, count = to_ir(edit.opened, edit.opened.proto), 0
    fusion = functools.partial(_restored, fresh=edit.fresh)
    while restored := apply(model, [fusion], lambda _: True):  # one may be inside another
        count += len(restored)
    if count:
        put_graph(edit.opened, model)
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


def _restored(node: ir.Node, *, fresh: Callable[[str], str]) -> Replacement | None:
    """Returns the node whose first output `node` makes, if it is marked and the graph is still that node's body."""
    for key, value in node.metadata_props.items():
        if key.startswith(_MARK):
            op, mark = contract.OPS.get(key.removeprefix(_MARK)), _mark(value)
            if op is not None and mark is not None and (whole := _whole(node, op, mark, fresh)) is not None:
                return whole
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


def _whole(node: ir.Node, op: contract.Op, mark: dict[str, Any], fresh: Callable[[str], str]) -> Replacement | None:
    settings, absent = mark["attributes"], mark["absent"]
    same = {key: type(value) for key, value in settings.items()} == {k: type(v) for k, v in op.attributes.items()}
    ports = {port.name for port in op.inputs if port.optional or port.name in _ABSENT}
    if not same or settings.get("block_size", BLOCK_SIZE) != BLOCK_SIZE or not absent.keys() <= ports:
        return None
    left_out = {port.name for port in op.inputs if port.optional} | absent.keys()
    for without in (absent.keys(), left_out):
        try:
            match = BodyMatch(op, body_of(op, settings, without))
        except (ValueError, TypeError, OverflowError, LookupError):  # attributes of values that there are not
            return None
        if match.finds(node) and {p.name for p in op.inputs} - match.inputs.keys() <= {*without}:
            return _replacement(node, op, mark, match, fresh)
    return None


def _replacement(
    node: ir.Node, op: contract.Op, mark: dict[str, Any], match: BodyMatch, fresh: Callable[[str], str]
) -> Replacement | None:
    outputs = [match.outputs.get(port.name) for port in op.outputs]
    operands = [*match.inputs.values()]
    gone = unneeded([output for output in outputs if output is not None], operands)
    others = match.outputs.keys() - {op.outputs[0].name}
    apart = {*operands} - match.behind_all(others)  # what is behind an output cannot be made of it
    if is_circular([match.outputs[name] for name in others], apart, gone):
        return None
    for at, (port, output) in enumerate(zip(op.outputs, outputs, strict=True)):
        if port.optional and output is not None and only_used_by(output, gone):
            outputs[at] = None
    before: list[ir.Node] = []
    inputs: list[ir.Value | None] = []
    for port in op.inputs:
        if port.name in mark["absent"]:
            before.append(_constant(port.name, mark["absent"][port.name], fresh))
            inputs.append(before[-1].outputs[0])
        else:
            inputs.append(match.inputs.get(port.name))
    while inputs and inputs[-1] is None:
        inputs.pop()
    whole = fused_node(op, inputs, list(map(heir, outputs)), mark["attributes"], node)
    whole.name = mark["name"]
    del whole.metadata_props[_MARK + op.name]
    return Replacement(kind=op.name, node=whole, gone=tuple(gone), before=tuple(before))


def _constant(port: str, absent: tuple[str, int], fresh: Callable[[str], str]) -> ir.Node:
    """Returns the node that makes the vector that stands for an input that is not there; `absent`: name and dtype."""
    name, dtype = fresh(absent[0]), absent[1]
    values = [dtype == contract.BOOL] * len(_ABSENT[port])
    tensor = onnx.helper.make_tensor(name, dtype, [len(values)], values)
    return ir.node("Constant", [], {"value": ir.from_proto(tensor)}, outputs=[ir.Value(name=name)], name=name)
