"""An analysis as a table and as parts of a page: bars, the error along the depth of the network, maps of outliers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from mxfp8_graph.checking.compare import sqnr
from mxfp8_graph.evidence.damage import Layer, SiteDamage
from mxfp8_graph.evidence.layers import layer_of
from mxfp8_graph.evidence.metrics import METRICS, Metric, Score
from mxfp8_graph.report import html
from mxfp8_graph.report.data import sizes

MOST_BARS: Final = 60
"""Bars of a ranking; the table has all sites."""
MOST_MAPPED: Final = 400
"""Sites whose inputs are mapped, the first ones of the network."""
_MOST_CELLS: Final = 128
"""Blocks in a row of a map: of more, some that stand side by side are one cell, the largest of them."""
_RELATIVE_L2: Final = METRICS["relative_l2"]

LAYER_HEADER: Final = ("layer", "sites", "relative L2, estimated", "share")
"""Header of `layer_rows`."""


def parts(sites: Sequence[SiteDamage], layers: Sequence[Layer], metric: Metric) -> Iterator[str]:
    """Yields the parts of the page; `sites` as they are ranked."""
    yield from _ranking(sites)
    by_depth = sorted(sites, key=lambda site: site.depth)
    yield from _plot(
        "Along the depth of the network: SQNR of each site's input, when everything is rewritten",
        [(site, sqnr(site.input.drift)) for site in by_depth if site.input],
    )
    yield from _plot(
        "Along the depth of the network: SQNR at the outputs, when the site alone is rewritten",
        [(site, sqnr(site.alone[_RELATIVE_L2.name].mean)) for site in by_depth],
    )
    yield html.Table("Layers", LAYER_HEADER, layer_rows(layers)).html()
    yield html.Table("Sites, the one that does most damage first", header(metric), rows(sites, metric)).html()
    yield from _maps(by_depth[:MOST_MAPPED])


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
    return [
        (layer.name, _number(len(layer.sites), "d"), _number(layer.relative_l2, ".4g"), _number(layer.share, ".1%"))
        for layer in layers
    ]


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
        *(_number(value, form) for value, form in numbers),
    )


def _score(score: Score) -> html.Cell:
    return _number(score.metric.shown(score.mean), ".4g")


def _number(value: float | None, form: str) -> html.Cell:
    if value is None:
        return ""
    return (format(value, form), float(value)) if math.isfinite(value) else format(value, form)


def _ranking(sites: Sequence[SiteDamage]) -> Iterator[str]:
    """Yields one bar per site: how far it alone takes the outputs from the original's."""
    errors = [(site.label, site.alone[_RELATIVE_L2.name].mean) for site in sites]
    known = [(label, error) for label, error in errors if math.isfinite(error)][:MOST_BARS]
    if known:
        heading = f"Relative L2 error at the outputs, each site alone ({len(known)} of {len(sites)})"
        bars = [(f"{place}. {label}: {error:.4g}", [error]) for place, (label, error) in enumerate(known, 1)]
        yield html.bars(heading, bars, ())


def _plot(heading: str, points: Sequence[tuple[SiteDamage, float]]) -> Iterator[str]:
    finite = [(f"{site.label}: {value:.1f} dB", value) for site, value in points if math.isfinite(value)]
    if finite:
        yield html.plot(heading, finite, unit="dB")


def _maps(sites: Sequence[SiteDamage]) -> Iterator[str]:
    """Yields, layer by layer, the largest magnitude of each block of 32 along K of what goes into each site."""
    layers: dict[str, list[tuple[str, list[float]]]] = {}
    for site in sites:
        if site.input is not None and (levels := _levels(site.input.block_amax)):
            label = f"{site.label}, K = {site.site.decision.site.k}"
            layers.setdefault(layer_of(site.site.decision.site), []).append((label, levels))
    if layers:
        yield html.text(
            "Outliers",
            "Each row is the input of a site, each cell a block of 32 channels, left to right along K. The darker, the "
            "larger is the largest magnitude in it: from the median of the row (lightest) to 64 times that (darkest).",
            code=False,
        )
    for name, of_layer in layers.items():
        yield html.heat_map(name, of_layer)


def _levels(block_amax: Sequence[float]) -> list[float]:
    """Returns how far each cell of a row is above the median, from 0 to 1: log2 of their ratio, divided by 6."""
    values = np.asarray(block_amax)
    if not np.isfinite(values).all() or not values.any():
        return []
    each = -(-len(values) // _MOST_CELLS)
    cells = np.array([values[start : start + each].max() for start in range(0, len(values), each)])
    median = float(np.median(cells)) or float(cells[cells > 0].min())
    with np.errstate(divide="ignore"):
        return [float(level) for level in np.clip(np.log2(cells / median) / 6, 0, 1)]
