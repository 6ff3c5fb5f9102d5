"""Replaces nodes of `contract.py` by standard ops, for programs that cannot run model-local functions.

The ops are the ops of the function bodies, written for one node: its attributes and absent inputs are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from onnx import NodeProto

from mxfp8_ops import contract
from mxfp8_ops.case import Case
from mxfp8_ops.errors import ContractError
from mxfp8_ops.function_body import Body, Style

STYLE: Final = Style(in_function=False)


def in_place_of(node: NodeProto, case: Case, fresh: Callable[[str], str]) -> list[NodeProto]:
    """Returns nodes that replace `node`, one of `contract.OPS`: standard ops, and unfused nodes of its body.

    They need opset `contract.MIN_OPSET` or later. They use no strings, and all their Constants are tensors.

    Args:
        node: the node to replace.
        case: its case, from `onnx_functions.case_of`.
        fresh: a function that makes a name new to the model from a wanted name.

    Raises:
        ContractError: an attribute has a value that the contract does not allow.
    """
    op = contract.OPS[node.op_type]
    inputs = dict(zip((port.name for port in op.inputs), node.input, strict=False))
    outputs = dict(zip((port.name for port in op.outputs), node.output, strict=False))
    try:
        nodes = body_of(case)
    except ContractError as error:
        raise error.inside(f"node {node.name!r}") from None
    # An empty name is an output that the node lacks: the ops that compute only it are left out.
    written = {name: output for name, output in outputs.items() if output}
    nodes = _needed(nodes, set(written))
    prefix = node.name or node.output[0]
    _rename(nodes, {"": "", **inputs, **written}, lambda name: fresh(f"{prefix}/{name}"))
    return nodes


def body_of(case: Case) -> list[NodeProto]:
    """Returns the nodes that replace the node of a case; their inputs and outputs have the names of its ports.

    Raises:
        ContractError: an attribute has a value that the contract does not allow.
    """
    body = Body(case, contract.MIN_OPSET, STYLE)
    case.op.body(body)
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


def _rename(nodes: Iterable[NodeProto], names: dict[str, str], fresh: Callable[[str], str]) -> None:
    """Renames all values and nodes of a body: by `names`, or by fresh names, which are added to `names`."""

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
        node.name = node.output[0]  # a value's name is new to the model, so the node's is too
