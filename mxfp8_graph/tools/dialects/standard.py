"""Standard ops alone, of opset 21: for ONNX Runtime without our library, OpenVINO and onnx's ReferenceEvaluator.

Every node of ours becomes the nodes of its function body. Weights are Cast and Mul, which ONNX Runtime computes once,
when a session opens.
"""

from __future__ import annotations

import onnx_ir as ir

from mxfp8_graph.tools.dialects.decompose import taken_apart
from mxfp8_graph.tools.dialects.edit import Edit, Nodes
from mxfp8_ops import contract


def write(edit: Edit, node: ir.Node, _: frozenset[str]) -> Nodes | None:
    """Returns standard ops for one of our nodes, or None for others."""
    return taken_apart(edit, node) if node.domain == contract.DOMAIN else None
