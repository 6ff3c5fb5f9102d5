"""convert(): reads MXFP8 of any dialect into our nodes, and writes them in another dialect."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import onnx
import onnx_ir as ir
from rich.filesize import decimal as size  # a number of bytes in words

from mxfp8_graph import provenance
from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.onnx_pass import record
from mxfp8_graph.onnx_pass.blame import blame_models_if_checker_complains
from mxfp8_graph.onnx_pass.dialect_ops import foreign
from mxfp8_graph.onnx_pass.fuse import fuse
from mxfp8_graph.onnx_pass.graph import STANDARD, name_of
from mxfp8_graph.onnx_pass.load import bytes_of, external_files, load
from mxfp8_graph.onnx_pass.prepare import upgrade
from mxfp8_graph.onnx_pass.protos import to_proto
from mxfp8_graph.onnx_pass.save import check_output, save, wants_external
from mxfp8_graph.options import Unpack, WriteOptions, check_options
from mxfp8_graph.policy.recipe import load_recipe
from mxfp8_graph.report.base import Data, Report
from mxfp8_graph.report.section import Section
from mxfp8_graph.tools.dialects.bodies import forget, restore, unfuse
from mxfp8_graph.tools.dialects.edit import Edit, Nodes, check_node, operand, operands, refuse_others, tensor_of
from mxfp8_graph.tools.dialects.gemms import put_together
from mxfp8_graph.tools.dialects.rows import DIALECTS, OPS
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError, Option

LOSSES: Final = ("activations", "rounding")
"""The losses of a conversion: quantized activations, the rounding of their scales, float32 around products."""

LEVELS: Final = (0, 4)
"""The accuracy levels of MatMulNBits that `convert` writes; the last is the default."""


@dataclass(frozen=True, kw_only=True)
class Counts(Data):
    """Numbers of quantized tensors of one dialect."""

    weights: int = 0
    activations: int = 0
    """Number of places where values are quantized while the model runs."""


@dataclass(frozen=True, kw_only=True)
class Conversion(Report):
    """The report of one conversion."""

    TITLE = "Conversion of {source} to {to}"
    FILES = ("source", "output")

    source: str
    """The path, or "model"."""
    output: str | None
    """The file that was written; None if the result is in memory."""
    to: str
    """The dialect of the result."""
    found: Mapping[str, Counts]
    """Dialect -> numbers of its tensors in the model."""
    losses: Mapping[str, int]
    """Property that the dialect cannot express, and whose loss the user allowed -> number of places."""
    notes: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """To mxfp8: weights that no gemm reads, which stay MXFP8Dequantize and a standard op."""
    gemms: int = 0
    """To mxfp8: gemms in the result."""
    bytes_before: int = 0
    bytes_after: int = 0
    fusions: int = 0
    """To mxfp8: nodes that were fused with their neighbours."""

    def sections(self) -> list[Section]:
        """Returns one section of (label, value) lines."""
        found = [
            (f"found {name}", f"{_count(n.weights, 'weight')}, {_count(n.activations, 'activation')}")
            for name, n in self.found.items()
        ]
        rows = found or [("found", "nothing that is quantized")]
        if self.to == "mxfp8":
            rows.append(("gemms", f"{self.gemms}, {_count(self.fusions, 'fusion')}"))
        rows += [("no gemm", name) for name in self.kept]
        rows += [("lost", f"{what} ({count})") for what, count in self.losses.items()]
        rows += [("note", note) for note in self.notes]
        rows.append(("size", f"{size(self.bytes_before)} -> {size(self.bytes_after)}"))
        return [Section(facts=[*rows, ("result", self.output or "in memory")])]


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


@blame_models_if_checker_complains("model")
def convert(
    model: str | Path | onnx.ModelProto,
    to: str,
    *,
    output: str | Path | None = None,
    allow: Collection[str] = (),
    accuracy_level: Literal[0, 4] = 4,
    **options: Unpack[WriteOptions],
) -> tuple[Path | onnx.ModelProto, Conversion]:
    """Returns an MXFP8 model in another dialect, and the report; elements and scales keep their bytes.

    Args:
        model: an ONNX file or model with MXFP8 of any dialect: ours, TensorRT's (modelopt, TransformerEngine), standard
            Q/DQ, ONNX Runtime's MatMulNBits, Quark's.
        to: "mxfp8" (ours, with function bodies), "qdq" (standard Q/DQ: Cast and DequantizeLinear), "trt" (TensorRT),
            "nbits" (ONNX Runtime's MatMulNBits, for MXINT8 weights) or "standard" (standard ops alone, quantized
            activations too).
        output: file to write. Default: MODEL.TO.onnx next to a path, nothing for a model in memory.
        allow: properties that may be lost if the dialect cannot express them: "activations", their quantization;
            "rounding", the rounding of their scales.
        accuracy_level: of MatMulNBits, to "nbits" only: at 4 ONNX Runtime rounds activations to int8, at 0 it computes
            in float32, slower. The report has the errors.
        **options: see `WriteOptions`.

    Returns:
        (the written path, or the converted model for a model in memory without `output`; the report).

    Raises:
        ContractError: nothing in the model is MXFP8; a node is quantized in another format; the dialect cannot express
            the model; the model cannot be read, or the output cannot be written.
    """
    check_options("convert", options, WriteOptions)
    written = tuple(name for name, row in DIALECTS.items() if row.is_written)
    asked = ((to, written), *((name, LOSSES) for name in allow), (str(accuracy_level), tuple(map(str, LEVELS))))
    for name, known in asked:
        if name not in known:
            raise ContractError.unknown("convert", name, known)
    if accuracy_level != LEVELS[-1] and not DIALECTS[to].has_levels:
        advice = ("leave ", Option("accuracy_level", accuracy_level), " out, or convert to nbits")
        raise ContractError("convert", f"{to} has no accuracy level", expected="nbits, whose op has one", advice=advice)
    kind = kind_of(model)
    if kind is Kind.UNKNOWN or kind.is_program or kind is Kind.GRAPHSURGEON:
        what, expected = "not an ONNX model or file", "a path or an onnx.ModelProto"
        raise ContractError("convert", what, expected=expected, advice="export programs with mxfp8_graph.to_onnx first")
    loaded = load(model)
    if kind.is_file and output is None:
        output = Path(str(model)).with_suffix(f".{to}.onnx")
    path, overwrite = Path(output) if output else None, options.get("overwrite", False)
    as_source = bool(external_files(loaded))
    external = wants_external(loaded, path, options.get("external_data", "auto"), as_source=as_source)
    # Before the conversion, so that a wrong path costs no time.
    replaces = [] if path is None else check_output(loaded, path, external=external, overwrite=overwrite)
    edit, facts = _converted(loaded, to, frozenset(allow), accuracy_level)
    result: Path | onnx.ModelProto
    if path is None:
        result = to_proto(edit.model)
        size_after = result.ByteSize()
    else:
        size_after = save(edit.model, path, external=external, overwrite=overwrite, replaces=replaces)
        result = path
    return result, Conversion(
        source=name_of(loaded),
        to=to,
        bytes_before=bytes_of(loaded),
        bytes_after=size_after,
        output=str(path) if path else None,
        losses=dict(edit.losses),
        notes=tuple(edit.notes),
        **facts,
    )


def _converted(model: ir.Model, to: str, allow: frozenset[str], accuracy_level: int) -> tuple[Edit, dict[str, Any]]:
    """Returns (the converted model with losses and notes, further fields of the report)."""
    record.remove_bodies(model)
    refuse_others(model)
    was_foreign = foreign(model) is not None
    theirs = {key for key in OPS if key[0] not in STANDARD} | {(domain, "DequantizeLinear") for domain in STANDARD}
    holds = lambda op: op in theirs or op[0] == contract.DOMAIN  # noqa: E731
    model, notes = upgrade(model, holds, least=max(DIALECTS[to].opset, contract.MIN_OPSET))
    edit = Edit(model, notes, allow, accuracy_level)
    # Counted twice: nodes that `restore` adds were standard ops in the model.
    counted = _ours(edit)
    restore(edit)
    for dialect, counts in (("mxfp8", counted), ("standard", _ours(edit) - counted)):
        edit.counts.update({(dialect, kind): count for kind, count in counts.items()})
    edit.infer()  # reading a node needs dtypes and ranks
    edit.each(_read)
    if not edit.counts:
        what, advice = "it has nothing in MXFP8", "quantize it: mxfp8-graph rewrite"
        raise ContractError(name_of(model), what, expected="a model in MXFP8 of some dialect", advice=advice)
    edit.infer()
    names = dict.fromkeys(dialect for dialect, _ in edit.counts)
    found = {n: Counts(weights=edit.counts[n, "weights"], activations=edit.counts[n, "activations"]) for n in names}
    facts = _to_ours(edit, fused=was_foreign or "nbits" in found) if to == "mxfp8" else _to_other(edit, to)
    _import_domains(edit.model)
    _record_losses(edit)
    record.add_bodies(edit.model, None)  # checks the graph only; `record.complete` adds bodies
    return edit, {"found": found, **facts}


def _module(name: str) -> Any:
    """Returns the module of a dialect, with its `read` and `WRITE`."""
    return importlib.import_module(f"mxfp8_graph.tools.dialects.{name}")


def _read(edit: Edit, node: ir.Node) -> Nodes | None:
    check_node(edit, node)
    modules = map(_module, dict.fromkeys(row.module for row in DIALECTS.values() if row.module))
    results = (module.read(edit, node) for module in modules if hasattr(module, "read"))
    return next((nodes for nodes in results if nodes is not None), None)


def _nodes_of_ours(edit: Edit) -> list[ir.Node]:
    return [node for node in edit.model.graph.all_nodes() if node.domain == contract.DOMAIN]


def _ours(edit: Edit) -> Counter[str]:
    """Returns the numbers of packed "weights" and quantized "activations" in our dialect."""
    nodes = [(node, op) for node in _nodes_of_ours(edit) if (op := contract.OPS.get(node.op_type)) is not None]
    packed = (operand(node, op.packed_at) for node, op in nodes if op.packed_at is not None)
    weights = {value for value in packed if tensor_of(value) is not None}
    # Without zeros, so that the report lists only dialects of the model.
    return +Counter(weights=len(weights), activations=sum(op.quantizes for _, op in nodes))


def _to_ours(edit: Edit, *, fused: bool) -> dict[str, Any]:
    """Joins products of dequantized operands to gemms, fuses them with their neighbours, and completes the model."""
    edit.each(put_together)
    fusions = restore(edit)
    forget(edit.model)
    if fused:
        edit.infer()
        recipe = load_recipe("mxfp8-weight-only")  # so that fused attention rounds no operands, as in the model
        fusions += len(fuse(edit.model, recipe)[0])
    record.complete(edit.model, record.recipe_of(edit.model))
    nodes = _nodes_of_ours(edit)
    left = [node for node in nodes if node.op_type == contract.DEQUANTIZE.name]
    return {
        "kept": tuple(f"{operands(node)[0].name} stays {node.op_type} and a standard op" for node in left),
        "gemms": sum(contract.OPS[node.op_type].is_gemm for node in nodes),
        "fusions": fusions,
    }


def _to_other(edit: Edit, to: str) -> dict[str, Any]:
    """Writes every node of ours in the dialect `to`."""
    # Again until no node is fused: a body may have fused nodes.
    while edit.each(unfuse):
        pass
    edit.infer()
    row = DIALECTS[to]
    for step in _module(row.module).WRITE[to]:
        edit.each(step)
    if left := _nodes_of_ours(edit):  # the error names a gemm, if there is one, and not the node that quantizes for it
        node = next((node for node in left if contract.OPS[node.op_type].is_gemm), left[0])
        advice = "convert to standard, or leave it out of the rewrite (--exclude)"
        raise edit.refuse(node, f"has no form in {to}", "nodes that the dialect has", advice)
    edit.model.ir_version = max(edit.model.ir_version, row.ir_version)
    edit.model.metadata_props.update(provenance.entries(None, to))
    return {}


def _record_losses(edit: Edit) -> None:
    """Adds the losses to the model's record of earlier conversions, and notes the earlier losses."""
    recorded = edit.model.metadata_props
    before = recorded.get(provenance.LOST_KEY, "")
    if before:
        edit.notes.append(f"lost in a conversion before: {before}")
    if lost := [*([before] if before else []), *(what for what in edit.losses if what not in before)]:
        recorded[provenance.LOST_KEY] = "; ".join(lost)


def _import_domains(model: ir.Model) -> None:
    """Imports the domains of the dialects that the model uses, and removes the others."""
    domains = {contract.DOMAIN: contract.VERSION}
    for row in DIALECTS.values():
        domains |= row.versions
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    used = {node.domain for graph in graphs for node in graph.all_nodes()}
    for domain in domains.keys() & model.opset_imports.keys() - used:
        del model.opset_imports[domain]
    for domain in sorted(used & domains.keys() - model.opset_imports.keys()):
        model.opset_imports[domain] = domains[domain]
