"""run_model(): runs a model with our kernels, on the user's inputs or synthesised ones, and times it."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.onnx_pass.blame import blame_models_if_checker_complains
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.options import Unpack, check_options
from mxfp8_graph.policy import presets
from mxfp8_graph.report.bars import Bars
from mxfp8_graph.report.base import Report
from mxfp8_graph.report.section import Columns, Head, Section, Tile, number, shape_text
from mxfp8_graph.running.inputs import Signature, describe
from mxfp8_graph.running.profile import NodeProfile
from mxfp8_graph.running.samples import SampleOptions, make_samples
from mxfp8_graph.running.sessions import Execution, Runnable, Session, Timing
from mxfp8_ops import contract, cpu, ort
from mxfp8_ops.errors import BackendError, ContractError

Model = Any
"""A path, an `onnx.ModelProto` or a `torch.export.ExportedProgram`: torch is not imported to name the last."""


@dataclass(frozen=True, kw_only=True)
class RunReport(Report):
    """The outputs of a model, and the times of repeated runs."""

    TITLE = "Run of {model}"
    FILES = ("model",)
    KEYS = "model inputs isa median_seconds=timing.median seconds=timing.seconds outputs nodes note?"

    model: str
    inputs: str
    """The inputs in words."""
    isa: str
    """The instruction set the kernels ran on, or the device."""
    timing: Timing
    nodes: tuple[NodeProfile, ...] = ()
    """Profile of each node over the same number of runs, if requested."""
    note: str = ""
    """Note on a model that runs as a changed copy."""

    def answer(self) -> str:
        """Returns a sentence with the median time of a run, and the range of times."""
        seconds = self.timing.seconds
        spread = f"{min(seconds) * 1e3:.3f} to {max(seconds) * 1e3:.3f} ms, {len(seconds)} runs after a warm-up"
        return f"A run takes {self.timing.median * 1e3:.3f} ms, the median ({spread})."

    def sections(self) -> Iterator[Section]:
        """Yields the inputs and kernels, the time of each node, and the outputs."""
        notes = [("note", self.note)] if self.note else []
        yield Section(facts=[("inputs", self.inputs), ("kernels", self.isa), *notes])
        if self.nodes:
            yield Section(
                title="Time by node type; blue: with our kernels", picture=_times(self.nodes, lambda node: node.op)
            )
            yield Section(title="Time by kernel; blue: ours", picture=_times(self.nodes, _kernel))
        title = f"Nodes: median of {len(self.timing.seconds)} further runs, with a profiler"
        yield Section(title=title, columns=_profile(self.nodes), bar="ms", folded=True)
        rows = [(output["name"], output["dtype"], shape_text(output["shape"])) for output in self.outputs]
        yield Section(title="Outputs", columns=(("output", "dtype", "shape"), rows))

    def head(self) -> Head:
        """Returns the time, its range and the share of our kernels, or the command that profiles them."""
        ms, command = [seconds * 1e3 for seconds in self.timing.seconds], ""
        tiles = [
            Tile("speed", f"{self.timing.median * 1e3:.3g} ms", note="a run, the median"),
            Tile("range, ms", f"{min(ms):.3g} to {max(ms):.3g}", note=f"of {len(ms)} runs after a warm-up"),
        ]
        if self.nodes:
            ours = sum(node.seconds for node in self.nodes if node.isa)
            share = ours / (sum(node.seconds for node in self.nodes) or 1.0)
            tiles.append(Tile("our kernels", f"{share:.0%}", note="of the time of all nodes"))
        elif Path(self.model).suffix:
            device = f" --device {self.isa}" if self.isa in ort.DEVICES else ""
            command = f"mxfp8-graph run {shlex.quote(self.model)}{device} --profile"
        return Head(tiles=tiles, command=command)

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Name, dtype and shape of each output."""
        return [{"name": name, "dtype": a.dtype.name, "shape": a.shape} for name, a in self.timing.outputs.items()]


@blame_models_if_checker_complains("model")
def run_model(
    model: Model, *, repeat: int = 10, profile: bool = False, device: str = "cpu", **samples: Unpack[SampleOptions]
) -> RunReport:
    """Returns outputs and latencies of `repeat` runs with our kernels, after a warm-up.

    Args:
        model: path of any ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`.
        repeat: number of timed runs, at least 1.
        profile: whether to run it again as often, with a profiler, for the kernel and the time of each node.
        device: where our nodes of an ONNX model run: one of `mxfp8_ops.ort.DEVICES`. A program runs on the CPU.
        **samples: see `samples.SampleOptions`; the first of several samples is run.

    Raises:
        ContractError: the model cannot be read.
        ShapeError: `inputs` does not fit the model.
        BackendError: ONNX Runtime cannot run it, the native library is missing, or the device cannot be used.
    """
    check_options("run_model", samples, SampleOptions)
    if device != "cpu" and is_program(model):
        advice = "write it with mxfp8_graph.to_onnx"
        raise BackendError(f"device {device!r}", "a program", expected="an ONNX model", advice=advice)
    signature, runnable = open_runnable(model, execution=Execution(device=device))
    chosen = make_samples(signature, samples, run=runnable.run)
    feeds = chosen.feeds[0]
    # Timed without a profiler, which would slow the runs; the profile comes from other runs.
    timing = runnable.time(feeds, repeat)
    nodes = tuple(runnable.profile(feeds, repeat)) if profile else ()
    description = f"{describe(feeds)}, {chosen.source}"
    isa = cpu.isa() if device == "cpu" else device
    facts: dict[str, Any] = {"model": signature.name, "inputs": description, "isa": isa}
    note = runnable.note
    if nodes and device == "cuda":
        note = "; ".join(filter(None, (note, "a node's time on a GPU is the time to queue its work")))
    return RunReport(**facts, timing=timing, nodes=nodes, note=note)


def is_program(model: Any) -> bool:
    """Whether `model` is a .pt2 file or an ExportedProgram; raises ContractError for a type that cannot be run."""
    kind = kind_of(model)
    if kind in {Kind.GRAPHSURGEON, Kind.UNKNOWN}:
        what = f"a {type(model).__name__}"
        advice = "onnx_graphsurgeon.export_onnx it first" if kind is Kind.GRAPHSURGEON else "load the model first"
        raise ContractError("model", what, expected="a path, an onnx.ModelProto or an ExportedProgram", advice=advice)
    return kind.is_program


def open_runnable(model: Model, where: str = "{}", execution: Execution | None = None) -> tuple[Signature, Runnable]:
    """Returns (the inputs of a model, the model ready to run with our kernels); raises as `run_model`.

    `where` names the model in errors; "{}" in it stands for the model's name. `execution` applies to ONNX models.
    """
    if is_program(model):
        # Here and not on top: importing torch takes seconds, and ONNX models do not need it.
        from mxfp8_graph.running.programs import TorchProgram

        program = TorchProgram(model)
        program.name = where.format(program.name)
        return program.signature, program
    loaded = load(model)
    signature = Signature.from_model(loaded)
    original = not signature.rewritten  # a rewritten model is never run in other dtypes
    name = where.format(signature.name)
    session = Session(model, kernels=True, where=name, float32=original, execution=execution or Execution())
    on_cpu = execution is None or execution.device == "cpu"
    if on_cpu and any(node.op_type == contract.CONV.name for node in loaded.graph.all_nodes()):
        session.note = "; ".join(filter(None, (session.note, presets.convolution_advice(cpu.isa()))))
    return signature, session


def _kernel(node: NodeProfile) -> str:
    return node.kernel or ("others of ours" if node.isa else "the framework's")


def _times(nodes: Sequence[NodeProfile], key: Callable[[NodeProfile], str]) -> Bars:
    """Returns bars of the times of groups of nodes; those with our kernels are highlighted."""
    groups: dict[str, list[NodeProfile]] = defaultdict(list)
    for node in nodes:
        groups[key(node)].append(node)
    rows = [(name, sum(n.seconds for n in some) * 1e3, any(n.isa for n in some)) for name, some in groups.items()]
    return Bars(unit="ms", rows=rows)


def _profile(nodes: Sequence[NodeProfile]) -> Columns:
    """Returns a line for each node that multiplies, the slowest first, and one for the others of each op."""
    total = sum(node.seconds for node in nodes) or 1.0
    # Nodes that multiply are few and take most of the time.
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
