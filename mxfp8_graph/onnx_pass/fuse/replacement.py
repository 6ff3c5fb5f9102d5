"""What a fusion found: the nodes that go away, and the fused node that takes their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx

from mxfp8_graph.onnx_pass.fuse.graph_view import GraphView


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """One node in place of several.

    Its outputs, and those of `after`, have the names of the values that others read; what `gone` makes besides is read
    by nobody else. Nodes of this graph that only `gone` read, such as constants, go away by themselves.
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
