"""run_model(): a model with our kernels, on given or synthesised inputs, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx

from mxfp8_graph.checking.index_ranges import index_ranges
from mxfp8_graph.checking.inputs import (
    Array,
    Inputs,
    InputSpec,
    check_inputs,
    describe,
    input_specs,
    load_inputs,
    synthesise_for,
)
from mxfp8_graph.checking.sessions import Session, Timing
from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.onnx_model.open import OpenedModel, open_path, open_proto
from mxfp8_ops.errors import ContractError, ShapeError

Model = Any
"""A path, an `onnx.ModelProto` or a `torch.export.ExportedProgram`: torch is not imported to name the last."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """One run, repeated."""

    model: str
    inputs: str
    """The inputs in words."""
    isa: str
    """The instruction set the kernels ran on."""
    timing: Timing


def run_model(
    model: Model,
    *,
    inputs: str | Path | Mapping[str, Array] | None = None,
    shapes: Mapping[str, int] | None = None,
    seed: int = 0,
    repeat: int = 10,
) -> RunReport:
    """Returns outputs and latencies of `repeat` runs with our kernels, after one that is not counted.

    Args:
        model: path of any ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`.
        inputs: an .npz file, or arrays by input name; synthesised if None.
        shapes: sizes of free dimensions for synthesised inputs; see `input_sizes.Sizes`.
        seed: of synthesised inputs.
        repeat: how many runs are counted, at least 1.

    Raises:
        ContractError: the model cannot be read.
        ShapeError: `inputs` does not fit the model.
        BackendError: ONNX Runtime cannot run it, or the native library is missing.
    """
    from mxfp8_ops import cpu

    runnable = open_runnable(model)
    feeds = make_inputs(runnable, inputs, shapes, seed)
    timing = runnable.time(feeds, repeat)
    return RunReport(model=runnable.name, inputs=describe(feeds), isa=cpu.isa(), timing=timing)


class Feedable(Protocol):
    """What is asked of a model to make inputs for it."""

    @property
    def name(self) -> str:
        """What to call it in messages."""

    @property
    def specs(self) -> list[InputSpec]:
        """Its inputs."""

    @property
    def ranges(self) -> Mapping[str, range]:
        """The values its integer inputs may take, where that is limited."""


@dataclass(frozen=True)
class Signature:
    """The inputs of an ONNX model."""

    name: str
    specs: list[InputSpec]
    ranges: Mapping[str, range]

    @classmethod
    def of(cls, source: OpenedModel) -> Signature:
        """Returns the inputs of an opened model."""
        return cls(source.name, input_specs(source.proto, source.name), index_ranges(source.proto))


class Runnable(Feedable, Protocol):
    """A model that can be run, whichever framework runs it."""

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs `run` returns, in order."""

    def run(self, inputs: Mapping[str, Array]) -> Inputs:
        """Returns the outputs by name."""

    def time(self, inputs: Mapping[str, Array], repeat: int) -> Timing:
        """Returns outputs and latencies of `repeat` runs after one that is not counted."""


class OnnxModel:
    """An ONNX model in a session with our kernels."""

    def __init__(self, model: str | Path | onnx.ModelProto) -> None:
        signature = Signature.of(open_model(model))
        self.name, self.specs, self.ranges = signature.name, signature.specs, signature.ranges
        self._session = Session(
            model if isinstance(model, onnx.ModelProto) else Path(model), kernels=True, where=self.name
        )

    @property
    def output_names(self) -> list[str]:
        """See `Runnable`."""
        return self._session.output_names

    def run(self, inputs: Mapping[str, Array]) -> Inputs:
        """See `Runnable`."""
        return self._session.run(inputs)

    def time(self, inputs: Mapping[str, Array], repeat: int) -> Timing:
        """See `Runnable`."""
        return self._session.time(inputs, repeat)


def is_program(model: Any) -> bool:
    """Whether `model` is a .pt2 file or an ExportedProgram; asks without importing torch.

    Raises:
        ContractError: it is nothing that can be run.
    """
    kind = kind_of(model)
    if kind in {Kind.GRAPHSURGEON, Kind.UNKNOWN}:
        raise ContractError(
            "model",
            f"a {type(model).__name__}",
            expected="a path, an onnx.ModelProto or an ExportedProgram",
            advice="onnx_graphsurgeon.export_onnx it first" if kind is Kind.GRAPHSURGEON else "load the model first",
        )
    return kind.is_program


def open_runnable(model: Model) -> Runnable:
    """Returns a model ready to run with our kernels.

    Raises:
        ContractError: it cannot be read.
        BackendError: its framework refuses it, or is missing.
    """
    if is_program(model):
        from mxfp8_graph.checking.programs import TorchProgram

        return TorchProgram(model)
    return OnnxModel(model)


def open_model(model: str | Path | onnx.ModelProto) -> OpenedModel:
    """Returns the structure of an ONNX model, its data left where it lies.

    Raises:
        ContractError: it cannot be read.
    """
    return open_proto(model) if isinstance(model, onnx.ModelProto) else open_path(Path(model))


def make_inputs(
    runnable: Feedable, inputs: str | Path | Mapping[str, Array] | None, shapes: Mapping[str, int] | None, seed: int
) -> Inputs:
    """Returns the given inputs, checked, or synthesised ones.

    Raises:
        ShapeError: they do not fit the model, or both inputs and shapes are given.
    """
    if inputs is None:
        return synthesise_for(runnable.specs, runnable.ranges, shapes=shapes, seed=seed, where=runnable.name)
    if shapes:
        raise ShapeError(
            runnable.name,
            f"sizes {', '.join(shapes)} with given inputs",
            expected="one or the other",
            advice="drop --dim: given inputs have their sizes",
        )
    if isinstance(inputs, (str, Path)):
        return load_inputs(inputs, runnable.specs)
    return check_inputs(inputs, runnable.specs, runnable.name)
