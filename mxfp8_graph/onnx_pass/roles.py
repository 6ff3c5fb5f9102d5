"""What a matmul is for, read off the graph around it: output projection, router, attention scores or values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import onnx_graphsurgeon as gs

from mxfp8_graph.onnx_pass.static_operands import StaticOperands
from mxfp8_graph.policy.plan import Role

_COMPUTE: Final = frozenset({"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "Attention", "LSTM", "GRU", "RNN"})
"""Ops that consume activations: a matmul that feeds one of these is inside the model, not at its end."""

_CHOICES: Final = frozenset({"TopK", "ArgMax"})
"""Ops whose result jumps when their input changes a little."""

_TO_OUTPUT: Final = frozenset(
    {"Cast", "Reshape", "Transpose", "Slice", "Softmax", "LogSoftmax", "Sigmoid", "Identity"}
    | {"Squeeze", "Unsqueeze", "Flatten", "Split", "Gather"}
    | _CHOICES
)
"""What may stand between an output projection and the output, besides a bias add, a constant factor or a soft cap."""

_TO_SOFTMAX: Final = frozenset(
    {"Add", "Sub", "Mul", "Div", "Where", "Cast", "Reshape", "Transpose", "Clip", "Max", "Min", "Tanh", "Identity"}
    | {"Expand", "Squeeze", "Unsqueeze", "Concat"}
)
"""Between Q @ K^T and its softmax: scaling, masking, soft-capping, attention sinks."""

_FROM_SOFTMAX: Final = frozenset(
    {"Cast", "Dropout", "Where", "Mul", "Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Slice", "Split"}
)
"""Between a softmax and its product with V."""


class Roles:
    """Answers for the matmuls of one model; `graphs` are its main graph and then every subgraph."""

    def __init__(self, graphs: Sequence[gs.Graph], constants: StaticOperands) -> None:
        self._constants = constants
        self._main_outputs = {id(t) for t in graphs[0].outputs}
        self._across: dict[int, list[gs.Tensor]] = {}
        """Where a tensor goes on across the border of a subgraph: in, out, and round to a loop's next iteration."""
        for graph in graphs:
            for node in graph.nodes:
                for inner in (v for v in node.attrs.values() if isinstance(v, gs.Graph)):
                    for start, end in _borders(node, inner):
                        self._across.setdefault(id(start), []).append(end)
        self._feeds_compute: dict[int, bool] = {}

    def of_linear(self, node: gs.Node) -> Role:
        """Returns the role of a matmul with a static operand.

        An output projection's result reaches a graph output passively and feeds no later matmul: the second condition
        tells an LM head from the key and value projections of a decoder that returns its cache. Of a router's result,
        the model chooses.
        """
        start = node.outputs[0]
        reached = list(self._passively_from(start))
        outputs = any(id(tensor) in self._main_outputs for _, tensor in reached)
        if outputs and not self._compute_below(start):
            return "output_projection"
        return "router" if any(op in _CHOICES for op, _ in reached) else "linear"

    def of_product(self, node: gs.Node) -> Role:
        """Returns the role of a matmul both of whose operands are computed at run time."""
        if self._leads_to_softmax(node.outputs[0], 0):
            return "attention_scores"
        if any(self._comes_from_softmax(tensor, 0) for tensor in node.inputs[:2]):
            return "attention_values"
        return "product"

    def _next(self, tensor: gs.Tensor) -> Iterator[tuple[gs.Node | None, gs.Tensor]]:
        """Yields (consumer, what it makes of `tensor`); the border of a subgraph is crossed with no consumer."""
        for consumer in tensor.outputs:
            for output in consumer.outputs:
                yield consumer, output
        for other in self._across.get(id(tensor), ()):
            yield None, other

    def _passively_from(self, start: gs.Tensor) -> Iterator[tuple[str, gs.Tensor]]:
        """Yields `start` and what it becomes through passive ops only, each with the op that made it. Iterative."""
        stack, seen = [("", start)], {id(start)}
        while stack:
            made_by, tensor = stack.pop()
            yield made_by, tensor
            for consumer, output in self._next(tensor):
                if id(output) not in seen and (consumer is None or self._is_passive(consumer, tensor)):
                    seen.add(id(output))
                    stack.append((consumer.op if consumer else "", output))

    def _is_passive(self, consumer: gs.Node, tensor: gs.Tensor) -> bool:
        if consumer.op == "Tanh":  # a soft cap, if it is scaled up again; an activation otherwise
            users = consumer.outputs[0].outputs
            return bool(users) and all(u.op == "Mul" and self._is_affine(u, consumer.outputs[0]) for u in users)
        return consumer.op in _TO_OUTPUT or self._is_affine(consumer, tensor)

    def _is_affine(self, consumer: gs.Node, tensor: gs.Tensor) -> bool:
        """Whether `consumer` adds a constant to `tensor` or scales it by one."""
        others = [i for i in consumer.inputs if i is not tensor]
        return consumer.op in {"Add", "Sub", "Mul", "Div"} and all(self._constants.is_constant(o) for o in others)

    def _compute_below(self, start: gs.Tensor) -> bool:
        """Whether any matmul-like node lies downstream of `start`. Iterative: graphs are deeper than Python's stack."""
        stack, seen = [start], {id(start)}
        while stack:
            tensor = stack.pop()
            if self._feeds_compute.get(id(tensor)):
                self._feeds_compute[id(start)] = True
                return True
            for consumer, output in self._next(tensor):
                if consumer is not None and consumer.op in _COMPUTE:
                    self._feeds_compute[id(start)] = True
                    return True
                if id(output) not in seen:
                    seen.add(id(output))
                    stack.append(output)
        return False

    def _leads_to_softmax(self, tensor: gs.Tensor, depth: int) -> bool:
        if depth > 16:
            return False
        return any(
            consumer.op == "Softmax" or (consumer.op in _TO_SOFTMAX and self._leads_to_softmax(output, depth + 1))
            for consumer, output in self._next(tensor)
            if consumer is not None
        )

    def _comes_from_softmax(self, tensor: gs.Tensor, depth: int) -> bool:
        if depth > 16 or not tensor.inputs:
            return False
        node = tensor.inputs[0]
        if node.op == "Softmax":
            return True
        return node.op in _FROM_SOFTMAX and any(self._comes_from_softmax(i, depth + 1) for i in node.inputs)


def _borders(node: gs.Node, inner: gs.Graph) -> Iterator[tuple[gs.Tensor, gs.Tensor]]:
    """Yields (tensor, the same tensor on the other side) for a control-flow node and one of its subgraphs."""
    skip = 1 if node.op == "Loop" else 0  # a Loop body's first output is its condition
    yield from zip(inner.outputs[skip:], node.outputs, strict=False)
    if node.op in {"Loop", "Scan"}:
        first = 2 * skip  # after the trip count and the condition
        carried = len(node.inputs) - (first or int(node.attrs.get("num_scan_inputs", 0)))
        yield from zip(node.inputs[first:], inner.inputs[first:], strict=False)
        yield from zip(inner.outputs[skip : skip + carried], inner.inputs[first:], strict=False)
