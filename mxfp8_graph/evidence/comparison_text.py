"""A comparison of recipes on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from mxfp8_graph.evidence.comparison import LEGEND, Comparison
from mxfp8_graph.report.text import columns, lines


def comparison(found: Comparison) -> RenderableType:
    """Returns the table, a line per recipe, and what there is to know about it."""
    header, rows = found.table()
    said = [tuple(cell if isinstance(cell, str) else cell[0] for cell in row) for row in rows]
    return Group(columns(header, said), Text(), lines((*found.facts(), *LEGEND)))
