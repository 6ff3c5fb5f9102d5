"""The recipes that go by a name, as plain data. Messages and the command line's help list what is here.

docs/recipes.md explains each to users; a test sees to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

Preset = Literal[
    "mxfp8",
    "MXFP8BlockScaling",
    "mxfp8-bf16",
    "mxfp8-weight-only",
    "ocp",
    "mxint8",
    "mxint8-weight-only",
    "all",
    "auto",
]
"""The names, for type checkers; a test compares them with `PRESETS`."""

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
AUTO: Final = "auto"
"""Stands for the preset of `best`."""


class Better(NamedTuple):
    """A preset that is faster and more accurate than the default."""

    preset: Preset
    speed: float
    """How many times as fast."""
    error: float
    """Share of the error."""


BETTER: Final[Mapping[str, Better]] = {
    "avx512_bf16": Better("mxint8", 1.16, 0.41),
    "avx512_vnni": Better("mxint8", 1.62, 0.40),
    "avx512": Better("mxint8", 1.01, 0.41),
    "avx2_vnni": Better("mxint8", 1.74, 0.41),
    "avx2": Better("mxint8", 1.38, 0.41),
    "portable": Better("mxint8", 1.02, 0.41),
}
"""By instruction set, measured on MiniLM with 8 x 128 tokens: benchmarks/results/presets.md. AMX was not measured."""

_AS_FAST: Final = 1.05
"""Times within 5 % are the same."""


def best(isa: str) -> Preset:
    """Returns the preset to take on a processor, by the instruction set of its kernels."""
    return BETTER[isa].preset if isa in BETTER else DEFAULT


def advice(isa: str) -> str:
    """Returns a sentence about a preset that is better than the default on a processor, or nothing."""
    if isa not in BETTER:
        return ""
    preset, speed, error = BETTER[isa]
    fast = f"{speed:.1f} times as fast as" if speed > _AS_FAST else "as fast as"
    return f"on this CPU ({isa}) --recipe {preset} is {fast} {DEFAULT}, with {error:.0%} of its error (MiniLM)"


def choices() -> str:
    """Returns what a user may give as a recipe, in words."""
    return f"{', '.join((*PRESETS, AUTO))}, or a .yaml or .toml file"
