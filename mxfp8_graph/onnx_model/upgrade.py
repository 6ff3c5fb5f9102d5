"""Converts a model up: inlines local functions that hold matmuls, converts opsets below 21.

onnx's converter goes through an intermediate form that loses node metadata, so only the nodes it really changed are
taken from its result; every other node stays the very message it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import onnx

from mxfp8_graph.naming import take_name
from mxfp8_graph.onnx_model import onnx_calls
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.validate import validate_structure
from mxfp8_graph.onnx_model.walk import (
    STANDARD,
    FunctionKey,
    called_function,
    copy_fields,
    function_key,
    iter_graphs,
    iter_nodes,
    subgraphs,
)
from mxfp8_ops.contract import MIN_OPSET
from mxfp8_ops.errors import ContractError

Multiplies = Callable[[str, str], bool]
"""Whether an op multiplies matrices, by its domain and type."""

_RUNTIME_OPS: Final = ("LayerNormalization", "SimplifiedLayerNormalization")
"""Ops that ONNX Runtime's optimizer writes into the default domain whatever its version; they never changed."""

_ELSEWHERE: Final = "mxfp8_graph.elsewhere"
"""The domain of what onnx's converter is to leave alone."""


def upgrade(opened: OpenedModel, multiplies: Multiplies, *, least: int = MIN_OPSET) -> None:
    """Inlines functions that multiply and converts an opset below `least`, in place; notes what was done.

    Raises:
        ContractError: the opset is unknown, or onnx's converter cannot convert the model.
    """
    opset = opened.opset
    newest = onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:
        expected = f"1 to {newest}, which onnx {onnx.__version__} knows"
        raise ContractError(opened.name, f"opset {opset}", expected=expected, advice="upgrade onnx")
    _inline(opened, multiplies, everything=opset < least)
    if opset < least:
        _convert(opened, opset, least)
    if opened.notes:
        # A call without all its inputs leaves nodes without theirs; attributes that an op lost may be left over.
        validate_structure(opened.proto, opened.name)
    opened.proto.ir_version = max(opened.proto.ir_version, 10)  # the first with opset 21 and float8 in functions


def _inline(opened: OpenedModel, multiplies: Multiplies, *, everything: bool) -> None:
    """Inlines functions that hold matmuls; all of them when the opset changes, which applies to their bodies too."""
    functions = {function_key(f): f for f in opened.proto.functions}
    holding = functions if everything else _holding(functions, multiplies)
    chosen = list(dict.fromkeys((domain, name) for domain, name, _ in holding))
    if not chosen:
        return
    # The inliner wants one opset; a function of another is as good if its ops are the same in both.
    imports = {key: [e for e in f.opset_import if e.domain in STANDARD] for key, f in functions.items()}
    opsets = {key: entry.version for key, entries in imports.items() for entry in entries}
    for key, version in opsets.items():
        if key[:2] in chosen:
            _refuse_other_ops(opened, functions[key], version)
        for entry in imports[key]:
            entry.version = opened.opset
    opened.proto = onnx_calls.inline(opened.proto, chosen, opened.name)
    for function in opened.proto.functions:
        for entry in (e for e in function.opset_import if e.domain in STANDARD):
            entry.version = opsets[function_key(function)]
    opened.notes.append(f"inlined local functions: {', '.join(name for _, name in chosen)}")


def _holding(functions: Mapping[FunctionKey, onnx.FunctionProto], multiplies: Multiplies) -> list[FunctionKey]:
    """Returns the local functions that multiply, themselves or in what they call."""
    known: dict[FunctionKey, bool] = {}

    def holds(key: FunctionKey) -> bool:  # none calls itself: the model was validated
        if key not in known:
            known[key] = any(map(counts, iter_nodes(functions[key].node)))
        return known[key]

    def counts(node: onnx.NodeProto) -> bool:
        if multiplies(node.domain, node.op_type):
            return True
        key = called_function(node)
        return key in functions and holds(key)

    return [key for key in functions if holds(key)]


def _refuse_other_ops(opened: OpenedModel, function: onnx.FunctionProto, opset: int) -> None:
    """Raises ContractError if an op of `function` changed between its opset and the model's."""
    for op in sorted({node.op_type for node in function.node if node.domain in STANDARD}):
        versions = {_since(op, opset), _since(op, opened.opset)}
        if len(versions) > 1:
            other = f"in which {op} is another than in the model's opset {opened.opset}"
            what = f"local function {function.name!r} is of opset {opset}, {other}"
            raise ContractError(opened.name, what, expected="one opset for both", advice="export the model again")


def _since(op: str, opset: int) -> int:
    known = 0 < opset <= onnx.defs.onnx_opset_version() and onnx.defs.has(op, opset)
    return int(onnx.defs.get_schema(op, opset).since_version) if known else 0


def _convert(opened: OpenedModel, opset: int, least: int) -> None:
    converted = onnx_calls.convert(_without_unknown(opened.proto, opset), least, opened.name)
    _graft(opened.proto.graph, converted.graph, {n.name for g in iter_graphs(opened.proto.graph) for n in g.node})
    for entry in opened.proto.opset_import:
        if entry.domain in STANDARD:
            entry.version = least
    opened.notes.append(f"converted opset {opset} to {least}")


def _without_unknown(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Returns a copy of `model` in which the ops that only ONNX Runtime has at `opset` are of another domain.

    onnx's converter refuses what it does not know in its own domain, and leaves other domains alone.
    """
    unknown = {op for op in _RUNTIME_OPS if not onnx.defs.has(op, opset)}
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.opset_import.add(domain=_ELSEWHERE, version=1)
    for graph in iter_graphs(copy.graph):
        for node in graph.node:
            if node.op_type in unknown and node.domain in STANDARD:
                node.domain = _ELSEWHERE
    return copy


def _graft(original: onnx.GraphProto, converted: onnx.GraphProto, names: set[str]) -> None:
    """Replaces the nodes of `original` by those of `converted`, keeping each node that did not change as it was.

    `names` are those of all nodes: the converter calls each node it adds like the one it adds it for.
    """
    known = {tuple(node.output): node for node in original.node}
    nodes: list[onnx.NodeProto] = []
    for node in converted.node:
        before = known.get(tuple(node.output))
        if before is None:
            if node.name:
                node.name = take_name(node.name, names)
            nodes.append(node)
            continue
        kept = onnx.NodeProto()
        kept.CopyFrom(before)
        inner = dict(subgraphs(node))
        for name, graph in subgraphs(kept):
            if name in inner:
                _graft(graph, inner[name], names)
        # A Constant means the same in every version, and where its data lies is dropped by the converter of onnx 1.18.
        if node.op_type != "Constant" and not _same(before, node):
            for name in ("op_type", "input", "attribute"):
                kept.ClearField(name)
            copy_fields(kept, node, skip={"output", "name", "doc_string", "metadata_props", "domain"})
        nodes.append(kept)
    del original.node[:]
    original.node.extend(nodes)
    have = {tensor.name for tensor in original.initializer}
    original.initializer.extend(t for t in converted.initializer if t.name not in have)


def _same(a: onnx.NodeProto, b: onnx.NodeProto) -> bool:
    def plain(node: onnx.NodeProto) -> list[bytes]:
        kept = (x for x in node.attribute if x.type not in {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS})
        return sorted(_undocumented(x) for x in kept)

    return a.op_type == b.op_type and list(a.input) == list(b.input) and plain(a) == plain(b)


def _undocumented(attribute: onnx.AttributeProto) -> bytes:
    copy = onnx.AttributeProto()
    copy_fields(copy, attribute, skip={"doc_string"})
    return bytes(copy.SerializeToString(deterministic=True))
