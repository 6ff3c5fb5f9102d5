"""A packed weight, whose data is read on access."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mxfp8_ops import cpu, formats
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import ContractError

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]

_SUFFIX: Final = re.compile(r"^(?P<name>.+)_mxfp8(?P<number>_\d+)?$")
"""Suffix that both passes append to a weight's name, with a number if one weight was packed in several ways."""


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """One weight as [..., N, K] elements and [..., N, ceil(K / 32)] scales, both read from the file on access."""

    name: str
    """Name of the weight before it was packed, such as "layers.0.up.weight"."""
    module: str | None
    """Path of the module that uses it (the first, if several do), such as "layers.0.up", if known."""
    shape: tuple[int, ...]
    """Shape of the elements."""
    element_format: str
    """"e4m3", "e5m2" or "int8"."""
    weight_only: bool | None
    """Whether its nodes leave activations in high precision, or have none; None if the model does not record it."""
    read_elements: Callable[[], Codes] = field(repr=False)
    read_scales: Callable[[], Codes] = field(repr=False)

    @property
    def elements(self) -> Codes:
        """uint8 [..., N, K]; read anew each time.

        Raises:
            ContractError: the file that holds it cannot be read.
        """
        return _checked(self.name, "elements", self.read_elements(), self.shape)

    @property
    def scales(self) -> Codes:
        """uint8 E8M0 codes [..., N, ceil(K / 32)]; read anew each time.

        Raises:
            ContractError: the file that holds it cannot be read.
        """
        return _checked(self.name, "scales", self.read_scales(), scale_shape(self.shape, -1))

    @property
    def parameter(self) -> str:
        """The parameter's name in the module tree: exporters may rename or merge weights, but keep names of modules."""
        if self.module is None or self.name.startswith(f"{self.module}."):
            return self.name
        return f"{self.module}.weight"

    def dequantize(self, dtype: str = "float32") -> Array:
        """Returns the values [..., N, K] as float32, float16 or bfloat16.

        Raises:
            ShapeError: another dtype.
            ContractError: the file that holds the weight cannot be read.
        """
        return cpu.dequantize(self.elements, self.scales, element_format=self.element_format, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A stored tensor that is not packed."""

    name: str
    module: str | None
    """Path of the first module that uses it, if known."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    read: Callable[[], Array] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The tensors of a model."""

    where: str
    """Name of the model in messages."""
    weights: dict[str, PackedWeight]
    others: list[Tensor]
    """Parameters that were not packed."""
    recipe: str | None
    """The recipe as JSON, if it is recorded."""
    files: frozenset[Path] = frozenset()
    """Files of the model."""


def original_name(elements: str) -> str:
    """Returns the name of the weight that `elements` was packed from: its own name without our suffix."""
    match = _SUFFIX.match(elements)
    return f"{match['name']}{match['number'] or ''}" if match else elements


def bias_name(name: str, taken: Collection[str]) -> str:
    """Returns `name` without the suffix "_f32" of a bias's float32 copy; `name` itself if `taken` has the other."""
    plain = name.removesuffix("_f32")
    return name if plain in taken else plain


def _checked(name: str, what: str, codes: Codes, shape: tuple[int, ...]) -> Codes:
    if codes.shape != shape:
        what, advice = f"{what} of shape {list(codes.shape)}", "the model is not an MXFP8 one, or is damaged"
        expected = f"{list(shape)}, K last and one scale per {formats.BLOCK_SIZE} values of K"
        raise ContractError(f"weight {name!r}", what, expected=expected, advice=advice)
    return codes
