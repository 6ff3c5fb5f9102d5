"""Replaces fused nodes by the standard ops of their bodies, and restores them where these ops are unchanged.

    MXFP8FusedGemm, MXFP8Attention ... <-> the nodes of their bodies

The node that computes the first output of a body has a mark in its metadata: the op, its name, and the case that its
body was written for. A mark alone proves nothing: `restore` writes the body again and compares the graph with it, op by
op and constant by constant, back from the first output and on to the others. If a tool changed the body in between, its
nodes stay.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.attention import is_circular, unneeded
from mxfp8_graph.onnx_pass.fuse.nodes import mxfp8_node, row_of
from mxfp8_graph.onnx_pass.graph import constant, facts, is_op, only_used_by
from mxfp8_graph.onnx_pass.replacement import Replacement, apply, value_replacing
from mxfp8_graph.tools.dialects.edit import MARK, Edit, Nodes, attributes_of, dims, marks, replacing_outputs, tensor_of
from mxfp8_ops import contract, onnx_functions, standard_ops
from mxfp8_ops.case import Case
from mxfp8_ops.formats import BLOCK_SIZE
from mxfp8_ops.standard_ops import body_of

ABSENT: Final[Mapping[str, Sequence[float]]] = {"attn_mask": [0], "past_key": [], "past_value": []}
"""Vectors that stand for absent inputs; a Boolean mask is True, since False would hide everything."""

_DAMAGES: Final = (ValueError, TypeError, OverflowError, LookupError, AttributeError, RecursionError)
"""Exceptions at reading a damaged or foreign mark."""


def unfuse(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns the nodes of a fused node's body, or None for other nodes."""
    op = row_of(node)
    return None if op is None or op.is_plain else _taken_apart(edit, node)


def standard(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns standard ops for one of our nodes, or None for others."""
    return _taken_apart(edit, node) if node.domain == contract.DOMAIN else None


def _taken_apart(edit: Edit, node: ir.Node) -> Nodes:
    """Returns the nodes of a body in place of its node, with a mark; inputs that stand for absent ones are left out."""
    inputs, absent = list(node.inputs), dict[str, tuple[str | None, int]]()
    for at, port in enumerate(contract.OPS[node.op_type].inputs[: len(inputs)]):
        value = inputs[at]
        stored = tensor_of(value) if port.name in ABSENT else None
        if value is not None and stored is not None and _is_absent(port.name, stored):
            absent[port.name], inputs[at] = (value.name, int(stored.dtype)), None
    try:
        nodes, case = _body(edit, node, inputs)
    except (ValueError, TypeError, OverflowError, LookupError) as error:
        what, advice = f"an attribute is {error}", "rewrite the original model again"
        raise edit.refuse(node, what, "attributes of the contract", advice) from None
    outputs = {str(new.name): new for new in replacing_outputs(node) if new.name}
    first = next(iter(outputs))
    for each in nodes:
        makes_first = any(value.name == first for value in each.outputs)
        if each.domain == contract.DOMAIN or makes_first:
            each.metadata_props.update(node.metadata_props)
        if each.domain == contract.DOMAIN:
            each.doc_string = node.doc_string
        if is_op(each, "QuantizeLinear"):  # without blocks, only its mark tells it from another quantization
            each.metadata_props[MARK + each.op_type] = ""
        if makes_first:
            mark = {"name": node.name, "case": case.to_json(), "absent": absent}
            each.metadata_props[MARK + node.op_type] = json.dumps(mark)
        for value in each.outputs:
            if (heir := outputs.get(str(value.name))) is not None:
                value.type, value.shape, value.doc_string = heir.type, heir.shape, heir.doc_string
                value.metadata_props.update(heir.metadata_props)
                value.meta.update(heir.meta)
    return nodes


def _is_absent(port: str, stored: ir.TensorProtocol) -> bool:
    """Whether a stored tensor has the value that stands for an absent input in the contract."""
    if dims(stored) != (len(ABSENT[port]),):
        return False
    return dims(stored) == (0,) or stored.numpy().item() == (stored.dtype == contract.BOOL)


def _body(edit: Edit, node: ir.Node, inputs: Sequence[ir.Value | None]) -> tuple[Nodes, Case]:
    """Returns the nodes of the body of `node` with these inputs, and with the names of its outputs."""
    plain = ir.to_proto(node)
    plain.input[:] = ["" if value is None else str(value.name) for value in inputs]
    ports = {str(value.name): value for value in inputs if value is not None}
    case = onnx_functions.case_of(plain, {name: facts(value) for name, value in ports.items()})
    graph = _graph_of(standard_ops.in_place_of(plain, case, edit.fresh), ports)
    for port in graph.inputs:
        port.replace_all_uses_with(ports[str(port.name)])
    # Initializers and not Constant nodes: shape inference reads the values of inputs there, and equal ones are shared.
    for each in [each for each in graph if is_op(each, "Constant")]:
        each.outputs[0].replace_all_uses_with(_constant(edit, each.attributes["value"].as_tensor()))
        graph.remove(each)
    nodes = list(graph)
    graph.remove(nodes)
    return nodes, case


def _constant(edit: Edit, tensor: ir.TensorProtocol) -> ir.Value:
    """Returns the initializer of the whole model for a small constant; equal ones share it."""
    whole, top = ir.to_proto(tensor), edit.model.graph

    def make() -> ir.Value:
        whole.name = edit.fresh("mxfp8_constant")
        value = ir.Value(name=whole.name, const_value=ir.serde.TensorProtoTensor(whole))
        top.register_initializer(value)
        return value

    return edit.shared(top, "constant", whole.SerializeToString(), make=make)


def _graph_of(body: Sequence[onnx.NodeProto], inputs: Iterable[str], outputs: Iterable[str] = ()) -> ir.Graph:
    """Returns the graph of some nodes, whose inputs and outputs have these names."""
    ports, ends = ([onnx.ValueInfoProto(name=name) for name in names] for names in (inputs, outputs))
    return ir.from_proto(onnx.GraphProto(node=body, input=ports, output=ends))


def restore(edit: Edit) -> int:
    """Restores every marked node whose body is unchanged; returns the number of restored nodes."""
    count, fusion = 0, functools.partial(_restored, fresh=edit.fresh)
    while restored := apply(edit.model, [fusion], lambda _: True):  # a restored node may be part of another body
        count += len(restored)
    return count


def forget(model: ir.Model) -> None:
    """Removes the remaining marks, whose bodies a tool changed."""
    for node in (node for graph in model.graphs() for node in graph):
        for key in marks(node):
            del node.metadata_props[key]


def _restored(node: ir.Node, *, fresh: Callable[[str], str]) -> Replacement | None:
    """Returns the original node of a body whose first output `node` computes, if it has a mark and is unchanged."""
    rows = ((contract.OPS.get(key.removeprefix(MARK)), text) for key, text in marks(node).items())
    wholes = (_whole(node, op, text, fresh) for op, text in rows if op is not None)
    return next((whole for whole in wholes if whole is not None), None)


def _whole(node: ir.Node, op: contract.Op, text: str, fresh: Callable[[str], str]) -> Replacement | None:
    """Returns the replacement of a body by the op of its mark, or None if the graph differs from the body."""
    may_be_absent = {port.name for port in op.inputs if port.optional or port.name in ABSENT}
    try:
        mark = json.loads(text)
        case = Case.from_json(op, mark["case"])
        match = _Match(op, body_of(case))
        absent = {port: (name, dtype) for port, (name, dtype) in mark["absent"].items()}
        names, dtypes = [mark["name"], *(name for name, _ in absent.values())], {dtype for _, dtype in absent.values()}
    except _DAMAGES:
        return None
    if not all(isinstance(name, str) for name in names) or not dtypes <= {contract.BOOL, *contract.VALUES}:
        return None
    if case.attributes.get("block_size", (BLOCK_SIZE,)) != (BLOCK_SIZE,) or not absent.keys() <= may_be_absent:
        return None
    left_out = {name for name, value in case.inputs.items() if value.present is False}
    if not match.finds(node) or not {port.name for port in op.inputs} - match.named(match.inputs).keys() <= left_out:
        return None
    inputs, outputs = match.named(match.inputs), list(map(match.bound.get, match.outputs))
    gone = unneeded([output for output in outputs if output is not None], inputs.values())
    others = [output for output in outputs[1:] if output is not None]
    # An input that all other outputs depend on cannot depend on one of them.
    if is_circular(others, {*inputs.values()} - match.behind_all(others), gone):
        return None
    # An optional output without a user outside of the body is absent again.
    for at, (port, output) in enumerate(zip(op.outputs, outputs, strict=True)):
        if port.optional and output is not None and only_used_by(output, gone):
            outputs[at] = None
    before = [_vector(fresh(name), dtype, ABSENT[port]) for port, (name, dtype) in absent.items()]
    inputs |= {port: each.outputs[0] for port, each in zip(absent, before, strict=True)}
    ports = [inputs.get(port.name) for port in op.inputs]
    while ports and ports[-1] is None:
        ports.pop()
    settings = {name: value for name, (value,) in case.attributes.items()}
    new = mxfp8_node(node, op, ports, list(map(value_replacing, outputs)), **settings)
    new.name = mark["name"]
    del new.metadata_props[MARK + op.name]
    return Replacement(kind=op.name, node=new, gone=tuple(gone), before=tuple(before))


def _vector(name: str, dtype: int, numbers: Sequence[float]) -> ir.Node:
    """Returns a Constant of the vector that stands for an absent input."""
    tensor = ir.tensor(np.full(len(numbers), dtype == contract.BOOL, ir.DataType(dtype).numpy()), name=name)
    return ir.node("Constant", [], {"value": tensor}, outputs=[ir.Value(name=name)], name=name)


class _Match:
    """The body of one node, compared with a graph."""

    def __init__(self, op: contract.Op, body: Sequence[onnx.NodeProto]) -> None:
        """Takes a `body` whose inputs and outputs have the names of the ports of `op`."""
        self._body = _graph_of(body, (port.name for port in op.inputs), (port.name for port in op.outputs))
        self.inputs, self.outputs = self._body.inputs, self._body.outputs
        self.bound: dict[ir.Value, ir.Value] = {}
        """Value of the body -> value of the graph; outputs that the graph does not compute are left out."""

    def named(self, ports: Iterable[ir.Value]) -> dict[str, ir.Value]:
        """Returns the values of the graph for these ports of the op, by name of the port."""
        return {str(port.name): self.bound[port] for port in ports if port in self.bound}

    def behind_all(self, outputs: Container[ir.Value]) -> set[ir.Value]:
        """Returns the values of the graph for those inputs of the op that each of these outputs depends on."""
        behind = {port for port in self.inputs if port in self.bound}
        for port in (port for port in self.outputs if self.bound.get(port) in outputs):
            needed: set[ir.Value | None] = {port}
            for node in reversed(self._body):
                needed.update(() if needed.isdisjoint(node.outputs) else node.inputs)
            behind &= needed
        return {self.bound[port] for port in behind}

    def finds(self, node: ir.Node) -> bool:
        """Whether the graph computes the first output of the body by `node`, and so everything before it.

        Looks for the other outputs too, which may be absent.
        """
        pattern = self.outputs[0].producer()
        if pattern is None or not self._same(pattern, node):
            return False
        for each in self._body:  # in the order of the computation
            if each.outputs[0] not in self.bound and not is_op(each, "Constant"):
                self._forward(each, node.graph)
        return True

    def _forward(self, pattern: ir.Node, graph: object) -> None:
        """Binds the results of a node of the body, if the graph has it behind values that are bound."""
        values = (self.bound[value] for value in pattern.inputs if value in self.bound)
        for user in (user for value in values for user in value.consumers() if user.graph is graph):
            before = dict(self.bound)
            if self._same(pattern, user):
                return
            self.bound = before  # the comparison may have bound values before it failed

    def _same(self, pattern: ir.Node, node: ir.Node) -> bool:
        """Whether a node of the graph, with everything before it, equals a node of the body; binds their values."""
        if pattern.op_identifier() != node.op_identifier() or len(pattern.outputs) < len(node.outputs):
            return False
        one, other = pattern.attributes, node.attributes
        if pattern.domain == contract.DOMAIN:
            # With defaults, since a tool may leave out attributes that have them.
            if attributes_of(pattern) != attributes_of(node):
                return False
        elif one.keys() != other.keys() or not all(self._same_attribute(one[name], other[name]) for name in one):
            return False
        self.bound.update(zip(pattern.outputs, node.outputs, strict=False))
        return all(self._same_value(*pair) for pair in itertools.zip_longest(pattern.inputs, node.inputs))

    def _same_value(self, value: ir.Value | None, other: ir.Value | None) -> bool:
        if value is None or other is None:
            return value is other
        pattern, node = value.producer(), other.producer()
        if is_op(pattern, "Constant"):
            return _same_array(constant(value), constant(other))
        if value in self.bound:
            return self.bound[value] is other
        if pattern is None:
            self.bound[value] = other
            return value in self.inputs
        return node is not None and self._same(pattern, node) and self.bound.get(value) is other

    def _same_attribute(self, one: ir.Attr, other: ir.Attr) -> bool:
        if one.type != other.type:
            return False
        if one.type == ir.AttributeType.TENSOR:
            return _same_array(one.as_tensor().numpy(), other.as_tensor().numpy())
        if one.type != ir.AttributeType.GRAPH:
            return bool(one.value == other.value)
        body, graph = one.as_graph(), other.as_graph()  # `bound` applies inside too: they see the values around them
        if (len(body.inputs), len(body.outputs)) != (len(graph.inputs), len(graph.outputs)):
            return False
        self.bound.update(zip(body.inputs, graph.inputs, strict=True))
        return all(map(self._same_value, body.outputs, graph.outputs))


def _same_array(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return False
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
