"""Nodes and names: a copy of each graph for onnx's own checker, and what that does not check of a node.

The copy has no weights, and everything that ONNX Runtime takes and onnx refuses is set right in it: nodes of the main
graph out of order, domains without an import, ops that onnx does not know, values without a type.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, NamedTuple

import onnx

from mxfp8_graph.onnx_model import child
from mxfp8_graph.onnx_model.onnx_calls import BYTES_PER_SECOND, MOST_SECONDS
from mxfp8_graph.onnx_model.walk import (
    MICROSOFT,
    STANDARD,
    FunctionKey,
    called_function,
    copy_fields,
    node_label,
    subgraphs,
)
from mxfp8_ops import contract, formats
from mxfp8_ops.errors import ContractError

EXPORT_AGAIN: Final = "export the model again"

Functions = Mapping[FunctionKey, onnx.FunctionProto]

_Proto = onnx.TensorProto
_Attribute = onnx.AttributeProto


@dataclass(frozen=True)
class Place:
    """A graph, a subgraph or a function of a model, as errors name it."""

    model: str
    """The model's path, or what to call a model without one."""
    inside: tuple[str, ...] = ()
    """The function, and the nodes and attributes, that lead there."""

    def within(self, *steps: str) -> Place:
        """Returns the place that `steps` lead to from here."""
        return Place(self.model, (*self.inside, *steps))

    def error(self, what: str, expected: str, advice: str = EXPORT_AGAIN) -> ContractError:
        """Returns the error for something wrong with the graph as a whole."""
        where = f"{self.model}: {'/'.join(self.inside)}" if self.inside else self.model
        return ContractError(where, what, expected=expected, advice=advice)

    def node_error(self, node: onnx.NodeProto, what: str, expected: str) -> ContractError:
        """Returns the error for something wrong with one node of the graph."""
        path = "/".join((*self.inside, node_label(node)))
        where = f"{self.model}: node {path!r} ({node.op_type})"
        return ContractError(where, what, expected=expected, advice=EXPORT_AGAIN)

    def tensor_error(self, name: str, what: str, expected: str) -> ContractError:
        """Returns the error for something wrong with a stored tensor."""
        return ContractError(f"{self.model}: tensor {name!r}", what, expected=expected, advice=EXPORT_AGAIN)


def check_text(names: Iterable[Any], place: Place) -> None:
    """Raises ContractError if a name is not text: protobuf then gives its bytes."""
    for name in names:
        if not isinstance(name, str):
            raise place.error(f"the name {name!r} is not UTF-8", "text")


def check_copies(copies: Mapping[str, onnx.ModelProto], name: str) -> None:
    """Raises ContractError if onnx refuses one of these models, each by the place that it is a copy of.

    In a child process: onnx's checker is C++, which may abort or run away.
    """
    seconds = MOST_SECONDS + sum(copy.ByteSize() for copy in copies.values()) // BYTES_PER_SECOND
    result = child.call(lambda: _refused(copies), seconds)
    if isinstance(result, child.Failure):
        what = f"onnx's checker {result.message}"
        raise ContractError(name, what, expected="a model that onnx understands", advice=EXPORT_AGAIN)
    if result:
        where, _, what = result.decode().partition("\n")
        raise ContractError(where, what, expected="a model that passes onnx.checker", advice=EXPORT_AGAIN)


def _refused(copies: Mapping[str, onnx.ModelProto]) -> bytes:
    """Returns where in the first copy that onnx refuses and, in the next line, why; nothing if it refuses none."""
    for where, copy in copies.items():
        try:
            onnx.checker.check_model(copy.SerializeToString())
        except Exception as error:  # whatever C++ raises
            said, _, context = " ".join(str(error).split()).partition(" ==> Context: ")
            node = re.match(r"Bad node spec for node\. Name: (.*?) OpType: (\S+)", context)
            at = f"{where}: node {node[1]!r} ({node[2]})" if node else where
            return f"{at}\n{said.rstrip('.') or type(error).__name__}".encode(errors="replace")
    return b""


def _opsets(imports: Iterable[onnx.OperatorSetIdProto], place: Place) -> dict[str, int]:
    """Returns the version of each domain that a model or a function imports, of which none may have two."""
    versions: dict[str, int] = {}
    for entry in imports:
        domain = "" if entry.domain in STANDARD else entry.domain
        if versions.setdefault(domain, entry.version) != entry.version:
            both = f"{versions[domain]} and {entry.version}"
            raise place.error(f"imports domain {domain or 'ai.onnx'!r} twice, versions {both}", "one version")
    return versions


# --- The copy for onnx's checker ---------------------------------------------------------------------------------

_TYPE: Final = onnx.helper.make_tensor_type_proto(_Proto.FLOAT, [])
_TENSOR: Final = _Proto(name="tensor", data_type=_Proto.FLOAT, dims=[0], raw_data=b"")
_SPARSE: Final = onnx.helper.make_sparse_tensor(
    _Proto(name="values", data_type=_Proto.FLOAT, dims=[1], raw_data=bytes(4)),
    _Proto(name="indices", data_type=_Proto.INT64, dims=[1], raw_data=bytes(8)),
    [1],
)
_UNKNOWN: Final = f"{contract.DOMAIN}.unknown"
"""Domain of what onnx does not know: it takes every op of a domain that is none of its own."""
_LEFT_OUT: Final = frozenset(
    {"s", "floats", "ints", "strings", "t", "g", "tensors", "graphs", "sparse_tensor", "ref_attr_name", "doc_string"}
)
"""Fields of an attribute that may be large, or that need not be text."""
_MOST: Final = 128
"""Bytes of a text, and entries of a list, in the copy of an attribute: onnx asks for their kind only."""
_REQUIRED: Final = {
    int(_Attribute.TENSOR): "t",
    int(_Attribute.GRAPH): "g",
    int(_Attribute.SPARSE_TENSOR): "sparse_tensor",
    int(_Attribute.TYPE_PROTO): "tp",
}
"""Kinds of attributes without a default value, and where their value is."""


class Copy:
    """Makes the copy of a graph, or of a local function, that onnx checks, and checks what onnx does not.

    Args:
        imports: of the model, or of the function.
        functions: the local functions of the model.
        place: of the graph.
        in_function: it is the body of a local function, whose attributes a node may refer to.
    """

    def __init__(
        self,
        imports: Iterable[onnx.OperatorSetIdProto],
        functions: Functions,
        place: Place,
        *,
        in_function: bool = False,
    ) -> None:
        self._opsets = _opsets(imports, place)
        self._functions, self._place, self._in_function = functions, place, in_function
        self._domains = {"", _UNKNOWN}
        self._visible: list[set[str]] = []
        """The names of the values of each graph around the one that is being copied, and of that."""

    def of_graph(self, graph: onnx.GraphProto) -> onnx.ModelProto:
        """Returns a model of the main graph, its nodes in order if there is one."""
        copy = onnx.ModelProto(ir_version=10)
        self._fill(graph, copy.graph, self._place, sort=True)
        return self._with_imports(copy)

    def of_function(self, function: onnx.FunctionProto) -> onnx.ModelProto:
        """Returns a model of the body of a local function."""
        copy = onnx.ModelProto(ir_version=10)
        self._visible.append(self._put_values(function.input, function.output, function.node, copy.graph, self._place))
        for node in function.node:
            self._put_node(node, copy.graph.node.add(), self._place)
        return self._with_imports(copy)

    def _with_imports(self, copy: onnx.ModelProto) -> onnx.ModelProto:
        newest = onnx.defs.onnx_opset_version()
        for domain in sorted(self._domains):
            version = self._opsets.get(domain, 1)
            # onnx knows no op of a version that it does not know, so any other version does.
            copy.opset_import.add(domain=domain, version=version if domain or 0 < version <= newest else newest)
        return copy

    def _fill(self, graph: onnx.GraphProto, copy: onnx.GraphProto, place: Place, *, sort: bool = False) -> None:
        given = [value.name for value in graph.input]
        stored = [*(t.name for t in graph.initializer), *(s.values.name for s in graph.sparse_initializer)]
        twice, times = next(iter(Counter(stored).most_common(1)), ("", 0))
        if times > 1:
            raise place.error(f"an initializer called {twice!r} is defined twice", "each name once")
        # onnx.checker sees this of outputs of nodes only. What reads the name gets one value in ONNX Runtime, and the
        # other in onnx's passes and reference.
        if hidden := [name for name in stored if any(name in names for names in self._visible)]:
            what = f"the initializer {hidden[0]!r} has the name of a value of a graph around it"
            raise place.error(what, "another name", f"rename it, or {EXPORT_AGAIN}")
        # Their values are checked already; as inputs, no data is copied.
        names = [*given, *(name for name in stored if name not in set(given))]
        self._visible.append(self._put_values(names, [value.name for value in graph.output], graph.node, copy, place))
        for node in _sorted(graph.node, set(names)) if sort else graph.node:
            self._put_node(node, copy.node.add(), place)
        self._visible.pop()

    def _put_values(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        nodes: Sequence[onnx.NodeProto],
        copy: onnx.GraphProto,
        place: Place,
    ) -> set[str]:
        """Puts the inputs and outputs of a graph into its copy; returns the names of all its values."""
        check_text((*inputs, *outputs), place)
        copy.name = "graph"
        defined = {*inputs, *(output for node in nodes for output in node.output)}
        for name in outputs:
            if name not in defined:
                raise place.error(f"output {name!r} is not defined", "an input, an initializer or a node's output")
        for values, kind in ((inputs, copy.input), (outputs, copy.output)):
            kind.extend(onnx.ValueInfoProto(name=name, type=_TYPE) for name in values)
        return defined

    def _put_node(self, node: onnx.NodeProto, copy: onnx.NodeProto, place: Place) -> None:
        check_text(
            (node.name, node.op_type, node.domain, *node.input, *node.output, *(a.name for a in node.attribute)), place
        )
        domain = "" if node.domain in STANDARD else node.domain
        copy.name, copy.op_type = node_label(node), node.op_type
        copy.input.extend(node.input)
        copy.output.extend(node.output)
        version, function = self._opsets.get(domain, 0), self._functions.get(called_function(node))
        if function is not None or self._in_function:
            self._check_call(node, domain, function, place)
        known = None if function is not None else _attributes(node.op_type, domain, version)
        copy.domain = _UNKNOWN if known is None else domain
        self._domains.add(copy.domain)
        if (schema := schema_of(node.op_type, domain)) is not None:
            _check_against(node, schema, place)
        elif domain == contract.DOMAIN:
            raise place.node_error(node, f"no node of domain {domain!r}", f"one of {', '.join(contract.OPS)}")
        for attribute in node.attribute or ():
            # onnx passes any attribute of an op that it defines by other ops.
            if known is not None and attribute.name not in known and not attribute.name.startswith("__"):
                expected = f"one of {', '.join(sorted(known))}" if known else "none"
                raise place.node_error(node, f"unknown attribute {attribute.name!r}", expected)
            self._put_attribute(attribute, copy.attribute.add(), node, place, unknown=known is None)
        if not copy.domain and node.op_type in _BODIES:
            _check_bodies(node, version, place)

    def _check_call(self, node: onnx.NodeProto, domain: str, function: onnx.FunctionProto | None, place: Place) -> None:
        if domain not in self._opsets:
            raise place.node_error(node, f"its domain {domain or 'ai.onnx'!r} is not imported", "an opset import")
        for kind in ("input", "output") if function else ():
            most, count = len(getattr(function, kind)), len(getattr(node, kind))
            if count > most:
                raise place.node_error(node, _count(count, kind), f"at most {most}, as its function has")

    def _put_attribute(
        self,
        attribute: onnx.AttributeProto,
        copy: onnx.AttributeProto,
        node: onnx.NodeProto,
        place: Place,
        *,
        unknown: bool,
    ) -> None:
        """Copies an attribute; of what may be large, and of a reference, something small of the same kind."""
        copy_fields(copy, attribute, skip=_LEFT_OUT)
        if attribute.HasField("s"):
            copy.s = attribute.s[:_MOST]
        copy.floats.extend(attribute.floats[:_MOST])
        copy.ints.extend(attribute.ints[:_MOST])
        copy.strings.extend(text[:_MOST] for text in attribute.strings[:_MOST])
        if attribute.ref_attr_name and not self._in_function:
            what = f"attribute {attribute.name!r} refers to one of a function"
            raise place.node_error(node, what, "a value, since the node is in no function")
        refers, required = bool(attribute.ref_attr_name), _REQUIRED.get(attribute.type)
        # onnx itself refuses this on the ops that it knows.
        if required and unknown and not refers and not attribute.HasField(required):
            what = f"attribute {attribute.name!r} has no value"
            raise place.node_error(node, what, f"one of kind {_Attribute.AttributeType.Name(attribute.type)}")
        if attribute.HasField("t") or (refers and attribute.type == _Attribute.TENSOR):
            copy.t.CopyFrom(_TENSOR)
        if attribute.HasField("sparse_tensor") or (refers and attribute.type == _Attribute.SPARSE_TENSOR):
            copy.sparse_tensor.CopyFrom(_SPARSE)
        copy.tensors.extend(_TENSOR for _ in attribute.tensors)
        if refers and attribute.type == _Attribute.GRAPH:
            copy.g.name = "graph"
        elif attribute.HasField("g"):
            self._fill(attribute.g, copy.g, place.within(node_label(node), attribute.name))
        for index, graph in enumerate(attribute.graphs or ()):
            self._fill(graph, copy.graphs.add(), place.within(node_label(node), f"{attribute.name}[{index}]"))


@functools.cache
def _attributes(op: str, domain: str, version: int) -> frozenset[str] | None:
    """Returns the attributes of an op at a version of its domain; None for what onnx does not know or has retired."""
    newest = onnx.defs.onnx_opset_version() if not domain else 2**31 - 2
    if not 0 < version <= newest or not onnx.defs.has(op, version, domain):
        return None
    schema = onnx.defs.get_schema(op, version, domain)
    return None if schema.deprecated else frozenset(schema.attributes)


def _sorted(nodes: Sequence[onnx.NodeProto], defined: set[str]) -> Iterable[onnx.NodeProto]:
    """Returns the nodes of a main graph in an order in which each comes after what it needs, as far as there is one."""
    made = {output: index for index, node in enumerate(nodes) for output in node.output if output not in defined}
    needs = {i: {made[name] for name in _needs(node) if name in made} for i, node in enumerate(nodes)}
    if all(max(before, default=-1) < index for index, before in needs.items()):
        return nodes
    try:
        return [nodes[index] for index in TopologicalSorter(needs).static_order()]
    except CycleError:
        return nodes  # for onnx to refuse


def _needs(node: onnx.NodeProto) -> Iterator[str]:
    """Yields the names that a node, or a subgraph in it, takes from the graph it is in."""
    yield from filter(None, node.input)
    if node.attribute:
        for _, graph in subgraphs(node):
            own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
            own |= {sparse.values.name for sparse in graph.sparse_initializer}
            own |= {output for inner in graph.node for output in inner.output}
            yield from (name for inner in graph.node for name in _needs(inner) if name not in own)


# --- What onnx does not check of nodes ---------------------------------------------------------------------------


class Schema(NamedTuple):
    """Inputs, outputs and attributes of an op that is not onnx's."""

    inputs: tuple[int, int]
    """The fewest and the most; the fewest are the first, and none of them is left empty."""
    outputs: tuple[int, int]
    attributes: Mapping[str, int]
    """Name -> onnx.AttributeProto.AttributeType."""
    needed: tuple[str, ...] = ()
    """Attributes that must be there."""
    more: bool = False
    """A node may have other attributes: another version of ONNX Runtime may know them."""


_INT: Final = int(_Attribute.INT)
_FLOAT: Final = int(_Attribute.FLOAT)
_KINDS: Final[dict[type, int]] = {int: _INT, float: _FLOAT, str: int(_Attribute.STRING)}

_TRANSPOSES: Final = {"alpha": _FLOAT, **dict.fromkeys(("transA", "transB", "transBatchA", "transBatchB"), _INT)}
_ACTIVATION: Final = {
    "activation": int(_Attribute.STRING),
    "activation_axis": _INT,
    **{f"activation_{name}": _FLOAT for name in ("alpha", "beta", "gamma")},
}
_PACKED_ATTENTION: Final = {
    **dict.fromkeys(("num_heads", "unidirectional", "past_present_share_buffer"), _INT),
    **dict.fromkeys(("do_rotary", "rotary_embedding_dim"), _INT),
    **dict.fromkeys(("scale", "mask_filter_value"), _FLOAT),
    "qkv_hidden_sizes": int(_Attribute.INTS),
}
_FUSED_GEMM: Final = {"alpha": _FLOAT, "beta": _FLOAT, "transA": _INT, "transB": _INT, **_ACTIVATION}
_SCHEMAS: Final[Mapping[tuple[str, str], Schema]] = {
    (MICROSOFT, "FusedMatMul"): Schema((2, 2), (1, 1), _TRANSPOSES, more=True),
    (MICROSOFT, "TransposeMatMul"): Schema((2, 2), (1, 1), _TRANSPOSES, more=True),
    (MICROSOFT, "FusedMatMulActivation"): Schema(
        (2, 2), (1, 1), {**_TRANSPOSES, **_ACTIVATION}, ("activation",), more=True
    ),
    (MICROSOFT, "FusedGemm"): Schema((2, 3), (1, 1), _FUSED_GEMM, more=True),
    (MICROSOFT, "Attention"): Schema((2, 7), (1, 3), _PACKED_ATTENTION, ("num_heads",), more=True),
    **{
        (contract.DOMAIN, op.name): Schema(
            (sum(not port.optional for port in op.inputs), len(op.inputs)),
            (len(op.outputs), len(op.outputs)),  # a body has to be given a name, or an empty one, for each
            {name: _KINDS[type(default)] for name, default in op.attributes.items()},
        )
        for op in contract.OPS.values()
    },
}
"""Our nodes, and those of ONNX Runtime's ops that the pass reads."""


def schema_of(op: str, domain: str) -> Schema | None:
    """Returns the schema of one of our nodes, or of an op of ONNX Runtime's own that the pass reads."""
    return _SCHEMAS.get((domain, op))


def _check_against(node: onnx.NodeProto, schema: Schema, place: Place) -> None:
    for kind, (least, most) in (("input", schema.inputs), ("output", schema.outputs)):
        names = list(getattr(node, kind))
        if not least <= len(names) <= most:
            raise place.node_error(
                node, _count(len(names), kind), f"{least}" if least == most else f"{least} to {most}"
            )
        if kind == "input" and "" in names[:least]:
            raise place.node_error(node, f"input {names.index('')} is left empty", "a name")
    for attribute in node.attribute:
        expected = schema.attributes.get(attribute.name)
        if expected is None and not schema.more and not attribute.name.startswith("__"):
            known = ", ".join(schema.attributes)
            raise place.node_error(node, f"unknown attribute {attribute.name!r}", f"one of {known}")
        if expected is not None and attribute.type != expected:
            what = f"attribute {attribute.name!r} is of kind {_Attribute.AttributeType.Name(attribute.type)}"
            raise place.node_error(node, what, _Attribute.AttributeType.Name(expected))
        if attribute.name == "block_size" and not attribute.ref_attr_name and attribute.i != formats.BLOCK_SIZE:
            raise place.node_error(node, f"block_size {attribute.i}", f"{formats.BLOCK_SIZE}, the only one that runs")
    if missing := set(schema.needed) - {attribute.name for attribute in node.attribute}:
        raise place.node_error(node, f"has no attribute {min(missing)!r}", "one")


_BODIES: Final = frozenset({"If", "Loop", "Scan"})


def _check_bodies(node: onnx.NodeProto, opset: int, place: Place) -> None:
    """Raises ContractError if a branch or body takes or gives another number of values than its node."""
    takes, gives = len(node.input), len(node.output)
    if node.op_type == "If":
        takes = 0
    elif node.op_type == "Loop":
        gives += 1  # a body gives its condition too
    else:
        takes -= 1 if opset < 9 else 0  # the first input was the sequence lengths
        scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
        if not 0 < scanned <= len(node.input):
            raise place.node_error(node, f"num_scan_inputs is {scanned}", f"1 to {len(node.input)}")
    for name, graph in subgraphs(node):
        for kind, count, expected in (("input", len(graph.input), takes), ("output", len(graph.output), gives)):
            if count != expected:
                raise place.node_error(node, f"{name!r} has {_count(count, kind)}", f"{expected} as the node has")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
