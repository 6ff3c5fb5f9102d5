"""Which recipe made a model: kept in the model's metadata. And what the nodes it holds ask of a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import onnx

from mxfp8_graph import provenance
from mxfp8_graph.onnx_model.walk import iter_graphs, node_label
from mxfp8_ops import contract, onnx_functions
from mxfp8_ops.case import Input


def find(model: onnx.ModelProto) -> provenance.RewriteRecord | None:
    """Returns how `model` was rewritten before, or None if it was not."""
    node = next((n for graph in iter_graphs(model.graph) for n in graph.node if n.domain == contract.DOMAIN), None)
    return None if node is None else provenance.RewriteRecord(node=node_label(node), recipe=recipe_of(model))


def is_rewritten(model: onnx.ModelProto) -> bool:
    """Whether `model` is a result of ours, in whatever dialect: one has no node of ours, but says so."""
    return find(model) is not None or any(p.key == provenance.VERSION_KEY for p in model.metadata_props)


def recipe_of(model: onnx.ModelProto) -> str | None:
    """Returns the recipe that made `model` as JSON, or None if it is not recorded."""
    return next((p.value for p in model.metadata_props if p.key == provenance.RECIPE_KEY), None)


def complete(model: onnx.ModelProto, recipe: str | None, known: Mapping[str, Input] = MappingProxyType({})) -> None:
    """Adds function bodies for the nodes of a rewritten model, the import of their domain, and how it was made.

    `known`: dtypes and shapes of values by name, beside those that the model has.
    """
    model.functions.extend(onnx_functions.functions(model, known=known))
    if not any(entry.domain == contract.DOMAIN for entry in model.opset_import):
        model.opset_import.add(domain=contract.DOMAIN, version=contract.VERSION)
    recorded = {entry.key: entry.value for entry in model.metadata_props}
    onnx.helper.set_model_props(model, {**recorded, **provenance.entries(recipe, "mxfp8")})
