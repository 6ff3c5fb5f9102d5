"""What a search found, on a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from mxfp8_graph.naming import printable
from mxfp8_graph.report.text import Fitted, lines
from mxfp8_graph.tools.tune.result import Tuning
from mxfp8_graph.tools.tune.tuner import Interrupted

SHOWN: Final = 12
"""Steps that are shown unless all are asked for, the last ones."""

SPARE: Final = ("relative L2, estimated", "step")


def tuning(found: Tuning, *, every: bool = False) -> RenderableType:
    """Returns the steps, with `every` also the weights, and what there is to know beside them."""
    header, rows = found.step_table()
    shown = rows if every else rows[-SHOWN:]
    more = f"{len(rows) - len(shown)} steps before; --verbose shows them" if len(rows) > len(shown) else ""
    parts: list[RenderableType] = [Text(printable(found.headline())), Text(more), Fitted(header, shown, SPARE)]
    if every:
        header, rows = found.unit_table()
        parts += [Text(), Fitted(header, rows)]
    facts = found.facts()
    if found.resumed:  # the result is the same: only here is it said
        facts.append(("resumed", f"{found.resumed} measurements are of a search that did not finish"))
    return Group(*parts, Text(), lines(facts))


def stopped(error: Interrupted) -> str:
    """Returns where a search that was interrupted goes on, and what there is of it."""
    if error.part is None:
        return "nothing was written"
    best = "the best so far is in" if error.best else "no plan keeps the budget so far; the measurements are in"
    return f"{best} {error.part}; the same command goes on from there"
