"""Nodes of `contract.py` as standard ops in their place, for what knows no functions, or not ours.

The ops are those of the function bodies, for one node: its attributes are known, and so are the inputs it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onnx import NodeProto, helper

from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError
from mxfp8_ops.function_body import Body
from mxfp8_ops.onnx_functions import BODIES


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
    settings = {**op.attributes, **{a.name: _plain(helper.get_attribute_value(a)) for a in node.attribute}}
    inputs = dict(zip((port.name for port in op.inputs), node.input, strict=False))
    absent = frozenset(port.name for port in op.inputs if not inputs.get(port.name))
    body = Body(op, contract.MIN_OPSET, given=settings, absent=absent)
    try:
        BODIES[op.name](body)
    except ValueError as error:
        raise ContractError(f"node {node.name!r}", str(error), expected="a known attribute", advice="") from None
    outputs = zip((port.name for port in op.outputs), node.output, strict=False)
    names = {"": "", **{name: given for name, given in (*inputs.items(), *outputs) if given}}
    prefix = node.name or node.output[0]
    _rename(body.nodes, names, lambda name: fresh(f"{prefix}/{name}"))
    return body.nodes


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
