"""rewrite_onnx(): calls the steps of the ONNX pass: load, prepare, find, plan, replace, fuse, save, report."""

from __future__ import annotations

import contextlib
import gc
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir
from rich.filesize import decimal as size  # a number of bytes in words

from mxfp8_graph.earlier_rewrite import already_rewritten, fusion_note
from mxfp8_graph.onnx_pass import record
from mxfp8_graph.onnx_pass.blame import blame_models_if_checker_complains
from mxfp8_graph.onnx_pass.dialect_ops import foreign
from mxfp8_graph.onnx_pass.find import OnnxSite, find_sites
from mxfp8_graph.onnx_pass.fuse import fuse
from mxfp8_graph.onnx_pass.graph import dtype_of, label, name_of, stored
from mxfp8_graph.onnx_pass.load import bytes_of, external_files, load, path_of
from mxfp8_graph.onnx_pass.prepare import prepare
from mxfp8_graph.onnx_pass.protos import described, to_proto
from mxfp8_graph.onnx_pass.replace import Replaced, Replacer, insert_all
from mxfp8_graph.onnx_pass.save import check_output, save, wants_external
from mxfp8_graph.options import Options
from mxfp8_graph.policy.checkpoint_weights import apply_checkpoint
from mxfp8_graph.policy.plan import Decision, plan, require_eligible, tied
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.build import Results, build_report
from mxfp8_graph.report.data import RewriteReport, SiteReport, StoredTensor, account
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

WANTED: Final = "MatMul or Gemm in the model"
"""The ops that the pass looks for, for messages."""

Result = tuple[Path | onnx.ModelProto | None, RewriteReport]


@blame_models_if_checker_complains("source")
def rewrite_onnx(source: Path | onnx.ModelProto, recipe: Recipe, options: Options) -> Result:
    """Returns (the output's path, or the rewritten proto without an output, or None on a dry run; the report).

    Raises the errors of `mxfp8_graph.rewrite`.
    """
    record.check_bodies(options.bodies)  # before the load, and also where an earlier rewrite has written the bodies
    model = load(source)
    _refuse_foreign(model)
    before = record.find(model)
    if not already_rewritten(before, recipe, options, what="model"):
        return rewrite_model(model, recipe, options, bytes_of(model))
    results: Results = {"already_rewritten": True, "notes": [*fusion_note(before, recipe), *cpu_note(model)]}
    result: Path | onnx.ModelProto = source
    if (path := options.copy_to) is not None:
        written = _write(model, path, options, as_source=bool(external_files(model)))
        result, results["bytes_after"] = path, written
    return None if options.dry_run else result, build_report(recipe, options, bytes_of(model), **results)


@contextlib.contextmanager
def _collecting_later() -> Iterator[None]:
    """Pauses Python's garbage collector.

    It would visit the whole graph each time the graph has grown by a quarter: a third of the time of a large rewrite.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collecting_later()
def rewrite_model(model: ir.Model, recipe: Recipe, options: Options, bytes_before: int) -> Result:
    """Rewrites a loaded model in place; returns the result of `rewrite_onnx`. `bytes_before` goes to the report."""
    as_source, tensor_bytes = bool(external_files(model)), sum(tensor.byte_size for tensor in stored_tensors(model))
    names = described(model)
    # The size before comes first: `prepare` may add and remove tensors.
    model, prepared = prepare(model, recipe)
    sites, decisions = find_and_plan(model, recipe)
    assigned = apply_checkpoint([site.matmul for site in sites], decisions, recipe, options.weights)
    decisions, linear = assigned.decisions, linear_note(model)
    wanted = " ".join([WANTED, *map("({})".format, linear)])
    require_eligible(decisions, options.name, wanted=wanted, held=partial(bytes_by_op, model))
    progress = None if options.dry_run else options.progress
    replacer = Replacer(
        model, allow_nonfinite=options.allow_nonfinite, checkpoint_weights=assigned.weights, progress=progress
    )
    outcomes = [*map(replacer.outcome, sites, decisions)]
    insert_all(model, outcomes)
    fusions, unfused = fuse(model, recipe) if recipe.fuse else ((), ())
    accounted = account(decisions, tensor_bytes, stored_tensors(model))
    record.complete(model, recipe.to_record(), bodies=options.bodies)
    changed = [*_stored_twice(sites, outcomes), *cpu_note(model), *_removed_notes(names, described(model))]
    written = _write(model, options.output, options, as_source=as_source)
    result: Path | onnx.ModelProto | None = None if options.dry_run else options.output
    if options.output is None and not options.dry_run:
        result = to_proto(model)
        written = result.ByteSize()
    return result, build_report(
        recipe,
        options,
        bytes_before,
        sites=[*map(site_report, decisions if options.dry_run else outcomes)],
        fusions=fusions,
        unfused=unfused,
        account=accounted,
        notes=[*prepared, *assigned.notes, *linear, *changed],
        bytes_after=written,
    )


def find_and_plan(model: ir.Model, recipe: Recipe) -> tuple[list[OnnxSite], list[Decision]]:
    """Returns the sites of a prepared model and the decision on each."""
    sites = find_sites(model)
    stored = [id(site.w.static.value) if site.w.static else None for site in sites]
    return sites, tied(plan([site.matmul for site in sites], recipe), stored)


def stored_tensors(model: ir.Model) -> Iterator[StoredTensor]:
    """Yields the initializers of every graph, and the tensors in attributes, most of them in Constant nodes.

    Function bodies of our own nodes do not count: they define nodes and hold no weights. Strings do not count either:
    they cannot be quantized, and onnx_ir does not know their size.
    """
    for name, tensor in _named_tensors(model):
        if tensor.dtype != ir.DataType.STRING:
            yield StoredTensor((name,), tuple(tensor.shape.numpy()), tensor.dtype.numpy().name, tensor.nbytes)


def _named_tensors(model: ir.Model) -> Iterator[tuple[str, ir.TensorProtocol]]:
    functions = (function.graph for function in model.functions.values() if function.domain != contract.DOMAIN)
    for graph in (each for outermost in (model.graph, *functions) for each in (outermost, *outermost.subgraphs())):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield str(value.name), value.const_value
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    constant = node.op_type == "Constant" and node.outputs
                    name = str(node.outputs[0].name) if constant else f"{label(node)}.{attribute.name}"
                    yield name, attribute.as_tensor()


def _write(model: ir.Model, path: Path | None, options: Options, *, as_source: bool) -> int | None:
    """Returns the number of bytes written; None on a dry run, and without a path."""
    external = wants_external(model, path, options.external_data, as_source=as_source)
    if path is None:
        return None
    if options.dry_run:
        check_output(model, path, external=external, overwrite=options.overwrite)
        return None
    return save(model, path, external=external, overwrite=options.overwrite)


def site_report(done: Replaced | Decision) -> SiteReport:
    """Returns the report of a site."""
    return SiteReport(decision=done) if isinstance(done, Decision) else done.report()


def linear_note(model: ir.Model) -> list[str]:
    """Returns a note on the linear models of ai.onnx.ml, which scikit-learn exports; [] without any."""
    ops = Counter(n.op_type for n in model.graph.all_nodes() if n.op_type in {"LinearClassifier", "LinearRegressor"})
    named = ", ".join(f"{count} {op}" for op, count in ops.items())
    return [f"{named}: not rewritten, the weights are attributes and no tensors"] if named else []


def bytes_by_op(model: ir.Model) -> str:
    """Returns the ops whose initializers hold most of a model's bytes, in words; "" without initializers."""
    held: Counter[str] = Counter()
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in graph.initializers.values():
            users, tensor = value.consumers(), value.const_value
            if users and tensor is not None and tensor.dtype != ir.DataType.STRING:  # as in `stored_tensors`
                held[users[0].op_type] += tensor.nbytes
    named = ", ".join(f"{op} {size(count)}" for op, count in held.most_common(3) if count)
    return f"its weights: {named}" if named else ""


def _stored_twice(sites: list[OnnxSite], outcomes: list[Replaced | Decision]) -> Iterator[str]:
    """Yields a note on each weight that is packed for some nodes, and stored as it was for others."""
    packed: dict[ir.Value, list[str]] = {}
    kept: dict[ir.Value, list[str]] = {}
    for site, outcome in zip(sites, outcomes, strict=True):
        if site.w.static:
            users = packed if isinstance(outcome, Replaced) else kept
            users.setdefault(site.w.static.value, []).append(site.matmul.name)
    for value, names in packed.items():
        readers = kept.get(value) or [label(node) for node in value.consumers()]
        readers += [f"output {value.name}"] if value.is_graph_output() else []
        if readers and (tensor := stored(value)) is not None:
            stays = f"{value.name!r} ({tensor.nbytes:,} bytes) is stored as it was for {', '.join(readers)}"
            yield f"weight {stays}, and packed for {', '.join(names)}"


def _removed_notes(before: dict[str, list[str]], after: dict[str, list[str]]) -> Iterator[str]:
    """Yields a note on each kind of `protos.described` that goes away with tensors and nodes."""
    for kind, names in before.items():
        if gone := [name for name in names if name not in {*after[kind]}]:
            yield f"{kind} that are replaced are removed: {', '.join(gone)}"


def cpu_note(model: ir.Model) -> list[str]:
    """Returns a note if a rewritten model computes in bfloat16, which most CPU kernels of ONNX Runtime lack."""
    # Cast and Gather have bfloat16 kernels there.
    computing = [
        n for n in model.graph.all_nodes() if n.domain != contract.DOMAIN and n.op_type not in {"Cast", "Gather"}
    ]
    values = (value for node in computing for value in (*node.inputs, *node.outputs) if value is not None)
    if not any(dtype_of(value) == ir.DataType.BFLOAT16 for value in values):
        return []
    advice = "rewrite the original with --for cpu (runs_on: cpu) for a model that does"
    return [f"computes in bfloat16, for which ONNX Runtime's CPU provider lacks most kernels; {advice}"]


def _refuse_foreign(model: ir.Model) -> None:
    """Raises ContractError if the model has MXFP8 nodes of another dialect: `convert` reads those."""
    if of_another := foreign(model):
        dialect, node = of_another
        where = f"{name_of(model)}: node {label(node)!r} ({node.op_type})"
        path = path_of(model)
        advice = f"convert it: mxfp8-graph convert {shlex.quote(str(path)) if path else 'MODEL'} --to mxfp8"
        raise ContractError(where, f"MXFP8 already, as {dialect}", expected="a model to quantize", advice=advice)
