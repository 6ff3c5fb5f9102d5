"""Patterns for a recipe's `exclude:` that match some sites, and no other."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import yaml

from mxfp8_graph.policy.plan import MatMulSite, plan
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops.errors import RecipeError


def patterns(excluded: Sequence[str], sites: Sequence[MatMulSite], recipe: Recipe) -> tuple[str, ...]:
    """Returns one pattern per site named in `excluded`, in that order: its module path, or its name if that is shared.

    The module path comes first since an ONNX model and a program of the same module have it in common.

    Raises:
        RecipeError: no pattern matches one of two sites and not the other.
    """
    found = anchored(excluded, sites)
    _check(found, excluded, sites, recipe)
    return found


def anchored(names: Sequence[str], sites: Sequence[MatMulSite]) -> tuple[str, ...]:
    """Returns one pattern per site that is named, as `patterns` does, without a look at what they do in a plan."""
    by_name = {site.name: site for site in sites}
    found = []
    for site in (by_name[name] for name in names):
        choices = [f"^{re.escape(name)}$" for name in (site.module, site.name) if name]
        alone = (p for p in choices if not any(_found(p, other) for other in sites if other is not site))
        found.append(next(alone, choices[-1]))
    return tuple(found)


def to_yaml(patterns: Sequence[str]) -> str:
    """Returns the lines to paste into a recipe file."""
    return yaml.safe_dump({"exclude": list(patterns)}, width=10_000) if patterns else ""


def _found(pattern: str, site: MatMulSite) -> bool:
    return bool(re.search(pattern, site.name) or re.search(pattern, site.module))


def _check(found: Sequence[str], excluded: Collection[str], sites: Sequence[MatMulSite], recipe: Recipe) -> None:
    """Asks the plan itself what the patterns do."""
    before = {decision.site.name for decision in plan(sites, recipe) if decision.quantize}
    after = {decision.site.name for decision in plan(sites, recipe.excluding(found)) if decision.quantize}
    if other := sorted((before - after) ^ set(excluded)):
        what = f"no pattern tells {other[0]!r} from other matmuls by name or module path"
        raise RecipeError("exclude", what, expected="names that differ", advice="name the nodes of the model")
