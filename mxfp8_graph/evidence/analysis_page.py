"""An analysis as a table and as parts of a page: bars, and the error along the depth of the network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from mxfp8_graph.evidence.damage import Layer, SiteDamage
from mxfp8_graph.evidence.metrics import METRICS, Metric, Score
from mxfp8_graph.report import html
from mxfp8_graph.report.data import filled, sizes

MOST_BARS: Final = 60
"""Bars of a ranking; the table has all sites."""
MOST_NAMED: Final = 5
"""Sites that have their name in the chart, the worst ones."""
_RELATIVE_L2: Final = METRICS["relative_l2"]


def parts(sites: Sequence[SiteDamage], layers: Sequence[Layer], metric: Metric, everything: Score) -> Iterator[str]:
    """Yields the parts of the page; `sites` as they are ranked, `everything` of all sites together."""
    title = metric.shown_title
    errors = [(site, metric.shown(site.alone[metric.name].mean)) for site in sites]
    known = [(site, error) for site, error in errors if math.isfinite(error)]
    bars = [(site.label, [0, error], f"{error:.3g}") for site, error in known[:MOST_BARS]]
    if math.isfinite(total := metric.shown(everything.mean)):
        bars.insert(0, ("everything rewritten", [total], f"{total:.3g}"))
    if bars:
        which = f"the worst {MOST_BARS} of {len(sites)}" if len(known) > MOST_BARS else f"all {len(known)}"
        yield html.bars(f"Mean {title} at the outputs, each site alone: {which}", bars)
    if known:
        points = [
            html.Point(site.depth, error, 3, f"{site.label}: {error:.3g}", site.label if place < MOST_NAMED else "")
            for place, (site, error) in enumerate(known)
        ]
        heading = f"Mean {title}, each site alone, along the depth of the network"
        yield html.Chart(heading=heading, points=points, axis="place in the graph", legend={}).html()
    yield html.Table("Layers", *layer_table(layers)).html()
    matmuls = [site.site.decision.site for site in sites]
    notes = [f"{matmul.module} {sizes(matmul)}".strip() for matmul in matmuls]
    table = html.Table("Sites, the one that does most damage first", *site_table(sites, metric), notes=notes)
    yield table.without("module", "M x N x K", "weight SQNR dB").html()


def site_table(sites: Sequence[SiteDamage], metric: Metric) -> html.Columns:
    """Returns (header, a row per site)."""
    relative = () if metric is _RELATIVE_L2 else (f"alone, {_RELATIVE_L2.title}",)
    errors = (f"alone, {metric.shown_title}", *relative, f"all but it, {metric.shown_title}")
    seen = ("input SQNR dB", "amax", "outlier blocks", "lost")
    return filled(
        ("site", "module", "M x N x K", *errors, "weight SQNR dB", *seen), [_row(site, metric) for site in sites]
    )


def layer_table(layers: Sequence[Layer]) -> html.Columns:
    """Returns (header, a row per layer)."""
    rows = [
        (one.name, html.number(len(one.sites), "d"), html.number(one.relative_l2, ".4g"), html.number(one.share, ".1%"))
        for one in layers
    ]
    return ("layer", "sites", "relative L2, estimated", "share"), rows


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
