"""The recipes with a name, as plain data. Messages and the command line's help list them from here.

docs/recipes.md explains each to users; a test compares the two.
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
    "mxint8-bf16",
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
    "mxint8-bf16": {"weight_format": "int8", "activations": "bfloat16", "scale_rounding": "floor"},
    "mxint8-weight-only": {"weight_format": "int8", "activations": "unchanged", "scale_rounding": "floor"},
    "all": {"output_projections": True, "routers": True, "embeddings": True, "fp8_dpa": True},
}
"""Name -> the fields of `Recipe` that differ from their defaults."""

DEFAULT: Final = "mxfp8"
AUTO: Final = "auto"
"""The name for the preset that `best` returns."""


WEIGHT_ONLY: Final[Mapping[str, Preset]] = {"mxfp8-bf16": "mxfp8-weight-only", "mxint8-bf16": "mxint8-weight-only"}
"""Preset with activations in bfloat16 -> the same with unchanged activations."""


class Better(NamedTuple):
    """A preset that is better than another: faster, or as fast and more accurate."""

    preset: Preset
    speed: float
    """Time of the other divided by its time."""
    error: float
    """Its error divided by the error of the other."""


BETTER: Final[Mapping[str, Mapping[str, Better]]] = {
    "mxfp8": {
        "avx512_bf16": Better("mxint8", 1.44, 0.42),
        "avx512_vnni": Better("mxint8", 2.00, 0.40),
        "avx512": Better("mxint8", 1.04, 0.41),
        "avx2_vnni": Better("mxint8", 1.91, 0.41),
        "avx2": Better("mxint8", 1.41, 0.41),
        "portable": Better("mxint8", 1.02, 0.41),
    },
    # bfloat16 is faster than float32 only where the processor has bfloat16 dot products.
    "mxfp8-weight-only": {
        "amx_bf16": Better("mxfp8-bf16", 1.75, 1.00),
        "avx512_bf16": Better("mxfp8-bf16", 1.64, 1.00),
    },
    "mxint8-weight-only": {"avx512_bf16": Better("mxint8-bf16", 1.65, 1.03)},
}
"""By preset, then by instruction set, measured on MiniLM with 8 x 128 tokens: benchmarks/results/presets.md; with AMX,
where INT8 weights were not measured, benchmarks/results/minilm.intel.md."""

AS_FAST: Final = 1.05
"""Two times within 5 % of each other count as equal."""


def best(isa: str) -> Preset:
    """Returns the preset to take on a processor, by the instruction set of its kernels."""
    return BETTER[DEFAULT][isa].preset if isa in BETTER[DEFAULT] else DEFAULT


def advice(isa: str, name: str = DEFAULT) -> str:
    """Returns a sentence that names a better preset for a processor, or says that bfloat16 gains no time there.

    It is empty where nothing is better, or nothing was measured.
    """
    here = f"on this CPU ({isa})"
    if better := BETTER.get(name, {}).get(isa):
        fast = f"{better.speed:.1f} times as fast as" if better.speed > AS_FAST else "as fast as"
        return f"{here} --recipe {better.preset} is {fast} {name}, with {better.error:.0%} of its error (MiniLM)"
    other = WEIGHT_ONLY.get(name)
    if other and isa in BETTER[DEFAULT] and isa not in BETTER[other]:
        return f"{here} activations in bfloat16 are multiplied as float32: {name} is no faster than {other}"
    return ""


SLOW_CONVOLUTIONS: Final = frozenset({"avx2", "portable"})
"""The instruction sets without a dot product of bytes, on which most convolutions take longer in INT8 than in float32:
measured by benchmarks/convolutions.py."""


def convolution_advice(isa: str) -> str:
    """Returns a sentence about INT8 convolutions where they are slow; "" elsewhere."""
    if isa not in SLOW_CONVOLUTIONS:
        return ""
    what = f"on this CPU ({isa}) most convolutions take longer in INT8 than in float32"
    return f"{what}: --set convolutions=weight-only keeps their speed and a quarter of their size"


def choices() -> str:
    """Returns the possible values of --recipe, in words."""
    return f"{', '.join((*PRESETS, AUTO))}, or a .yaml or .toml file"
