"""Converts the opset of a model by onnx's converter, and sets right what that gets wrong.

The converter goes through an intermediate form that loses node metadata, so only the nodes it really changed are taken
from its result; every other node stays the very message it was.
"""

from __future__ import annotations

import onnx

from mxfp8_graph.naming import take_name
from mxfp8_graph.onnx_model import old_ops, onnx_calls
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.walk import STANDARD, copy_fields, iter_graphs, subgraphs

_ELSEWHERE = "mxfp8_graph.elsewhere"
"""The domain of what onnx's converter is to leave alone."""


def convert(opened: OpenedModel, opset: int, target: int) -> None:
    """Converts a model from `opset` up to `target`, in place; notes what was done.

    Raises:
        ContractError: an op cannot be converted, or its conversion would compute something else.
    """
    old_ops.prepare(opened.proto, opset, target, opened.name)
    converted = onnx_calls.convert(_without_unknown(opened.proto, opset), target, opened.name)
    notes = old_ops.repair(converted, opset, opened.name)
    _graft(opened.proto.graph, converted.graph, {n.name for g in iter_graphs(opened.proto.graph) for n in g.node})
    for entry in opened.proto.opset_import:
        if entry.domain in STANDARD:
            entry.version = target
    opened.notes += [f"converted opset {opset} to {target}", *notes]


def _without_unknown(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Returns a copy of `model` in which the ops that only ONNX Runtime has at `opset` are of another domain.

    onnx's converter refuses what it does not know in its own domain, and leaves other domains alone.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.opset_import.add(domain=_ELSEWHERE, version=1)
    for graph in iter_graphs(copy.graph):
        for node in graph.node:
            if node.domain in STANDARD and not onnx.defs.has(node.op_type, opset):
                node.domain = _ELSEWHERE
    return copy


def _graft(original: onnx.GraphProto, converted: onnx.GraphProto, names: set[str]) -> None:
    """Replaces the nodes of `original` by those of `converted`, keeping each node that did not change as it was.

    `names` are those of all nodes: the converter calls each node it adds like the one it adds it for.
    """
    known = {tuple(node.output): node for node in original.node}
    nodes: list[onnx.NodeProto] = []
    for node in converted.node:
        before = known.get(tuple(node.output))
        if before is None:
            if node.name:
                node.name = take_name(node.name, names)
            nodes.append(node)
            continue
        kept = onnx.NodeProto()
        kept.CopyFrom(before)
        inner = dict(subgraphs(node))
        for name, graph in subgraphs(kept):
            if name in inner:
                _graft(graph, inner[name], names)
        # A Constant means the same in every version, and where its data lies is dropped by the converter of onnx 1.18.
        if node.op_type != "Constant" and not _same(before, node):
            for name in ("op_type", "input", "attribute"):
                kept.ClearField(name)
            copy_fields(kept, node, skip={"output", "name", "doc_string", "metadata_props", "domain"})
        nodes.append(kept)
    del original.node[:]
    original.node.extend(nodes)
    have = {tensor.name for tensor in original.initializer}
    original.initializer.extend(t for t in converted.initializer if t.name not in have)


def _same(a: onnx.NodeProto, b: onnx.NodeProto) -> bool:
    def plain(node: onnx.NodeProto) -> list[bytes]:
        kept = (x for x in node.attribute if x.type not in {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS})
        return sorted(_undocumented(x) for x in kept)

    return a.op_type == b.op_type and list(a.input) == list(b.input) and plain(a) == plain(b)


def _undocumented(attribute: onnx.AttributeProto) -> bytes:
    copy = onnx.AttributeProto()
    copy_fields(copy, attribute, skip={"doc_string"})
    return bytes(copy.SerializeToString(deterministic=True))
