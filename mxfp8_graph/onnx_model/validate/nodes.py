"""Nodes against the schemas of their ops: how many inputs and outputs, which attributes, and what is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import onnx

from mxfp8_graph.onnx_model.validate.places import Place, count
from mxfp8_graph.onnx_model.validate.schemas import MANY, Schema, schema_of
from mxfp8_graph.onnx_model.walk import STANDARD, subgraphs
from mxfp8_ops import contract

_Attribute = onnx.AttributeProto

_NO_DEFAULT: Final = {
    _Attribute.TENSOR: "t",
    _Attribute.GRAPH: "g",
    _Attribute.SPARSE_TENSOR: "sparse_tensor",
    _Attribute.TYPE_PROTO: "tp",
}
"""Where attributes keep what has no default."""

_FIELDS: Final = {
    _Attribute.FLOAT: "f",
    _Attribute.INT: "i",
    _Attribute.STRING: "s",
    _Attribute.TENSOR: "t",
    _Attribute.GRAPH: "g",
    _Attribute.TYPE_PROTO: "tp",
    _Attribute.FLOATS: "floats",
    _Attribute.INTS: "ints",
    _Attribute.STRINGS: "strings",
    _Attribute.TENSORS: "tensors",
    _Attribute.GRAPHS: "graphs",
    _Attribute.TYPE_PROTOS: "type_protos",
}
"""Where attributes keep values. ONNX Runtime does not mind sparse tensors beside others."""
_ANY_FIELD: Final = frozenset(_FIELDS.values())


def check_node(node: onnx.NodeProto, opsets: Mapping[str, int], place: Place, *, typed: bool) -> None:
    """Raises ContractError if a node is not what the schema of its op says; ops without one may be anything.

    Args:
        node: any.
        opsets: version of each domain, for where the node is.
        place: of the graph.
        typed: attributes say of which kind they are, as they have to since IR version 2.
    """
    op, domain = node.op_type, node.domain
    if not isinstance(op, str) or not isinstance(domain, str) or not isinstance(node.name, str):
        raise place.node_error(node, "its name, op or domain is not UTF-8", "text")
    has_attributes = bool(node.attribute)
    if has_attributes:
        _check_attributes(node, place)
    domain = "" if domain in STANDARD else domain
    schema = schema_of(op, domain, opsets.get(domain, 0))
    if schema is None:
        if domain == contract.DOMAIN:
            raise place.node_error(node, f"no node of domain {domain!r}", f"one of {', '.join(contract.OPS)}")
        return
    _check_names(node, list(node.input), schema.inputs, schema.needed_inputs, place, kind="input")
    _check_names(node, list(node.output), schema.outputs, schema.needed_outputs, place, kind="output")
    if has_attributes or schema.needed_attributes:
        _check_against(node, schema, place, typed)
    if domain == "" and op in _BODIES:
        _check_bodies(node, opsets, place)


def _check_names(
    node: onnx.NodeProto,
    names: Sequence[str],
    limits: tuple[int, int],
    needed: AbstractSet[int],
    place: Place,
    *,
    kind: str,
) -> None:
    """Raises ContractError if a node has too few or too many inputs or outputs, or leaves one empty that is needed."""
    least, most = limits
    if not least <= len(names) <= most:
        expected = f"at least {least}" if most >= MANY else f"{least}" if least == most else f"{least} to {most}"
        raise place.node_error(node, count(len(names), kind), expected)
    if "" in names:
        for index, name in enumerate(names):
            if not name and index in needed:
                raise place.node_error(node, f"{kind} {index} is left empty", "a name")


def _check_attributes(node: onnx.NodeProto, place: Place) -> None:
    """Raises ContractError for what no attribute of any op may be."""
    names = [attribute.name for attribute in node.attribute]
    for name in names:
        if not isinstance(name, str) or not name:
            raise place.node_error(node, f"an attribute called {name!r}", "a name")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise place.node_error(node, f"has attribute {twice!r} twice", "each once")
    for attribute in node.attribute:
        field = _NO_DEFAULT.get(attribute.type)
        if attribute.ref_attr_name and not place.in_function:
            what = f"attribute {attribute.name!r} refers to one of a function"
            raise place.node_error(node, what, "a value, since the node is in no function")
        if field is not None and not attribute.ref_attr_name and not attribute.HasField(field):
            raise place.node_error(node, f"attribute {attribute.name!r} has no value", "one")
        if attribute.type:
            _check_field(attribute, node, place)


def _check_field(attribute: onnx.AttributeProto, node: onnx.NodeProto, place: Place) -> None:
    """Raises ContractError if an attribute has a value of another kind than it says, beside its own or instead."""
    used = {field.name for field, _ in attribute.ListFields()}
    other = min(used & _ANY_FIELD - {_FIELDS.get(attribute.type)}, default=None)
    if other is not None:
        kind = _Attribute.AttributeType.Name(attribute.type)
        what = f"attribute {attribute.name!r} of kind {kind} has a value in field {other!r}"
        raise place.node_error(node, what, "a value of its kind and no other")


def _check_against(node: onnx.NodeProto, schema: Schema, place: Place, typed: bool) -> None:
    """Raises ContractError if the attributes of a node are not those of its schema."""
    names = set()
    for attribute in node.attribute:
        name = attribute.name
        names.add(name)
        kind = schema.attributes.get(name)
        if kind is None:
            if schema.more_attributes or name.startswith("__"):  # reserved for what tools keep to themselves
                continue
            known = ", ".join(schema.attributes)
            raise place.node_error(node, f"unknown attribute {name!r}", f"one of {known}" if known else "none")
        if attribute.type != kind and (typed or attribute.type):
            found = _Attribute.AttributeType.Name(attribute.type)
            raise place.node_error(node, f"attribute {name!r} is of kind {found}", _Attribute.AttributeType.Name(kind))
    if missing := schema.needed_attributes - names:
        raise place.node_error(node, f"has no attribute {min(missing)!r}", "one")


def _check_if(node: onnx.NodeProto, bodies: Mapping[str, onnx.GraphProto], opset: int) -> list[tuple[str, int, int]]:
    return [(name, 0, len(node.output)) for name in bodies]


def _check_loop(node: onnx.NodeProto, bodies: Mapping[str, onnx.GraphProto], opset: int) -> list[tuple[str, int, int]]:
    return [("body", len(node.input), len(node.output) + 1)]  # a body gives its condition too


def _check_scan(node: onnx.NodeProto, bodies: Mapping[str, onnx.GraphProto], opset: int) -> list[tuple[str, int, int]]:
    lengths = 1 if opset < 9 else 0  # the first input was the sequence lengths
    return [("body", len(node.input) - lengths, len(node.output))]


_BODIES: Final = {"If": _check_if, "Loop": _check_loop, "Scan": _check_scan}
"""Op -> (attribute, inputs, outputs) of each graph that it runs."""


def _check_bodies(node: onnx.NodeProto, opsets: Mapping[str, int], place: Place) -> None:
    """Raises ContractError if a branch or body takes or gives another number of values than its node."""
    bodies = dict(subgraphs(node))
    for name, takes, gives in _BODIES[node.op_type](node, bodies, opsets[""]):
        graph = bodies.get(name)
        if graph is None:  # it refers to an attribute of the function around it
            continue
        for kind, found, expected in (("input", len(graph.input), takes), ("output", len(graph.output), gives)):
            if found != expected:
                raise place.node_error(node, f"{name!r} has {count(found, kind)}", f"{expected} as the node has")
    if node.op_type == "Scan":
        scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
        if not 0 < scanned <= len(node.input):
            raise place.node_error(node, f"num_scan_inputs is {scanned}", f"1 to {len(node.input)}")
