"""TransformerEngine's names for recipes, and its other recipes, which are not MXFP8.

MXFP8BlockScaling                              -> the default recipe (a preset, and a function of `recipe.py`)
recipe_type: MXFP8BlockScaling                 -> nothing: every recipe here is one
Format.HYBRID                                  -> "HYBRID"
DelayedScaling, Float8CurrentScaling, ...      -> an error that says what they are
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

MXFP8: Final = "MXFP8BlockScaling"

OTHERS: Final[Mapping[str, str]] = {
    "DelayedScaling": "FP8 with one scale per tensor, from the magnitudes of earlier steps",
    "Float8CurrentScaling": "FP8 with one scale per tensor, from its own magnitude",
    "Float8BlockScaling": "FP8 with a float32 scale per 128 values, or per 128 x 128 of a weight",
    "NVFP4BlockScaling": "FP4 with an E4M3 scale per 16 values and one per tensor",
}
"""TransformerEngine's other recipes, and what each of them is."""

_COMPARE: Final = "`mxfp8-graph compare` emulates it and shows the error it makes on your model"


def refusal(name: object) -> tuple[str, str] | None:
    """Returns (a description of one of its other recipes, advice), or None for a name that is none of them."""
    if not isinstance(name, str) or name not in OTHERS:
        return None
    return f"{name} is {OTHERS[name]}, not MXFP8", _COMPARE


def in_recipe(fields: Any) -> Any:
    """Returns the fields of a recipe without `recipe_type`, which every recipe here has.

    Raises:
        ValueError: it is another.
    """
    if not isinstance(fields, Mapping) or "recipe_type" not in fields:
        return fields
    # Accepted and dropped: configurations that were written for TransformerEngine name the type of the recipe.
    kind = fields["recipe_type"]
    if kind != MXFP8:
        what, advice = refusal(kind) or (repr(kind)[:200], "correct or remove it")
        raise ValueError(f"recipe_type: {what}; expected {MXFP8}; {advice}")
    return {key: value for key, value in fields.items() if key != "recipe_type"}


def format_name(value: Any) -> Any:
    """Returns the name of one of its `Format`s, or of whatever else has one; other values as they are."""
    # By attribute, so that TransformerEngine need not be installed.
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else value
