"""What a rewrite did: every site, decision, reason, bytes and error, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mxfp8_graph.plan import Decision


@dataclass(frozen=True, kw_only=True)
class SiteReport:
    """What became of one site."""

    decision: Decision
    nodes: tuple[str, ...] = ()
    """Names of the nodes that stand in its place; empty if it was kept or the run was dry."""
    packed: str | None = None
    """Name of the initializer that holds the packed elements."""
    bytes_before: int = 0
    bytes_after: int = 0
    """Of the static operand: as found, and as elements plus scales."""
    relative_l2: float | None = None
    """|w - dequantized| / |w| of the static operand; None without one."""


@dataclass(frozen=True, kw_only=True)
class RewriteReport:
    """What one rewrite did."""

    source: str
    output: str | None
    recipe: dict[str, Any]
    sites: tuple[SiteReport, ...]
    bytes_before: int
    bytes_after: int | None
    """Size of the model, external data included; None if nothing was written."""
    seconds: float
    notes: tuple[str, ...] = field(default=())
    """What else was done to the model: opset conversion, inlined functions."""
    dry_run: bool = False
    already_rewritten: bool = False
