"""Limits on a config: no more and no larger tensors than the header of the checkpoint lists.

transformers makes lists, modules and tables of any size that a config names, so a kilobyte could take all memory. Its
numbers are checked before transformers reads them, then the model as it is built without memory, on meta tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from torch.nn import Module

from mxfp8_ops.errors import ContractError

_SLACK: Final = 1000
"""Parameters that a model may have beyond those of the checkpoint, and layers: ALBERT's 24 share the tensors of one."""
_ANY: Final = 1 << 18
"""A number that every field may have: a list or table of so many entries takes less than a second."""
_BYTES: Final = 1 << 29
_UNBOUND: Final = re.compile("position|len|seq|context|ctx|theta|base|param")
"""Names of numbers that are not lengths of lists; a table of positions is checked when it is built."""
_LAYERS: Final = re.compile("layers|layer$")
"""Names of numbers of layers, but not vocab_size_per_layer_input."""


class Limits:
    """The limits that follow from the tensors of a checkpoint."""

    def __init__(self, stored: Sequence[tuple[int, ...]], byte_size: int, config: Path) -> None:
        """`stored`: the shapes of all tensors; `byte_size`: their bytes; `config`: path in messages."""
        shapes = [shape for shape in stored if shape and 0 not in shape]  # [0, 2^62] takes no room in a file
        self._config = config
        self._number = max([_ANY, *map(max, shapes)])
        self._tensors = len(stored) + _SLACK
        # One parameter may be a stack of many tensors, such as experts; one that the checkpoint lacks is named later.
        self._values = sum(map(math.prod, shapes)) + _ANY
        self._bytes = max(_BYTES, byte_size)

    def check_numbers(self, config: Mapping[str, Any]) -> None:
        """Raises ContractError if a number in the config, at any depth, exceeds its limit."""
        left: list[tuple[str, Any]] = list(config.items())
        while left:
            key, value = left.pop()
            if isinstance(value, dict):
                left += value.items()
            elif isinstance(value, list):
                left += [(key, each) for each in value]
            # JSON may write a count as 1e9, which is a float.
            elif isinstance(value, (int, float)) and value == value // 1 and not _UNBOUND.search(key):
                self._require(repr(key), value, self._tensors if _LAYERS.search(key) else self._number)

    def check_parameter(self, parameter: Tensor, before: int) -> None:
        """Raises ContractError if a parameter is too large, or one too many after `before` others."""
        self._require("parameters", before + 1, self._tensors)
        self._require("values of a parameter", parameter.numel(), self._values)

    def check_buffers(self, model: Module) -> None:
        """Raises ContractError if the buffers of a model, such as masks, take too much memory."""
        self._require("bytes of buffers", sum(b.numel() * b.itemsize for b in model.buffers()), self._bytes)

    def _require(self, what: str, number: float, most: int) -> None:
        if number > most:
            advice = "check that they belong together"
            expected = f"{most} at most for this checkpoint"
            raise ContractError(self._config, f"{what}: {str(number)[:40]}", expected=expected, advice=advice)
