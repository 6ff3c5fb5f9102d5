"""The recipes that go by a name, as plain data. Messages and the command line's help list what is here.

docs/recipes.md explains each to users; a test sees to that.
"""

from __future__ import annotations

from typing import Any, Final

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "mxfp8": {},  # the default policy
    "mxfp8-bf16": {"activations": "bfloat16"},
    "mxfp8-weight-only": {"activations": "unchanged"},
    "ocp": {"scale_rounding": "floor"},
    "mxint8": {"weight_format": "int8", "activations": "int8", "scale_rounding": "floor"},
    "mxint8-weight-only": {"weight_format": "int8", "activations": "unchanged", "scale_rounding": "floor"},
    "all": {"output_projections": True, "routers": True, "embeddings": True, "fp8_dpa": True},
}
"""Name -> the fields of `Recipe` that differ from their defaults."""

DEFAULT: Final = "mxfp8"


def choices() -> str:
    """Returns what a user may give as a recipe, in words."""
    return f"{', '.join(PRESETS)}, or a .yaml or .toml file"
