"""ONNX graphs as `policy.roles` sees them: the op table, and how graphsurgeon's graphs are walked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import onnx_graphsurgeon as gs

from mxfp8_graph.onnx_model.walk import STANDARD
from mxfp8_graph.onnx_pass.matmul_forms import FORMS, MICROSOFT_FORMS
from mxfp8_graph.onnx_pass.static_operands import StaticOperands
from mxfp8_graph.policy.roles import RoleOps

_FUSED: Final = (
    *("MultiHeadAttention", "GroupQueryAttention", "DecoderMaskedMultiHeadAttention", "PackedMultiHeadAttention"),
    *("PagedAttention", "SparseAttention", "QAttention", "MatMulNBits", "MatMulInteger", "MatMulIntegerToFloat"),
    *("DynamicQuantizeMatMul", "QLinearMatMul", "FusedConv", "QMoE"),
)
"""ONNX Runtime's ops, and quantized ones, that multiply activations by something."""

ROLE_OPS: Final = RoleOps(
    compute=frozenset({*FORMS, *MICROSOFT_FORMS, "Conv", "ConvTranspose", "Attention", "LSTM", "GRU", "RNN", *_FUSED}),
    choices=frozenset({"TopK", "ArgMax"}),
    softmax=frozenset({"Softmax"}),
    views=frozenset({"Cast", "Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Flatten"}),
    to_output=frozenset({"Slice", "Softmax", "LogSoftmax", "Sigmoid", "Split", "Gather"}),
    to_softmax=frozenset({"Add", "Sub", "Mul", "Div", "Where", "Clip", "Max", "Min", "Tanh", "Expand", "Concat"}),
    from_softmax=frozenset({"Dropout", "Where", "Mul", "Slice", "Split"}),
    affine=frozenset({"Add", "Sub", "Mul", "Div"}),
    add="Add",
    tanh="Tanh",
    multiply="Mul",
)


class OnnxView:
    """The graphs of one model as a `policy.roles.GraphView`: main graph first, then every subgraph."""

    def __init__(self, graphs: Sequence[gs.Graph], statics: StaticOperands) -> None:
        self.is_constant = statics.is_constant
        self._main_outputs = {id(tensor) for tensor in graphs[0].outputs}
        self._across: dict[int, list[gs.Tensor]] = {}
        """Where a tensor goes on across the border of a subgraph, by the tensor's id."""
        for graph in graphs:
            for node in graph.nodes:
                for inner in (v for v in node.attrs.values() if isinstance(v, gs.Graph)):
                    for start, end in _borders(node, inner):
                        self._across.setdefault(id(start), []).append(end)

    def consumers(self, value: gs.Tensor) -> Iterator[tuple[gs.Node | None, gs.Tensor]]:
        """See `GraphView`."""
        for node in value.outputs:
            for output in node.outputs:
                yield node, output
        for other in self._across.get(id(value), ()):
            yield None, other

    def producer(self, value: gs.Tensor) -> gs.Node | None:
        """See `GraphView`."""
        return value.inputs[0] if value.inputs else None

    def operands(self, op: gs.Node) -> Sequence[gs.Tensor]:
        """See `GraphView`."""
        inputs: Sequence[gs.Tensor] = op.inputs
        return inputs

    def name(self, op: gs.Node) -> str:
        """See `GraphView`."""
        return str(op.op)

    def is_model_output(self, value: gs.Tensor) -> bool:
        """See `GraphView`."""
        return id(value) in self._main_outputs


def _borders(node: gs.Node, inner: gs.Graph) -> Iterator[tuple[gs.Tensor, gs.Tensor]]:
    """Yields (tensor, the same tensor on the other side) for a control-flow node and one of its subgraphs."""
    skip = 1 if node.op == "Loop" else 0  # a Loop body's first output is its condition
    yield from zip(inner.outputs[skip:], node.outputs, strict=False)
    if node.op in {"Loop", "Scan"} and node.domain in STANDARD:
        first = 2 * skip  # after the trip count and the condition
        carried = len(node.inputs) - (first or int(node.attrs.get("num_scan_inputs", 0)))
        yield from zip(node.inputs[first:], inner.inputs[first:], strict=False)
        yield from zip(inner.outputs[skip : skip + carried], inner.inputs[first:], strict=False)
