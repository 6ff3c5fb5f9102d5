"""What was measured of one site, of one layer, and of a set of sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mxfp8_graph.report.base import Data
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.tools.analyze.input_statistics import InputStatistics
from mxfp8_graph.tools.metrics import Score

Scores = Mapping[str, Score]
"""By the name of the metric."""


@dataclass(frozen=True, kw_only=True)
class SiteDamage(Data):
    """What rewriting one site does."""

    KEYS = "depth alone without input"

    site: SiteReport
    """What a rewrite makes of it, the error of its weight included."""
    depth: int
    """How many sites with a switch come before it in the graph."""
    alone: Scores
    """Errors of the outputs, with this site alone rewritten."""
    without: Scores
    """Errors of the outputs, with everything but this site rewritten."""
    input: InputStatistics | None
    """None for an embedding, and inside of subgraphs."""

    @property
    def label(self) -> str:
        """What to call the site: its module path, or its name."""
        return self.site.decision.site.module or self.site.decision.site.name

    def content(self) -> dict[str, Any]:
        """Returns what the JSON has."""
        return {**self.site.content(), **super().content()}


@dataclass(frozen=True, kw_only=True)
class Layer(Data):
    """Sites whose names begin alike."""

    KEYS = "name estimated_relative_l2=relative_l2 share sites"

    name: str
    sites: tuple[str, ...]
    relative_l2: float
    """Estimated: the root of the sum of the squares of what its sites do alone."""
    share: float
    """Share of that sum over all sites."""


@dataclass(frozen=True, kw_only=True)
class Exclusion(Data):
    """Sites to keep in high precision, and what that gives."""

    KEYS = "sites exclude=patterns weight_bytes all_weight_bytes scores"

    sites: tuple[str, ...]
    """Their names, the worst first."""
    patterns: tuple[str, ...]
    """For the recipe's `exclude`: each matches one of them, and no other matmul of the model."""
    yaml: str
    """The lines to paste into a recipe file, with what the recipe excludes already."""
    weight_bytes: int
    """Bytes of their weights, as the model has them."""
    all_weight_bytes: int
    """Bytes of the weights of all sites that the recipe rewrites."""
    scores: Scores
    """Measured, of the outputs, with everything but them rewritten."""

    @property
    def share(self) -> float:
        """Their share of the weight bytes."""
        return self.weight_bytes / self.all_weight_bytes if self.all_weight_bytes else 0.0
