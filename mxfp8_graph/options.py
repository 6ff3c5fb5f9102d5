"""The options of the functions that write models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from typing_extensions import Unpack as Unpack  # noqa: PLC0414 - used elsewhere

from mxfp8_graph.files import OF_CALLBACK, data_path_of, is_any_of
from mxfp8_ops.errors import ContractError, Option

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Progress = Callable[[str, int, int], None]
"""Called as progress(site_name, bytes_done, bytes_total) while weights are packed."""


class WriteOptions(TypedDict, total=False):
    """The options of every function that writes a model."""

    external_data: Literal["auto", "always", "never"]
    """Whether tensors of an ONNX file go to OUTPUT.data. "auto", the default: if the source has external data, or near
    2 GB."""
    overwrite: bool
    """Whether an existing output may be replaced. The input never is. Default: False."""


class ExportOptions(WriteOptions, total=False):
    """The options of a function that reads a model, of ONNX or torch, and writes one."""

    bodies: Literal["folded", "small", "none"]
    """How an ONNX file computes its nodes where our library is not registered: "folded", the default, decodes weights
    to float32 when a session opens, "small" keeps them in 8 bits and decodes them at every run, "none" cannot run
    there."""


class PackOptions(WriteOptions, total=False):
    """The options of a function that packs weights."""

    allow_nonfinite: bool
    """Pack weights with NaN or Inf (their blocks become NaN) instead of refusing them. Default: False."""
    progress: Progress | None
    """Called as progress(site_name, bytes_done, bytes_total) after each weight. Default: None."""


class RewriteOptions(ExportOptions, PackOptions, total=False):
    """The options of `rewrite` for any model."""

    dry_run: bool
    """Plan, report and check that the output can be written, but write nothing: the first result is None. An existing
    output is no error. Default: False."""


class RewriteCall(RewriteOptions, total=False):
    """All keywords of `rewrite` for a model that is not a module."""

    output: str | Path | None
    training: bool
    weights: str | Path | None
    weight_names: str | Path | Mapping[str, str] | None


def check_options(function: str, options: Mapping[str, Any], known: type) -> None:
    """Raises Python's TypeError for an option that `known`, a TypedDict, does not have."""
    # Without this check the call would fail in an inner function, and perhaps after minutes.
    for name in options.keys() - known.__annotations__.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


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
    replaces_all: bool = False
    """Whether the model has no values of its own, so that every weight must be used."""
    others: tuple[str, ...] = ()
    """Names of tensors of the checkpoint that are not in MXFP8; the model keeps its own values for them."""
    files: frozenset[Path] = frozenset()
    """Files of the weights and of their names."""

    def refuse_output(self, output: Path) -> None:
        """Raises ContractError if a result would replace one of the files, itself or by its external data."""
        for path in (output, data_path_of(output)):
            if is_any_of(path, self.files):
                another = ("pass another ", Option("output"))
                raise ContractError(path, "is a file of the checkpoint", expected="another file", advice=another)


@dataclass(frozen=True, kw_only=True)
class Options:
    """`RewriteOptions` with their defaults, and values that `rewrite` derives from its other arguments."""

    name: str
    """Name of the model in messages and in the report: its path, "model" or "program"."""
    output: Path | None = None
    """File to write; None keeps the result in memory."""
    copy_to: Path | None = None
    """File for a copy of a model that is rewritten already; None for no copy."""
    external_data: Literal["auto", "always", "never"] = "auto"
    overwrite: bool = False
    dry_run: bool = False
    allow_nonfinite: bool = False
    training: bool = False
    bodies: str = "folded"
    weights: CheckpointWeights | None = None
    progress: Progress | None = None
    started: float = field(default_factory=time.perf_counter, init=False)
    """When the call began, in the seconds of `time.perf_counter`. Make the options before the model is opened."""

    def __post_init__(self) -> None:
        if self.progress is not None:
            object.__setattr__(self, "progress", _marking(self.progress))


def _marking(callback: Progress) -> Progress:
    """Returns a user's callback that marks its OSErrors, so that they are not taken for errors of the output."""

    def call(site: str, done: int, total: int) -> None:
        try:
            callback(site, done, total)
        except OSError as error:
            setattr(error, OF_CALLBACK, True)
            raise

    return call
