"""Takes ONNX's Attention apart into the nodes that the standard defines it by, so that its products can be matmuls."""

from __future__ import annotations

from typing import Final

import onnx

from mxfp8_graph.onnx_model import onnx_calls
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.walk import STANDARD, iter_graphs, iter_nodes
from mxfp8_ops.errors import ContractError

_ATTENTION: Final = "Attention"


def take_apart(opened: OpenedModel) -> None:
    """Replaces every Attention of the model, in place, and notes it; or notes why they stay, if onnx cannot do that.

    What a node becomes has its metadata, and names that begin with its.
    """
    whole = {node.output[0]: node for node in iter_nodes(opened.proto.graph.node) if _is_attention(node)}
    if not whole:
        return
    before = {name for node in iter_nodes(opened.proto.graph.node) for name in node.output} - whole.keys()
    try:
        opened.proto = onnx_calls.inline_standard(opened.proto, [("", _ATTENTION)], opened.name)
    except ContractError as error:
        opened.notes.append(f"the products inside Attention are not quantized: {error}")
        return
    for graph in iter_graphs(opened.proto.graph):
        parts: list[onnx.NodeProto] = []
        for node in graph.node:
            if before.isdisjoint(node.output):
                parts.append(node)
            if node.output and (origin := whole.get(node.output[0])) is not None:
                _label(parts, origin)
                parts = []
    opened.notes.append(f"took apart {len(whole)} Attention, for the recipe quantizes attention products")


def _is_attention(node: onnx.NodeProto) -> bool:
    return node.op_type == _ATTENTION and node.domain in STANDARD


def _label(parts: list[onnx.NodeProto], origin: onnx.NodeProto) -> None:
    """Says where nodes come from."""
    for part in parts:
        part.metadata_props.MergeFrom(origin.metadata_props)
        if origin.name:
            part.name = f"{origin.name}_{part.output[0]}"
