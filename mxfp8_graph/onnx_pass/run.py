"""rewrite_onnx(): the ONNX pass, step by step."""

from __future__ import annotations

from pathlib import Path

import onnx

from mxfp8_graph import provenance
from mxfp8_graph.onnx_model.open import open_path, open_proto
from mxfp8_graph.onnx_model.upgrade import upgrade
from mxfp8_graph.onnx_model.walk import iter_graphs
from mxfp8_graph.onnx_model.write import open_target, wants_external
from mxfp8_graph.onnx_pass.find import find_sites
from mxfp8_graph.onnx_pass.matmul_forms import FORMS
from mxfp8_graph.onnx_pass.replace import Editor, bytes_after
from mxfp8_graph.options import Options
from mxfp8_graph.pass_steps import Reporter, already_rewritten, replace_each, require_eligible
from mxfp8_graph.policy.plan import plan
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import RewriteReport
from mxfp8_ops import contract


def rewrite_onnx(
    model: Path | onnx.ModelProto, recipe: Recipe, options: Options
) -> tuple[Path | onnx.ModelProto | None, RewriteReport]:
    """Returns (the output's path, or the rewritten proto if no output is asked for, or None on a dry run; report).

    Raises:
        ContractError: the model or its external data cannot be read, converted or packed; or the output not written.
        RecipeError: a rule decides nothing, or the model was rewritten with another recipe.
        NothingEligibleError: no matmul of the model is rewritten.
    """
    reporter = Reporter(recipe=recipe, options=options)
    opened = open_path(model) if isinstance(model, Path) else open_proto(model)
    reporter.bytes_before, reporter.notes = opened.byte_size, opened.notes
    if already_rewritten(_made(opened.proto), recipe, options, what="model"):
        return model, reporter.report(already_rewritten=True)
    upgrade(opened, FORMS)
    sites = find_sites(opened)
    decisions = plan([site.matmul for site in sites], recipe)
    require_eligible(decisions, options, wanted="MatMul or Gemm in the model")
    external = wants_external(opened, bytes_after(opened, sites, decisions), options.output, options.external_data)
    with open_target(opened, options.output, external=external, overwrite=options.overwrite) as target:
        if options.dry_run:
            target.probe()
            return None, reporter.dry_run(decisions)
        editor = Editor(opened, target, allow_nonfinite=options.allow_nonfinite)
        reports = replace_each(sites, decisions, editor.apply, progress=options.progress)
        editor.finish()
        _record(opened.proto, recipe)
        target.finish()
    return target.path or opened.proto, reporter.report(reports, target.byte_size)


def _made(model: onnx.ModelProto) -> provenance.Made | None:
    """Returns how `model` was rewritten before, or None if it was not."""
    node = next((n for g in iter_graphs(model.graph) for n in g.node if n.domain == contract.DOMAIN), None)
    if node is None:
        return None
    recipe = next((p.value for p in model.metadata_props if p.key == provenance.RECIPE_KEY), None)
    return provenance.Made(node=node.name or node.output[0], recipe=recipe)


def _record(model: onnx.ModelProto, recipe: Recipe) -> None:
    props = {p.key: p.value for p in model.metadata_props}
    onnx.helper.set_model_props(model, {**props, **provenance.entries(recipe.model_dump_json())})
