"""Matches the weights of a checkpoint with matmuls, by name. Pure data: knows neither files nor graphs.

A checkpoint decides which weights are packed, instead of the recipe's default policy: its MXFP8 weights are packed in
the model too, and no others, since nothing is quantized here. The recipe decides the rest: activations, exclusions and
fusion.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mxfp8_graph.files import data_path_of, is_any_of
from mxfp8_graph.policy.plan import Decision, MatMulSite
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops.errors import ContractError, Option


class StoredWeight(Protocol):
    """A packed weight of a checkpoint, which is read on each access."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the elements, [..., N, K]."""

    @property
    def element_format(self) -> str:
        """Either "e4m3" or "e5m2"."""

    @property
    def elements(self) -> npt.NDArray[np.uint8]:
        """uint8 codes [..., N, K]."""

    @property
    def scales(self) -> npt.NDArray[np.uint8]:
        """uint8 E8M0 codes [..., N, ceil(K / 32)]."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWeights:
    """Packed weights of a checkpoint, whose bytes replace the model's own weights."""

    where: str
    """Name of the checkpoint in messages."""
    weights: Mapping[str, StoredWeight]
    """Weights by their name in the checkpoint."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name of a weight, node or module in the model -> name of its weight in the checkpoint, where they differ."""
    replaces_all: bool = False
    """Whether the model has no values of its own, so that every weight must be used."""
    others: tuple[str, ...] = ()
    """Names of tensors of the checkpoint that are not in MXFP8; the model keeps its own values for them."""
    files: frozenset[Path] = frozenset()
    """Files of the weights and of their names."""

    def refuse_output(self, output: Path) -> None:
        """Raises ContractError if a result would replace one of the files, itself or by its external data."""
        for path in (output, data_path_of(output)):
            if is_any_of(path, self.files):
                another = ("pass another ", Option("output"))
                raise ContractError(path, "is a file of the checkpoint", expected="another file", advice=another)


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
    by_place = [stored[by_site[site.name]] if site.name in by_site else None for site in sites]
    result = [_decided(decision, weight, recipe) for decision, weight in zip(decisions, by_place, strict=True)]
    pairs = zip(result, by_place, strict=True)
    matched = {each.site.name: (each, weight) for each, weight in pairs if weight is not None}
    users = defaultdict[str, dict[str, None]](dict)
    for decision, weight in matched.values():
        # By weight and not by site: sites that share a weight of the model may share a weight of the checkpoint.
        users[weight.name][str(decision.site.weight)] = None
    problems = [f"{name!r} matches nothing in the model" for name in stored if name not in users]
    problems += filter(None, (_obstacle(decision, weight, checkpoint) for decision, weight in matched.values()))
    several = {name: own for name, own in users.items() if len(own) > 1 and name not in checkpoint.names.values()}
    problems += [f"{name!r} fits several weights: {', '.join(own)}" for name, own in several.items()]
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
        factor = "a factor for each channel" if math.isnan(site.weight_factor) else str(site.weight_factor)
        return f"{where}: the model uses {factor} times the weight, which packed bytes cannot express"
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
    for name, stored in checkpoint.names.items():
        if name not in known or stored not in checkpoint.weights:
            expected = "a weight, matmul or module of the model, as --dry-run prints it, and one of its MXFP8 weights"
            advice = ("correct ", Option("weight_names"))
            raise ContractError(checkpoint.where, f"{name!r} is mapped to {stored!r}", expected=expected, advice=advice)
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
    return {site: stored for site, name in names if (stored := more + name.removeprefix(less)) in free}


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
