"""What `verify` and `run` found, on a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from mxfp8_graph.checking.node_check import NodeCheck
from mxfp8_graph.checking.profile import NodeProfile
from mxfp8_graph.checking.report import VerifyReport
from mxfp8_graph.checking.runner import RunReport
from mxfp8_graph.report.data import filled
from mxfp8_graph.report.text import Fitted, grid, lines

SPARE: Final = ("worst sample", "dtype", "max error", "shape")


def verification(report: VerifyReport) -> RenderableType:
    """Returns the outputs, what the nodes did, notes, failures and the verdict."""
    means = ("mean rel. L2", "mean cosine", "worst sample") if any(output.sample for output in report.outputs) else ()
    errors = ("rel. L2", "max error", "cosine", "kernel vs body: rel. L2", "max error")
    header = ("output", "dtype", "shape", *means, *errors)
    rows = []
    for output in report.outputs:
        error, kernel = output.rewritten, output.kernel
        numbers = (f"{error.relative_l2:.3g}", f"{error.max_abs:.3g}", f"{error.cosine:.6f}")
        against_body = (f"{kernel.relative_l2:.3g}", f"{kernel.max_abs:.3g}") if kernel else ("", "")
        of_all = (f"{output.mean_relative_l2:.3g}", f"{output.mean_cosine:.6f}", output.sample) if means else ()
        rows.append((output.name, output.dtype, _shape(output.shape), *of_all, *numbers, *against_body))
    pairs = [("inputs", report.inputs), ("kernels", report.isa)]
    pairs += [("nodes", _node_line(op, nodes)) for op, nodes in report.nodes_by_op.items()]
    pairs += [("note", note) for note in report.notes]
    pairs += [("failed", failure) for failure in report.failures]
    pairs.append(("verdict", report.verdict()))
    return Group(Fitted(*filled(header, rows), SPARE), Text(), lines(pairs)) if rows else lines(pairs)


def run(report: RunReport) -> RenderableType:
    """Returns the outputs of a run, and how long it took."""
    rows = [(name, array.dtype.name, _shape(array.shape)) for name, array in report.timing.outputs.items()]
    seconds, median = report.timing.seconds, report.timing.median
    spread = f"{min(seconds) * 1e3:.3f} to {max(seconds) * 1e3:.3f} ms, {len(seconds)} runs after a warm-up"
    latency = f"median {median * 1e3:.3f} ms ({spread})"
    pairs = [("inputs", report.inputs), ("kernels", report.isa), ("latency", latency)]
    pairs += [("note", report.note)] if report.note else []
    parts = [grid(("output", "dtype", "shape"), rows), lines(pairs)]
    return Group(*parts, _profile(report.nodes)) if report.nodes else Group(*parts)


def _profile(nodes: Sequence[NodeProfile]) -> RenderableType:
    """Returns a line for each node that multiplies, the slowest first, and one for the others of each op."""
    total = sum(node.seconds for node in nodes) or 1.0
    others: dict[tuple[str, str], list[NodeProfile]] = defaultdict(list)
    rows: list[tuple[float, tuple[str, ...]]] = []
    for node in nodes:
        if node.operands:
            rows.append((node.seconds, (node.name, node.op, node.operands, node.kernel, node.isa)))
        else:
            others[node.op, node.isa].append(node)
    for (op, isa), some in others.items():
        name = some[0].name if len(some) == 1 else f"{len(some)} nodes"
        rows.append((sum(node.seconds for node in some), (name, op, "", "", isa)))
    rows.sort(key=lambda row: -row[0])
    header = ("node", "op", "multiplies", "kernel", "ISA", "ms", "share")
    return grid(header, [(*cells, f"{s * 1e3:.3f}", f"{s / total:.1%}") for s, cells in rows])


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _node_line(op: str, nodes: Sequence[NodeCheck]) -> str:
    """Returns what the kernels of one op did against their function bodies, in words."""
    worst = max(node.excess for node in nodes)
    kernels = ", ".join(dict.fromkeys(node.kernel for node in nodes if node.kernel))
    named = f"{len(nodes)} {op} ({kernels})" if kernels else f"{len(nodes)} {op}"
    if nodes[0].has_bound:
        bound = f"at most {worst:.2g} of the fp32 accumulation bound"
        return f"{named}: kernel and function body differ by {bound}"
    differing = f"{worst:.0f} values differ" if worst else "the same bytes"
    return f"{named}: kernel against function body, {differing}"
