"""What a fusion found: the nodes that go away, and the fused node that takes their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from mxfp8_graph.onnx_pass.fuse.graph_view import GraphView
from mxfp8_ops import contract


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """One node in place of several.

    Its outputs, and those of `after`, have the names of the values that others read; what `gone` makes besides is read
    by no other node. Nodes of this graph that only `gone` read, such as constants, go away by themselves.
    """

    kind: str
    """What was fused, for reports: "gemm + gelu"."""
    node: onnx.NodeProto
    gone: tuple[onnx.NodeProto, ...]
    """Nodes of the graph."""
    before: tuple[onnx.NodeProto, ...] = ()
    """Further new nodes that make what `node` reads: constants, views."""
    after: tuple[onnx.NodeProto, ...] = ()
    """Further new nodes that read what `node` makes."""


Fusion = Callable[[GraphView, onnx.NodeProto], Replacement | None]
"""Returns what takes the place of the pattern that ends, or begins, in a node; None if it is not there."""


def successor(
    node: onnx.NodeProto, op: contract.Op, inputs: Sequence[str], outputs: Sequence[str], **changes: Any
) -> onnx.NodeProto:
    """Returns a node of type `op` with the name, the metadata and the attributes of `node`, as far as `op` has them."""
    given = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    settings = {name: changes.get(name, given.get(name, default)) for name, default in op.attributes.items()}
    fused = helper.make_node(op.name, inputs, outputs, name=node.name, domain=contract.DOMAIN, **settings)
    fused.metadata_props.MergeFrom(node.metadata_props)
    if node.doc_string:  # an empty field is written too
        fused.doc_string = node.doc_string
    return fused
