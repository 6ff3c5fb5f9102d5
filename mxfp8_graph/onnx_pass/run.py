"""rewrite_onnx(): the way through the ONNX pass, step by step."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx

from mxfp8_graph import provenance
from mxfp8_graph.onnx_model.open import OpenedModel, open_path, open_proto
from mxfp8_graph.onnx_model.upgrade import upgrade
from mxfp8_graph.onnx_model.walk import iter_graphs
from mxfp8_graph.onnx_model.write import Target, open_target, wants_external
from mxfp8_graph.onnx_pass.find import OnnxSite, find_sites
from mxfp8_graph.onnx_pass.matmul_forms import FORMS
from mxfp8_graph.onnx_pass.replace import Editor, bytes_after
from mxfp8_graph.policy.plan import Decision, NothingEligibleError, plan
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import RewriteReport, SiteReport
from mxfp8_ops import contract
from mxfp8_ops.errors import RecipeError

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to rewrite, besides the recipe. See `mxfp8_graph.rewrite`."""

    output: Path | None = None
    external_data: Literal["auto", "always", "never"] = "auto"
    overwrite: bool = False
    dry_run: bool = False
    allow_nonfinite: bool = False
    progress: Progress | None = None


def rewrite_onnx(
    model: Path | onnx.ModelProto, recipe: Recipe, options: Options
) -> tuple[Path | onnx.ModelProto | None, RewriteReport]:
    """Returns (the output's path, or the rewritten proto if no output is asked for, or None on a dry run; report).

    Raises:
        ContractError: the model or its external data cannot be read, converted or packed; or the output not written.
        RecipeError: a rule decides nothing, or the model was rewritten with another recipe.
        NothingEligibleError: no matmul of the model is rewritten.
    """
    start = time.perf_counter()
    source = open_path(model) if isinstance(model, Path) else open_proto(model)
    before = source.byte_size

    def report(sites: Sequence[SiteReport], output: Target | None = None, *, already: bool = False) -> RewriteReport:
        return RewriteReport(
            source=source.name,
            output=str(output.path) if output and output.path else None,
            recipe=recipe.model_dump(mode="json"),
            sites=tuple(sites),
            bytes_before=before,
            bytes_after=output.byte_size if output else None,
            seconds=time.perf_counter() - start,
            notes=tuple(source.notes),
            dry_run=options.dry_run,
            already_rewritten=already,
        )

    if _already_rewritten(source, recipe):
        return model, report([], already=True)
    upgrade(source, FORMS)
    sites = find_sites(source)
    decisions = plan([site.matmul for site in sites], recipe)
    if not any(decision.quantize for decision in decisions):
        raise NothingEligibleError(_nothing(source, decisions), decisions)
    external = wants_external(source, bytes_after(source, sites, decisions), options.output, options.external_data)
    with open_target(source, options.output, external=external, overwrite=options.overwrite) as target:
        if options.dry_run:
            target.probe()
            return None, report([SiteReport(decision=d, bytes_before=d.site.weight_bytes) for d in decisions])
        reports = _apply(source, target, sites, decisions, options)
        _record(source.proto, recipe)
        target.finish()
    return target.path or source.proto, report(reports, target)


def _apply(
    source: OpenedModel, target: Target, sites: Sequence[OnnxSite], decisions: Sequence[Decision], options: Options
) -> list[SiteReport]:
    editor = Editor(source, target, allow_nonfinite=options.allow_nonfinite)
    total = sum(d.site.weight_bytes for d in decisions if d.quantize)
    done = 0
    reports = []
    for site, decision in zip(sites, decisions, strict=True):
        if not decision.quantize:
            reports.append(SiteReport(decision=decision, bytes_before=site.matmul.weight_bytes))
            continue
        reports.append(editor.apply(site, decision))
        done += site.matmul.weight_bytes
        if options.progress:
            options.progress(site.matmul.name, done, total)
    editor.finish()
    return reports


def _already_rewritten(source: OpenedModel, recipe: Recipe) -> bool:
    """Whether `recipe` made this model.

    Raises:
        RecipeError: another recipe did; packed weights cannot be packed again.
    """
    first = next((n for g in iter_graphs(source.proto.graph) for n in g.node if n.domain == contract.DOMAIN), None)
    if first is None:
        return False
    recorded = next((p.value for p in source.proto.metadata_props if p.key == provenance.RECIPE_KEY), None)
    if recorded == recipe.model_dump_json():
        return True
    packed_with = "an unrecorded recipe"
    with contextlib.suppress(ValueError, TypeError, KeyError):
        packed_with = json.loads(recorded or "")["name"]
    raise RecipeError(
        source.name,
        f"Recipe mismatch for {first.name or first.output[0]!r}: packed with {packed_with!r}, asked for "
        f"{recipe.name!r}",
        expected="the original model, since packed weights cannot be packed again",
        advice="rewrite that one",
    )


def _record(model: onnx.ModelProto, recipe: Recipe) -> None:
    props = {p.key: p.value for p in model.metadata_props}
    onnx.helper.set_model_props(model, {**props, **provenance.entries(recipe.model_dump_json())})


def _nothing(source: OpenedModel, decisions: Sequence[Decision]) -> str:
    if not decisions:
        return f"{source.name}: no MatMul or Gemm in the model; expected at least one; nothing to rewrite"
    count = f"{len(decisions)} matmul{'s' if len(decisions) > 1 else ''}"
    return (
        f"{source.name}: none of its {count} is eligible; expected at least one; see the reasons and adapt the recipe"
    )
