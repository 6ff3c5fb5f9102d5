"""Matches the weights of a checkpoint with matmuls, by name. Pure data: knows neither files nor graphs.

A checkpoint decides which weights are packed, instead of the recipe's default policy: its MXFP8 weights are packed in
the model too, and no others, since nothing is quantized here. The recipe decides the rest: activations, exclusions and
fusion.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from mxfp8_graph.options import CheckpointWeights, StoredWeight
from mxfp8_graph.policy.plan import Decision, MatMulSite
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops.errors import ContractError, Option


@dataclass(frozen=True)
class Assigned:
    """The plan with a checkpoint."""

    decisions: list[Decision]
    weights: Mapping[str, StoredWeight]
    """The weight of each rewritten site with a static operand, by the site's name."""
    notes: tuple[str, ...] = ()
    """Notes for the report."""


def apply_checkpoint(
    sites: Sequence[MatMulSite], decisions: Sequence[Decision], recipe: Recipe, checkpoint: CheckpointWeights | None
) -> Assigned:
    """Returns the decision on each site if a checkpoint supplies the weights; without one, `decisions`.

    Raises:
        ContractError: some weights fit no matmul by name, shape or place. All are listed.
    """
    if checkpoint is None:
        return Assigned(list(decisions), {})
    stored, by_site = checkpoint.weights, _names([site for site in sites if site.weight is not None], checkpoint)
    theirs = [stored[by_site[site.name]] if site.name in by_site else None for site in sites]
    result = [_decided(decision, weight, recipe) for decision, weight in zip(decisions, theirs, strict=True)]
    pairs = zip(result, theirs, strict=True)
    matched = {each.site.name: (each, weight) for each, weight in pairs if weight is not None}
    takers = defaultdict[str, dict[str, None]](dict)
    for decision, weight in matched.values():
        # By weight and not by site: sites that share a weight of the model may share a weight of the checkpoint.
        takers[weight.name][str(decision.site.weight)] = None
    problems = [f"{name!r} matches nothing in the model" for name in stored if name not in takers]
    problems += filter(None, (_obstacle(decision, weight, checkpoint) for decision, weight in matched.values()))
    several = {name: mine for name, mine in takers.items() if len(mine) > 1 and name not in checkpoint.names.values()}
    problems += [f"{name!r} fits several weights: {', '.join(mine)}" for name, mine in several.items()]
    # All problems in one error: a user who writes weight_names needs the whole list, and not one name a run.
    if problems:
        model = [*dict.fromkeys(site.weight for site in sites if site.weight is not None)]
        shown = ", ".join(model[:10]) + (", ..." if len(model) > 10 else "") or "none"
        advice = ("name them with ", Option("weight_names"), f". Weights of the model: {shown}")
        expected = "a matmul of that name and shape for each weight"
        raise ContractError(checkpoint.where, "; ".join(problems), expected=expected, advice=advice)
    weights = {name: weight for name, (decision, weight) in matched.items() if decision.quantize}
    notes = [f"{len(weights)} matmuls take the bytes of {len(stored)} weights of {checkpoint.where}"]
    if others := checkpoint.others:
        names = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        notes.append(f"the model keeps its own values for what is not MXFP8 in {checkpoint.where}: {names}")
    return Assigned(result, weights, tuple(notes))


def _decided(decision: Decision, weight: StoredWeight | None, recipe: Recipe) -> Decision:
    """Returns the decision on a site; `weight` is its MXFP8 weight in the checkpoint, or None."""
    # A checkpoint overrules the default policy, but no rule that a user wrote.
    if decision.site.weight is None or not (decision.quantize or decision.rule in {"policy", "checkpoint"}):
        return decision
    if weight is None:
        reason = "the checkpoint does not have it in MXFP8, and nothing else is quantized"
        return replace(decision, kind="checkpoint", rule="checkpoint", reason=reason)
    if not decision.quantize:
        decision = replace(decision, kind="quantized", rule="checkpoint", activations=recipe.activations)
    reason = f"the checkpoint has it in MXFP8, as {weight.name!r}"
    return replace(decision, reason=reason, weight_format=weight.element_format)


def _obstacle(decision: Decision, weight: StoredWeight, checkpoint: CheckpointWeights) -> str | None:
    """Returns the reason why a site cannot take its weight, or None."""
    site = decision.site
    where = f"{weight.name!r} for {site.module or site.name!r}"
    # A blocked site may have no shape; its blocker is more useful than an empty list of sizes.
    if weight.shape != site.weight_shape and not (site.blocker and not site.weight_shape):
        return f"{where}: {list(weight.shape)}, and the model multiplies with [..., N, K] = {list(site.weight_shape)}"
    # With `replaces_all` the model has no values of its own, so a weight that stays in high precision would have none.
    if not decision.quantize and (decision.rule == "structure" or checkpoint.replaces_all):
        return f"{where}: {decision.reason}"
    # Packed bytes are written as they are; a factor would have to be rounded into them.
    if site.weight_factor != 1.0:
        return f"{where}: the model uses {site.weight_factor} times the weight, which packed bytes cannot express"
    return None


def _candidates(site: MatMulSite) -> list[str]:
    """Returns the possible names of a site's weight in a checkpoint, best last: by its module, or its own."""
    weight = site.weight or ""
    # torch's older exporter names a node by its module and its op: /model/layers.0/mlp/up_proj/MatMul.
    modules = (site.name.strip("/").rpartition("/")[0].replace("/", "."), site.module)
    # The name m.proj says which parameter of module m it is, so the weight is not m.weight.
    return [*(f"{module}.weight" for module in modules if module and not weight.startswith(f"{module}.")), weight]


def _names(sites: Sequence[MatMulSite], checkpoint: CheckpointWeights) -> dict[str, str]:
    """Returns site name -> name of its weight in the checkpoint; a site without one is left out."""
    keys = [(site.name, key) for site in sites for key in (site.module, site.name, site.weight) if key]
    known = {key for _, key in keys}
    for mine, theirs in checkpoint.names.items():
        if mine not in known or theirs not in checkpoint.weights:
            expected = "a weight, matmul or module of the model, as --dry-run prints it, and one of its MXFP8 weights"
            advice = ("correct ", Option("weight_names"))
            raise ContractError(checkpoint.where, f"{mine!r} is mapped to {theirs!r}", expected=expected, advice=advice)
    free = checkpoint.weights.keys() - set(checkpoint.names.values())
    explicit = {site: checkpoint.names[key] for site, key in keys if key in checkpoint.names}
    left = [site for site in sites if site.name not in explicit]
    exact = _matches(left, free)
    # One prefix for all the others. With a prefix for each, a weight could match another layer's whose name ends alike.
    left, free = [site for site in left if site.name not in exact], free - set(exact.values())
    prefixes = Counter(_prefixes(left, free)).most_common(2)
    if len(prefixes) == 2 and prefixes[0][1] == prefixes[1][1]:
        what = "its names match the model's with several prefixes: " + ", ".join(repr("".join(p)) for p, _ in prefixes)
        advice = ("name them with ", Option("weight_names"))
        raise ContractError(checkpoint.where, what, expected="one prefix for all", advice=advice)
    return explicit | exact | (_matches(left, free, *prefixes[0][0]) if prefixes else {})


def _matches(sites: Sequence[MatMulSite], free: AbstractSet[str], more: str = "", less: str = "") -> dict[str, str]:
    """Returns site name -> the name in `free` that is a candidate with prefix `more`, or without prefix `less`."""
    names = ((site.name, name) for site in sites for name in _candidates(site) if name.startswith(less))
    return {site: theirs for site, name in names if (theirs := more + name.removeprefix(less)) in free}


def _prefixes(sites: Sequence[MatMulSite], free: AbstractSet[str]) -> Iterator[tuple[str, str]]:
    """Yields (prefix, "") if a checkpoint's name is prefix + candidate, and ("", prefix) in the reverse case."""
    longer = {tail: name.removesuffix(tail) for name in sorted(free) for tail in _tails(name)}
    for candidate in (name for site in sites for name in _candidates(site)):
        if candidate in longer:
            yield longer[candidate], ""
        yield from (("", candidate.removesuffix(tail)) for tail in _tails(candidate) if tail in free)


def _tails(name: str) -> list[str]:
    """Returns a dotted name without its first component, its first two, ..., as long as two are left."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts) - 1)]
