"""The test vectors: vectors.npz as cases, each an input of one operation and its expected result.

The file is a zip archive of .npy arrays, called KIND/GROUP/SETTINGS/ARRAY; docs/numerics.md describes it. It is
written by custom_ops/conformance_vectors.py from `numpy_nodes`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

PATH: Final = Path(__file__).with_name("vectors.npz")

Array = npt.NDArray[Any]

KINDS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "quantize": (("x",), ("elements", "scales"), ("element_format", "scale_rounding")),
    "dequantize": (("elements", "scales"), ("values",), ("element_format",)),
    "gemm": (("a", "a_scales", "b", "b_scales", "bias"), ("y", "bound"), ("a_format", "b_format")),
}
"""Names of inputs, of results, and of the options that are a case's settings."""


@dataclass(frozen=True)
class Case:
    """One call of the operation that is tested. Arrays have their names in the file."""

    name: str
    """KIND/GROUP/SETTINGS, such as "quantize/boundaries/e4m3-ceil"."""
    options: Mapping[str, Any]
    """Keyword arguments of the call, those of the function of this kind in `numpy_nodes`."""
    inputs: Mapping[str, Array]
    """Positional arguments, in order."""
    expected: Mapping[str, Array]
    """quantize: elements and scales, uint8; dequantize: values, float32; gemm: y, float64."""
    bound: Array | None
    """How far a gemm may be from `y`."""


@functools.cache
def cases(kind: str) -> tuple[Case, ...]:
    """Returns the cases of one kind: "quantize", "dequantize" or "gemm"."""
    with np.load(PATH) as file:
        arrays = {name: file[name] for name in file.files if name.startswith(f"{kind}/")}
    names = dict.fromkeys(name.rpartition("/")[0] for name in arrays if name.count("/") == 3)
    return tuple(_case(name, arrays) for name in names)


def _case(name: str, arrays: Mapping[str, Array]) -> Case:
    kind, group, settings = name.split("/")
    inputs, results, options = KINDS[kind]

    def named(folder: str, names: tuple[str, ...]) -> dict[str, Array]:
        paths = (f"{folder}/{each}" for each in names)
        return {path: arrays[path] for path in paths if path in arrays}

    axis = {"axis": 0 if group == "columnwise" else -1} if kind == "quantize" else {}
    chosen = dict(zip(options, settings.split("-"), strict=True)) | axis
    expected = named(name, results)
    bound = expected.pop(f"{name}/bound", None)
    # What is quantized is one array for all settings.
    return Case(name, chosen, named(f"{kind}/{group}" if axis else name, inputs), expected, bound)
