"""What a rewritten model records about how it was made, under the same keys in ONNX metadata and in .pt2 programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from mxfp8_graph._version import __version__
from mxfp8_ops import contract

RECIPE_KEY: Final = "mxfp8_graph.recipe"
VERSION_KEY: Final = "mxfp8_graph.version"
CONTRACT_KEY: Final = "mxfp8_graph.contract_version"
DIALECT_KEY: Final = "mxfp8_graph.dialect"
"""What an ONNX file was written as: "mxfp8" is our nodes with their function bodies; see `mxfp8_graph.convert`."""
LOST_KEY: Final = "mxfp8_graph.lost"
"""What conversions have lost since the rewrite; absent where nothing is."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """How a model was rewritten."""

    node: str
    """The first node that says so."""
    recipe: str | None
    """As JSON, or None if it is not recorded."""
    packed: bool = True
    """Weights are packed; otherwise the model was prepared for training."""
    training: bool = False
    """What is packed is frozen and passes gradients on, so that the rest can be trained."""


def entries(recipe: str | None, dialect: str | None = None) -> dict[str, str]:
    """Returns what to record: recipe (as JSON) and dialect if known, the version of this tool and that of the nodes."""
    values = {VERSION_KEY: __version__, CONTRACT_KEY: str(contract.VERSION)}
    if dialect is not None:
        values[DIALECT_KEY] = dialect
    return values if recipe is None else {RECIPE_KEY: recipe, **values}


def recipe_name(recorded: str | None) -> str:
    """Returns the name of a recorded recipe, for messages; a later version may have written it."""
    try:
        fields = json.loads(recorded or "")
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return "an unrecorded recipe"
    return str(fields.get("name", "a recipe this version cannot read"))
