"""The result of an analysis: what was measured of a site, of a layer, and of a set of sites.

A layer has the sites whose names begin alike, up to a number: "encoder.layer.3.output.dense" is in "encoder.layer.3".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from mxfp8_graph.policy.plan import MatMulSite
from mxfp8_graph.report.base import Data, Report
from mxfp8_graph.report.data import SiteReport, sizes
from mxfp8_graph.report.section import Cell, Columns, Section, filled, number
from mxfp8_graph.tools.analyze.input_statistics import InputStatistics
from mxfp8_graph.tools.metrics import METRICS, Metric, Score

SCHEMA: Final = 1
"""Version of the layout of `Analysis.to_dict`; it grows when a key changes its meaning or goes away."""

SHOWN: Final = 20
"""Sites and layers that a terminal shows unless all are asked for."""
_RELATIVE_L2: Final = METRICS["relative_l2"]
_SQNR_HEADER: Final = ("weight SQNR dB", "input SQNR dB", "amax", "outlier blocks", "lost")


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


@dataclass(frozen=True, kw_only=True)
class Analysis(Report):
    """What `analyze` found."""

    TITLE = "Analysis of {source}"
    FILES = ("source",)
    KEYS = (
        "schema source recipe inputs synthesised samples isa metric=metric.name everything exclusion "
        "runs seconds notes layers sites kept"
    )
    schema: ClassVar[int] = SCHEMA

    source: str
    recipe: dict[str, Any]
    inputs: str
    """The samples in words."""
    synthesised: bool
    samples: int
    isa: str
    """The instruction set the kernels ran on."""
    metric: Metric
    """What the sites are ranked by."""
    everything: Scores
    """Errors of the outputs, with all sites rewritten, not fused."""
    sites: tuple[SiteDamage, ...]
    """The rewritten sites, the one that does the most damage alone first."""
    layers: tuple[Layer, ...]
    kept: tuple[SiteReport, ...]
    """Sites that were not analyzed: the recipe keeps them, or they cannot be switched."""
    exclusion: Exclusion | None
    """None if no site does damage, or there is one site only."""
    runs: int
    """Runs of the model, for all samples together."""
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def by_depth(self) -> tuple[SiteDamage, ...]:
        """The rewritten sites in the order of the graph."""
        return tuple(sorted(self.sites, key=lambda site: site.depth))

    def sections(self) -> Iterator[Section]:
        """Yields the ranking, the layers, what there is to know beside them, and the lines to paste."""
        header, sites = self.site_table()
        modules = {site.site.decision.site.module for site in self.sites} - {""}
        named = len(modules) == len(sites)  # node names are generated by exporters, so module paths replace them
        yield Section(
            title="Sites, the one that does most damage first",
            columns=(header[named:], [row[named:] for row in sites]),
            bar=f"alone, {self.metric.shown_title}",
            most=SHOWN,
        )
        if len(self.layers) > 1:
            yield Section(title="Layers", columns=self.layer_table(), bar="share", most=SHOWN)
        yield Section(facts=self.facts())
        if self.exclusion is not None:
            yield Section(title="To paste into a recipe file", text=self.exclusion.yaml)

    def answer(self) -> str:
        """Returns the outcome in one line."""
        worst = f"; {self.sites[0].label} hurts most" if len(self.sites) > 1 else ""
        return f"{len(self.sites)} rewritten sites analyzed with recipe {self.recipe['name']}{worst}"

    def facts(self) -> list[tuple[str, str]]:
        """Returns what there is to know beside the sites."""
        lines = [("inputs", self.inputs), ("kernels", self.isa)]
        lines += [("everything rewritten", score_text(score)) for score in self.everything.values()]
        if (chosen := self.exclusion) is not None:
            count, share = len(chosen.sites), f"{chosen.share:.1%} of the rewritten weights' bytes"
            scores = "; ".join(score_text(score) for score in chosen.scores.values())
            lines.append(("excluded", f"the {count} worst, {share}: measured, {scores}"))
        lines.append(("time", f"{self.seconds:.1f} s, {self.runs} runs"))
        if self.kept:
            lines.append(("not analyzed", f"{len(self.kept)} matmuls and embeddings that the recipe keeps"))
        return lines + [("note", note) for note in self.notes]

    def site_table(self) -> Columns:
        """Returns (header, a row per site)."""
        title = self.metric.shown_title
        relative = () if self.metric is _RELATIVE_L2 else (f"alone, {_RELATIVE_L2.title}",)
        header = ("site", "module", "M x N x K", f"alone, {title}", *relative, f"all but it, {title}", *_SQNR_HEADER)
        return filled(header, [_row(site, self.metric) for site in self.sites])

    def layer_table(self) -> Columns:
        """Returns (header, a row per layer)."""
        rows = [
            (a.name, number(len(a.sites), "d"), number(a.relative_l2, ".4g"), number(a.share, ".1%"))
            for a in self.layers
        ]
        return ("layer", "sites", "relative L2, estimated", "share"), rows


def score_text(score: Score) -> str:
    """Returns a score in words."""
    metric = score.metric
    worst = f" (worst {metric.shown(score.worst):.4g}, sample {score.worst_sample + 1})" * (len(score.values) > 1)
    return f"{metric.shown_title} {metric.shown(score.mean):.4g}{worst}"


def _row(site: SiteDamage, metric: Metric) -> tuple[Cell, ...]:
    matmul, seen = site.site.decision.site, site.input
    relative = () if metric is _RELATIVE_L2 else (_score(site.alone[_RELATIVE_L2.name]),)
    inputs = (seen.sqnr_db, seen.amax, seen.outlier_blocks, seen.lost) if seen else (None,) * 4
    return (
        site.site.path,
        matmul.module,
        sizes(matmul),
        _score(site.alone[metric.name]),
        *relative,
        _score(site.without[metric.name]),
        number(site.site.sqnr_db, ".1f"),
        *(number(*pair) for pair in zip(inputs, (".1f", ".4g", ".2%", ".2%"), strict=True)),
    )


def _score(score: Score) -> Cell:
    return number(score.metric.shown(score.mean), ".4g")


_NUMBERED: Final = (re.compile(r"^(.*?(?:^|[./])\d+)(?=[./])"), re.compile(r"^(.*?\d+)(?=[./])"))
"""A name up to its first part that is a number; or else that ends in one. Something must follow."""

OTHERS: Final = "(others)"
"""The layer of sites whose name has no number."""


def layer_of(site: MatMulSite) -> str:
    """Returns the layer that a site's module path, or else its name, puts it in."""
    found = filter(None, (pattern.match(site.module or site.name) for pattern in _NUMBERED))
    return next((match[1] for match in found), OTHERS)


def by_layer(sites: Sequence[MatMulSite]) -> dict[str, list[int]]:
    """Returns the indices of the sites in each layer, both in the order of `sites`."""
    layers: dict[str, list[int]] = {}
    for index, site in enumerate(sites):
        layers.setdefault(layer_of(site), []).append(index)
    return layers
