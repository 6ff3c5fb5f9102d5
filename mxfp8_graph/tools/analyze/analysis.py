"""The result of an analysis: the errors of sites, of layers, and of the proposed exclusion.

A layer has the sites whose names begin alike, up to a number: "encoder.layer.3.output.dense" is in "encoder.layer.3".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from mxfp8_graph.policy.plan import MatMulSite, counted
from mxfp8_graph.report.bars import Depths
from mxfp8_graph.report.base import Data
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.report.section import Columns, Head, Section, Tile, filled, number
from mxfp8_graph.running.report import Measurement
from mxfp8_graph.tools.analyze.input_statistics import InputStatistics
from mxfp8_graph.tools.metrics import RELATIVE_L2, Metric, Score

SHOWN: Final = 20
"""Number of sites and layers that a terminal shows by default."""

Scores = Mapping[str, Score]
"""Scores by the name of the metric."""


@dataclass(frozen=True, kw_only=True)
class SiteDamage(Data):
    """The damage of one site: the errors of the outputs if it is rewritten."""

    KEYS = "depth alone without input"

    site: SiteReport
    depth: int
    """Number of sites with a switch that come before it in the graph."""
    alone: Scores
    """Errors of the outputs, with this site alone rewritten."""
    without: Scores
    """Errors of the outputs, with everything but this site rewritten."""
    input: InputStatistics | None
    """None for an embedding, and inside of subgraphs."""

    @property
    def label(self) -> str:
        """The module path of the site, or its name."""
        return self.site.decision.site.module or self.site.decision.site.name

    @property
    def square(self) -> float:
        """Squared relative L2 error of the site alone, infinite for NaN; squares of the errors of sites add up."""
        return RELATIVE_L2.badness(self.alone[RELATIVE_L2.name].mean) ** 2

    def content(self) -> dict[str, Any]:
        """Returns the entries of the site in the JSON."""
        return {**self.site.content(), **super().content()}


@dataclass(frozen=True, kw_only=True)
class Layer(Data):
    """Sites whose names begin alike."""

    KEYS = "name estimated_relative_l2=relative_l2 share sites"

    name: str
    sites: tuple[str, ...]
    relative_l2: float
    """Estimated: the root of the sum of the squared errors of its sites."""
    share: float
    """Share of the squared errors of all sites."""


@dataclass(frozen=True, kw_only=True)
class Exclusion(Data):
    """Sites to keep in high precision, and the errors after that."""

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
    """Measured errors of the outputs, with all other sites rewritten."""

    @property
    def share(self) -> float:
        """Their share of the weight bytes."""
        return self.weight_bytes / self.all_weight_bytes if self.all_weight_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Analysis(Measurement):
    """The sites of a model, ranked by the damage of rewriting them."""

    TITLE = "Analysis of {source}"
    FILES = ("source",)
    KEYS = (
        "schema source recipe inputs synthesised samples isa metric=metric.name everything exclusion "
        "runs seconds advice? notes layers sites kept"
    )
    schema: ClassVar[int] = 2
    """Version of the layout of the JSON; it grows when a key changes its meaning or goes away."""

    source: str
    recipe: dict[str, Any]
    synthesised: bool
    samples: int
    metric: Metric
    """The metric of the ranking."""
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
    advice: str = ""
    """A better preset for this processor than the recipe; "" if there is none."""

    def answer(self) -> str:
        """Returns a sentence with the sites to exclude, and the error before and after."""
        title, count = self.metric.shown_title, counted([each.site.decision.site for each in self.sites])
        before = self.metric.shown(self.everything[self.metric.name].mean)
        if self.exclusion is None:
            return f"Nothing to exclude: {title} {before:.3g} with all {count} rewritten."
        after, chosen = self.metric.shown(self.exclusion.scores[self.metric.name].mean), len(self.exclusion.sites)
        worst = f"the worst {chosen} of {count}, {self.exclusion.share:.1%} of the weights"
        return f"Exclude {worst}, first {self.sites[0].label}: {title} {after:.3g} instead of {before:.3g}."

    def head(self) -> Head:
        """Returns the error without and with the exclusion, and what that keeps."""
        title, name = self.metric.shown_title, self.metric.name
        before = f"{self.metric.shown(self.everything[name].mean):.3g}"
        if self.exclusion is None:
            tiles = [Tile("error", before, note=f"{title}, everything rewritten")]
        else:
            after = f"{self.metric.shown(self.exclusion.scores[name].mean):.3g}"
            tiles = [Tile("error", after, before, f"{title}, after exclusion")]
            kept = f"{len(self.exclusion.sites)} of {len(self.sites)}"
            tiles.append(Tile("excluded", kept, note=f"{self.exclusion.share:.0%} of the weights"))
        if self.sites:
            worst = f"{self.metric.shown(self.sites[0].alone[name].mean):.3g}"
            tiles.append(Tile("the worst alone", worst, note=self.sites[0].label))
        return Head(verdict="warning" if self.exclusion else "good", tiles=tiles)

    def _depths(self) -> Depths | None:
        """Returns the errors of single sites in the order of the graph; None without a finite one."""
        excluded = self.exclusion.sites if self.exclusion else ()
        columns = []
        for each in sorted(self.sites, key=lambda each: each.depth):
            site, value = each.site.decision.site, each.alone[self.metric.name].mean
            if math.isfinite(shown := self.metric.shown(value)):
                columns.append((layer_of(site), each.label, shown, site.name in excluded))
        return Depths(title=f"alone, {self.metric.shown_title}", columns=columns) if columns else None

    def sections(self) -> Iterator[Section]:
        """Yields the lines to paste, the facts, the ranking and the layers."""
        marked = "; blue: excluded" if self.exclusion else ""
        yield Section(title=f"Error of each site alone, by depth{marked}", picture=self._depths())
        if self.exclusion is not None:
            yield Section(title="To paste into a recipe file", text=self.exclusion.yaml)
        yield Section(facts=self.facts())
        header, sites = self.site_table()
        modules = {site.site.decision.site.module for site in self.sites} - {""}
        named = len(modules) == len(sites)  # exporters generate node names, so unique module paths replace them
        yield Section(
            title="Sites, the one that does most damage first",
            columns=(header[named:], [row[named:] for row in sites]),
            bar=f"alone, {self.metric.shown_title}",
            most=SHOWN,
            folded=True,
        )
        if len(self.layers) > 1:
            rows = [
                (a.name, number(len(a.sites), "d"), number(a.relative_l2, ".4g"), number(a.share, ".1%"))
                for a in self.layers
            ]
            columns = ("layer", "sites", "relative L2, estimated", "share"), rows
            yield Section(title="Layers", columns=columns, bar="share", most=SHOWN)

    def facts(self) -> list[tuple[str, str]]:
        """Returns (label, value) pairs beside the sites."""
        lines = [("inputs", self.inputs), ("kernels", self.isa), ("recipe", str(self.recipe["name"]))]
        lines += [("everything rewritten", str(score)) for score in self.everything.values()]
        if self.exclusion is not None:
            lines.append(("after exclusion", "; ".join(map(str, self.exclusion.scores.values()))))
        lines.append(("time", f"{self.seconds:.1f} s, {self.runs} runs"))
        lines += [("advice", self.advice)] * bool(self.advice)
        if self.kept:
            kept = counted([each.decision.site for each in self.kept])
            lines.append(("not analyzed", f"{kept} that the recipe keeps"))
        return lines + [("note", note) for note in self.notes]

    def site_table(self) -> Columns:
        """Returns (header, a row per site)."""
        metrics = dict.fromkeys((self.metric, RELATIVE_L2))
        errors = [*(f"alone, {metric.shown_title}" for metric in metrics), f"all but it, {self.metric.shown_title}"]
        inputs = ("input SQNR dB", "amax", "outlier blocks", "lost")
        rows = []
        for damage in self.sites:
            scores = [*(damage.alone[metric.name] for metric in metrics), damage.without[self.metric.name]]
            stats = damage.input
            numbers = (stats.sqnr_db, stats.amax, stats.outlier_blocks, stats.lost) if stats else (None,) * 4
            cells = [
                *(number(score.metric.shown(score.mean), ".4g") for score in scores),
                *(number(*pair) for pair in zip(numbers, (".1f", ".4g", ".2%", ".2%"), strict=True)),
            ]
            rows.append((damage.site.path, damage.site.decision.site.module, *cells))
        return filled(("site", "module", *errors, *inputs), rows)


_NUMBERED: Final = (re.compile(r"^(.*?(?:^|[./])\d+)(?=[./])"), re.compile(r"^(.*?\d+)(?=[./])"))
"""A name up to its first part that is a number, or else up to its first part that ends in one; a part must follow."""


def layer_of(site: MatMulSite) -> str:
    """Returns the layer of a site by its module path, or else its name; "(others)" for a name without a number."""
    matches = filter(None, (pattern.match(site.module or site.name) for pattern in _NUMBERED))
    return next((match[1] for match in matches), "(others)")


def layers_of(sites: Sequence[SiteDamage]) -> list[Layer]:
    """Returns the layers, the one that does the most damage first."""
    groups: dict[str, list[SiteDamage]] = {}
    for site in sites:
        groups.setdefault(layer_of(site.site.decision.site), []).append(site)
    total = sum(site.square for site in sites)
    layers = []
    for name, group in groups.items():
        # The squares of the errors of single sites add up, see `SiteDamage.square`.
        square = sum(site.square for site in group)
        # Without damage, or with a NaN, there are no shares.
        share = square / total if 0 < total < math.inf else 0.0
        names = tuple(site.site.decision.site.name for site in group)
        layers.append(Layer(name=name, sites=names, relative_l2=math.sqrt(square), share=share))
    return sorted(layers, key=lambda layer: -layer.relative_l2)
