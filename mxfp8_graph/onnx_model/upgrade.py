"""Brings a model to the form that sites are looked for in: opset, local functions, Attention and Dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import onnx
import onnx_ir as ir

from mxfp8_graph.onnx_model import conversion, onnx_calls
from mxfp8_graph.onnx_model.check import validate_structure
from mxfp8_graph.onnx_model.graph import graphs_of, is_op, stored
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.walk import STANDARD, FunctionKey, called_function, function_key, iter_graphs, iter_nodes
from mxfp8_ops.contract import MIN_OPSET
from mxfp8_ops.errors import ContractError

Multiplies = Callable[[str, str], bool]
"""Whether an op multiplies matrices, by its domain and type."""


def upgrade(opened: OpenedModel, multiplies: Multiplies, *, least: int = MIN_OPSET) -> None:
    """Inlines functions that multiply and converts an opset below `least`, in place; notes what was done.

    Raises:
        ContractError: the opset is unknown, or onnx's converter cannot convert the model.
    """
    _import_standard(opened.proto)
    opset = opened.opset
    newest = onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:
        expected = f"1 to {newest}, which onnx {onnx.__version__} knows"
        raise ContractError(opened.name, f"opset {opset}", expected=expected, advice="upgrade onnx")
    _inline(opened, multiplies, everything=opset < least)
    if opset < least:
        conversion.convert(opened, opset, least)
    if opened.notes:
        # A call without all its inputs leaves nodes without theirs; attributes that an op lost may be left over.
        validate_structure(opened.proto, opened.name)
    opened.proto.ir_version = max(opened.proto.ir_version, 10)  # the first with opset 21 and float8 in functions


def switch_off_dropout(model: ir.Model) -> list[str]:
    """Makes every Dropout that drops pass its input on, in place, but not where the caller chooses; returns a note."""
    count = 0
    for graph in graphs_of(model.graph):
        for node in graph:
            flag = node.inputs[2] if is_op(node, "Dropout") and len(node.inputs) == 3 else None
            tensor = None if flag is None else stored(flag)
            if tensor is not None and tensor.numpy().any():
                node.resize_inputs(2)
                count += 1
    return [f"the model was exported in training mode; in the result Dropout is off ({count})"] if count else []


def _import_standard(model: onnx.ModelProto) -> None:
    """Imports the default domain, which our nodes' bodies use, into a model that has no node of it."""
    used = (entry.domain for entry in model.opset_import), (node.domain for node in iter_nodes(model.graph.node))
    if STANDARD.isdisjoint(domain for domains in used for domain in domains):
        model.opset_import.add(version=MIN_OPSET)


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


_ATTENTION: Final = "Attention"


def take_attention_apart(opened: OpenedModel) -> None:
    """Replaces every Attention of the model, in place, and notes it; or notes why they stay, if onnx cannot do that.

    What a node becomes has its metadata, and names that begin with its.
    """
    whole = {node.output[0]: node for node in iter_nodes(opened.proto.graph.node) if _is_attention(node)}
    if not whole:
        return
    before = {name for node in iter_nodes(opened.proto.graph.node) for name in node.output} - whole.keys()
    try:
        opened.proto = onnx_calls.inline_standard(opened.proto, [("", _ATTENTION)], opened.name)
    except ContractError as error:
        opened.notes.append(f"the products inside Attention are not quantized: {error}")
        return
    for graph in iter_graphs(opened.proto.graph):
        parts: list[onnx.NodeProto] = []
        for node in graph.node:
            if before.isdisjoint(node.output):
                parts.append(node)
            if node.output and (origin := whole.get(node.output[0])) is not None:
                _label(parts, origin)
                parts = []
    opened.notes.append(f"took apart {len(whole)} Attention, for the recipe quantizes attention products")


def _is_attention(node: onnx.NodeProto) -> bool:
    return node.op_type == _ATTENTION and node.domain in STANDARD


def _label(parts: list[onnx.NodeProto], origin: onnx.NodeProto) -> None:
    """Says where nodes come from."""
    for part in parts:
        part.metadata_props.MergeFrom(origin.metadata_props)
        if origin.name:
            part.name = f"{origin.name}_{part.output[0]}"
