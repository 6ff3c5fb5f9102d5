"""An analysis as a table and as parts of a page: bars, and the error along the depth of the network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from mxfp8_graph.evidence.damage import Layer, SiteDamage
from mxfp8_graph.evidence.metrics import METRICS, Metric, Score
from mxfp8_graph.report import html
from mxfp8_graph.report.data import sizes

MOST_BARS: Final = 60
"""Bars of a ranking; the table has all sites."""
MOST_NAMED: Final = 5
"""Sites that have their name in the chart, the worst ones."""
_RELATIVE_L2: Final = METRICS["relative_l2"]

LAYER_HEADER: Final = ("layer", "sites", "relative L2, estimated", "share")
"""Header of `layer_rows`."""


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
    yield html.Table("Layers", LAYER_HEADER, layer_rows(layers)).html()
    matmuls = [site.site.decision.site for site in sites]
    notes = [f"{matmul.module} {sizes(matmul)}".strip() for matmul in matmuls]
    table = html.Table("Sites, the one that does most damage first", header(metric), rows(sites, metric), notes=notes)
    yield table.without("module", "M x N x K", "weight SQNR dB").html()


def header(metric: Metric) -> tuple[str, ...]:
    """Returns the header of `rows`."""
    relative = () if metric is _RELATIVE_L2 else (f"alone, {_RELATIVE_L2.title}",)
    errors = (f"alone, {metric.shown_title}", *relative, f"all but it, {metric.shown_title}")
    return ("site", "module", "M x N x K", *errors, "weight SQNR dB", "input SQNR dB", "amax", "outlier blocks", "lost")


def rows(sites: Sequence[SiteDamage], metric: Metric) -> list[tuple[html.Cell, ...]]:
    """Returns a row per site, with the numbers to sort by."""
    return [_row(site, metric) for site in sites]


def layer_rows(layers: Sequence[Layer]) -> list[tuple[html.Cell, ...]]:
    """Returns a row per layer."""
    forms = ("d", ".4g", ".1%")
    numbers = [(len(layer.sites), layer.relative_l2, layer.share) for layer in layers]
    cells = [[html.number(*pair) for pair in zip(row, forms, strict=True)] for row in numbers]
    return [(layer.name, *row) for layer, row in zip(layers, cells, strict=True)]


def _row(site: SiteDamage, metric: Metric) -> tuple[html.Cell, ...]:
    matmul, seen = site.site.decision.site, site.input
    relative = () if metric is _RELATIVE_L2 else (_score(site.alone[_RELATIVE_L2.name]),)
    numbers = (
        (site.site.sqnr_db, ".1f"),
        (None if seen is None else seen.sqnr_db, ".1f"),
        (None if seen is None else seen.amax, ".4g"),
        (None if seen is None else seen.outlier_blocks, ".2%"),
        (None if seen is None else seen.lost, ".2%"),
    )
    return (
        site.site.row[0],
        matmul.module,
        sizes(matmul),
        _score(site.alone[metric.name]),
        *relative,
        _score(site.without[metric.name]),
        *(html.number(value, form) for value, form in numbers),
    )


def _score(score: Score) -> html.Cell:
    return html.number(score.metric.shown(score.mean), ".4g")
