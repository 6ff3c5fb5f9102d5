"""Whether a graph computes what the body of a node does: op by op, back from an output and on to the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from mxfp8_graph.onnx_model.walk import STANDARD, stored_in
from mxfp8_graph.onnx_pass.fuse.graph_view import GraphView
from mxfp8_ops import contract
from mxfp8_ops.standard_ops import settings_of


class BodyMatch:
    """The body of one node, compared with a graph."""

    def __init__(self, view: GraphView, op: contract.Op, body: Sequence[onnx.NodeProto]) -> None:
        """`body`: named as the ports of `op` are."""
        self.bound: dict[str, str] = {}
        """What the graph calls the values of the body."""
        self._view = view
        self._op = op
        self._ports = {port.name for port in op.inputs}
        self._body = {name: node for node in body for name in node.output}
        self._below: dict[str, onnx.NodeProto] = {}
        """Makers of the values in subgraphs that are being compared."""
        self._stored_below: dict[str, onnx.TensorProto] = {}

    @property
    def inputs(self) -> Mapping[str, str]:
        """What the graph has for each input of the op, by port."""
        return {name: given for name, given in self.bound.items() if name in self._ports}

    def behind_all(self, outputs: Iterable[str]) -> set[str]:
        """Returns the inputs of the op that each of these outputs depends on, as the graph calls them."""
        behind = [self._behind(name) for name in outputs]
        return {self.bound[port] for port in self._ports & self.bound.keys() if all(port in each for each in behind)}

    def _behind(self, name: str) -> set[str]:
        """Returns the values of the body that one is made of."""
        found, waiting = set[str](), [name]
        while waiting:
            if (value := waiting.pop()) not in found:
                found.add(value)
                waiting += self._body[value].input if value in self._body else []
        return found

    def outputs(self, node: onnx.NodeProto) -> dict[str, onnx.NodeProto] | None:
        """Returns the node that makes each output, `node` for the first; None if the graph is another than the body.

        Other outputs that the graph does not make are left out.
        """
        first, *others = (port.name for port in self._op.outputs)
        if not self._same(self._body[first], node):
            return None
        found = {first: node}
        for name in others:
            if (maker := self._forward(name)) is not None:
                found[name] = maker
        return found

    def _forward(self, name: str) -> onnx.NodeProto | None:
        """Returns the node of the graph that makes a value of the body from others that are found already."""
        pattern = self._body[name]
        if name in self.bound:
            return self._view.maker(self.bound[name])
        for value in pattern.input:
            known = value in self.bound or value not in self._body or self._body[value].op_type == "Constant"
            if not known and self._forward(value) is None:
                return None
        for value in pattern.input:
            for reader in self._view.readers(self.bound.get(value, "")):
                before = dict(self.bound)
                if self._same(pattern, reader):
                    return reader
                self.bound = before
        return None

    def _same(self, pattern: onnx.NodeProto, node: onnx.NodeProto) -> bool:
        """Whether a node of the graph is that of the body, and so is everything before it; binds their values."""
        if (pattern.op_type, pattern.domain in STANDARD) != (node.op_type, node.domain in STANDARD):
            return False
        if pattern.domain not in STANDARD and pattern.domain != node.domain:
            return False
        if not self._same_attributes(pattern, node) or len(pattern.output) < len(node.output):
            return False
        inputs, others = (_without_end(each.input) for each in (pattern, node))
        if len(inputs) != len(others):
            return False
        self.bound.update(zip(pattern.output, node.output, strict=False))
        return all(self._same_value(*pair) for pair in zip(inputs, others, strict=True))

    def _same_value(self, name: str, given: str) -> bool:
        if not name or not given:
            return name == given
        pattern = self._body.get(name)
        if pattern is not None and pattern.op_type == "Constant":
            expected = numpy_helper.to_array(pattern.attribute[0].t)
            actual = self._constant(given)
            return actual is not None and _bits(actual) == _bits(expected)
        if name in self.bound:
            return self.bound[name] == given
        if pattern is None:
            self.bound[name] = given
            return name in self._ports
        maker = self._below.get(given) or self._view.maker(given)
        return maker is not None and self._same(pattern, maker) and self.bound.get(name) == given

    def _constant(self, name: str) -> npt.NDArray[Any] | None:
        stored = self._stored_below.get(name)
        return self._view.constant(name) if stored is None else numpy_helper.to_array(stored)

    def _same_attributes(self, pattern: onnx.NodeProto, node: onnx.NodeProto) -> bool:
        if pattern.domain == contract.DOMAIN:
            return settings_of(pattern) == settings_of(node)
        plain, others = ({a.name: a for a in each.attribute} for each in (pattern, node))
        if plain.keys() != others.keys():
            return False
        for name, attribute in plain.items():
            if attribute.type != others[name].type:
                return False
            if attribute.type == onnx.AttributeProto.GRAPH:
                if not self._same_graph(attribute.g, others[name].g):
                    return False
            elif helper.get_attribute_value(attribute) != helper.get_attribute_value(others[name]):
                return False
        return True

    def _same_graph(self, pattern: onnx.GraphProto, graph: onnx.GraphProto) -> bool:
        """Whether a subgraph is that of the body, which sees the values around it."""
        ends = ((pattern.input, graph.input), (pattern.output, graph.output))
        if any(len(one) != len(other) for one, other in ends):
            return False
        self.bound.update({own.name: given.name for own, given in zip(pattern.input, graph.input, strict=True)})
        self._body |= {name: node for node in pattern.node for name in node.output}
        self._below |= {name: node for node in graph.node for name in node.output}
        self._stored_below |= stored_in(graph)
        pairs = zip(pattern.output, graph.output, strict=True)
        return all(self._same_value(own.name, given.name) for own, given in pairs)


def _without_end(names: Sequence[str]) -> list[str]:
    """Returns the names without the empty ones at the end."""
    names = list(names)
    while names and not names[-1]:
        names.pop()
    return names


def _bits(array: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, array.tobytes()
