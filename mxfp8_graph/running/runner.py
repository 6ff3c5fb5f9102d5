"""run_model(): a model with our kernels, on given or synthesised inputs, and how long it takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.options import Unpack, check_options
from mxfp8_graph.report.base import Report
from mxfp8_graph.report.section import Columns, Section, number, shape_text
from mxfp8_graph.running.inputs import Signature, describe
from mxfp8_graph.running.profile import NodeProfile
from mxfp8_graph.running.samples import SampleOptions, make_samples
from mxfp8_graph.running.sessions import Execution, Runnable, Session, Timing
from mxfp8_ops import cpu
from mxfp8_ops.errors import ContractError

Model = Any
"""A path, an `onnx.ModelProto` or a `torch.export.ExportedProgram`: torch is not imported to name the last."""


@dataclass(frozen=True, kw_only=True)
class RunReport(Report):
    """One run, repeated."""

    TITLE = "Run of {model}"
    FILES = ("model",)
    KEYS = "model inputs isa median_seconds=timing.median seconds=timing.seconds outputs nodes note?"

    model: str
    inputs: str
    """The inputs in words."""
    isa: str
    """The instruction set the kernels ran on."""
    timing: Timing
    nodes: tuple[NodeProfile, ...] = ()
    """Profile of each node in as many runs, if one was asked for."""
    note: str = ""
    """Note on a model that runs as a changed copy."""

    def answer(self) -> str:
        """Returns how long a run takes."""
        seconds = self.timing.seconds
        spread = f"{min(seconds) * 1e3:.3f} to {max(seconds) * 1e3:.3f} ms, {len(seconds)} runs after a warm-up"
        return f"A run takes {self.timing.median * 1e3:.3f} ms, the median ({spread})."

    def sections(self) -> Iterator[Section]:
        """Yields the inputs and kernels, where the time goes, and the outputs."""
        notes = [("note", self.note)] if self.note else []
        yield Section(facts=[("inputs", self.inputs), ("kernels", self.isa), *notes])
        yield Section(title="Nodes", columns=_profile(self.nodes), bar="ms")
        rows = [(output["name"], output["dtype"], shape_text(output["shape"])) for output in self.outputs]
        yield Section(title="Outputs", columns=(("output", "dtype", "shape"), rows))

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Name, dtype and shape of each output."""
        return [{"name": name, "dtype": a.dtype.name, "shape": a.shape} for name, a in self.timing.outputs.items()]


def run_model(model: Model, *, repeat: int = 10, profile: bool = False, **samples: Unpack[SampleOptions]) -> RunReport:
    """Returns outputs and latencies of `repeat` runs with our kernels, after one that is not counted.

    Args:
        model: path of any ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`.
        repeat: how many runs are counted, at least 1.
        profile: run it as often once more, and say which kernel each node ran and how long.
        **samples: see `samples.SampleOptions`; the first of several samples is run.

    Raises:
        ContractError: the model cannot be read.
        ShapeError: `inputs` does not fit the model.
        BackendError: ONNX Runtime cannot run it, or the native library is missing.
    """
    check_options("run_model", samples, SampleOptions)
    signature, runnable = open_runnable(model)
    chosen = make_samples(signature, samples, run=runnable.run)
    feeds = chosen.feeds[0]
    # Timed without a profiler, which would slow the runs; the profile is of other runs.
    timing = runnable.time(feeds, repeat)
    nodes = tuple(runnable.profile(feeds, repeat)) if profile else ()
    description = f"{describe(feeds)}, {chosen.source}"
    facts: dict[str, Any] = {"model": signature.name, "inputs": description, "isa": cpu.isa()}
    return RunReport(**facts, timing=timing, nodes=nodes, note=runnable.note)


def is_program(model: Any) -> bool:
    """Whether `model` is a .pt2 file or an ExportedProgram; ContractError if it is nothing that can be run."""
    kind = kind_of(model)
    if kind in {Kind.GRAPHSURGEON, Kind.UNKNOWN}:
        what = f"a {type(model).__name__}"
        advice = "onnx_graphsurgeon.export_onnx it first" if kind is Kind.GRAPHSURGEON else "load the model first"
        raise ContractError("model", what, expected="a path, an onnx.ModelProto or an ExportedProgram", advice=advice)
    return kind.is_program


def open_runnable(model: Model, where: str = "{}", execution: Execution | None = None) -> tuple[Signature, Runnable]:
    """Returns (the inputs of a model, the model ready to run with our kernels); errors as `run_model`.

    `where` is what errors call the model; "{}" in it is the model's name. `execution` is of an ONNX model.
    """
    if is_program(model):
        # Here and not on top: importing torch takes seconds, and ONNX models do not need it.
        from mxfp8_graph.running.programs import TorchProgram

        program = TorchProgram(model)
        program.name = where.format(program.name)
        return program.signature, program
    signature = Signature.of(load(model))
    original = not signature.rewritten  # a rewritten model is never run in other dtypes
    name = where.format(signature.name)
    return signature, Session(model, kernels=True, where=name, float32=original, execution=execution or Execution())


def _profile(nodes: Sequence[NodeProfile]) -> Columns:
    """Returns a line for each node that multiplies, the slowest first, and one for the others of each op."""
    total = sum(node.seconds for node in nodes) or 1.0
    # Nodes that multiply are few and take the time; the others are one line for each op.
    groups: dict[object, list[NodeProfile]] = defaultdict(list)
    for node in nodes:
        groups[node if node.operands else (node.op, node.isa)].append(node)
    rows = []
    for some in groups.values():
        name = some[0].name if len(some) == 1 else f"{len(some)} nodes"
        seconds = sum(node.seconds for node in some)
        rows.append((seconds, (name, some[0].op, some[0].operands, some[0].kernel, some[0].isa)))
    rows.sort(key=lambda row: -row[0])
    header = ("node", "op", "multiplies", "kernel", "ISA", "ms", "share")
    return header, [(*cells, number(s * 1e3, ".3f"), f"{s / total:.1%}") for s, cells in rows]
