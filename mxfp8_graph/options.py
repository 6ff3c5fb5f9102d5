"""The options of the functions that write models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from typing_extensions import Unpack as Unpack  # noqa: PLC0414 - used elsewhere

from mxfp8_graph.files import OF_CALLBACK

if TYPE_CHECKING:
    from mxfp8_graph.policy.checkpoint_weights import CheckpointWeights

Progress = Callable[[str, int, int], None]
"""Called as progress(site_name, bytes_done, bytes_total) while weights are packed."""


ExternalData = Literal["auto", "always", "never"]
Bodies = Literal["folded", "small", "none"]


class WriteOptions(TypedDict, total=False):
    """The options of every function that writes a model."""

    external_data: ExternalData
    """Whether tensors of an ONNX file go to OUTPUT.data. "auto", the default: if the source has external data, or near
    2 GB."""
    overwrite: bool
    """Whether an existing output may be replaced. The input never is. Default: False."""


class ExportOptions(WriteOptions, total=False):
    """The options of a function that reads a model, of ONNX or torch, and writes one."""

    bodies: Bodies
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


@dataclass(frozen=True, kw_only=True)
class Options:
    """`RewriteOptions` with their defaults, and values that `rewrite` derives from its other arguments."""

    name: str
    """Name of the model in messages and in the report: its path, "model" or "program"."""
    output: Path | None = None
    """File to write; None keeps the result in memory."""
    copy_to: Path | None = None
    """File for a copy of a model that is rewritten already; None for no copy."""
    external_data: ExternalData = "auto"
    overwrite: bool = False
    dry_run: bool = False
    allow_nonfinite: bool = False
    training: bool = False
    bodies: Bodies = "folded"
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
