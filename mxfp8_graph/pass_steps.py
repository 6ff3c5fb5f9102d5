"""The steps that every pass takes in the same way, whatever library its graphs come from.

already_rewritten -> (sites -> plan) -> require_eligible -> replace_each -> Reporter.report
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TypeVar

from mxfp8_graph.naming import printable
from mxfp8_graph.options import Options, Progress, StoredWeight
from mxfp8_graph.policy.plan import Decision, MatMulSite, NothingEligibleError
from mxfp8_graph.policy.recipe import Recipe, recorded
from mxfp8_graph.policy.weights_by_name import assigned
from mxfp8_graph.provenance import RewriteRecord, recipe_name
from mxfp8_graph.report.account import Account
from mxfp8_graph.report.data import FusionReport, RewriteReport, SiteReport
from mxfp8_ops.errors import ContractError, RecipeError

Site = TypeVar("Site")


@dataclass(frozen=True)
class PackedNames:
    """A packed weight in the rewritten model."""

    elements: str
    """Name of the initializer or buffer with the elements."""
    scales: str
    """Name of the one with the scales."""
    byte_size: int
    """Bytes of both."""
    relative_l2: float | None
    """Rounding error of the weight, where it is known."""


@dataclass(kw_only=True)
class Reporter:
    """Makes the report of one rewrite. The clock starts with it, before the model is opened."""

    recipe: Recipe
    options: Options
    bytes_before: int = 0
    """Size of the model, once it is known."""
    notes: list[str] = field(default_factory=list)
    """What else was done to the model; grows on the way."""
    fusions: Sequence[FusionReport] = ()
    """What was fused."""
    _started: float = field(default_factory=time.perf_counter, init=False)

    def report(
        self,
        sites: Sequence[SiteReport] = (),
        bytes_after: int | None = None,
        *,
        account: Account | None = None,
        already_rewritten: bool = False,
    ) -> RewriteReport:
        """Returns the report; `bytes_after` is None if nothing was written."""
        output = self.options.output if bytes_after is not None else None
        gone = {name for fusion in self.fusions for name in fusion.replaced}
        fused = [fusion for fusion in self.fusions if fusion.kind == "attention"]
        attention = {name for fusion in fused for name in (fusion.node, *fusion.replaced)}
        return RewriteReport(
            source=self.options.name,
            output=None if output is None else str(output),
            recipe=self.recipe.model_dump(mode="json"),
            sites=tuple(self._fused(site, attention).without(gone) for site in sites) if gone else tuple(sites),
            fusions=tuple(self.fusions),
            bytes_before=self.bytes_before,
            bytes_after=bytes_after,
            account=account or Account(),
            seconds=time.perf_counter() - self._started,
            notes=tuple(self.notes),
            dry_run=self.options.dry_run,
            already_rewritten=already_rewritten,
        )

    def _fused(self, site: SiteReport, attention: AbstractSet[str]) -> SiteReport:
        """Returns the report of a site, which says so if the site is a product in one of the `attention` nodes."""
        if site.decision.quantize or site.decision.site.name not in attention:
            return site
        how = "not rounded" if self.recipe.activations == "unchanged" else "rounded to bfloat16"
        reason = site.decision.reason.replace("no static operand", f"fused, {how}")
        return replace(site, decision=replace(site.decision, reason=reason))

    def dry_run(self, decisions: Sequence[Decision], account: Account) -> RewriteReport:
        """Returns the report of a rewrite that stops with the plan; `account` says what its result would store."""
        return self.report([untouched(decision) for decision in decisions], account=account)


def already_rewritten(made: RewriteRecord | None, recipe: Recipe, options: Options, *, what: str) -> bool:
    """Whether `recipe` made the model, as `made` tells; warns if another recipe prepared it for training.

    `what` is "model" or "program", for the message.

    A program that is packed, and to be prepared for training or taken back from it, is not.

    Raises:
        RecipeError: another recipe packed its weights; they cannot be packed again.
    """
    if made is None:
        return False
    if options.weights is not None:
        expected, advice = f"a {what} in high precision", "rewrite the original"
        raise ContractError(options.name, "has MXFP8 weights already", expected=expected, advice=advice)
    before = recorded(made.recipe)
    fields = None if before is None else before.differences(recipe)
    same = fields == {}  # weights are packed alike
    if made.packed:
        if same and made.training == options.training:
            return True
        turned = made.training or options.training
        if turned and fields is not None and set(fields) <= {"fp8_format"}:  # which says nothing of packing
            return False
        packed, asked = f"packed with {recipe_name(made.recipe)!r}", f"asked for {recipe.name!r}"
        if fields:
            packed, asked = _packed_and_asked(fields)
        elif options.training:
            asked = f"asked for training with {recipe.name!r}"
        found = f"Recipe mismatch for {made.node!r}: {packed}, {asked}"
        expected = f"the original {what}, since packed weights cannot be packed again"
        advice = "rewrite that one, or name the recipe that packed this one" if turned else "rewrite that one"
        raise RecipeError(options.name, found, expected=expected, advice=advice)
    if not same:
        changed = f"Recipe type changed from {recipe_name(made.recipe)} to {recipe.name}"
        differing = ", ".join(f"{name} from {old} to {new}" for name, (old, new) in (fields or {}).items())
        warnings.warn(printable(f"{changed}: {differing}" if differing else changed), stacklevel=4)  # rewrite's caller
    return same and options.training


def _packed_and_asked(fields: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Returns "packed with fp8_format E4M3" and "asked for HYBRID", or for more fields both with their names."""
    packed = ", ".join(f"{name} {old}" for name, (old, _) in fields.items())
    asked = ", ".join(new if len(fields) == 1 else f"{name} {new}" for name, (_, new) in fields.items())
    return f"packed with {packed}", f"asked for {asked}"


def take_given(
    sites: Sequence[MatMulSite], decisions: Sequence[Decision], reporter: Reporter
) -> tuple[list[Decision], Mapping[str, StoredWeight]]:
    """Returns (the decisions, the weights that a checkpoint gives by the site's name); see `policy.weights_by_name`."""
    given = reporter.options.weights
    if given is None:
        return list(decisions), {}
    planned, weights = assigned(sites, decisions, reporter.recipe, given)
    reporter.notes.append(f"{len(weights)} matmuls take the bytes of {len(given.weights)} weights of {given.where}")
    if given.others:
        names = ", ".join(given.others[:3]) + (", ..." if len(given.others) > 3 else "")
        reporter.notes.append(f"the model keeps its own values for what is not MXFP8 in {given.where}: {names}")
    return planned, weights


def fusion_note(made: RewriteRecord | None, recipe: Recipe) -> list[str]:
    """Returns what to tell of a model that was rewritten before with fusion where `recipe` has none, or without it."""
    before = None if made is None else recorded(made.recipe)
    if before is None or before.fuse == recipe.fuse:
        return []
    return [f"it was rewritten with{'' if before.fuse else 'out'} fusion; rewrite the original to change that"]


def require_eligible(
    decisions: Sequence[Decision], options: Options, *, wanted: str, account: Callable[[], Account]
) -> None:
    """Raises NothingEligibleError if no site is rewritten.

    Args:
        decisions: the plan.
        options: name the model.
        wanted: what the pass looked for, and where.
        account: where the bytes of the model are, for the message.
    """
    if any(decision.quantize for decision in decisions):
        return
    if decisions:
        what, advice = f"none of its {_counted(decisions)} is eligible", "see the reasons and adapt the recipe"
    else:
        what, advice = f"no {wanted}", "nothing to rewrite"
    if elsewhere := account().elsewhere():
        advice = f"{advice}: {elsewhere}"
    raise NothingEligibleError(options.name, what, advice, decisions)


def _counted(decisions: Sequence[Decision]) -> str:
    """Returns how many matmuls and embeddings there are, in words."""
    embeddings = sum(decision.site.role == "embedding" for decision in decisions)
    counts = (("matmul", len(decisions) - embeddings), ("embedding", embeddings))
    return " and ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts if count)


def replace_each(
    sites: Sequence[Site],
    decisions: Sequence[Decision],
    replace: Callable[[Site, Decision], SiteReport],
    *,
    keep: Callable[[Site], None] | None = None,
    progress: Progress | None = None,
) -> list[SiteReport]:
    """Returns a report of each site: `replace` is called for those that are rewritten, `keep` for the others."""
    total = sum(decision.site.weight_bytes for decision in decisions if decision.quantize)
    done = 0
    reports = []
    for site, decision in zip(sites, decisions, strict=True):
        if not decision.quantize:
            if keep is not None:
                keep(site)
            reports.append(untouched(decision))
            continue
        reports.append(replace(site, decision))
        done += decision.site.weight_bytes
        if progress is not None:
            progress(decision.site.name, done, total)
    return reports


def replaced(decision: Decision, nodes: Sequence[str], weight: PackedNames | None) -> SiteReport:
    """Returns the report of a site that `nodes` replace."""
    if weight is None:
        return SiteReport(decision=decision, nodes=tuple(nodes))
    return SiteReport(
        decision=decision,
        nodes=tuple(nodes),
        packed=weight.elements,
        bytes_before=decision.site.weight_bytes,
        bytes_after=weight.byte_size,
        relative_l2=weight.relative_l2,
    )


def untouched(decision: Decision) -> SiteReport:
    return SiteReport(decision=decision, bytes_before=decision.site.weight_bytes)
