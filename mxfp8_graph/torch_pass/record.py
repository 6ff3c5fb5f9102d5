"""The record of a rewrite, in the `custom` metadata of every node that the pass wrote.

It survives save and load, decomposition and retracing, unlike the metadata of the graph module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.traceback import annotate, preserve_node_meta

from mxfp8_graph import provenance
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.provenance import RewriteRecord
from mxfp8_graph.torch_pass import internals
from mxfp8_ops import contract

EXTRA_FILE: Final = "mxfp8_graph.json"
"""Name of the extra file in a .pt2 archive: the record of the rewrite, and the modules that define the containers."""
MODULES_KEY: Final = "mxfp8_graph.modules"
SAMPLES_KEY: Final = "mxfp8_graph.samples"
"""Key that a file has if its sample inputs are the leaves of their tree, without containers."""
LAYER_KEY: Final = "mxfp8_graph.layer"
"""Key in the metadata of a node that is the product of a layer of `te`."""


def mark(node: Node, recipe: Recipe) -> None:
    """Adds the record of a rewrite to `node`."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), **provenance.entries(recipe.to_record())}


@contextmanager
def traced(recipe: Recipe, **more: str) -> Iterator[None]:
    """In this context, torch.export adds the record of a rewrite to the nodes that it traces, and `more`."""
    with preserve_node_meta(), annotate({**provenance.entries(recipe.to_record()), **more}):
        yield


def is_layer(node: Node) -> bool:
    """Returns whether a layer of `te` made the node."""
    return LAYER_KEY in (node.meta.get("custom") or {})


def _is_marked(node: Node) -> bool:
    return provenance.RECIPE_KEY in (node.meta.get("custom") or {})


def unmark(node: Node) -> None:
    """Removes the record."""
    custom = node.meta.get("custom") or {}
    ours = {*provenance.entries(""), LAYER_KEY}
    node.meta["custom"] = {key: value for key, value in custom.items() if key not in ours}


def find(program: ExportedProgram) -> RewriteRecord | None:
    """Returns the record of an earlier rewrite of `program`, or None if there was none."""
    nodes = [node for _, _, graph in internals.graphs(program.graph_module) for node in graph.nodes]
    packed = [node for node in nodes if internals.op_name(node) in contract.PACKED_OPS]
    # The weight of a convolution may be all that is packed.
    packed += [node for node in nodes if internals.op_name(node) == "mxfp8::dequantize" and _is_marked(node)]
    training = [node for node in nodes if internals.op_name(node) in contract.TRAINING_OPS]
    # A program that was prepared for training around packed weights has both kinds. The packed ones come first, since
    # their weights no longer exist in high precision.
    if not (first := next(iter(packed + training), None)):
        return None
    recipe = (first.meta.get("custom") or {}).get(provenance.RECIPE_KEY)
    return RewriteRecord(node=first.name, recipe=recipe, packed=bool(packed), training=bool(training))
