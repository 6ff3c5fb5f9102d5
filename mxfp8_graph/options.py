"""How to rewrite, besides the recipe: the same for every front end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Progress = Callable[[str, int, int], None]
"""Called as progress(site_name, bytes_done, bytes_total) while weights are packed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `mxfp8_graph.rewrite`, which says what each one does."""

    name: str
    """What to call the model in messages and in the report: its path, "model" or "program"."""
    output: Path | None = None
    """File to write; None keeps the result in memory."""
    external_data: Literal["auto", "always", "never"] = "auto"
    overwrite: bool = False
    dry_run: bool = False
    allow_nonfinite: bool = False
    training: bool = False
    trust_pickle: bool = False
    progress: Progress | None = None
