"""convert(): reads MXFP8 of any dialect as ours, and writes it in the one that is asked for."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

import onnx

from mxfp8_graph import provenance
from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.onnx_model import onnx_calls, record
from mxfp8_graph.onnx_model.dialect_ops import dialect_of, foreign, is_quantized, may_be_mxfp8
from mxfp8_graph.onnx_model.dialects import DIALECTS, WRITTEN, Dialect
from mxfp8_graph.onnx_model.graph import put_graph, to_ir
from mxfp8_graph.onnx_model.open import OpenedModel, open_model
from mxfp8_graph.onnx_model.upgrade import upgrade
from mxfp8_graph.onnx_model.walk import iter_graphs, iter_nodes, node_label
from mxfp8_graph.onnx_model.write import open_target, wants_external
from mxfp8_graph.onnx_pass.fuse import fuse
from mxfp8_graph.policy.recipe import load_recipe
from mxfp8_graph.tools.dialects import apart, gemms, restored
from mxfp8_graph.tools.dialects.graph_edit import Edit, Nodes, Scope
from mxfp8_graph.tools.dialects.node_check import check_node
from mxfp8_graph.tools.dialects.report import Conversion, Counts
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

LOSSES: Final = ("activations", "rounding", "half")
"""The losses of a conversion: quantized activations, the rounding of their scales, float32 around products."""


def convert(
    model: str | Path | onnx.ModelProto,
    to: str,
    *,
    output: str | Path | None = None,
    allow: Collection[str] = (),
    external_data: Literal["auto", "always", "never"] = "auto",
    overwrite: bool = False,
) -> tuple[Path | onnx.ModelProto, Conversion]:
    """Returns an MXFP8 model in another dialect, and the report; elements and scales are the same bytes.

    Args:
        model: an ONNX file or model with MXFP8 of any dialect: ours, TensorRT's (modelopt, TransformerEngine), standard
            Q/DQ, ONNX Runtime's MatMulBlockQuantizedFp8Weight, Quark's.
        to: "mxfp8" (ours, with function bodies), "qdq" (standard Q/DQ: Cast and DequantizeLinear), "trt" (TensorRT),
            "ort-cuda" (ONNX Runtime's CUDA op) or "standard" (standard ops alone, quantized activations too).
        output: file to write. Default: MODEL.TO.onnx next to a path, nothing for a model in memory.
        allow: what may be lost where the dialect cannot say it: "activations", that they are quantized; "rounding", how
            scales of activations are; "half", float32 activations and results of products.
        external_data: as in `mxfp8_graph.rewrite`.
        overwrite: whether an existing output may be replaced. The input never is.

    Returns:
        The path that was written, or a model for a model without `output`; and what was found, written and lost.

    Raises:
        ContractError: nothing in the model is MXFP8; something in it is quantized in another way; the dialect cannot
            say what the model does; the model cannot be read, or the output not written.
    """
    for name, known in ((to, WRITTEN), *((name, LOSSES) for name in allow)):
        if name not in known:
            raise ContractError.unknown("convert", name, known)
    kind = kind_of(model)
    if kind is Kind.UNKNOWN or kind.is_program or kind is Kind.GRAPHSURGEON:
        what, advice = "not an ONNX model or file", "export programs with mxfp8_graph.to_onnx first"
        raise ContractError("convert", what, expected="a path or an onnx.ModelProto", advice=advice)
    opened = open_model(model)
    if kind.is_file and output is None:
        output = Path(str(model)).with_suffix(f".{to}.onnx")
    path = Path(output) if output else None
    external = wants_external(opened, opened.byte_size, path, external_data)
    with open_target(opened, path, external=external, overwrite=overwrite) as target:
        facts = _convert(opened, to, frozenset(allow))
        target.finish()
    facts |= {"notes": tuple(opened.notes), "output": str(path) if path else None, "bytes_after": target.byte_size}
    return target.path or opened.proto, Conversion(source=opened.name, to=to, bytes_before=opened.byte_size, **facts)


def _convert(opened: OpenedModel, to: str, allow: frozenset[str]) -> dict[str, Any]:
    """Converts an opened model in place; returns what the report says of it."""
    _refuse_others(opened)
    was_foreign = foreign(opened.proto) is not None
    kept = [function for function in opened.proto.functions if function.domain != contract.DOMAIN]
    del opened.proto.functions[:]
    opened.proto.functions.extend(kept)
    upgrade(opened, _in_dialect, least=max(DIALECTS[to].opset, contract.MIN_OPSET))
    edit = Edit(opened)
    ours = _ours(edit)
    restored.restore(edit)
    for dialect, counted in (("mxfp8", ours), ("standard", _ours(edit) - ours)):
        edit.counts.update({(dialect, kind): count for kind, count in counted.items()})
    _infer(edit)
    edit.each(_read)
    if not edit.counts:
        what, advice = "it has nothing in MXFP8", "quantize it: mxfp8-graph rewrite"
        raise ContractError(opened.name, what, expected="a model in MXFP8 of some dialect", advice=advice)
    _infer(edit)
    names = dict.fromkeys(dialect for dialect, _ in edit.counts)
    found = {n: Counts(weights=edit.counts[n, "weights"], activations=edit.counts[n, "activations"]) for n in names}
    made = _to_ours(edit, fused=was_foreign) if to == "mxfp8" else _to_other(edit, to, allow)
    _import_domains(opened.proto)
    _record_losses(edit)
    return {"found": found, "losses": dict(edit.losses), **made}


def _in_dialect(domain: str, op: str) -> bool:
    node = onnx.NodeProto(domain=domain, op_type=op)
    return dialect_of(node) is not None or op == "DequantizeLinear"


def _refuse_others(opened: OpenedModel) -> None:
    """Raises ContractError if something is quantized, but in no dialect of MXFP8."""
    functions = [node for function in opened.proto.functions for node in function.node]
    graphs = iter_graphs(opened.proto.graph)
    nodes = [*(node for graph in graphs for node in graph.node), *iter_nodes(functions)]
    others = [node for node in nodes if is_quantized(node) and not may_be_mxfp8(node)]
    if others:
        kinds = Counter(f"{node.domain + '.' if node.domain else ''}{node.op_type}" for node in others)
        what = ", ".join(f"{count} {name}" for name, count in kinds.items())
        where = f"{opened.name}: node {node_label(others[0])!r}"
        advice = "start from the model that is not quantized: mxfp8-graph rewrite"
        raise ContractError(where, f"quantized, but not in MXFP8 ({what})", expected="MXFP8 alone", advice=advice)


def _read(scope: Scope, node: onnx.NodeProto) -> Nodes | None:
    check_node(scope, node)
    for row in DIALECTS.values():
        read = row.module and getattr(module_of(row), "read", None)
        if read and (made := read(scope, node)) is not None:
            return made  # type: ignore[no-any-return]
    return None


def module_of(dialect: Dialect) -> ModuleType:
    """Returns the file that reads and writes a dialect."""
    return importlib.import_module(f"mxfp8_graph.tools.dialects.{dialect.module}")


def _ours(edit: Edit) -> Counter[str]:
    """Returns how many packed "weights" and quantized "activations" the model has in our dialect."""
    weights: set[tuple[int, str]] = set()
    counted: Counter[str] = Counter()

    def count(scope: Scope, node: onnx.NodeProto) -> None:
        op = contract.OPS.get(node.op_type) if node.domain == contract.DOMAIN else None
        if op is None:
            return
        if (at := op.packed_at) is not None and scope.tensor(node.input[at]) is not None:
            weights.add((id(scope.owner(node.input[at]).graph), node.input[at]))
        if op.quantizes:
            counted["activations"] += 1

    edit.each(count)
    if weights:
        counted["weights"] = len(weights)
    return counted


def _infer(edit: Edit) -> onnx.ModelProto:
    """Returns the model with dtypes and shapes, as far as onnx can infer them; the edit knows dtypes and ranks."""
    model = onnx.ModelProto()
    model.CopyFrom(edit.opened.proto)
    record.complete(model, edit.opened.opset, None)
    inferred = onnx_calls.infer_shapes(model, edit.opened.name, [])
    types: dict[str, tuple[int, int | None]] = {}
    unsure: set[str] = set()
    for graph in iter_graphs(inferred.graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            known = tensor.elem_type, len(tensor.shape.dim) if tensor.HasField("shape") else None
            if types.setdefault(value.name, known) != known:
                unsure.add(value.name)
        types |= {stored.name: (stored.data_type, len(stored.dims)) for stored in graph.initializer}
    for name in unsure:
        del types[name]
    edit.dtypes = {name: dtype for name, (dtype, _) in types.items()}
    edit.ranks = {name: rank for name, (_, rank) in types.items() if rank is not None}
    return inferred


def _to_ours(edit: Edit, *, fused: bool) -> dict[str, Any]:
    """Puts gemms together, fuses them with their neighbours, and completes the model."""
    opened = edit.opened
    edit.each(gemms.put_together)
    fusions = restored.restore(edit)
    restored.forget(opened.proto)
    if fused:
        recipe = load_recipe("mxfp8-weight-only")  # attention as it was: nothing rounds its operands
        model = to_ir(opened, _infer(edit))
        fusions += len(fuse(model, recipe))
        put_graph(opened, model)
    record.complete(opened.proto, opened.opset, record.recipe_of(opened.proto))
    nodes = [node for graph in iter_graphs(opened.proto.graph) for node in graph.node if node.domain == contract.DOMAIN]
    left = [node for node in nodes if node.op_type == contract.DEQUANTIZE.name]
    return {
        "kept": tuple(f"{node.input[0]} stays {node.op_type} and a standard op" for node in left),
        "gemms": sum(contract.OPS[node.op_type].is_gemm for node in nodes),
        "fusions": fusions,
    }


def _to_other(edit: Edit, to: str, allow: frozenset[str]) -> dict[str, Any]:
    """Writes every node of ours in the dialect `to`."""
    opened = edit.opened
    while edit.each(apart.unfuse):
        pass
    _infer(edit)
    row, module = DIALECTS[to], module_of(DIALECTS[to])
    if write_product := getattr(module, "write_product", None):
        edit.each(lambda scope, node: write_product(scope, node, allow))
    edit.each(apart.take_apart)
    edit.each(lambda scope, node: module.write(scope, node, allow))
    left = [n for graph in iter_graphs(opened.proto.graph) for n in graph.node if n.domain == contract.DOMAIN]
    if left:  # what reads quantized values, rather than what quantizes them for it
        node = next((node for node in left if contract.OPS[node.op_type].is_gemm), left[0])
        advice = "convert to standard, or leave it out of the rewrite (--exclude)"
        raise edit.refuse(node, f"has no form in {to}", expected="nodes that the dialect has", advice=advice)
    opened.proto.ir_version = max(opened.proto.ir_version, row.ir_version)
    _record_dialect(opened.proto, to)
    if check := getattr(module, "check", None):
        _import_domains(opened.proto)
        check(opened)
    return {}


def _record_losses(edit: Edit) -> None:
    """Records what is lost beside what conversions before this one lost, and tells of those."""
    model = edit.opened.proto
    recorded = {entry.key: entry.value for entry in model.metadata_props}
    before = recorded.get(provenance.LOST_KEY, "")
    if before:
        edit.opened.notes.append(f"lost in a conversion before: {before}")
    if lost := [*([before] if before else []), *(what for what in edit.losses if what not in before)]:
        onnx.helper.set_model_props(model, {**recorded, provenance.LOST_KEY: "; ".join(lost)})


def _record_dialect(model: onnx.ModelProto, dialect: str) -> None:
    recorded = {entry.key: entry.value for entry in model.metadata_props}
    onnx.helper.set_model_props(model, {**recorded, **provenance.entries(None, dialect)})


def _import_domains(model: onnx.ModelProto) -> None:
    """Imports the domains of the dialects that the model uses, and no other of them."""
    domains = {contract.DOMAIN: contract.VERSION}
    for row in DIALECTS.values():
        domains |= row.versions
    bodies = [node for function in model.functions for node in function.node]
    used = {node.domain for node in iter_nodes([*model.graph.node, *bodies])}
    for index in reversed(range(len(model.opset_import))):
        domain = model.opset_import[index].domain
        if domain in domains and domain not in used:
            del model.opset_import[index]
    for domain in sorted(used & domains.keys() - {entry.domain for entry in model.opset_import}):
        model.opset_import.add(domain=domain, version=domains[domain])
