"""What a config may ask for: no more and no larger tensors than the header of the checkpoint says there are.

transformers makes lists, modules and tables of any size that a config names, so a kilobyte could take all memory. Its
numbers are checked before transformers reads them, then the model as it is built without memory, on meta tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from mxfp8_graph.packed.checkpoint import Checkpoint
from mxfp8_ops.errors import ContractError

_SLACK: Final = 1000
"""Tensors that a model may have beyond those of the checkpoint, and layers: ALBERT's 24 share the tensors of one."""
_ANY_SIZE: Final = 1 << 18
"""A number that is harmless whatever it means: no list or table of so many entries takes a second."""
_UNBOUND: Final = re.compile("position|length|context|ctx|theta|rope|rotary|param")
"""Numbers that no list is made of; a table of positions is refused when it is built."""
_BYTES: Final = 1 << 29
"""Of what a model computes when it is built, such as masks, and of the cache that it is exported with."""


@dataclass(frozen=True)
class Limits:
    """What the header of a checkpoint allows."""

    where: Path
    """The config.json."""
    tensors: int
    values: int
    """Of a tensor."""
    size: int
    """Of a dimension, and of other numbers."""
    bytes: int
    """Of tensors that the checkpoint does not have."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, where: Path) -> Limits:
        """Returns the limits for the config that belongs to a checkpoint."""
        shapes = [tensor.shape for tensor in (*checkpoint.weights.values(), *checkpoint.others.values())]
        # Somewhat more than there is: a shape that does not fit is told as such, with the name of its tensor.
        values = 4 * max(map(math.prod, shapes)) + _ANY_SIZE
        size = max(_ANY_SIZE, *(max(shape, default=0) for shape in shapes))
        return cls(where, len(shapes) + _SLACK, values, size, max(_BYTES, checkpoint.byte_size))

    def check_numbers(self, config: Mapping[str, Any]) -> None:
        """Raises ContractError if a number of the config, or of one inside, is larger than what there can be."""
        left: list[tuple[str, Any]] = list(config.items())
        while left:
            key, value = left.pop()
            if isinstance(value, dict):
                left += value.items()
            elif isinstance(value, list):
                left += [(key, each) for each in value]
            elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
                most = self.tensors if "layer" in key else self.size
                if value > most and not _UNBOUND.search(key):
                    raise self._excess(f"{key!r} of {str(value)[:40]}", most)

    def check_tensor(self, tensor: Tensor, before: int) -> None:
        """Raises ContractError if a model cannot have that parameter, and `before` others."""
        if before >= self.tensors:
            raise self._excess("more tensors", self.tensors)
        if tensor.numel() > self.values:
            raise self._excess(f"a tensor of {tensor.numel()} values", self.values)

    def check_bytes(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Raises ContractError if tensors that the checkpoint does not have would take much memory."""
        if (size := sum(tensor.numel() * tensor.itemsize for tensor in tensors)) > self.bytes:
            raise self._excess(f"{what} of {size} bytes", self.bytes)

    def _excess(self, what: str, most: int) -> ContractError:
        expected = f"{most} at most for this checkpoint"
        return ContractError(
            self.where, f"asks for {what}", expected=expected, advice="check that they belong together"
        )
