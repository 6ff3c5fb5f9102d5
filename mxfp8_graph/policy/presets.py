"""The recipes with a name, as plain data. Messages and the command line's help list them from here.

docs/recipes.md explains each to users; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, cast

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


class Measured(NamedTuple):
    """The speed and the error of a preset."""

    speed: float
    """Times as fast as float32 in ONNX Runtime."""
    error: float
    """Relative L2 error of the outputs."""


MEASURED: Final[Mapping[str, Mapping[Preset, Measured]]] = {
    "amx_bf16": {
        "mxfp8": Measured(3.80, 0.0944),
        "mxfp8-bf16": Measured(3.59, 0.0653),
        "mxfp8-weight-only": Measured(1.98, 0.0651),
    },
    "avx512_bf16": {
        "mxfp8": Measured(2.45, 0.0944),
        "mxfp8-bf16": Measured(2.31, 0.0653),
        "mxfp8-weight-only": Measured(1.41, 0.0651),
        "mxint8": Measured(3.53, 0.0399),
        "mxint8-bf16": Measured(2.32, 0.0249),
        "mxint8-weight-only": Measured(1.41, 0.0242),
    },
    "avx512_vnni": {
        "mxfp8": Measured(1.66, 0.0968),
        "mxfp8-bf16": Measured(1.34, 0.0652),
        "mxfp8-weight-only": Measured(1.38, 0.0651),
        "mxint8": Measured(3.32, 0.0392),
        "mxint8-bf16": Measured(1.30, 0.0247),
        "mxint8-weight-only": Measured(1.41, 0.0242),
    },
    "avx512": {
        "mxfp8": Measured(1.34, 0.0965),
        "mxfp8-bf16": Measured(1.35, 0.0652),
        "mxfp8-weight-only": Measured(1.38, 0.0651),
        "mxint8": Measured(1.40, 0.0392),
        "mxint8-bf16": Measured(1.37, 0.0247),
        "mxint8-weight-only": Measured(1.39, 0.0242),
    },
    "avx2_vnni": {
        "mxfp8": Measured(1.01, 0.0970),
        "mxfp8-bf16": Measured(0.77, 0.0653),
        "mxfp8-weight-only": Measured(0.79, 0.0651),
        "mxint8": Measured(1.93, 0.0396),
        "mxint8-bf16": Measured(0.77, 0.0246),
        "mxint8-weight-only": Measured(0.78, 0.0242),
    },
    "avx2": {
        "mxfp8": Measured(1.06, 0.0967),
        "mxfp8-bf16": Measured(1.05, 0.0653),
        "mxfp8-weight-only": Measured(1.17, 0.0651),
        "mxint8": Measured(1.28, 0.0395),
        "mxint8-bf16": Measured(1.07, 0.0247),
        "mxint8-weight-only": Measured(1.21, 0.0242),
    },
    "portable": {
        "mxfp8": Measured(0.27, 0.0962),
        "mxfp8-bf16": Measured(0.28, 0.0652),
        "mxfp8-weight-only": Measured(0.28, 0.0651),
        "mxint8": Measured(0.27, 0.0395),
        "mxint8-bf16": Measured(0.28, 0.0245),
        "mxint8-weight-only": Measured(0.28, 0.0242),
    },
}
"""By instruction set, on MiniLM with 8 x 128 tokens: benchmarks/results/presets.md, and for AVX2 presets.avx2.md, of a
processor without AVX-512. With AMX, where INT8 weights were not measured, the speeds are of
benchmarks/results/minilm.intel.md; errors do not depend on the processor."""

SAME: Final = 1.05
"""Two times or two errors within 5 % of each other count as equal."""


def best(isa: str) -> Preset:
    """Returns the preset that `auto` takes on a processor, by the instruction set of its kernels.

    It is the faster of the two whose weights and activations are in 8 bits; if they are as fast, the more accurate one.
    """
    known = MEASURED.get(isa, {})
    whole: tuple[Preset, ...] = ("mxint8", "mxfp8")
    fastest = max((known[name].speed for name in whole if name in known), default=0.0)
    good = (name for name in whole if name in known and known[name].speed * SAME >= fastest)
    return min(good, key=lambda name: known[name].error, default="mxfp8")


def most_accurate(isa: str) -> Preset:
    """Returns the fastest of the most accurate presets on a processor; the default if it was not measured."""
    known = MEASURED.get(isa, {})
    least = min((each.error for each in known.values()), default=0.0)
    good = (name for name in known if known[name].error <= SAME * least)
    return max(good, key=lambda name: known[name].speed, default="mxfp8")


def two_answers(fastest: tuple[str, Measured], accurate: tuple[str, Measured], error: str) -> str:
    """Returns the fastest recipe and the most accurate one in words; every tool gives its answer in this form."""
    name, fast = fastest
    text = f"Fastest: --recipe {name}, {fast.speed:.2g} times the original, {error} {fast.error:.2g}"
    if name == accurate[0]:
        return f"{text}; none of its size is more accurate"
    name, good = accurate
    return f"{text}. Most accurate at that size: --recipe {name}, {good.speed:.2g} times, {good.error:.2g}"


def answer(isa: str) -> str:
    """Returns the recipes to take on a processor, in words."""
    if isa not in MEASURED:
        return f"--recipe {DEFAULT}: no preset was measured on this CPU ({isa})"
    known, accurate = MEASURED[isa], most_accurate(isa)
    words = two_answers((best(isa), known[best(isa)]), (accurate, known[accurate]), "error")
    return f"{words} (measured on MiniLM with {isa})"


def advice(isa: str, name: str = DEFAULT) -> str:
    """Returns `answer`, if one of its presets is better than the one called `name`: faster or more accurate, and
    neither slower nor less accurate. Returns "" otherwise, and where nothing was measured.
    """
    own = MEASURED.get(isa, {}).get(cast("Preset", name))
    if own is None or name == best(isa):
        return ""
    for other in (MEASURED[isa][each] for each in (best(isa), most_accurate(isa))):
        no_worse = other.speed * SAME >= own.speed and other.error <= own.error * SAME
        if no_worse and (other.speed > own.speed * SAME or other.error * SAME < own.error):
            return answer(isa)
    return ""


SLOW_CONVOLUTIONS: Final = frozenset({"avx2", "portable"})
"""The instruction sets without a dot product of bytes. There convolutions in INT8 are hardly faster than in float32, or
slower: on AVX2 five files of benchmarks/convolutions.py ran 0.9 to 1.2 times as fast."""


def convolution_advice(isa: str) -> str:
    """Returns a sentence about INT8 convolutions where they are no faster; "" elsewhere."""
    if isa not in SLOW_CONVOLUTIONS:
        return ""
    what = f"on this CPU ({isa}) convolutions in INT8 are hardly faster than in float32, or slower"
    return f"{what}: --set convolutions=weight-only has their speed and size, and is more accurate"


def choices() -> str:
    """Returns the possible values of --recipe, in words."""
    return f"{', '.join((*PRESETS, AUTO))}, or a .yaml or .toml file"
