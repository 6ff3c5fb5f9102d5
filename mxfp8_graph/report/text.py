"""What the commands print: reports as words and Rich tables. Nothing is computed here and nothing is decided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from rich import box, filesize
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mxfp8_graph.policy.plan import Decision, MatMulSite
from mxfp8_graph.report.data import RewriteReport, SiteReport, sqnr_db

if TYPE_CHECKING:
    from mxfp8_graph.checking.node_check import NodeCheck
    from mxfp8_graph.checking.runner import RunReport
    from mxfp8_graph.checking.verify import VerifyReport
    from mxfp8_graph.doctor import Check

STYLES: Final = {
    "rewritten": "green",
    "kept": "yellow",
    "ok": "green",
    "failed": "bold red",
    "missing": "yellow",
    "broken": "red",
}
"""Style of a cell that says exactly this."""

SITE_HEADER: Final[tuple[str, ...]] = ("site", "module", "op", "M x N x K", "decision", "rule", "reason")


def headline(report: RewriteReport) -> str:
    """Returns the outcome in one line."""
    recipe = report.recipe.get("name", "custom")
    if report.already_rewritten:
        return f"already rewritten with recipe {recipe}; nothing to do"
    verb = "would be rewritten" if report.dry_run else "rewritten"
    return f"{len(report.rewritten)} of {len(report.sites)} matmuls {verb} to MXFP8 with recipe {recipe}"


def facts(report: RewriteReport) -> list[tuple[str, str]]:
    """Returns the lines under the table: size, weight error, time, notes, and where the result is."""
    lines: list[tuple[str, str]] = []
    if report.bytes_after is None:
        lines.append(("size", size(report.bytes_before)))
    else:
        ratio = f" ({report.bytes_before / report.bytes_after:.2f}x smaller)" if report.bytes_after else ""
        lines.append(("size", f"{size(report.bytes_before)} -> {size(report.bytes_after)}{ratio}"))
    if error := report.weight_error:
        mean, worst = f"{error.mean:.4f} ({decibels(error.mean)})", f"{error.worst:.4f} ({decibels(error.worst)})"
        lines.append(("weight error", f"relative L2 mean {mean}, worst {worst} at {error.worst_site}"))
    lines.append(("time", f"{report.seconds:.1f} s"))
    lines += [("note", note) for note in report.notes]
    if report.dry_run:
        lines.append(("result", "nothing written (dry run)"))
    elif report.already_rewritten:
        lines.append(("result", f"nothing written; {report.source} is the result"))
    elif report.output:
        lines.append(("result", report.output))
    return lines


def closing(report: RewriteReport) -> RenderableType:
    """Returns the table that ends a rewrite: sites grouped by reason, then `facts`."""
    if report.already_rewritten:
        return _lines((("", headline(report)), *facts(report)[-1:]))
    rows = [
        (decision, str(len(sites)), reason)
        for decision, groups in (("rewritten", report.rewritten_by_reason), ("kept", report.kept_by_reason))
        for reason, sites in groups.items()
    ]
    return Group(Text(printable(headline(report))), grid(("decision", "sites", "reason"), rows), _lines(facts(report)))


def plan(report: RewriteReport, *, weights: bool = False) -> Text:
    """Returns one line per site: what `site_row` says; with `weights` also bytes and errors."""
    header, rows = SITE_HEADER, [site_row(site) for site in report.sites]
    if weights:
        header = (*header[:5], "before", "after", "rel. L2", "SQNR dB", *header[5:])
        rows = [(*row[:5], *weight_row(site), *row[5:]) for site, row in zip(report.sites, rows, strict=True)]
    return columns(*filled(header, rows))


def reasons(decisions: Iterable[Decision]) -> Text:
    """Returns why nothing is eligible: one line per site."""
    rows = [(d.site.name, d.site.module, d.site.op, sizes(d.site), d.rule, d.reason) for d in decisions]
    return columns(*filled(("site", "module", "op", "M x N x K", "rule", "reason"), rows))


def site_row(site: SiteReport) -> tuple[str, ...]:
    """Returns the cells under `SITE_HEADER`."""
    decision = site.decision
    name = f"{decision.site.subgraph}/{decision.site.name}" if decision.site.subgraph else decision.site.name
    verdict = "rewritten" if decision.quantize else "kept"
    return (
        name,
        decision.site.module,
        decision.site.op,
        sizes(decision.site),
        verdict,
        decision.rule,
        decision.reason,
    )


def weight_row(site: SiteReport) -> tuple[str, ...]:
    """Returns bytes before, bytes after, relative L2, SQNR; empty where the site has no packed weight."""
    if site.relative_l2 is None:
        return (size(site.bytes_before) if site.bytes_before else "", "", "", "")
    ratio = sqnr_db(site.relative_l2)
    return (size(site.bytes_before), size(site.bytes_after), f"{site.relative_l2:.4f}", f"{ratio:.1f}")


def sizes(site: MatMulSite) -> str:
    """Returns M x N x K, "?" for a size nobody knows before the model runs."""
    return " x ".join("?" if size is None else str(size) for size in (site.m, site.n, site.k))


def size(count: int) -> str:
    """Returns a number of bytes in words, in decimal units."""
    return filesize.decimal(count)


def decibels(relative_l2: float) -> str:
    """Returns the SQNR of a relative L2 error in words."""
    return f"{sqnr_db(relative_l2):.1f} dB"


def filled(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns a table without its columns that have only empty cells."""
    used = [i for i in range(len(header)) if any(row[i] for row in rows) or not rows]
    return tuple(header[i] for i in used), [tuple(row[i] for i in used) for row in rows]


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Returns a plain table. Long cells fold onto further lines: a name is never cut."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in header:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell), style=STYLES.get(cell, "")) for cell in row))
    return table


def verification(report: VerifyReport) -> RenderableType:
    """Returns the outputs, what the nodes did, notes, failures and the verdict."""
    header = ("output", "dtype", "shape", "rel. L2", "max error", "cosine", "kernel vs body: rel. L2", "max error")
    rows = [
        (
            output.name,
            output.dtype,
            " x ".join(map(str, output.shape)) or "scalar",
            f"{output.rewritten.relative_l2:.3g}",
            f"{output.rewritten.max_abs:.3g}",
            f"{output.rewritten.cosine:.6f}",
            f"{output.kernel.relative_l2:.3g}" if output.kernel else "",
            f"{output.kernel.max_abs:.3g}" if output.kernel else "",
        )
        for output in report.outputs
    ]
    lines = [("inputs", report.inputs), ("kernels", report.isa)]
    lines += [("nodes", node_line(op, nodes)) for op, nodes in report.nodes_by_op.items()]
    lines += [("note", note) for note in report.notes]
    lines += [("failed", failure) for failure in report.failures]
    lines.append(("verdict", "passed" if report.passed else "FAILED"))
    return Group(grid(*filled(header, rows)), _lines(lines)) if rows else _lines(lines)


def node_line(op: str, nodes: Sequence[NodeCheck]) -> str:
    """Returns what the kernels of one op did against their function bodies, in words."""
    worst = max(node.excess for node in nodes)
    if nodes[0].is_gemm:
        return (
            f"{len(nodes)} {op}: kernel and function body differ by at most {worst:.2g} of the fp32 accumulation bound"
        )
    differing = f"{worst:.0f} values differ" if worst else "the same bytes"
    return f"{len(nodes)} {op}: kernel against function body, {differing}"


def run(report: RunReport) -> RenderableType:
    """Returns the outputs of a run, and how long it took."""
    rows = [
        (name, array.dtype.name, " x ".join(map(str, array.shape)) or "scalar")
        for name, array in report.timing.outputs.items()
    ]
    seconds = report.timing.seconds
    spread = f"{min(seconds) * 1e3:.3f} to {max(seconds) * 1e3:.3f} ms, {len(seconds)} runs after a warm-up"
    lines = [
        ("inputs", report.inputs),
        ("kernels", report.isa),
        ("latency", f"median {report.timing.median * 1e3:.3f} ms ({spread})"),
    ]
    return Group(grid(("output", "dtype", "shape"), rows), _lines(lines))


def diagnosis(checks: Iterable[Check]) -> RenderableType:
    """Returns the checks of doctor, one line each, advice below what is not ok."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        table.add_row(check.name, Text(check.state, style=STYLES[check.state]), Text(printable(check.detail)))
        if check.advice:
            table.add_row("", "", Text(f"-> {printable(check.advice)}"))
    return table


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Text:
    """Returns one line per row, in aligned columns and never folded: for lists to read, grep and pipe."""
    table = [tuple(header), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    text = Text(no_wrap=True, overflow="ignore")
    for row in table:
        last = max((i for i, cell in enumerate(row) if cell), default=0)
        for i, cell in enumerate(row[: last + 1]):
            text.append(cell, style=STYLES.get(cell, "bold" if row is table[0] else ""))
            text.append("\n" if i == last else " " * (widths[i] - cell_len(cell) + 2))
    text.right_crop(1)
    return text


def _lines(pairs: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for label, value in pairs:
        table.add_row(label, Text(printable(value)))
    return table


def printable(text: str) -> str:
    """Returns `text` with control characters escaped: names come from files anyone may have made."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
