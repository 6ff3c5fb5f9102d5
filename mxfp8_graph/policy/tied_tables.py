"""Tables that an embedding and a matmul share: the cost of quantizing only one of the two."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Final

from mxfp8_graph.policy.plan import Decision, MatMulSite

SETTINGS: Final = {"embedding": "embeddings", "output_projection": "output_projections", "router": "routers"}
"""Role -> the recipe's field that makes its sites eligible."""


def explained(decisions: Sequence[Decision], weights: Sequence[Hashable | None]) -> list[Decision]:
    """Returns the decisions, with the reason of each rewritten site saying so if its table stays for another site.

    An embedding whose table stays for others anyway is kept, unless a rule asks for it: to pack it alone saves nothing.

    Args:
        decisions: one per site.
        weights: what the site's static operand is stored as, equal for sites that share it; None without one.
    """
    groups: dict[Hashable, list[Decision]] = {}
    for decision, weight in zip(decisions, weights, strict=True):
        if weight is not None:
            groups.setdefault(weight, []).append(decision)
    return [_explained(d, groups.get(weight, ())) for d, weight in zip(decisions, weights, strict=True)]


def _explained(decision: Decision, sharing: Sequence[Decision]) -> Decision:
    """Returns a decision, with a reason that names `partner`, the first site that shares the weight and is kept."""
    partner = next((other for other in sharing if not other.quantize), None)
    if not decision.quantize or partner is None or all(other.site.role != "embedding" for other in sharing):
        return decision
    setting = f"set {SETTINGS.get(partner.site.role)}: true"
    advice = f"{setting} to share one" if setting in partner.reason else "see why"
    shared = (
        f"its {_what(decision.site)} is also the {_what(partner.site)} of {partner.site.module or partner.site.name!r}"
    )
    packed = any(other.quantize and other.site.role != "embedding" for other in sharing)
    if decision.site.role == "embedding" and decision.rule == "policy" and not packed:
        reason = f"embedding: {shared}, which is kept: packed alone it would make the file larger; {advice}"
        return replace(decision, quantize=False, reason=reason)
    stored = "both copies are stored, and the file is larger than with neither quantized"
    return replace(decision, reason=f"{decision.reason}; {shared}, which is kept: {stored}; {advice}")


def _what(site: MatMulSite) -> str:
    return "table" if site.role == "embedding" else "weight"
