"""The options of a rewrite besides the recipe, the same for every front end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from mxfp8_graph.file_reading import is_any_of
from mxfp8_graph.files import data_path_of
from mxfp8_ops.errors import ContractError, Option

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Progress = Callable[[str, int, int], None]
"""Called as progress(site_name, bytes_done, bytes_total) while weights are packed."""


class StoredWeight(Protocol):
    """A packed weight of a checkpoint, which is read on each access."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the elements, [..., N, K]."""

    @property
    def element_format(self) -> str:
        """Either "e4m3" or "e5m2"."""

    @property
    def elements(self) -> npt.NDArray[np.uint8]:
        """uint8 codes [..., N, K]."""

    @property
    def scales(self) -> npt.NDArray[np.uint8]:
        """uint8 E8M0 codes [..., N, ceil(K / 32)]."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWeights:
    """Packed weights of a checkpoint, whose bytes replace the model's own weights."""

    where: str
    """Name of the checkpoint in messages."""
    weights: Mapping[str, StoredWeight]
    """Weights by their name in the checkpoint."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name of a weight, node or module in the model -> name of its weight in the checkpoint, where they differ."""
    instead: bool = False
    """Whether the model has no values of its own, so that every weight must be used."""
    check: Callable[[], None] = field(default=lambda: None, repr=False)
    """Raises ContractError if a file of the checkpoint changed since it was opened."""
    others: tuple[str, ...] = ()
    """Names of tensors of the checkpoint that are not in MXFP8; the model keeps its own values for them."""
    files: frozenset[Path] = frozenset()
    """Files of the weights and of their names."""

    def keep(self, output: Path) -> None:
        """Raises ContractError if a result would replace one of the files, itself or by its external data."""
        for path in (output, data_path_of(output)):
            if is_any_of(path, self.files):
                another = ("pass another ", Option("output"))
                raise ContractError(path, "is a file of the checkpoint", expected="another file", advice=another)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `mxfp8_graph.rewrite`, where each one is explained."""

    name: str
    """Name of the model in messages and in the report: its path, "model" or "program"."""
    output: Path | None = None
    """File to write; None keeps the result in memory."""
    copy_to: Path | None = None
    """File to copy a model to that is rewritten already; None does not copy it."""
    external_data: Literal["auto", "always", "never"] = "auto"
    overwrite: bool = False
    dry_run: bool = False
    allow_nonfinite: bool = False
    training: bool = False
    trust_pickle: bool = False
    weights: CheckpointWeights | None = None
    progress: Progress | None = None
