"""Builds the report of a rewrite from what its steps return."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final, TypedDict

from rich.filesize import decimal as size  # a number of bytes in words
from typing_extensions import Unpack

from mxfp8_graph.options import Options
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.plan import ROLE_SETTINGS, Role
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import Account, FusionReport, RewriteReport, SiteReport, UnfusedReport
from mxfp8_ops import cpu
from mxfp8_ops.errors import BackendError


class Results(TypedDict, total=False):
    """What the steps return."""

    sites: Sequence[SiteReport]
    """The report of each site."""
    fusions: Sequence[FusionReport]
    """The fused nodes."""
    unfused: Sequence[UnfusedReport]
    """The nodes that could have been."""
    account: Account
    """The bytes of the tensors."""
    notes: Sequence[str]
    """Notes on other changes of the model."""
    bytes_after: int | None
    """Size of the output; None, the default, if nothing was written."""
    already_rewritten: bool
    trained: bool
    """Whether the weights were trained in MXFP8: another format would undo that."""


def build_report(recipe: Recipe, options: Options, bytes_before: int, **results: Unpack[Results]) -> RewriteReport:
    """Returns the report of a rewrite of a model of `bytes_before` bytes, which ends now."""
    again = results.get("already_rewritten", False)
    output = options.output if results.get("bytes_after") is not None else None
    notes, fusions = [*results.get("notes", ())], results.get("fusions", ())
    if options.dry_run and not again and options.output is not None and options.output.exists():
        notes.append(f"{options.output} exists already: only overwrite replaces it")
    # A site lists the nodes that replaced it, of which fusions replaced some in turn.
    gone = {name for fusion in fusions for name in fusion.replaced}
    attention = {name for fusion in fusions if fusion.kind == "attention" for name in (fusion.node, *fusion.replaced)}
    advice: list[str] = []
    # Presets were compared in inference, so there is no advice for training, or for weights that were trained for one.
    if not (again or options.training or results.get("trained")):
        advice = [better_preset(recipe), _slow(results), _large(results)]
    return RewriteReport(
        source=options.name,
        output=None if output is None else str(output),
        recipe=recipe.model_dump(mode="json"),
        sites=tuple(_after_fusion(site, recipe, gone, attention) for site in results.get("sites", ())),
        fusions=tuple(fusions),
        unfused=tuple(results.get("unfused", ())),
        bytes_before=bytes_before,
        bytes_after=results.get("bytes_after"),
        account=results.get("account", Account()),
        seconds=time.perf_counter() - options.started,
        notes=tuple(notes),
        dry_run=options.dry_run,
        already_rewritten=again,
        advice="; ".join(filter(None, advice)),
    )


def _after_fusion(site: SiteReport, recipe: Recipe, gone: AbstractSet[str], attention: AbstractSet[str]) -> SiteReport:
    """Returns the report of a site without the nodes in `gone`, with kind "fused" inside an `attention` node."""
    site = replace(site, nodes=tuple(name for name in site.nodes if name not in gone))
    decision, role = site.decision, site.decision.site.role
    # If an `exclude` pattern or a rule keeps the product, its reason stays.
    if decision.kind != "role" or role not in ROLE_SETTINGS or decision.site.name not in attention:
        return site
    how = "not rounded" if recipe.activations == "unchanged" else "rounded to bfloat16"
    reason = f"{role.replace('_', ' ')}, fused, {how}; set {ROLE_SETTINGS[role]}: true to quantize it"
    return replace(site, decision=replace(decision, kind="fused", reason=reason))


def _slow(results: Results) -> str:
    """Returns a sentence if the model has INT8 convolutions, and they are slow on this processor."""
    decisions = (site.decision for site in results.get("sites", ()))
    if not any(d.quantize and d.site.role == "convolution" and not d.weight_only for d in decisions):
        return ""
    try:
        return presets.convolution_advice(cpu.isa())
    except BackendError:  # no native library
        return ""


_LARGE: Final = 0.25
"""Share of the bytes of the result from which on the weights of a role are named."""


def _large(results: Results) -> str:
    """Returns a sentence about the weights that keep the result large, and the setting that packs them."""
    stored = results.get("account", Account()).bytes_after
    weights: dict[Role, dict[str, int]] = defaultdict(dict)
    for site in results.get("sites", ()):
        if site.decision.kind == "role":
            weights[site.decision.site.role][site.decision.site.weight or site.name] = site.bytes_before
    held = {role: sum(each.values()) for role, each in weights.items()}
    role = max(held, key=lambda each: held[each], default=None)
    if role is None or held[role] < _LARGE * stored:
        return ""
    whole = f"{size(held[role])} of {size(stored)} are weights of {role.replace('_', ' ')}s in high precision"
    return f"{whole}: --set {ROLE_SETTINGS[role]}=true packs them"


def better_preset(recipe: Recipe) -> str:
    """Returns a sentence about a preset that is better on this processor than the first with this recipe's formats."""
    known = {name: Recipe(**fields) for name, fields in presets.PRESETS.items()}
    formats = recipe.weight_format, recipe.activations
    like = (name for name, each in known.items() if (each.weight_format, each.activations) == formats)
    try:
        return presets.advice(cpu.isa(), next(like, ""))
    except BackendError:  # no native library: a plan works without it, and has no advice
        return ""
