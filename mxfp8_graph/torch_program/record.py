"""Which recipe made a program: kept in the `custom` metadata of every node the pass wrote.

That survives save and load, decomposition and retracing; the graph module's own metadata does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

import mxfp8_graph
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.torch_program import internals
from mxfp8_ops import contract

RECIPE_KEY: Final = "mxfp8_graph.policy.recipe"
VERSION_KEY: Final = "mxfp8_graph.version"
CONTRACT_KEY: Final = "mxfp8_graph.contract_version"


@dataclass(frozen=True)
class Made:
    """How a program was rewritten."""

    node: str
    """The first node that says so."""
    recipe: str | None
    """As JSON, or None if it is not recorded."""
    packed: bool
    """Weights are packed; otherwise the program was prepared for training."""

    @property
    def recipe_name(self) -> str:
        """The recipe's name, for messages."""
        try:
            return Recipe.model_validate_json(self.recipe).name if self.recipe else "an unrecorded recipe"
        except ValidationError:
            return "a recipe this version cannot read"


def entries(recipe: str | None) -> dict[str, str]:
    """Returns what is recorded, in a node's metadata and in a file."""
    values = {VERSION_KEY: mxfp8_graph.__version__, CONTRACT_KEY: str(contract.VERSION)}
    return {RECIPE_KEY: recipe, **values} if recipe is not None else values


def mark(node: Node, made: Made) -> None:
    """Records in `node` what made it."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), **entries(made.recipe)}


def unmark(node: Node) -> None:
    """Removes the record."""
    custom = node.meta.get("custom") or {}
    node.meta["custom"] = {key: value for key, value in custom.items() if key not in entries("")}


def find(program: ExportedProgram) -> Made | None:
    """Returns how `program` was rewritten before, or None if it was not. Packed nodes outweigh training nodes."""
    found: Made | None = None
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            op = internals.op_name(node)
            if op in contract.PACKED_OPS:
                return Made(node.name, (node.meta.get("custom") or {}).get(RECIPE_KEY), packed=True)
            if op in contract.TRAINING_OPS and found is None:
                found = Made(node.name, (node.meta.get("custom") or {}).get(RECIPE_KEY), packed=False)
    return found
