"""rewrite_onnx(): the ONNX pass, step by step.

load            open_model, to_ir      checks the protobuf, makes it an onnx_ir.Model
upgrade         prepare                opset, local functions, Attention, Dropout, dtypes; infers types
find, plan      find_and_plan
replace         Editor.apply
remove unused   Editor.finish          before `fuse`, which asks who uses a value
fuse            fuse
save            to_proto, Target       serializes the graph once, checks it, streams the tensors
"""

from __future__ import annotations

import contextlib
import gc
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir

from mxfp8_graph.onnx_model import cpu_provider, dialect_ops, record
from mxfp8_graph.onnx_model.check import check_result
from mxfp8_graph.onnx_model.graph import facts_of, infer, to_ir, to_proto
from mxfp8_graph.onnx_model.open import OpenedModel, open_model
from mxfp8_graph.onnx_model.upgrade import switch_off_dropout, take_attention_apart, upgrade
from mxfp8_graph.onnx_model.walk import node_label
from mxfp8_graph.onnx_model.write import open_target, wants_external
from mxfp8_graph.onnx_pass.account import Uses, account, inventory, key_of
from mxfp8_graph.onnx_pass.find import OnnxSite, find_sites
from mxfp8_graph.onnx_pass.fuse import fuse
from mxfp8_graph.onnx_pass.ops import looks_up, multiplies
from mxfp8_graph.onnx_pass.replace import Editor, bytes_after
from mxfp8_graph.options import Options
from mxfp8_graph.pass_steps import (
    Reporter,
    already_rewritten,
    fusion_note,
    replace_each,
    require_eligible,
    take_given,
)
from mxfp8_graph.policy.plan import Decision, plan, tied
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import RewriteReport
from mxfp8_ops.errors import ContractError

WANTED: Final = "MatMul or Gemm in the model"
"""What the pass looks for, in words."""


def rewrite_onnx(
    model: Path | onnx.ModelProto, recipe: Recipe, options: Options
) -> tuple[Path | onnx.ModelProto | None, RewriteReport]:
    """Returns (the output's path, or the rewritten proto if no output is asked for, or None on a dry run; report).

    Errors: see `mxfp8_graph.rewrite`.
    """
    reporter = Reporter(recipe=recipe, options=options)
    opened = open_model(model)
    _refuse_foreign(opened)
    made = record.find(opened.proto)
    if already_rewritten(made, recipe, options, what="model"):
        reporter.bytes_before = opened.byte_size
        reporter.notes = [*opened.notes, *fusion_note(made, recipe), *cpu_provider.note(opened.proto)]
        return _copied(model, opened, reporter)
    return rewrite_opened(opened, reporter)


def _copied(
    model: Path | onnx.ModelProto, opened: OpenedModel, reporter: Reporter
) -> tuple[Path | onnx.ModelProto | None, RewriteReport]:
    """Returns what `rewrite_onnx` does of a model that is rewritten already: a copy where an output is asked for."""
    options, path = reporter.options, reporter.options.copy_to
    if path is None:
        return model, reporter.report(already_rewritten=True)
    external = wants_external(opened, opened.byte_size, path, options.external_data)
    with open_target(opened, path, external=external, overwrite=options.overwrite) as target:
        if options.dry_run:
            target.discard()
            return None, reporter.report(already_rewritten=True)
        target.finish(opened.proto)
    return path, reporter.report((), target.byte_size, already_rewritten=True)


@contextlib.contextmanager
def _collecting_later() -> Iterator[None]:
    """Pauses Python's garbage collector.

    It would pass over the whole graph each time that has grown by a quarter: a third of the time of a large rewrite.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collecting_later()
def rewrite_opened(opened: OpenedModel, reporter: Reporter) -> tuple[Path | onnx.ModelProto | None, RewriteReport]:
    """Returns what `rewrite_onnx` does, of a model that is open and was not rewritten before; edits it in place."""
    recipe, options = reporter.recipe, reporter.options
    reporter.bytes_before, reporter.notes = reporter.bytes_before or opened.byte_size, opened.notes
    model = to_ir(opened)
    before = inventory(model)
    model, widened = prepare(opened, model, recipe)
    planned = inventory(model) if opened.notes or widened else before  # nothing else was done to it without a note
    sites, decisions = find_and_plan(model, recipe)
    decisions, given = take_given([site.matmul for site in sites], decisions, reporter)
    uses = Uses(model, sites, decisions)
    accounted = partial(account, before, planned, uses.of)
    require_eligible(decisions, options, wanted=WANTED, account=lambda: accounted(planned, {}))
    external = wants_external(opened, bytes_after(opened, sites, decisions), options.output, options.external_data)
    with open_target(opened, options.output, external=external, overwrite=options.overwrite) as target:
        nonfinite, sizes_only = options.allow_nonfinite, options.dry_run
        editor = Editor(opened, model, target, allow_nonfinite=nonfinite, sizes_only=sizes_only, given=given)
        progress = None if options.dry_run else options.progress
        reports = replace_each(sites, decisions, editor.apply, progress=progress)
        editor.finish()
        if recipe.fuse:
            reporter.fusions = fuse(model, recipe)
        sources = {name: key_of(uses.paths[graph], source) for name, (graph, source) in editor.made_from.items()}
        result = accounted(inventory(model), sources)
        proto = to_proto(opened, model)
        record.complete(proto, recipe.to_record(), facts_of(model), bodies=options.bodies)
        check_result(proto, opened.name)
        reporter.notes += cpu_provider.note(proto, widened)
        if options.dry_run:
            target.discard()
            return None, reporter.dry_run(decisions, result)
        target.finish(proto)
    return target.path or proto, reporter.report(reports, target.byte_size, account=result)


def _refuse_foreign(opened: OpenedModel) -> None:
    """Raises ContractError if the model has MXFP8 of another dialect, which is converted and not rewritten."""
    if found := dialect_ops.foreign(opened.proto):
        dialect, node = found
        where = f"{opened.name}: node {node_label(node)!r} ({node.op_type})"
        file = opened.name if opened.folder is not None else "MODEL"
        advice = f"convert it: mxfp8-graph convert {shlex.quote(file)} --to mxfp8"
        raise ContractError(where, f"MXFP8 already, as {dialect}", expected="a model to quantize", advice=advice)


def prepare(opened: OpenedModel, model: ir.Model, recipe: Recipe) -> tuple[ir.Model, str]:
    """Brings a model to the form that sites are looked for in: its opset, functions, mode, dtypes and attention nodes.

    Args:
        opened: the model; edited by onnx's own passes, which take protobufs.
        model: its graph; edited, unless those passes changed it.
        recipe: which says what is looked for.

    Returns:
        The graph, and what to say of its dtypes if those changed.
    """
    known = len(opened.notes)
    upgrade(opened, lambda domain, op: multiplies(domain, op) or (recipe.embeddings and looks_up(domain, op)))
    if recipe.attention_scores or recipe.attention_values:
        take_attention_apart(opened)
    if len(opened.notes) > known:
        model = to_ir(opened)
    opened.notes += switch_off_dropout(model)
    infer(opened, model)
    return model, cpu_provider.widen(opened, model) if recipe.runs_on else ""


def find_and_plan(model: ir.Model, recipe: Recipe) -> tuple[list[OnnxSite], list[Decision]]:
    """Returns the sites of a prepared model and the decision on each."""
    sites = find_sites(model)
    stored = [id(site.w.static.value) if site.w.static else None for site in sites]
    return sites, tied(plan([site.matmul for site in sites], recipe), stored)
