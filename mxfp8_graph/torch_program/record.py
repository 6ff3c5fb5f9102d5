"""Which recipe made a program: kept in the `custom` metadata of every node the pass wrote.

That survives save and load, decomposition and retracing; the graph module's own metadata does not.
"""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from mxfp8_graph import provenance
from mxfp8_graph.provenance import Made
from mxfp8_graph.torch_program import internals
from mxfp8_ops import contract


def mark(node: Node, made: Made) -> None:
    """Records in `node` what made it."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), **provenance.entries(made.recipe)}


def unmark(node: Node) -> None:
    """Removes the record."""
    custom = node.meta.get("custom") or {}
    node.meta["custom"] = {key: value for key, value in custom.items() if key not in provenance.entries("")}


def find(program: ExportedProgram) -> Made | None:
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
    first = packed or training
    if first is None:
        return None
    recipe = (first.meta.get("custom") or {}).get(provenance.RECIPE_KEY)
    return Made(node=first.name, recipe=recipe, packed=packed is not None, training=training is not None)
