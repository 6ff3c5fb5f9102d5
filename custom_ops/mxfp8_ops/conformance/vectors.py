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


@dataclass(frozen=True)
class Case:
    """One call of the operation that is tested."""

    kind: str
    """quantize, dequantize or gemm."""
    group: str
    """The values that the case tests, such as "boundaries" or "nan"."""
    options: Mapping[str, Any]
    """Keyword arguments of the call, those of the function of this kind in `numpy_nodes`."""
    inputs: tuple[Array, ...]
    """Positional arguments."""
    expected: tuple[Array, ...]
    """quantize: elements and scales, uint8; dequantize: values, float32; gemm: y, float64, and its bound."""

    @property
    def settings(self) -> str:
        """The options in a word: "e4m3-ceil"."""
        return "-".join(str(value) for name, value in self.options.items() if name != "axis")

    @property
    def name(self) -> str:
        """The case's folder in the file."""
        return f"{self.kind}/{self.group}/{self.settings}"


@functools.cache
def cases(kind: str) -> tuple[Case, ...]:
    """Returns the cases of one kind: "quantize", "dequantize" or "gemm"."""
    with np.load(PATH) as file:
        arrays = {name: file[name] for name in file.files if name.startswith(f"{kind}/")}
    folders = dict.fromkeys(name.rpartition("/")[0] for name in arrays if name.count("/") == 3)
    return tuple(_case(kind, folder, arrays) for folder in folders)


def _case(kind: str, folder: str, arrays: Mapping[str, Array]) -> Case:
    _, group, settings = folder.split("/")
    words = settings.split("-")

    def named(*names: str) -> tuple[Array, ...]:
        return tuple(arrays[f"{folder}/{name}"] for name in names if f"{folder}/{name}" in arrays)

    if kind == "quantize":
        axis = 0 if group == "columnwise" else -1
        options = {"axis": axis, "element_format": words[0], "scale_rounding": words[1]}
        return Case(kind, group, options, (arrays[f"{kind}/{group}/x"],), named("elements", "scales"))
    if kind == "dequantize":
        return Case(kind, group, {"element_format": words[0]}, named("elements", "scales"), named("values"))
    operands = named("a", "a_scales", "b", "b_scales", "bias")
    return Case(kind, group, {"a_format": words[0], "b_format": words[1]}, operands, named("y", "bound"))
