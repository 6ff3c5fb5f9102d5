"""A matmul as the ONNX pass sees it: `MatMulSite` for the plan, and what `edit.py` needs to replace it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from mxfp8_graph.onnx_pass.static_operands import Static, Stored
from mxfp8_graph.policy.plan import MatMulSite


@dataclass(frozen=True)
class Scope:
    """One graph of the model, seen by graphsurgeon and as the message itself."""

    path: str
    """Node and attribute names down to it, unique; "" is the main graph."""
    depth: int
    view: gs.Graph
    proto: onnx.GraphProto
    visible: Stored
    """Constants of this graph and of those around it."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One side of the product."""

    name: str
    rank: int | None
    transposed: bool = False
    """K is the last axis but one."""
    static: Static | None = None
    perm: tuple[int, ...] | None = None
    """Of a run-time operand: what brings K to the end; None if it is there, or if the rank is unknown."""


@dataclass(frozen=True, kw_only=True)
class OnnxSite:
    """A site and what `edit.py` needs to replace it."""

    site: MatMulSite
    scope: Scope
    index: int
    """Of the node within `scope.proto.node`."""
    x: Operand
    w: Operand
    dtype: int
    """onnx.TensorProto.DataType of activations and result."""
    output: str
    swapped: bool = False
    """The gemm computes the transpose of the result."""
    alpha: float = 1.0
    beta: float = 1.0
    bias: Static | None = None
    """Absorbed into the gemm."""
    bias_index: int | None = None
    """Of the Add node that the absorbed bias came from, which goes away."""
    addend: str | None = None
    """Gemm's C where it cannot be absorbed: added by nodes of its own."""
