"""Which recipe made a model: kept in the model's metadata. And what the nodes it holds ask of a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import onnx

from mxfp8_graph import provenance
from mxfp8_graph.onnx_model.walk import iter_graphs, node_label
from mxfp8_ops import contract, onnx_functions
from mxfp8_ops.case import Input
from mxfp8_ops.errors import ContractError
from mxfp8_ops.function_body import STYLE, Style


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


STYLES: Final = {"folded": STYLE, "small": Style(folds_weights=False), "none": None}
"""How function bodies are written, by the name of the option `bodies`."""


def complete(
    model: onnx.ModelProto,
    recipe: str | None,
    known: Mapping[str, Input] = MappingProxyType({}),
    *,
    bodies: str = "folded",
) -> None:
    """Adds function bodies for the nodes of a rewritten model, the import of their domain, and how it was made.

    Args:
        model: edited in place.
        recipe: the recipe as JSON, or None if it is not known.
        known: dtypes and shapes of values by name, beside those that the model has.
        bodies: one of `STYLES`.
    """
    if bodies not in STYLES:
        raise ContractError.unknown("bodies", bodies, STYLES)
    recorded = {entry.key: entry.value for entry in model.metadata_props if entry.key != provenance.BODIES_KEY}
    if bodies != "folded":
        recorded[provenance.BODIES_KEY] = bodies
    if (style := STYLES[bodies]) is not None:
        model.functions.extend(onnx_functions.functions(model, style, known))
    if not any(entry.domain == contract.DOMAIN for entry in model.opset_import):
        model.opset_import.add(domain=contract.DOMAIN, version=contract.VERSION)
    onnx.helper.set_model_props(model, {**recorded, **provenance.entries(recipe, "mxfp8")})
