"""What a rewritten model records about how it was made, under the same keys in ONNX metadata and in .pt2 programs."""

from __future__ import annotations

from typing import Final

import mxfp8_graph
from mxfp8_ops import contract

RECIPE_KEY: Final = "mxfp8_graph.policy.recipe"
VERSION_KEY: Final = "mxfp8_graph.version"
CONTRACT_KEY: Final = "mxfp8_graph.contract_version"


def entries(recipe: str | None) -> dict[str, str]:
    """Returns what to record: the recipe as JSON if it is known, the version of this tool and that of the nodes."""
    values = {VERSION_KEY: mxfp8_graph.__version__, CONTRACT_KEY: str(contract.VERSION)}
    return values if recipe is None else {RECIPE_KEY: recipe, **values}
