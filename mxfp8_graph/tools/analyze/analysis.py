"""What an analysis found, as data, as JSON and as a page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from mxfp8_graph.report import html
from mxfp8_graph.report.data import Report, SiteReport, filled, sizes
from mxfp8_graph.tools.analyze.damage import Exclusion, Layer, Scores, SiteDamage, plain
from mxfp8_graph.tools.metrics import METRICS, Metric, Score

SCHEMA: Final = 1
"""Version of the layout of `Analysis.to_dict`; it grows when a key changes its meaning or goes away."""

MOST_BARS: Final = 60
"""Bars of a ranking; the table has all sites."""
MOST_NAMED: Final = 5
"""Sites that have their name in the chart, the worst ones."""
_RELATIVE_L2: Final = METRICS["relative_l2"]
_SQNR_HEADER: Final = ("weight SQNR dB", "input SQNR dB", "amax", "outlier blocks", "lost")


@dataclass(frozen=True, kw_only=True)
class Analysis(Report):
    """What `analyze` found."""

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

    def to_dict(self) -> dict[str, Any]:
        """Returns everything with JSON types only. Numbers that JSON lacks (NaN, infinity) are None."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "recipe": self.recipe,
            "inputs": self.inputs,
            "synthesised": self.synthesised,
            "samples": self.samples,
            "isa": self.isa,
            "metric": self.metric.name,
            "everything": plain(self.everything),
            "exclusion": self.exclusion.to_dict() if self.exclusion else None,
            "runs": self.runs,
            "seconds": self.seconds,
            "notes": list(self.notes),
            "layers": [layer.to_dict() for layer in self.layers],
            "sites": [site.to_dict() for site in self.sites],
            "kept": [site.to_dict() for site in self.kept],
        }

    def to_html(self) -> str:
        """Returns one self-contained page."""
        first = {"everything rewritten", "excluded"}
        lead = [f"{headline(self)}.", *(f"{key.capitalize()}: {said}." for key, said in facts(self) if key in first)]
        parts = [html.facts(fact for fact in facts(self) if fact[0] not in first)]
        if self.exclusion:
            parts.append(html.text("To paste into a recipe", self.exclusion.yaml))
        return html.page(f"Analysis of {self.source}", [*parts, *self._parts()], lead=lead, files=[self.source])

    def _parts(self) -> Iterator[str]:
        """Yields the charts and tables of the page."""
        title, metric = self.metric.shown_title, self.metric
        errors = [(site, metric.shown(site.alone[metric.name].mean)) for site in self.sites]
        known = [(site, error) for site, error in errors if math.isfinite(error)]
        bars = [(site.label, [0, error], f"{error:.3g}") for site, error in known[:MOST_BARS]]
        if math.isfinite(total := metric.shown(self.everything[metric.name].mean)):
            bars.insert(0, ("everything rewritten", [total], f"{total:.3g}"))
        if bars:
            which = f"the worst {MOST_BARS} of {len(self.sites)}" if len(known) > MOST_BARS else f"all {len(known)}"
            yield html.bars(f"Mean {title} at the outputs, each site alone: {which}", bars)
        points = [
            html.Point(site.depth, error, 3, f"{site.label}: {error:.3g}", site.label if place < MOST_NAMED else "")
            for place, (site, error) in enumerate(known)
        ]
        heading = f"Mean {title}, each site alone, along the depth of the network"
        yield html.Chart(heading=heading, points=points, axis="place in the graph", legend={}).html()
        yield html.Table("Layers", *self.layer_table()).html()
        matmuls = [site.site.decision.site for site in self.sites]
        notes = [f"{matmul.module} {sizes(matmul)}".strip() for matmul in matmuls]
        table = html.Table("Sites, the one that does most damage first", *self.site_table(), notes=notes)
        yield table.without("module", "M x N x K", "weight SQNR dB").html()

    def site_table(self) -> html.Columns:
        """Returns (header, a row per site)."""
        title = self.metric.shown_title
        relative = () if self.metric is _RELATIVE_L2 else (f"alone, {_RELATIVE_L2.title}",)
        header = ("site", "module", "M x N x K", f"alone, {title}", *relative, f"all but it, {title}", *_SQNR_HEADER)
        return filled(header, [_row(site, self.metric) for site in self.sites])

    def layer_table(self) -> html.Columns:
        """Returns (header, a row per layer)."""
        rows = [
            (a.name, html.number(len(a.sites), "d"), html.number(a.relative_l2, ".4g"), html.number(a.share, ".1%"))
            for a in self.layers
        ]
        return ("layer", "sites", "relative L2, estimated", "share"), rows


def headline(analysis: Analysis) -> str:
    """Returns the outcome in one line."""
    worst = f"; {analysis.sites[0].label} hurts most" if len(analysis.sites) > 1 else ""
    return f"{len(analysis.sites)} rewritten sites analyzed with recipe {analysis.recipe['name']}{worst}"


def facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Returns what there is to know beside the sites."""
    lines = [("inputs", analysis.inputs), ("kernels", analysis.isa)]
    lines += [("everything rewritten", score_text(score)) for score in analysis.everything.values()]
    if (chosen := analysis.exclusion) is not None:
        count, share = len(chosen.sites), f"{chosen.share:.1%} of the rewritten weights' bytes"
        scores = "; ".join(score_text(score) for score in chosen.scores.values())
        lines.append(("excluded", f"the {count} worst, {share}: measured, {scores}"))
    lines.append(("time", f"{analysis.seconds:.1f} s, {analysis.runs} runs"))
    if analysis.kept:
        lines.append(("not analyzed", f"{len(analysis.kept)} matmuls and embeddings that the recipe keeps"))
    return lines + [("note", note) for note in analysis.notes]


def score_text(score: Score) -> str:
    """Returns a score in words."""
    metric = score.metric
    worst = f" (worst {metric.shown(score.worst):.4g}, sample {score.worst_sample + 1})" * (len(score.values) > 1)
    return f"{metric.shown_title} {metric.shown(score.mean):.4g}{worst}"


def _row(site: SiteDamage, metric: Metric) -> tuple[html.Cell, ...]:
    matmul, seen = site.site.decision.site, site.input
    relative = () if metric is _RELATIVE_L2 else (_score(site.alone[_RELATIVE_L2.name]),)
    inputs = (seen.sqnr_db, seen.amax, seen.outlier_blocks, seen.lost) if seen else (None,) * 4
    return (
        site.site.row[0],
        matmul.module,
        sizes(matmul),
        _score(site.alone[metric.name]),
        *relative,
        _score(site.without[metric.name]),
        html.number(site.site.sqnr_db, ".1f"),
        *(html.number(*pair) for pair in zip(inputs, (".1f", ".4g", ".2%", ".2%"), strict=True)),
    )


def _score(score: Score) -> html.Cell:
    return html.number(score.metric.shown(score.mean), ".4g")
