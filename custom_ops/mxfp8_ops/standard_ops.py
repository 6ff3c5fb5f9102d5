"""Nodes of `contract.py` replaced by standard ops, for programs that do not know functions, or not those of the domain.

The ops are those of the function bodies, for one node: its attributes are known, and so are the inputs it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from onnx import NodeProto, helper

from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError
from mxfp8_ops.function_body import Body


def in_place_of(node: NodeProto, fresh: Callable[[str], str]) -> list[NodeProto]:
    """Returns nodes that compute what `node`, one of `contract.OPS`, does: standard ops, and unfused nodes of its body.

    They are for any opset from `contract.MIN_OPSET` on, and hold no string and no Constant but of tensors.

    Args:
        node: with its inputs and outputs.
        fresh: makes a name that nothing in the model has from the one wanted.

    Raises:
        ContractError: an attribute has a value that the contract does not know.
    """
    op = contract.OPS[node.op_type]
    inputs = dict(zip((port.name for port in op.inputs), node.input, strict=False))
    outputs = dict(zip((port.name for port in op.outputs), node.output, strict=False))
    absent = [port.name for port in op.inputs if not inputs.get(port.name)]
    try:
        nodes = body_of(op, settings_of(node), absent)
    except ValueError as error:
        raise ContractError(
            f"node {node.name!r}", str(error), expected="an attribute of the contract", advice="correct it"
        ) from None
    written = {name: output for name, output in outputs.items() if output}
    nodes = _needed(nodes, set(written))
    prefix = node.name or node.output[0]
    _rename(nodes, {"": "", **inputs, **written}, lambda name: fresh(f"{prefix}/{name}"))
    return nodes


def settings_of(node: NodeProto) -> dict[str, Any]:
    """Returns every attribute of one of `contract.OPS`: text as str, defaults for those that it leaves out."""
    written = {a.name: _plain(helper.get_attribute_value(a)) for a in node.attribute}
    return {**contract.OPS[node.op_type].attributes, **written}


def body_of(op: contract.Op, settings: Mapping[str, Any], absent: Iterable[str] = ()) -> list[NodeProto]:
    """Returns the nodes that `op` with these attributes and without these inputs stands for, named as its ports are.

    Raises:
        ValueError: an attribute has a value that the contract does not know.
    """
    body = Body(op, contract.MIN_OPSET, given=settings, absent=frozenset(absent))
    op.body(body)
    return body.nodes


def _needed(nodes: Sequence[NodeProto], wanted: set[str]) -> list[NodeProto]:
    """Returns the nodes of a body that the values `wanted` depend on, in order."""
    needed: list[NodeProto] = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            needed.append(node)
            wanted |= {*node.input, *(name for inner in _inner(node) for name in inner.input)}
    return needed[::-1]


def _inner(node: NodeProto) -> Iterable[NodeProto]:
    for attribute in node.attribute:
        for below in attribute.g.node:
            yield below
            yield from _inner(below)


def _plain(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _rename(nodes: Iterable[NodeProto], names: dict[str, str], fresh: Callable[[str], str]) -> None:
    """Calls every value and node of a body as `names` says, or by a fresh name that goes there."""

    def new(name: str) -> str:
        if name not in names:
            names[name] = fresh(name)
        return names[name]

    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                for value in (*attribute.g.input, *attribute.g.output):
                    value.name = new(value.name)
                _rename(attribute.g.node, names, fresh)
        node.input[:] = [new(name) for name in node.input]
        node.output[:] = [new(name) for name in node.output]
        node.name = node.output[0]
