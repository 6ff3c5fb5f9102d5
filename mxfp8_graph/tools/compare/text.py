"""A comparison of recipes on a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from mxfp8_graph.report.text import Fitted, lines
from mxfp8_graph.tools.compare.comparison import LEGEND, Comparison

SPARE: Final = ("matmuls", "bytes per weight", "weight SQNR, dB", "worst", "kind")


def comparison(found: Comparison) -> RenderableType:
    """Returns the table, a line per recipe, what each recipe is, and what there is to know about the table."""
    header, rows = found.table()
    shown = [row[:-1] for row in rows]  # that is below
    recipes = [(row.name, row.what) for row in found.rows if row.what]
    return Group(Fitted(header[:-1], shown, SPARE), Text(), lines((*found.facts(), *recipes, *LEGEND)))
