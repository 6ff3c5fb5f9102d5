"""Makes the report of a rewrite: first a report of each site, then the whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from mxfp8_graph.options import Options
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.plan import ROLE_SETTINGS, Decision
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import Account, FusionReport, RewriteReport, SiteReport, UnfusedReport
from mxfp8_ops import cpu
from mxfp8_ops.errors import BackendError


@dataclass(kw_only=True)
class Reporter:
    """Makes the report of one rewrite. Create it before the model is opened: its clock starts at once."""

    recipe: Recipe
    options: Options
    bytes_before: int = 0
    """Size of the model, once it is known."""
    notes: list[str] = field(default_factory=list)
    """Notes on other changes of the model, which the steps add."""
    fusions: Sequence[FusionReport] = ()
    """The fused nodes."""
    unfused: Sequence[UnfusedReport] = ()
    """The nodes that could have been."""
    account: Account = field(default=Account())
    """The bytes of the tensors, once the result is known."""
    _started: float = field(default_factory=time.perf_counter, init=False)

    def report(
        self, sites: Sequence[SiteReport] = (), bytes_after: int | None = None, *, already_rewritten: bool = False
    ) -> RewriteReport:
        """Returns the report; `bytes_after` is None if nothing was written."""
        output = self.options.output if bytes_after is not None else None
        # A site lists the nodes that replaced it, of which fusions replaced some in turn.
        gone = {name for fusion in self.fusions for name in fusion.replaced}
        fused = [fusion for fusion in self.fusions if fusion.kind == "attention"]
        attention = {name for fusion in fused for name in (fusion.node, *fusion.replaced)}
        return RewriteReport(
            source=self.options.name,
            output=None if output is None else str(output),
            recipe=self.recipe.model_dump(mode="json"),
            sites=tuple(self._fused(site, gone, attention) for site in sites),
            fusions=tuple(self.fusions),
            unfused=tuple(self.unfused),
            bytes_before=self.bytes_before,
            bytes_after=bytes_after,
            account=self.account,
            seconds=time.perf_counter() - self._started,
            notes=tuple(self.notes),
            dry_run=self.options.dry_run,
            already_rewritten=already_rewritten,
            # Presets were compared in inference, so there is no advice for training.
            advice="" if already_rewritten or self.options.training else better_preset(self.recipe),
        )

    def report_of_plan(self, decisions: Sequence[Decision]) -> RewriteReport:
        """Returns the report of a rewrite that stops with the plan."""
        output = self.options.output
        if output is not None and output.exists():
            self.notes.append(f"{output} exists already: only overwrite replaces it")
        return self.report([SiteReport(decision=decision) for decision in decisions])

    def _fused(self, site: SiteReport, gone: AbstractSet[str], attention: AbstractSet[str]) -> SiteReport:
        """Returns the report of a site without the nodes in `gone`, with kind "fused" inside an `attention` node."""
        site = replace(site, nodes=tuple(name for name in site.nodes if name not in gone))
        decision, role = site.decision, site.decision.site.role
        # If an `exclude` pattern or a rule keeps the product, its reason stays.
        if decision.kind != "role" or role not in ROLE_SETTINGS or decision.site.name not in attention:
            return site
        how = "not rounded" if self.recipe.activations == "unchanged" else "rounded to bfloat16"
        reason = f"{role.replace('_', ' ')}, fused, {how}; set {ROLE_SETTINGS[role]}: true to quantize it"
        return replace(site, decision=replace(decision, kind="fused", reason=reason))


def better_preset(recipe: Recipe) -> str:
    """Returns a sentence about a preset that is better on this processor than the first with this recipe's formats."""
    known = {name: Recipe(**fields) for name, fields in presets.PRESETS.items()}
    formats = recipe.weight_format, recipe.activations
    like = (name for name, each in known.items() if (each.weight_format, each.activations) == formats)
    try:
        return presets.advice(cpu.isa(), next(like, ""))
    except BackendError:  # no native library: a plan works without it, and has no advice
        return ""
