"""run_model(): a model with our kernels, on given or synthesised inputs, and how long it takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType

from mxfp8_graph.checking.inputs import Signature, describe
from mxfp8_graph.checking.profile import NodeProfile
from mxfp8_graph.checking.samples import SampleSource, make_samples
from mxfp8_graph.checking.sessions import Runnable, Session, Timing
from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.onnx_model.open import open_model
from mxfp8_graph.report import html, text
from mxfp8_graph.report.base import Report
from mxfp8_ops import cpu
from mxfp8_ops.errors import ContractError

Model = Any
"""A path, an `onnx.ModelProto` or a `torch.export.ExportedProgram`: torch is not imported to name the last."""


@dataclass(frozen=True, kw_only=True)
class RunReport(Report):
    """One run, repeated."""

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

    def facts(self) -> list[tuple[str, str]]:
        """Returns (label, value) pairs: inputs, kernels, latency and a note."""
        seconds = self.timing.seconds
        spread = f"{min(seconds) * 1e3:.3f} to {max(seconds) * 1e3:.3f} ms, {len(seconds)} runs after a warm-up"
        latency = f"median {self.timing.median * 1e3:.3f} ms ({spread})"
        lines = [("inputs", self.inputs), ("kernels", self.isa), ("latency", latency)]
        return lines + ([("note", self.note)] if self.note else [])

    def table(self) -> html.Columns:
        """Returns (header, a row per output)."""
        outputs = self.timing.outputs.items()
        return ("output", "dtype", "shape"), [(name, a.dtype.name, html.shape_text(a.shape)) for name, a in outputs]

    def to_text(self, *, every: bool = False) -> RenderableType:
        """Returns the outputs, how long the runs took, and where the time goes."""
        parts = [text.grid(*self.table()), text.lines(self.facts())]
        return Group(*parts, _profile(self.nodes)) if self.nodes else Group(*parts)

    def to_html(self) -> str:
        """Returns one self-contained page: latency, outputs, and where the time goes."""
        parts = [html.facts(self.facts()), html.Table("Outputs", *self.table()).html()]
        if slowest := sorted(self.nodes, key=lambda node: -node.seconds):
            cells = [(f"{node.isa} {node.kernel}".strip(), html.number(node.seconds * 1e3, ".3f")) for node in slowest]
            rows = [(node.name, node.op, node.operands, *last) for node, last in zip(slowest, cells, strict=True)]
            header = ("node", "op", "multiplies", "kernel", "ms")
            parts.append(html.Table("Nodes", *html.filled(header, rows)).html())
        return html.page(f"Run of {self.model}", parts, files=[self.model])

    def content(self) -> dict[str, Any]:
        """Returns what the JSON has."""
        outputs = self.timing.outputs.items()
        return {
            "model": self.model,
            "inputs": self.inputs,
            "isa": self.isa,
            "median_seconds": self.timing.median,
            "seconds": self.timing.seconds,
            "outputs": [{"name": name, "dtype": a.dtype.name, "shape": a.shape} for name, a in outputs],
            "nodes": self.nodes,
            "note": self.note or None,
        }


def run_model(
    model: Model,
    *,
    inputs: SampleSource = None,
    shapes: Mapping[str, int] | None = None,
    seed: int = 0,
    repeat: int = 10,
    profile: bool = False,
    trust_pickle: bool = False,
) -> RunReport:
    """Returns outputs and latencies of `repeat` runs with our kernels, after one that is not counted.

    Args:
        model: path of any ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`.
        inputs: see `samples.py`; the first of several samples is run. Synthesised if None.
        shapes: sizes of free dimensions for synthesised inputs; see `inputs.Sizes`.
        seed: for synthesised inputs.
        repeat: how many runs are counted, at least 1.
        profile: run it as often once more, and say which kernel each node ran and how long.
        trust_pickle: let a .pt2 file run code that it brings; see `mxfp8_graph.load`.

    Raises:
        ContractError: the model cannot be read.
        ShapeError: `inputs` does not fit the model.
        BackendError: ONNX Runtime cannot run it, or the native library is missing.
    """
    signature, runnable = open_runnable(model, trust_pickle=trust_pickle)
    samples = make_samples(signature, inputs, shapes, seed, run=runnable.run)
    feeds = samples.feeds[0]
    # Timed without a profiler, which would slow the runs; the profile is of other runs.
    timing = runnable.time(feeds, repeat)
    nodes = tuple(runnable.profile(feeds, repeat)) if profile else ()
    description = f"{describe(feeds)}, {samples.source}"
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


def open_runnable(model: Model, *, trust_pickle: bool = False) -> tuple[Signature, Runnable]:
    """Returns (the inputs of a model, the model ready to run with our kernels); errors as `run_model`."""
    if is_program(model):
        # Here and not on top: importing torch takes seconds, and ONNX models do not need it.
        from mxfp8_graph.checking.programs import TorchProgram

        program = TorchProgram(model, trust_pickle=trust_pickle)
        return Signature(program.name, program.specs, program.ranges, program.is_rewritten), program
    signature = Signature.of(open_model(model))
    original = not signature.rewritten  # a rewritten model is never run in other dtypes
    return signature, Session(model, kernels=True, where=signature.name, float32=original)


def _profile(nodes: Sequence[NodeProfile]) -> RenderableType:
    """Returns a line for each node that multiplies, the slowest first, and one for the others of each op."""
    total = sum(node.seconds for node in nodes) or 1.0
    others: dict[tuple[str, str], list[NodeProfile]] = defaultdict(list)
    rows: list[tuple[float, tuple[str, ...]]] = []
    for node in nodes:
        # Nodes that multiply are few and take the time; the others are one line for each op.
        if node.operands:
            rows.append((node.seconds, (node.name, node.op, node.operands, node.kernel, node.isa)))
        else:
            others[node.op, node.isa].append(node)
    for (op, isa), some in others.items():
        name = some[0].name if len(some) == 1 else f"{len(some)} nodes"
        rows.append((sum(node.seconds for node in some), (name, op, "", "", isa)))
    rows.sort(key=lambda row: -row[0])
    header = ("node", "op", "multiplies", "kernel", "ISA", "ms", "share")
    return text.grid(header, [(*cells, f"{s * 1e3:.3f}", f"{s / total:.1%}") for s, cells in rows])
