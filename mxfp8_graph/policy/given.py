"""Which matmul takes which weight of a checkpoint, by name. Pure data: knows neither files nor graphs.

A checkpoint decides which weights are packed, instead of the recipe's default policy: what it has in MXFP8 is, and
nothing else, since nothing is quantized here. The recipe decides the rest: activations, what a user excludes, fusion.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mxfp8_graph.options import GivenWeights, StoredWeight
from mxfp8_graph.policy.plan import Decision, MatMulSite
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops.errors import ContractError, Option

_NODE_PATH: Final = re.compile(r"^/?(?P<module>.+)/[^/]+$")
"""A node as torch's older exporter names it, by its module and its op: /model/layers.0/mlp/up_proj/MatMul."""

_EXPLICIT: Final = "explicit name"

_MOST: Final = 10
"""How many names a message lists."""

_OVERRULED: Final = frozenset({"policy", "checkpoint"})
"""What a checkpoint overrules: the default policy, not what a user asks for by name."""


@dataclass(frozen=True)
class _Match:
    """A weight of the checkpoint, and by which name of the model it was found."""

    weight: StoredWeight
    how: str


@dataclass(frozen=True)
class Assigned:
    """The plan with a checkpoint."""

    decisions: list[Decision]
    weights: Mapping[str, StoredWeight]
    """The weight of each rewritten site with a static operand, by the site's name."""
    note: str
    """How names were matched, for the report."""


def assigned(
    sites: Sequence[MatMulSite], decisions: Sequence[Decision], recipe: Recipe, given: GivenWeights
) -> Assigned:
    """Returns what becomes of each site once a checkpoint gives the weights.

    Raises:
        ContractError: a weight of the checkpoint fits no matmul: its name, its shape or its place; lists them all.
    """
    matches = _Names(sites, given).matches()
    found: list[Decision] = []
    weights: dict[str, StoredWeight] = {}
    problems: list[str] = []
    used: set[str] = set()
    for site, decision in zip(sites, decisions, strict=True):
        match = matches.get(site.name)
        if match is None:
            found.append(_without(decision))
            continue
        used.add(match.weight.name)
        decided = _with(decision, match, recipe)
        found.append(decided)
        if obstacle := _obstacle(site, decided, match.weight, given):
            problems.append(obstacle)
        elif decided.quantize:
            weights[site.name] = match.weight
    problems += _ambiguous(sites, matches)
    unused = [f"{name!r} matches nothing in the model" for name in given.weights if name not in used]
    if problems or unused:
        raise _unfit([*unused, *problems], sites, used, given)
    how = Counter(matches[name].how for name in weights)
    ways = ", ".join(f"{count} by {way}" for way, count in how.items())
    note = f"{len(weights)} matmuls take the bytes of {len(used)} weights of {given.where} ({ways})"
    return Assigned(found, weights, note)


def _ambiguous(sites: Sequence[MatMulSite], matches: Mapping[str, _Match]) -> list[str]:
    """Returns which weights of the checkpoint were found for several of the model, other than by explicit names."""
    takers: dict[str, dict[str, None]] = {}
    for site in sites:
        match = matches.get(site.name)
        if match is not None and site.weight is not None and match.how != _EXPLICIT:
            takers.setdefault(match.weight.name, {})[site.weight] = None
    return [f"{name!r} fits several: {', '.join(mine)}" for name, mine in takers.items() if len(mine) > 1]


def _without(decision: Decision) -> Decision:
    """Returns the decision on a site whose weight is not in the checkpoint."""
    if decision.site.weight is None or not (decision.quantize or decision.rule in _OVERRULED):
        return decision
    reason = "the checkpoint does not have it in MXFP8, and nothing else is quantized"
    return replace(decision, quantize=False, rule="checkpoint", reason=reason)


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
        decision, quantize=True, rule=rule, reason=reason, activations=activations, weight_format=element_format
    )


def _obstacle(site: MatMulSite, decision: Decision, weight: StoredWeight, given: GivenWeights) -> str | None:
    """Returns why a site cannot take its weight, or None."""
    where = f"{weight.name!r} for {site.module or site.name!r}"
    if weight.shape != site.weight_shape and not (site.blocker and not site.weight_shape):
        return f"{where}: {list(weight.shape)}, and the model multiplies with [..., N, K] = {list(site.weight_shape)}"
    if not decision.quantize and decision.rule == "structure":
        return f"{where}: {decision.reason}"
    if site.weight_factor != 1.0:
        return f"{where}: the model multiplies with {site.weight_factor} times the weight, which its bytes cannot say"
    if not decision.quantize and given.instead:
        return f"{where}: {decision.reason}, and the checkpoint has it in MXFP8 only"
    return None


def _unfit(problems: Sequence[str], sites: Sequence[MatMulSite], used: set[str], given: GivenWeights) -> ContractError:
    shown = "; ".join(problems[:_MOST]) + (f"; ... ({len(problems)} in all)" if len(problems) > _MOST else "")
    names = list(dict.fromkeys(next(_candidates(site))[0] for site in sites if site.weight is not None))
    model = ", ".join(names[:_MOST]) + (", ..." if len(names) > _MOST else "")
    advice = ("name them with ", Option("weight_names"), f". Weights of the model: {model or 'none'}")
    return ContractError(given.where, shown, expected="a matmul of that name and shape for each weight", advice=advice)


def _candidates(site: MatMulSite) -> Iterator[tuple[str, str]]:
    """Yields what a checkpoint may call the weight of a site, the likeliest first, and what tells so."""
    if site.weight is not None:
        yield site.weight, "name"
    node = _NODE_PATH.match(site.name)
    for module, how in ((site.module, "module path"), (node and node["module"].replace("/", "."), "node name")):
        # A name that tells which parameter of the module it is was not lost: m.proj is not m.weight.
        if module and not (site.weight or "").startswith(f"{module}."):
            yield f"{module}.weight", how


class _Names:
    """Matches the names of a model with those of a checkpoint."""

    def __init__(self, sites: Sequence[MatMulSite], given: GivenWeights) -> None:
        self._sites = [site for site in sites if site.weight is not None]
        self._given = given
        taken = set(given.names.values())
        self._free = {name: weight for name, weight in given.weights.items() if name not in taken}
        """What no explicit name speaks for."""
        self._prefix = self._common_prefix()

    def matches(self) -> dict[str, _Match]:
        """Returns the weight of each site that has one, by the site's name.

        Raises:
            ContractError: an explicit name is not in the checkpoint, or not in the model.
        """
        self._check_explicit()
        return {site.name: match for site in self._sites if (match := self._match(site)) is not None}

    def _match(self, site: MatMulSite) -> _Match | None:
        weights, names = self._given.weights, self._given.names
        for key in (site.weight, site.name, site.module):
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
        found: dict[tuple[str, str], set[str]] = {}
        for site in self._sites:
            named = any(key in self._given.names for key in (site.weight, site.name, site.module))
            if named or any(name in self._free for name, _ in _candidates(site)):
                continue
            prefixes: set[tuple[str, str]] = set()
            for candidate, _ in _candidates(site):
                if longer := shorter.get(candidate):
                    prefixes.add((longer.removesuffix(candidate), ""))
                prefixes |= {("", candidate.removesuffix(tail)) for tail in _tails(candidate) if tail in self._free}
            for prefix in prefixes:
                found.setdefault(prefix, set()).add(site.name)
        best = max(found, key=lambda prefix: len(found[prefix]), default=("", ""))
        others = [p for p in found if p[1] and len(found[p]) == len(found[best]) and found[p] != found[best]]
        if others:
            told = ", ".join(repr(removed) for _, removed in (best, *others))
            advice = ("name them with ", Option("weight_names"))
            what = f"its weights fit as many of the model's without {told}"
            raise ContractError(self._given.where, what, expected="one prefix for all", advice=advice)
        return best

    def _check_explicit(self) -> None:
        keys = {key for site in self._sites for key in (site.weight, site.name, site.module)}
        for mine, theirs in self._given.names.items():
            if theirs not in self._given.weights:
                what = f"{mine!r} is mapped to {theirs!r}, which is not among its MXFP8 weights"
                advice = ("correct ", Option("weight_names"))
                raise ContractError(self._given.where, what, expected="the name of a weight", advice=advice)
            if mine not in keys:
                what = f"{mine!r}, mapped to {theirs!r}, is no weight, matmul or module of the model"
                advice = ("correct ", Option("weight_names"))
                raise ContractError(self._given.where, what, expected="a name as --dry-run prints it", advice=advice)


def _tails(name: str) -> Iterator[str]:
    """Yields what is left of a dotted name without its first components, but for its last alone."""
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(1, len(parts) - 1))
