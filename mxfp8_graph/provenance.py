"""The record of a rewrite in a model, under the same keys in ONNX metadata and in .pt2 programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from mxfp8_graph._version import __version__
from mxfp8_ops import node

RECIPE_KEY: Final = "mxfp8_graph.recipe"
VERSION_KEY: Final = "mxfp8_graph.version"
CONTRACT_KEY: Final = "mxfp8_graph.contract_version"
DIALECT_KEY: Final = "mxfp8_graph.dialect"
"""Dialect of an ONNX file: "mxfp8" is our nodes with their function bodies; see `mxfp8_graph.convert`."""
BODIES_KEY: Final = "mxfp8_graph.bodies"
"""The option `bodies` of the rewrite, "small" or "none"; absent for the default."""
LOST_KEY: Final = "mxfp8_graph.lost"
"""Losses of conversions after the rewrite; absent if there are none."""


@dataclass(frozen=True, kw_only=True)
class RewriteRecord:
    """The record of a rewritten model."""

    node: str
    """Name of the first rewritten node."""
    recipe: str | None
    """The recipe as JSON, or None if it is not recorded."""
    packed: bool = True
    """Whether weights are packed; otherwise the model was prepared for training."""
    training: bool = False
    """Whether gradients pass through the packed weights, which are frozen, to train other parameters."""


def entries(recipe: str | None, dialect: str | None = None) -> dict[str, str]:
    """Returns the record as key -> text: the recipe (JSON) and dialect, if known, and versions of tool and nodes."""
    values = {VERSION_KEY: __version__, CONTRACT_KEY: str(node.VERSION)}
    if dialect is not None:
        values[DIALECT_KEY] = dialect
    return values if recipe is None else {RECIPE_KEY: recipe, **values}


def recipe_name(recorded: str | None) -> str:
    """Returns the name of a recorded recipe, for messages."""
    # A later version may have written the record, with fields that this one does not know.
    try:
        fields = json.loads(recorded or "")
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return "an unrecorded recipe"
    return str(fields.get("name", "a recipe this version cannot read"))
