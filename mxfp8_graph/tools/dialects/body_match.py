"""Whether a graph computes what the body of a node does: op by op, back from an output and on to the others."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx
import onnx_ir as ir

from mxfp8_graph.onnx_model.graph import constant, is_op
from mxfp8_ops import contract


class BodyMatch:
    """The body of one node, compared with a graph."""

    def __init__(self, op: contract.Op, body: Sequence[onnx.NodeProto]) -> None:
        """`body`: named as the ports of `op` are."""
        ports = [onnx.ValueInfoProto(name=port.name) for port in op.inputs]
        ends = [onnx.ValueInfoProto(name=port.name) for port in op.outputs]
        graph = ir.from_proto(onnx.GraphProto(node=body, input=ports, output=ends))
        self._inputs, self._outputs = graph.inputs, graph.outputs
        self._bound: dict[ir.Value, ir.Value] = {}
        """Values of the graph by those of the body."""

    @property
    def inputs(self) -> Mapping[str, ir.Value]:
        """What the graph has for each input of the op, by port."""
        return {str(port.name): self._bound[port] for port in self._inputs if port in self._bound}

    @property
    def outputs(self) -> Mapping[str, ir.Value]:
        """What the graph has for each output of the op, by port; outputs that it does not compute are left out."""
        return {str(port.name): self._bound[port] for port in self._outputs if port in self._bound}

    def behind_all(self, outputs: Container[str]) -> set[ir.Value]:
        """Returns the inputs of the op that each of these outputs depends on, as the graph has them."""
        behind = [self._behind(port) for port in self._outputs if str(port.name) in outputs]
        bound = (port for port in self._inputs if port in self._bound)
        return {self._bound[port] for port in bound if all(port in each for each in behind)}

    def _behind(self, port: ir.Value) -> set[ir.Value | None]:
        """Returns the values of the body that one depends on."""
        behind, waiting = set[ir.Value | None](), list[ir.Value | None]([port])
        while waiting:
            if (value := waiting.pop()) is not None and value not in behind:
                behind.add(value)
                waiting += node.inputs if (node := value.producer()) is not None else ()
        return behind

    def finds(self, node: ir.Node) -> bool:
        """Whether the graph computes the first output of the body by `node`, and so everything before it.

        Looks for the other outputs too, which may be absent.
        """
        first, *others = self._outputs
        pattern = first.producer()
        if pattern is None or not self._same(pattern, node):
            return False
        for value in others:
            self._forward(value)
        return True

    def _forward(self, value: ir.Value) -> bool:
        """Whether the graph computes a value of the body from others that are bound already; binds it."""
        pattern = value.producer()
        if value in self._bound or pattern is None:
            return value in self._bound
        inputs = [each for each in pattern.inputs if each is not None]
        for each in inputs:
            known = each in self._bound or each.producer() is None or is_op(each.producer(), "Constant")
            if not known and not self._forward(each):
                return False
        for user in (user for each in inputs if each in self._bound for user in self._bound[each].consumers()):
            before = dict(self._bound)
            if user.graph is self._bound[self._outputs[0]].graph and self._same(pattern, user):
                return True
            self._bound = before
        return False

    def _same(self, pattern: ir.Node, node: ir.Node) -> bool:
        """Whether a node of the graph is that of the body, and so is everything before it; binds their values."""
        if (pattern.op_type, pattern.domain) != (node.op_type, node.domain):
            return False
        if not self._same_attributes(pattern, node) or len(pattern.outputs) < len(node.outputs):
            return False
        inputs, others = (_without_end(each.inputs) for each in (pattern, node))
        if len(inputs) != len(others):
            return False
        self._bound.update(zip(pattern.outputs, node.outputs, strict=False))
        return all(map(self._same_value, inputs, others))

    def _same_value(self, value: ir.Value | None, other: ir.Value | None) -> bool:
        if value is None or other is None:
            return value is other
        pattern = value.producer()
        if pattern is not None and is_op(pattern, "Constant"):
            expected, actual = constant(value), constant(other)
            return expected is not None and actual is not None and _bits(actual) == _bits(expected)
        if value in self._bound:
            return self._bound[value] is other
        if pattern is None:
            self._bound[value] = other
            return value in self._inputs
        node = other.producer()
        return node is not None and self._same(pattern, node) and self._bound.get(value) is other

    def _same_attributes(self, pattern: ir.Node, node: ir.Node) -> bool:
        plain, others = ({a.name: a for a in each.attributes.values()} for each in (pattern, node))
        if pattern.domain == contract.DOMAIN:
            defaults = contract.OPS[pattern.op_type].attributes
            one, other = ({**defaults, **{a.name: a.value for a in each.values()}} for each in (plain, others))
            return one == other
        return plain.keys() == others.keys() and all(self._same_attribute(plain[name], others[name]) for name in plain)

    def _same_attribute(self, one: ir.Attr, other: ir.Attr) -> bool:
        if one.type != other.type:
            return False
        if one.type == ir.AttributeType.GRAPH:
            return self._same_graph(one.as_graph(), other.as_graph())
        if one.type == ir.AttributeType.TENSOR:
            return _bits(one.as_tensor().numpy()) == _bits(other.as_tensor().numpy())
        return bool(one.value == other.value)

    def _same_graph(self, pattern: ir.Graph, graph: ir.Graph) -> bool:
        """Whether a subgraph is that of the body, which sees the values around it."""
        if (len(pattern.inputs), len(pattern.outputs)) != (len(graph.inputs), len(graph.outputs)):
            return False
        self._bound.update(zip(pattern.inputs, graph.inputs, strict=True))
        return all(map(self._same_value, pattern.outputs, graph.outputs))


def _without_end(values: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """Returns the values without the absent ones at the end."""
    values = list(values)
    while values and values[-1] is None:
        values.pop()
    return values


def _bits(array: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, array.tobytes()
