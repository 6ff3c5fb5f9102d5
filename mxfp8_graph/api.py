"""rewrite(): the one call, whatever the model is. Chooses the front end; the front ends know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mxfp8_graph.recipe import Recipe
from mxfp8_graph.report import RewriteReport

Progress = Callable[[str, int, int], None]
"""Called as progress(tensor_name, bytes_done, bytes_total) while weights are packed."""


def rewrite(
    model: Any,
    recipe: str | Path | Recipe = "mxfp8",
    *,
    output: str | Path | None = None,
    external_data: Literal["auto", "always", "never"] = "auto",
    overwrite: bool = False,
    dry_run: bool = False,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> tuple[Any, RewriteReport]:
    """Returns (rewritten model, report)."""
    raise NotImplementedError
