"""What a conversion found, wrote and lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.filesize import decimal as size  # a number of bytes in words

from mxfp8_graph.report.base import Data, Report
from mxfp8_graph.report.section import Section


@dataclass(frozen=True, kw_only=True)
class Counts(Data):
    """How many tensors of one dialect there are."""

    weights: int = 0
    activations: int = 0
    """Places where values are quantized while the model runs."""


@dataclass(frozen=True, kw_only=True)
class Conversion(Report):
    """The report of one conversion."""

    TITLE = "Conversion of {source} to {to}"
    FILES = ("source", "output")

    source: str
    """The path, or "model"."""
    output: str | None
    """The file that was written; None if the result is in memory."""
    to: str
    """The dialect that was asked for."""
    found: Mapping[str, Counts]
    """By dialect, what was read."""
    losses: Mapping[str, int]
    """What the dialect cannot say and was allowed to lose, with how often."""
    notes: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """To mxfp8: weights that no gemm reads, which stay MXFP8Dequantize and a standard op."""
    gemms: int = 0
    """To mxfp8: gemms in the result."""
    bytes_before: int = 0
    bytes_after: int = 0
    fusions: int = 0
    """To mxfp8: nodes that were fused with their neighbours."""

    def sections(self) -> list[Section]:
        """Returns `facts`."""
        return [Section(facts=self.facts())]

    def facts(self) -> list[tuple[str, str]]:
        """Returns (label, value) lines for a terminal."""
        rows = [
            (name, f"{_count(n.weights, 'weight')}, {_count(n.activations, 'activation')}")
            for name, n in self.found.items()
        ]
        rows = [(f"found {name}", what) for name, what in rows] or [("found", "nothing that is quantized")]
        if self.to == "mxfp8":
            rows.append(("gemms", f"{self.gemms}, {_count(self.fusions, 'fusion')}"))
        rows += [("no gemm", name) for name in self.kept]
        rows += [("lost", f"{what} ({count})") for what, count in self.losses.items()]
        rows += [("note", note) for note in self.notes]
        rows.append(("size", f"{size(self.bytes_before)} -> {size(self.bytes_after)}"))
        return [*rows, ("result", self.output or "in memory")]


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"
