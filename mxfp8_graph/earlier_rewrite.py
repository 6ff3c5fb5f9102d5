"""Compares a recipe with the recorded recipe of a model that was rewritten before."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from mxfp8_graph.naming import printable
from mxfp8_graph.options import Options
from mxfp8_graph.policy.recipe import Recipe, recorded
from mxfp8_graph.provenance import RewriteRecord, recipe_name
from mxfp8_ops.errors import ContractError, RecipeError


def already_rewritten(before: RewriteRecord | None, recipe: Recipe, options: Options, *, what: str) -> bool:
    """Whether nothing is left to do, because the record says that `recipe` made the model.

    Warns if another recipe prepared the model for training. False for a packed program that is to be prepared for
    training, or back for inference.

    Args:
        before: the record of the model; None if it was not rewritten.
        recipe: the recipe of this call.
        options: the options of this call.
        what: "model" or "program", for messages.

    Raises:
        ContractError: a checkpoint is to replace weights that are packed already.
        RecipeError: another recipe packed the weights, which cannot be packed again.
    """
    if before is None:
        return False
    if options.weights is not None:
        expected, advice = f"a {what} in high precision", "rewrite the original"
        raise ContractError(options.name, "has MXFP8 weights already", expected=expected, advice=advice)
    first = recorded(before.recipe)
    fields = None if first is None else first.differences(recipe)  # {}: weights are packed the same
    if not before.packed:
        if fields != {}:
            changed = ", ".join(f"{name} from {old} to {new}" for name, (old, new) in (fields or {}).items())
            old_name = recipe_name(before.recipe)
            # Two recipes of one kind, such as E4M3 and HYBRID, may have one name.
            same = old_name == recipe.name
            text = f"Recipe {recipe.name} changed" if same else f"Recipe type changed from {old_name} to {recipe.name}"
            # Warned where `mxfp8_graph.rewrite` is called.
            warnings.warn(printable(f"{text}: {changed}" if changed else text), stacklevel=4)
        return fields == {} and options.training
    trained = before.training or options.training
    if fields == {} and before.training == options.training:
        return True
    # Training reads packed weights as they are, and `fp8_format` does not change the packing.
    if trained and fields is not None and fields.keys() <= {"fp8_format"}:
        return False
    mismatch = f"Recipe mismatch for {before.node!r}: {_packed_and_asked(fields, before, recipe)}"
    expected = f"the original {what}, since packed weights cannot be packed again"
    advice = "rewrite that one, or name the recipe that packed this one" if trained else "rewrite that one"
    raise RecipeError(options.name, mismatch, expected=expected, advice=advice)


def _packed_and_asked(fields: Mapping[str, tuple[str, str]] | None, before: RewriteRecord, recipe: Recipe) -> str:
    """Returns "packed with fp8_format E4M3, asked for HYBRID", or the recipes' names if the fields are unknown."""
    if not fields:
        return f"packed with {recipe_name(before.recipe)!r}, asked for {recipe.name!r}"
    packed = ", ".join(f"{name} {old}" for name, (old, _) in fields.items())
    asked = ", ".join(new if len(fields) == 1 else f"{name} {new}" for name, (_, new) in fields.items())
    return f"packed with {packed}, asked for {asked}"


def fusion_note(before: RewriteRecord | None, recipe: Recipe) -> list[str]:
    """Returns a note if the model was rewritten with fusion and `recipe` has none, or the reverse; else []."""
    first = None if before is None else recorded(before.recipe)
    if first is None or first.fuse == recipe.fuse:
        return []
    return [f"it was rewritten with{'' if first.fuse else 'out'} fusion; rewrite the original to change that"]
