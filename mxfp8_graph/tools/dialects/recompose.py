"""What a conversion of ours took apart is put together again, where it is still the same.

A mark (see `decompose.py`) alone counts for nothing: `restore` writes the body anew and compares the graph with it, op
by op and constant by constant, back from an output and on to the others. What a tool has changed since stays as it is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.attention import is_circular, unneeded
from mxfp8_graph.onnx_pass.fuse.replacement import Replacement, mxfp8_node, value_replacing
from mxfp8_graph.onnx_pass.fuse.run import apply
from mxfp8_graph.onnx_pass.graph import constant, is_op, only_used_by
from mxfp8_graph.tools.dialects.decompose import ABSENT, MARK, graph_of, is_marked
from mxfp8_graph.tools.dialects.edit import Edit, settings_of
from mxfp8_ops import contract
from mxfp8_ops.case import Case
from mxfp8_ops.formats import BLOCK_SIZE
from mxfp8_ops.standard_ops import body_of


def restore(edit: Edit) -> int:
    """Puts every marked node together that is still its body; returns how many."""
    count, fusion = 0, functools.partial(_restored, fresh=edit.fresh)
    while restored := apply(edit.model, [fusion], lambda _: True):  # one may be inside another
        count += len(restored)
    return count


def forget(model: ir.Model) -> None:
    """Removes the marks that are left: of nodes that something has changed."""
    for graph in model.graphs():
        for node in filter(is_marked, graph):
            for key in [key for key in node.metadata_props if key.startswith(MARK)]:
                del node.metadata_props[key]


def _restored(node: ir.Node, *, fresh: Callable[[str], str]) -> Replacement | None:
    """Returns the node whose first output `node` makes, if it is marked and the graph is still that node's body."""
    for key, value in node.metadata_props.items():
        if key.startswith(MARK):
            op, mark = contract.OPS.get(key.removeprefix(MARK)), _mark(value)
            if op is not None and mark is not None and (whole := _whole(node, op, mark, fresh)) is not None:
                return whole
    return None


def _mark(text: str) -> dict[str, Any] | None:
    """Returns what a mark says, or None if it is none of ours."""
    try:
        mark = json.loads(text)
    except (ValueError, RecursionError):
        return None
    kinds = {"name": str, "case": dict, "absent": dict}
    if not isinstance(mark, dict) or not all(isinstance(mark.get(key), kind) for key, kind in kinds.items()):
        return None
    known = (contract.BOOL, *contract.VALUES)
    for each in mark["absent"].values():
        if not isinstance(each, list) or len(each) != 2 or not isinstance(each[0], str) or each[1] not in known:
            return None
    return mark


def _whole(node: ir.Node, op: contract.Op, mark: dict[str, Any], fresh: Callable[[str], str]) -> Replacement | None:
    absent = mark["absent"]
    ports = {port.name for port in op.inputs if port.optional or port.name in ABSENT}
    try:
        case = Case.from_json(op, mark["case"])
        if case.attributes.get("block_size", (BLOCK_SIZE,)) != (BLOCK_SIZE,) or not absent.keys() <= ports:
            return None
        match = _BodyMatch(op, body_of(case))
    except (ValueError, TypeError, OverflowError, LookupError, AttributeError):  # none of ours, or changed
        return None
    left_out = {name for name, value in case.inputs.items() if value.present is False}
    if match.finds(node) and {p.name for p in op.inputs} - match.inputs.keys() <= left_out:
        return _replacement(node, case, mark, match, fresh)
    return None


def _replacement(
    node: ir.Node, case: Case, mark: dict[str, Any], match: _BodyMatch, fresh: Callable[[str], str]
) -> Replacement | None:
    op = case.op
    outputs = [match.outputs.get(port.name) for port in op.outputs]
    operands = [*match.inputs.values()]
    gone = unneeded([output for output in outputs if output is not None], operands)
    others = match.outputs.keys() - {op.outputs[0].name}
    apart = {*operands} - match.behind_all(others)  # what is behind an output cannot be made of it
    if is_circular([match.outputs[name] for name in others], apart, gone):
        return None
    for at, (port, output) in enumerate(zip(op.outputs, outputs, strict=True)):
        if port.optional and output is not None and only_used_by(output, gone):
            outputs[at] = None
    before: list[ir.Node] = []
    inputs: list[ir.Value | None] = []
    for port in op.inputs:
        if port.name in mark["absent"]:
            before.append(_constant(port.name, mark["absent"][port.name], fresh))
            inputs.append(before[-1].outputs[0])
        else:
            inputs.append(match.inputs.get(port.name))
    while inputs and inputs[-1] is None:
        inputs.pop()
    settings = {name: value for name, (value,) in case.attributes.items()}
    whole = mxfp8_node(node, op, inputs, list(map(value_replacing, outputs)), **settings)
    whole.name = mark["name"]
    del whole.metadata_props[MARK + op.name]
    return Replacement(kind=op.name, node=whole, gone=tuple(gone), before=tuple(before))


def _constant(port: str, absent: tuple[str, int], fresh: Callable[[str], str]) -> ir.Node:
    """Returns the node that makes the vector that stands for an input that is not there; `absent`: name and dtype."""
    name, dtype = fresh(absent[0]), absent[1]
    values = [dtype == contract.BOOL] * len(ABSENT[port])
    tensor = ir.tensor(np.array(values, ir.DataType(dtype).numpy()), name=name)
    return ir.node("Constant", [], {"value": tensor}, outputs=[ir.Value(name=name)], name=name)


class _BodyMatch:
    """The body of one node, compared with a graph."""

    def __init__(self, op: contract.Op, body: Sequence[Any]) -> None:
        """`body`: node protobufs, whose values are named as the ports of `op`."""
        graph = graph_of(body, (port.name for port in op.inputs), (port.name for port in op.outputs))
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
            return settings_of(pattern) == settings_of(node)
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
