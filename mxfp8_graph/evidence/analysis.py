"""What an analysis found, as data and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from mxfp8_graph.evidence import analysis_page
from mxfp8_graph.evidence.damage import Exclusion, Layer, Scores, SiteDamage, plain
from mxfp8_graph.evidence.metrics import Metric, Score
from mxfp8_graph.report import html
from mxfp8_graph.report.data import Report, SiteReport

SCHEMA: Final = 1
"""Version of the layout of `Analysis.to_dict`; it grows when a key changes its meaning or goes away."""


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
    """Of the outputs, with all sites rewritten, not fused."""
    sites: tuple[SiteDamage, ...]
    """The rewritten sites, the one that does the most damage alone first."""
    layers: tuple[Layer, ...]
    kept: tuple[SiteReport, ...]
    """Sites that were not analyzed: the recipe keeps them, or they cannot be switched."""
    exclusion: Exclusion | None
    """None if no site does damage, or there is one site only."""
    runs: int
    """Of the model, for all samples together."""
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
        lead = [f"{label.capitalize()}: {said}." for label, said in facts(self) if label in first]
        parts = [html.facts(fact for fact in facts(self) if fact[0] not in first)]
        if self.exclusion:
            parts.append(html.text("To paste into a recipe", self.exclusion.yaml))
        parts += analysis_page.parts(self.sites, self.layers, self.metric, self.everything[self.metric.name])
        return html.page(f"Analysis of {self.source}", parts, lead=[f"{headline(self)}.", *lead], files=[self.source])


def headline(analysis: Analysis) -> str:
    """Returns the outcome in one line."""
    worst = f"; {analysis.sites[0].label} hurts most" if len(analysis.sites) > 1 else ""
    return f"{len(analysis.sites)} rewritten sites analyzed with recipe {analysis.recipe['name']}{worst}"


def facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Returns what there is to know beside the sites."""
    lines = [("inputs", analysis.inputs), ("kernels", analysis.isa)]
    lines += [("everything rewritten", told(score)) for score in analysis.everything.values()]
    if (chosen := analysis.exclusion) is not None:
        count, share = len(chosen.sites), f"{chosen.share:.1%} of the rewritten weights' bytes"
        scores = "; ".join(told(score) for score in chosen.scores.values())
        lines.append(("excluded", f"the {count} worst, {share}: measured, {scores}"))
    lines.append(("time", f"{analysis.seconds:.1f} s, {analysis.runs} runs"))
    if analysis.kept:
        lines.append(("not analyzed", f"{len(analysis.kept)} matmuls and embeddings that the recipe keeps"))
    return lines + [("note", note) for note in analysis.notes]


def told(score: Score) -> str:
    """Returns a score in words."""
    metric = score.metric
    worst = f" (worst {metric.shown(score.worst):.4g}, sample {score.worst_sample + 1})" * (len(score.values) > 1)
    return f"{metric.shown_title} {metric.shown(score.mean):.4g}{worst}"
