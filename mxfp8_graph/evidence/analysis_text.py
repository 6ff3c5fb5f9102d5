"""An analysis on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from mxfp8_graph.evidence.analysis import Analysis, facts, headline
from mxfp8_graph.naming import printable
from mxfp8_graph.report import html
from mxfp8_graph.report.text import Fitted, lines

SHOWN: Final = 20
"""Sites and layers that are shown unless all are asked for."""

SPARE: Final = ("lost", "outlier blocks", "weight SQNR dB", "M x N x K", "amax", "input SQNR dB")


def analysis(found: Analysis, *, every: bool = False) -> RenderableType:
    """Returns the ranking, the layers, what there is to know beside them, and the lines to paste."""
    parts: list[RenderableType] = [Text(printable(headline(found))), Text("")]
    header, sites = found.site_table()
    modules = {site.site.decision.site.module for site in found.sites} - {""}
    named = len(modules) == len(sites)  # then node names are left out: nobody chose them
    parts += _table(header[named:], [row[named:] for row in sites], SPARE, every=every)
    if len(found.layers) > 1:
        parts += _table(*found.layer_table(), (), every=every)
    parts.append(lines(facts(found)))
    if found.exclusion is not None:
        parts += [
            Text("\nto paste into a recipe file:\n"),
            Text("\n".join(map(printable, found.exclusion.yaml.splitlines()))),
        ]
    return Group(*parts)


def _table(
    header: Sequence[str], rows: Sequence[Sequence[html.Cell]], spare: Sequence[str], *, every: bool
) -> list[RenderableType]:
    shown = rows if every else rows[:SHOWN]
    more = len(rows) - len(shown)
    return [Fitted(header, shown, spare), Text(f"... and {more} more; --verbose shows them\n" if more else "")]
