"""How to rewrite, besides the recipe: the same for every front end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from mxfp8_graph.file_reading import is_any_of
from mxfp8_ops.errors import ContractError, Option

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Progress = Callable[[str, int, int], None]
"""Called as progress(site_name, bytes_done, bytes_total) while weights are packed."""


class StoredWeight(Protocol):
    """A packed weight of a checkpoint, read whenever it is asked for."""

    @property
    def name(self) -> str:
        """What the checkpoint calls it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the elements, [..., N, K]."""

    @property
    def element_format(self) -> str:
        """Either "e4m3" or "e5m2"."""

    @property
    def elements(self) -> npt.NDArray[np.uint8]:
        """[..., N, K]."""

    @property
    def scales(self) -> npt.NDArray[np.uint8]:
        """[..., N, ceil(K / 32)]."""


@dataclass(frozen=True, kw_only=True)
class GivenWeights:
    """Packed weights to put in the place of the model's own, byte for byte."""

    where: str
    """What to call the checkpoint in messages."""
    weights: Mapping[str, StoredWeight]
    """By name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The checkpoint's names of some weights, by the name of the weight, node or module in the model."""
    instead: bool = False
    """The model has no values of its own for them: each must be used."""
    check: Callable[[], None] = field(default=lambda: None, repr=False)
    """Raises ContractError if a file of the checkpoint changed since it was opened."""
    others: tuple[str, ...] = ()
    """Names of tensors of the checkpoint that are not in MXFP8, where the model keeps its own."""
    files: frozenset[Path] = frozenset()
    """What the weights and their names are read from."""

    def keep(self, output: Path) -> None:
        """Raises ContractError if a result would replace one of the files, itself or by its external data."""
        for path in (output, output.with_name(f"{output.name}.data")):
            if is_any_of(path, self.files):
                another = ("pass another ", Option("output"))
                raise ContractError(path, "is a file of the checkpoint", expected="another file", advice=another)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `mxfp8_graph.rewrite`, which says what each one does."""

    name: str
    """What to call the model in messages and in the report: its path, "model" or "program"."""
    output: Path | None = None
    """File to write; None keeps the result in memory."""
    copy_to: Path | None = None
    """File that a model which is rewritten already is copied to; None leaves it where it is."""
    external_data: Literal["auto", "always", "never"] = "auto"
    overwrite: bool = False
    dry_run: bool = False
    allow_nonfinite: bool = False
    training: bool = False
    trust_pickle: bool = False
    given: GivenWeights | None = None
    progress: Progress | None = None
