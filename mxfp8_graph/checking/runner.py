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
    synthesise,
)
from mxfp8_graph.checking.sessions import Session, Timing
from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.onnx_model.open import OpenedModel, open_path, open_proto
from mxfp8_ops import cpu
from mxfp8_ops.errors import ContractError, Option, ShapeError

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
        seed: for synthesised inputs.
        repeat: how many runs are counted, at least 1.

    Raises:
        ContractError: the model cannot be read.
        ShapeError: `inputs` does not fit the model.
        BackendError: ONNX Runtime cannot run it, or the native library is missing.
    """
    signature, runnable = open_runnable(model)
    feeds = make_inputs(signature, inputs, shapes, seed)
    timing = runnable.time(feeds, repeat)
    return RunReport(model=signature.name, inputs=describe(feeds), isa=cpu.isa(), timing=timing)


@dataclass(frozen=True)
class Signature:
    """What a model takes."""

    name: str
    """What to call the model in messages."""
    specs: list[InputSpec]
    ranges: Mapping[str, range]
    """The values that integer inputs may take, where that is limited."""

    @classmethod
    def of(cls, opened: OpenedModel) -> Signature:
        """Returns the inputs of an opened model."""
        return cls(opened.name, input_specs(opened.proto, opened.name), index_ranges(opened.proto))


class Runnable(Protocol):
    """A model that can be run, whichever framework runs it."""

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs `run` returns, in order."""

    def run(self, inputs: Mapping[str, Array]) -> Inputs:
        """Returns the outputs by name."""

    def time(self, inputs: Mapping[str, Array], repeat: int) -> Timing:
        """Returns outputs and latencies of `repeat` runs after one that is not counted."""


def is_program(model: Any) -> bool:
    """Whether `model` is a .pt2 file or an ExportedProgram; asks without importing torch.

    Raises:
        ContractError: it is nothing that can be run.
    """
    kind = kind_of(model)
    if kind in {Kind.GRAPHSURGEON, Kind.UNKNOWN}:
        what = f"a {type(model).__name__}"
        advice = "onnx_graphsurgeon.export_onnx it first" if kind is Kind.GRAPHSURGEON else "load the model first"
        raise ContractError("model", what, expected="a path, an onnx.ModelProto or an ExportedProgram", advice=advice)
    return kind.is_program


def open_runnable(model: Model) -> tuple[Signature, Runnable]:
    """Returns (what a model takes, the model ready to run with our kernels).

    Raises:
        ContractError: it cannot be read.
        BackendError: its framework refuses it, or is missing.
    """
    if is_program(model):
        from mxfp8_graph.checking.programs import TorchProgram

        program = TorchProgram(model)
        return Signature(program.name, program.specs, program.ranges), program
    signature = Signature.of(open_model(model))
    return signature, Session(model, kernels=True, where=signature.name)


def open_model(model: str | Path | onnx.ModelProto) -> OpenedModel:
    """Returns the structure of an ONNX model; the data of large tensors is not read.

    Raises:
        ContractError: it cannot be read.
    """
    return open_proto(model) if isinstance(model, onnx.ModelProto) else open_path(Path(model))


def make_inputs(
    signature: Signature, inputs: str | Path | Mapping[str, Array] | None, shapes: Mapping[str, int] | None, seed: int
) -> Inputs:
    """Returns the given inputs, checked, or synthesised ones.

    Raises:
        ShapeError: they do not fit the model, or both inputs and shapes are given.
    """
    if inputs is None:
        return synthesise(signature.specs, signature.ranges, shapes=shapes, seed=seed, where=signature.name)
    if shapes:
        what = f"sizes {', '.join(shapes)} with given inputs"
        advice = ("drop ", Option("shapes"), ": given inputs have their sizes")
        raise ShapeError(signature.name, what, expected="one or the other", advice=advice)
    if isinstance(inputs, (str, Path)):
        return load_inputs(inputs, signature.specs)
    return check_inputs(inputs, signature.specs, signature.name)
