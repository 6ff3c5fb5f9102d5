"""run_model(): a model with our kernels, on given or synthesised inputs, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from mxfp8_graph.checking.inputs import Array, Inputs, check_inputs, describe, input_specs, load_inputs, synthesise
from mxfp8_graph.checking.sessions import Session, Timing
from mxfp8_graph.onnx_pass.source import Source, open_path, open_proto
from mxfp8_ops.errors import ShapeError

Model = str | Path | onnx.ModelProto


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
    """Returns outputs and latencies of `repeat` runs in a custom-op session, after one that is not counted.

    Args:
        model: path of any ONNX model, or the proto.
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

    source = open_model(model)
    feeds = make_inputs(source, inputs, shapes, seed)
    session = Session(model if isinstance(model, onnx.ModelProto) else Path(model), kernels=True, where=source.name)
    timing = session.time(feeds, repeat)
    return RunReport(model=source.name, inputs=describe(feeds), isa=cpu.isa(), timing=timing)


def open_model(model: Model) -> Source:
    """Returns the structure of a model, its data left where it lies.

    Raises:
        ContractError: it cannot be read.
    """
    return open_proto(model) if isinstance(model, onnx.ModelProto) else open_path(Path(model))


def make_inputs(
    source: Source, inputs: str | Path | Mapping[str, Array] | None, shapes: Mapping[str, int] | None, seed: int
) -> Inputs:
    """Returns the given inputs, checked, or synthesised ones.

    Raises:
        ShapeError: they do not fit the model, or both inputs and shapes are given.
    """
    if inputs is None:
        return synthesise(source.proto, shapes=shapes, seed=seed, where=source.name)
    if shapes:
        raise ShapeError(
            f"{source.name}: sizes {', '.join(shapes)} with given inputs; expected one or the other; "
            "drop --dim: given inputs have their sizes"
        )
    if isinstance(inputs, (str, Path)):
        return load_inputs(inputs, source.proto, source.name)
    return check_inputs(inputs, input_specs(source.proto, source.name), source.name)
