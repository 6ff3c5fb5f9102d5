"""Compares the kernel of every MXFP8 node with its function body, on the same inputs, in one ONNX Runtime session.

Comparing the two at the model's outputs proves little: a difference in the last bit of a float32 sum may round the
next layer's element the other way, and that is a whole step of the element format, so two correct executions drift
apart by as much as the quantization error itself. Node by node there is no drift, and a bound holds:

- MXFP8Quantize, MXFP8Dequantize, MXFP8Embedding: no difference at all.
- The gemms: both sums are float32 sums of the same exact products, in any order. Each is within
  `numerics.gemm_error_bound` of the exact result, or `fused.gemm_error_bound`, so they are within twice that of each
  other.
- The normalizations: the normalized values likewise, by `fused.norm_error_bound`. The elements and scales of the kernel
  are those of its own normalized values, and the sum of both is the same: there is no difference at all.
- The gemm that quantizes: its values as those of the gemms, its elements and scales as those of the normalizations.

The model is instrumented: each node gets a twin in another domain that only has the function body, and a few standard
ops that reduce the two results to one number. Nothing large leaves the session. A few nodes at a time: the time that
ONNX Runtime takes to put function bodies into a model grows with the square of their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper

from mxfp8_graph.checking.node_comparison import BODY_DOMAIN, USED_BY_CHECKS, Comparison, is_inexact
from mxfp8_graph.checking.profile import by_node, gemms_of, isas_of
from mxfp8_graph.checking.sessions import Session
from mxfp8_graph.onnx_model.walk import STANDARD, iter_graphs, iter_nodes
from mxfp8_ops import contract, cpu, onnx_functions

_AT_ONCE: Final = 16
"""Nodes that are checked in one session: of MiniLM's 68, 8 at a time take 6 s in all, 16 take 5 s, all at once 14 s."""


@dataclass(frozen=True)
class NodeCheck:
    """The comparison of one node's kernel with its function body."""

    name: str
    op: str
    excess: float
    """The largest difference, in units of the bound; for an op without one, the number of values that differ."""
    kernel: str = ""
    """The instruction set its kernel ran on, and the gemm kernels: "avx512 gemm_f32"."""

    @property
    def has_bound(self) -> bool:
        """Whether the node sums values, so that the order of the sum shows in its last bits."""
        op = contract.OPS[self.op]
        return is_inexact(op)

    @property
    def passed(self) -> bool:
        """Whether kernel and body agree: no value differs, or no difference is beyond the bound."""
        return self.excess <= (1 if self.has_bound else 0)

    def to_dict(self) -> dict[str, Any]:
        """Returns the check with JSON types only: infinity is None."""
        excess = self.excess if math.isfinite(self.excess) else None
        return {"name": self.name, "op": self.op, "kernel": self.kernel, "excess": excess, "passed": self.passed}

    def __str__(self) -> str:
        """Returns the failure in words."""
        if self.has_bound:
            return f"{self.op} {self.name!r}: kernel and function body differ by {self.excess:.3g} times the bound"
        return f"{self.op} {self.name!r}: kernel and function body differ in {self.excess:.0f} values; expected none"


def check_nodes(model: ModelProto, inputs: Mapping[str, Any], folder: Path | None, where: str) -> list[NodeCheck]:
    """Returns one check per MXFP8 node of the main graph; nodes in subgraphs are not reached.

    The model, whose external data is in `folder`, is not modified. Errors call it `where`.

    Raises:
        BackendError: the model cannot be instrumented or run.
    """
    nodes = [node for node in model.graph.node if node.domain == contract.DOMAIN]
    if not nodes:
        return []
    return [
        check
        for start in range(0, len(nodes), _AT_ONCE)
        for check in _checks(model, range(start, min(start + _AT_ONCE, len(nodes))), inputs, folder, where)
    ]


def _checks(
    model: ModelProto, chosen: range, inputs: Mapping[str, Any], folder: Path | None, where: str
) -> list[NodeCheck]:
    """Returns the checks of some of the MXFP8 nodes, which are counted from 0."""
    instrumented, nodes = _instrumented(model, chosen)
    # Unoptimized, so that every node runs as the file has it.
    session = Session(instrumented, kernels=True, where=where, folder=folder, optimize=False)
    with cpu.profiled() as written:
        values = session.run(inputs)
        kernels = {
            name: f"{isas_of(calls)} {gemms_of(calls)}".strip() for name, calls in by_node(written.calls()).items()
        }
    return [
        NodeCheck(node.name or node.output[0], node.op_type, float(values[_result(i)]), kernels.get(node.name, ""))
        for i, node in zip(chosen, nodes, strict=True)
    ]


def nodes_in_subgraphs(model: ModelProto) -> int:
    """Returns how many MXFP8 nodes are inside If, Loop and Scan bodies."""
    _, *inner = iter_graphs(model.graph)
    return sum(node.domain == contract.DOMAIN for graph in inner for node in graph.node)


def _result(index: int) -> str:
    return f"mxfp8.check/{index}"


def _instrumented(model: ModelProto, chosen: range) -> tuple[ModelProto, list[NodeProto]]:
    """Returns (the model with checks as its only outputs, the nodes that are checked, in order)."""
    copy = ModelProto()
    copy.CopyFrom(model)
    opset = next(entry.version for entry in copy.opset_import if entry.domain in STANDARD)
    nodes = [node for node in copy.graph.node if node.domain == contract.DOMAIN][chosen.start : chosen.stop]
    needed = sorted({node.op_type for node in nodes} | {*USED_BY_CHECKS})
    # The model's own bodies are what other runtimes execute; ours fill in the helpers that a comparison needs and the
    # model lacks.
    carried = {function.name: function for function in model.functions if function.domain == contract.DOMAIN}
    for reference in onnx_functions.functions(opset, needed):
        copy.functions.append(_twin_of(carried.get(reference.name, reference)))
    copy.opset_import.append(helper.make_opsetid(BODY_DOMAIN, contract.VERSION))
    # The checks are scalars: no activation has to leave the session.
    del copy.graph.output[:]
    for index, node in zip(chosen, nodes, strict=True):
        check = Comparison(node, _result(index))
        check.build()
        copy.graph.node.extend(check.nodes)
        copy.graph.initializer.extend(check.constants)
        copy.graph.output.append(helper.make_tensor_value_info(_result(index), TensorProto.FLOAT, []))
    return copy, nodes


def _twin_of(function: FunctionProto) -> FunctionProto:
    """Returns a function body, and the MXFP8 nodes in it, in the domain of the twins."""
    twin = FunctionProto()
    twin.CopyFrom(function)
    twin.domain = BODY_DOMAIN
    for node in iter_nodes(twin.node):
        if node.domain == contract.DOMAIN:
            node.domain = BODY_DOMAIN
    for entry in twin.opset_import:
        if entry.domain == contract.DOMAIN:
            entry.domain = BODY_DOMAIN
    return twin
