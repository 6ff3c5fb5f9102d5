"""The record of a rewrite, in the `custom` metadata of every node that the pass wrote.

It survives save and load, decomposition and retracing, unlike the metadata of the graph module.
"""

from __future__ import annotations

from typing import Final

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from mxfp8_graph import provenance
from mxfp8_graph.provenance import RewriteRecord
from mxfp8_graph.torch_pass import internals
from mxfp8_ops import contract

EXTRA_FILE: Final = "mxfp8_graph.json"
"""Name of the extra file in a .pt2 archive: the record of the rewrite, and the modules that define the containers."""
MODULES_KEY: Final = "mxfp8_graph.modules"
SAMPLES_KEY: Final = "mxfp8_graph.samples"
"""There if the sample inputs are stored as the leaves of their tree, without its containers."""


def mark(node: Node, rewrite_record: RewriteRecord) -> None:
    """Adds the record of a rewrite to `node`."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), **provenance.entries(rewrite_record.recipe)}


def unmark(node: Node) -> None:
    """Removes the record."""
    custom = node.meta.get("custom") or {}
    node.meta["custom"] = {key: value for key, value in custom.items() if key not in provenance.entries("")}


def find(program: ExportedProgram) -> RewriteRecord | None:
    """Returns how `program` was rewritten before, or None if it was not. Packed nodes outweigh training nodes."""
    packed: Node | None = None
    training: Node | None = None
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            op = internals.op_name(node)
            if op in contract.PACKED_OPS:
                packed = packed or node
            if op in contract.TRAINING_OPS:
                training = training or node
    # A program that was prepared for training around packed weights has both kinds; the packed ones decide what is
    # possible.
    first = packed or training
    if first is None:
        return None
    recipe = (first.meta.get("custom") or {}).get(provenance.RECIPE_KEY)
    return RewriteRecord(node=first.name, recipe=recipe, packed=packed is not None, training=training is not None)
