"""Matches the weights of a checkpoint with matmuls, by name. Pure data: knows neither files nor graphs.

A checkpoint decides which weights are packed, instead of the recipe's default policy: what it has in MXFP8 is, and
nothing else, since nothing is quantized here. The recipe decides the rest: activations, what a user excludes, fusion.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mxfp8_graph.options import CheckpointWeights, StoredWeight
from mxfp8_graph.policy.plan import Decision, MatMulSite
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops.errors import ContractError, Option

_NODE_PATH: Final = re.compile(r"^/?(?P<module>.+)/[^/]+$")
"""A node as torch's older exporter names it, by its module and its op: /model/layers.0/mlp/up_proj/MatMul."""

_EXPLICIT: Final = "explicit name"

_MOST: Final = 10
"""Names that a message lists at most."""

_OVERRULED: Final = frozenset({"policy", "checkpoint"})
"""Rules that a checkpoint overrules: the default policy, but no rule that a user wrote."""


@dataclass(frozen=True)
class _Match:
    """A weight of the checkpoint, and which name of the model matched it."""

    weight: StoredWeight
    how: str


@dataclass(frozen=True)
class Assigned:
    """The plan with a checkpoint."""

    decisions: list[Decision]
    weights: Mapping[str, StoredWeight]
    """The weight of each rewritten site with a static operand, by the site's name."""
    notes: tuple[str, ...] = ()
    """Notes for the report: the ways in which names were matched, and what of the checkpoint is not used."""


def apply_checkpoint(
    sites: Sequence[MatMulSite], decisions: Sequence[Decision], recipe: Recipe, checkpoint: CheckpointWeights | None
) -> Assigned:
    """Returns the decision on each site when a checkpoint, if there is one, supplies the weights.

    Raises:
        ContractError: a weight of the checkpoint fits no matmul: its name, its shape or its place; lists them all.
    """
    if checkpoint is None:
        return Assigned(list(decisions), {})
    matches = _Names(sites, checkpoint).matches()
    new_decisions: list[Decision] = []
    weights: dict[str, StoredWeight] = {}
    problems: list[str] = []
    used: set[str] = set()
    for site, decision in zip(sites, decisions, strict=True):
        match = matches.get(site.name)
        if match is None:
            new_decisions.append(_without(decision))
            continue
        used.add(match.weight.name)
        decided = _with(decision, match, recipe)
        new_decisions.append(decided)
        if obstacle := _obstacle(site, decided, match.weight, checkpoint):
            problems.append(obstacle)
        elif decided.quantize:
            weights[site.name] = match.weight
    # All problems in one error: a user who writes weight_names needs the whole list, and not one name a run.
    problems += _ambiguous(sites, matches)
    unused = [f"{name!r} matches nothing in the model" for name in checkpoint.weights if name not in used]
    if problems or unused:
        raise _unfit([*unused, *problems], sites, used, checkpoint)
    how = Counter(matches[name].how for name in weights)
    ways = ", ".join(f"{count} by {way}" for way, count in how.items())
    notes = [f"{len(weights)} matmuls take the bytes of {len(used)} weights of {checkpoint.where} ({ways})"]
    if checkpoint.others:
        names = ", ".join(checkpoint.others[:3]) + (", ..." if len(checkpoint.others) > 3 else "")
        notes.append(f"the model keeps its own values for what is not MXFP8 in {checkpoint.where}: {names}")
    return Assigned(new_decisions, weights, tuple(notes))


def _ambiguous(sites: Sequence[MatMulSite], matches: Mapping[str, _Match]) -> list[str]:
    """Returns which weights of the checkpoint match several weights of the model, other than by explicit names."""
    takers: dict[str, dict[str, None]] = {}
    for site in sites:
        match = matches.get(site.name)
        if match is not None and site.weight is not None and match.how != _EXPLICIT:
            # By weight and not by site: sites that share one weight of the model may well take one of the checkpoint.
            takers.setdefault(match.weight.name, {})[site.weight] = None
    return [f"{name!r} fits several weights: {', '.join(mine)}" for name, mine in takers.items() if len(mine) > 1]


def _without(decision: Decision) -> Decision:
    """Returns the decision on a site whose weight is not in the checkpoint."""
    if decision.site.weight is None or not (decision.quantize or decision.rule in _OVERRULED):
        return decision
    reason = "the checkpoint does not have it in MXFP8, and nothing else is quantized"
    return replace(decision, kind="checkpoint", rule="checkpoint", reason=reason)


def _with(decision: Decision, match: _Match, recipe: Recipe) -> Decision:
    """Returns the decision on a site whose weight is in the checkpoint."""
    if not decision.quantize and decision.rule not in _OVERRULED:
        return decision
    reason = f"the checkpoint has it in MXFP8, found by {match.how}"
    rule, activations = decision.rule, decision.activations
    if not decision.quantize:
        rule, activations = "checkpoint", recipe.activations
    element_format = match.weight.element_format
    return replace(
        decision, kind="quantized", rule=rule, reason=reason, activations=activations, weight_format=element_format
    )


def _obstacle(site: MatMulSite, decision: Decision, weight: StoredWeight, checkpoint: CheckpointWeights) -> str | None:
    """Returns why a site cannot take its weight, or None."""
    where = f"{weight.name!r} for {site.module or site.name!r}"
    # A blocked site may have no shape; its blocker says more than an empty list of sizes would.
    if weight.shape != site.weight_shape and not (site.blocker and not site.weight_shape):
        return f"{where}: {list(weight.shape)}, and the model multiplies with [..., N, K] = {list(site.weight_shape)}"
    if not decision.quantize and decision.rule == "structure":
        return f"{where}: {decision.reason}"
    # Packed bytes are written as they are; a factor would have to be rounded into them.
    if site.weight_factor != 1.0:
        return f"{where}: the model uses {site.weight_factor} times the weight, which packed bytes cannot express"
    # from_hf has no values of its own, so a weight that stays in high precision would have none at all.
    if not decision.quantize and checkpoint.instead:
        return f"{where}: {decision.reason}, and the checkpoint has it in MXFP8 only"
    return None


def _unfit(
    problems: Sequence[str], sites: Sequence[MatMulSite], used: set[str], checkpoint: CheckpointWeights
) -> ContractError:
    shown = "; ".join(problems[:_MOST]) + (f"; ... ({len(problems)} in all)" if len(problems) > _MOST else "")
    names = list(dict.fromkeys(next(_candidates(site))[0] for site in sites if site.weight is not None))
    model = ", ".join(names[:_MOST]) + (", ..." if len(names) > _MOST else "")
    advice = ("name them with ", Option("weight_names"), f". Weights of the model: {model or 'none'}")
    return ContractError(
        checkpoint.where, shown, expected="a matmul of that name and shape for each weight", advice=advice
    )


def _candidates(site: MatMulSite) -> Iterator[tuple[str, str]]:
    """Yields (a name that a checkpoint may have for the weight of a site, where it is from), the likeliest first."""
    if site.weight is not None:
        yield site.weight, "name"
    node = _NODE_PATH.match(site.name)
    for module, how in ((site.module, "module path"), (node and node["module"].replace("/", "."), "node name")):
        # A name that tells which parameter of the module it is was not lost: m.proj is not m.weight.
        if module and not (site.weight or "").startswith(f"{module}."):
            yield f"{module}.weight", how


class _Names:
    """Matches the names of a model with those of a checkpoint."""

    def __init__(self, sites: Sequence[MatMulSite], checkpoint: CheckpointWeights) -> None:
        self._sites = [site for site in sites if site.weight is not None]
        self._checkpoint = checkpoint
        taken = set(checkpoint.names.values())
        self._free = {name: weight for name, weight in checkpoint.weights.items() if name not in taken}
        """The weights that no explicit name assigns."""
        self._prefix = self._common_prefix()

    def matches(self) -> dict[str, _Match]:
        """Returns the weight of each site that has one, by the site's name.

        Raises:
            ContractError: an explicit name is not in the checkpoint, or not in the model.
        """
        self._check_explicit()
        return {site.name: match for site in self._sites if (match := self._match(site)) is not None}

    def _match(self, site: MatMulSite) -> _Match | None:
        weights, names = self._checkpoint.weights, self._checkpoint.names
        for key in (site.weight, site.name, site.module):
            # Explicit names first, and they take the weight away from all other sites.
            if key and key in names:
                return _Match(weights[names[key]], _EXPLICIT)
        for candidate, how in _candidates(site):
            if candidate in self._free:
                return _Match(self._free[candidate], how)
        added, removed = self._prefix
        for candidate, how in _candidates(site):
            if (added or removed) and candidate.startswith(removed):
                name = added + candidate[len(removed) :]
                if name in self._free:
                    change = f"with {added!r} before it" if added else f"without {removed!r}"
                    return _Match(self._free[name], f"{how} {change}")
        return None

    def _common_prefix(self) -> tuple[str, str]:
        """Returns the one prefix (that the checkpoint's names have more, that the model's have more) of most weights.

        A model may be exported inside of another module, or without its head. One prefix for all: so no weight can
        be taken for that of another part of the model by chance.
        """
        shorter = {tail: name for name in self._free for tail in _tails(name)}
        takers: dict[tuple[str, str], set[str]] = {}
        for site in self._sites:
            named = any(key in self._checkpoint.names for key in (site.weight, site.name, site.module))
            if named or any(name in self._free for name, _ in _candidates(site)):
                continue
            prefixes: set[tuple[str, str]] = set()
            for candidate, _ in _candidates(site):
                if longer := shorter.get(candidate):
                    prefixes.add((longer.removesuffix(candidate), ""))
                prefixes |= {("", candidate.removesuffix(tail)) for tail in _tails(candidate) if tail in self._free}
            for prefix in prefixes:
                takers.setdefault(prefix, set()).add(site.name)
        # One prefix for all weights: if each had its own, a weight could match that of another layer that ends alike.
        best = max(takers, key=lambda prefix: len(takers[prefix]), default=("", ""))
        others = [p for p in takers if p[1] and len(takers[p]) == len(takers[best]) and takers[p] != takers[best]]
        if others:
            prefixes_text = ", ".join(repr(removed) for _, removed in (best, *others))
            advice = ("name them with ", Option("weight_names"))
            what = f"its weights match the model's equally well without {prefixes_text}"
            raise ContractError(self._checkpoint.where, what, expected="one prefix for all", advice=advice)
        return best

    def _check_explicit(self) -> None:
        keys = {key for site in self._sites for key in (site.weight, site.name, site.module)}
        for mine, theirs in self._checkpoint.names.items():
            if theirs not in self._checkpoint.weights:
                what = f"{mine!r} is mapped to {theirs!r}, which is not among its MXFP8 weights"
                advice = ("correct ", Option("weight_names"))
                raise ContractError(self._checkpoint.where, what, expected="the name of a weight", advice=advice)
            if mine not in keys:
                what = f"{mine!r}, mapped to {theirs!r}, is not a weight, matmul or module of the model"
                advice = ("correct ", Option("weight_names"))
                raise ContractError(
                    self._checkpoint.where, what, expected="a name as --dry-run prints it", advice=advice
                )


def _tails(name: str) -> Iterator[str]:
    """Yields what is left of a dotted name without its first components, but for its last alone."""
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(1, len(parts) - 1))
