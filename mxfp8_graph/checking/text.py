"""The reports of `verify` and `run` on a terminal."""

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
from mxfp8_graph.report.text import Fitted, grid, lines

SPARE: Final = ("worst sample", "dtype", "kernel vs body: max error", "max error", "shape")


def verification(report: VerifyReport) -> RenderableType:
    """Returns the outputs, what the nodes did, notes, failures and the verdict."""
    pairs = [
        *report.facts(),
        *(("nodes", _node_line(op, nodes)) for op, nodes in report.nodes_by_op.items()),
        *(("failed", failure) for failure in report.failures),
        ("verdict", report.verdict()),
    ]
    return Group(Fitted(*report.table(), SPARE), Text(), lines(pairs)) if report.outputs else lines(pairs)


def run(report: RunReport) -> RenderableType:
    """Returns the outputs of a run, and how long it took."""
    parts = [grid(*report.table()), lines(report.facts())]
    return Group(*parts, _profile(report.nodes)) if report.nodes else Group(*parts)


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
    return grid(header, [(*cells, f"{s * 1e3:.3f}", f"{s / total:.1%}") for s, cells in rows])


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
