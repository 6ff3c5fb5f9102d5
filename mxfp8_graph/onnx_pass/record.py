"""Reads and writes the record of a rewrite in a model's metadata; adds the function bodies and domain of our nodes."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from mxfp8_graph import provenance
from mxfp8_graph.onnx_pass import check
from mxfp8_graph.onnx_pass.graph import facts_of, is_op, label, name_of
from mxfp8_graph.onnx_pass.protos import proto_without_data
from mxfp8_ops import contract, onnx_functions
from mxfp8_ops.errors import ContractError
from mxfp8_ops.function_body import STYLE, Style


def find(model: ir.Model) -> provenance.RewriteRecord | None:
    """Returns the record of an earlier rewrite of `model`, or None."""
    node = next((node for node in model.graph.all_nodes() if node.domain == contract.DOMAIN), None)
    # Convolutions that only have a packed weight are standard nodes.
    if node is None and model.metadata_props.get(provenance.DIALECT_KEY) == "mxfp8":
        node = next((node for node in model.graph.all_nodes() if is_op(node, "Conv")), None)
    return None if node is None else provenance.RewriteRecord(node=label(node), recipe=recipe_of(model))


def is_rewritten(model: ir.Model) -> bool:
    """Whether `model` is a result of `rewrite` or `convert`."""
    # Other dialects have no node of ours, but their metadata records the version.
    return find(model) is not None or provenance.VERSION_KEY in model.metadata_props


def recipe_of(model: ir.Model) -> str | None:
    """Returns the recipe that made `model` as JSON, or None if it is not recorded."""
    return model.metadata_props.get(provenance.RECIPE_KEY)


STYLES: Final = {"folded": STYLE, "small": Style(folds_weights=False), "none": None}
"""How function bodies are written, by the name of the option `bodies`."""


def check_bodies(bodies: str) -> None:
    """Raises ContractError unless `bodies` is one of `STYLES`."""
    if bodies not in STYLES:
        raise ContractError.unknown("bodies", bodies, STYLES)


def complete(model: ir.Model, recipe: str | None, *, bodies: str = "folded") -> None:
    """Adds function bodies for the nodes of a rewritten model, the import of their domain, and the record.

    Args:
        model: edited in place.
        recipe: the recipe as JSON, or None if it is not known.
        bodies: one of `STYLES`.

    Raises:
        ContractError: there is no such style.
        RuntimeError: the names of the result are damaged, which is a defect of ours.
    """
    check_bodies(bodies)
    add_bodies(model, STYLES[bodies])
    model.opset_imports.setdefault(contract.DOMAIN, contract.VERSION)
    model.metadata_props.pop(provenance.BODIES_KEY, None)
    if bodies != "folded":
        model.metadata_props[provenance.BODIES_KEY] = bodies
    model.metadata_props.update(provenance.entries(recipe, "mxfp8"))


def add_bodies(model: ir.Model, style: Style | None = STYLE) -> None:
    """Adds function bodies in a style for our nodes, or none for None; raises RuntimeError as `complete` does."""
    with proto_without_data(model) as proto:
        # The same check as at the load, so that a damaged result is not written.
        try:
            list(check.names(proto, name_of(model)))
        except ContractError as error:
            raise RuntimeError(f"{error.problem}, in the result, which is not written") from error
        for function in () if style is None else onnx_functions.functions(proto, style, facts_of(model)):
            model.functions[function.domain, function.name, function.overload] = ir.from_proto(function)


def remove_bodies(model: ir.Model) -> None:
    """Removes the function bodies of our nodes."""
    for key in [key for key in model.functions if key[0] == contract.DOMAIN]:
        del model.functions[key]
