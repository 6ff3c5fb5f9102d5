"""The report of a rewrite: sites, decisions, reasons, bytes and errors, as data, text, JSON or one HTML page."""

from __future__ import annotations

import math
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich.filesize import decimal as size  # a number of bytes in words

from mxfp8_graph.file_reading import is_any_of, is_folder
from mxfp8_graph.files import is_taken, write_text
from mxfp8_graph.policy.plan import Decision, MatMulSite
from mxfp8_graph.report import html
from mxfp8_graph.report.account import Account
from mxfp8_graph.report.json_text import finite, json_text
from mxfp8_ops.errors import Mxfp8Error, Option

SCHEMA: Final = 2
"""Version of the layout of `RewriteReport.to_dict`; it grows when a key changes its meaning or goes away."""

SUFFIXES: Final = (".json", ".html")
"""Suffixes of the files that `Report.write` can write."""

_SITE: Final = ("name", "op", "module", "subgraph", "role", "m", "n", "k", "dtype", "weight", "shared_with", "has_bias")
_DECISION: Final = ("quantize", "rule", "reason", "activations", "weight_format", "scale_rounding")
"""Fields of a site and of its decision that `SiteReport.to_dict` has, in this order."""

SITE_HEADER: Final[tuple[str, ...]] = ("site", "module", "op", "M x N x K", "decision", "rule", "reason")
"""Header of `SiteReport.row`."""

WEIGHT_HEADER: Final[tuple[str, ...]] = ("before", "after", "rel. L2", "SQNR dB")
"""Header of `SiteReport.weight_row`."""

FUSION_HEADER: Final[tuple[str, ...]] = ("kind", "node", "stands also for")
"""Header of the fused nodes."""

REASON_HEADER: Final[tuple[str, ...]] = ("decision", "sites", "reason")
"""Header of `reason_rows`."""


def sqnr_db(relative_l2: float) -> float:
    """Returns the signal-to-quantization-noise ratio in dB of a relative L2 error; infinite for an error of 0."""
    return math.inf if relative_l2 == 0 else -20 * math.log10(relative_l2)


@dataclass(frozen=True, kw_only=True)
class SiteReport:
    """The decision on one site, its new nodes, its bytes and its error."""

    decision: Decision
    nodes: tuple[str, ...] = ()
    """Names of the nodes that replace it; empty if it was kept or in a dry run."""
    packed: str | None = None
    """Name of the initializer that holds the packed elements."""
    bytes_before: int = 0
    """Bytes of the static operand in the original."""
    bytes_after: int = 0
    """Bytes of its elements and scales."""
    relative_l2: float | None = None
    """|w - dequantized| / |w| of the static operand; None without one."""

    def without(self, nodes: Container[str]) -> SiteReport:
        """Returns the report without the names of nodes that a fused node replaced."""
        return replace(self, nodes=tuple(name for name in self.nodes if name not in nodes))

    @property
    def sqnr_db(self) -> float | None:
        """The same error as signal-to-quantization-noise ratio in dB."""
        return None if self.relative_l2 is None else sqnr_db(self.relative_l2)

    @property
    def row(self) -> tuple[str, ...]:
        """The site and its decision in words, as `SITE_HEADER` has them."""
        decision, site = self.decision, self.decision.site
        name = f"{site.subgraph}/{site.name}" if site.subgraph else site.name
        verdict = "rewritten" if decision.quantize else "kept"
        return (name, site.module, site.op, sizes(site), verdict, decision.rule, decision.reason)

    @property
    def weight_row(self) -> tuple[html.Cell, ...]:
        """Bytes and errors in words, as `WEIGHT_HEADER` has them; empty where the site has no packed weight."""
        before = html.byte_size(self.bytes_before or None)
        if self.relative_l2 is None:
            return (before, "", "", "")
        errors = html.number(self.relative_l2, ".4f"), html.number(self.sqnr_db, ".1f")
        return (before, html.byte_size(self.bytes_after), *errors)

    def to_dict(self) -> dict[str, Any]:
        """Returns the site, its decision and its result as one flat dict with JSON types only."""
        return {
            **{key: getattr(self.decision.site, key) for key in _SITE},
            **{key: getattr(self.decision, key) for key in _DECISION},
            "nodes": list(self.nodes),
            "packed": self.packed,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "relative_l2": finite(self.relative_l2),
            "sqnr_db": finite(self.sqnr_db),
        }


@dataclass(frozen=True, kw_only=True)
class FusionReport:
    """One fused node."""

    kind: str
    """The fused ops: "gemm + gelu"."""
    node: str
    """Its name."""
    replaced: tuple[str, ...]
    """Names of the other nodes that it replaces."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fusion with JSON types only."""
        return {"kind": self.kind, "node": self.node, "replaced": list(self.replaced)}


@dataclass(frozen=True, kw_only=True)
class WeightError:
    """Errors of the packed weights, each weight counted once however many sites share it."""

    mean: float
    """Mean of the relative L2 errors."""
    worst: float
    worst_site: str
    """Name of the (first) site whose weight has the worst error."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the errors with JSON types only."""
        return {
            "mean_relative_l2": finite(self.mean),
            "mean_sqnr_db": finite(sqnr_db(self.mean)),
            "worst_relative_l2": finite(self.worst),
            "worst_sqnr_db": finite(sqnr_db(self.worst)),
            "worst_site": self.worst_site,
        }


class Report(ABC):
    """The result of a command, as data, JSON or an HTML page."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Returns everything with JSON types only. Numbers that JSON lacks (NaN, infinity) are None."""

    @abstractmethod
    def to_html(self) -> str:
        """Returns one self-contained page: nothing is fetched, and all is there without its script."""

    def to_json(self) -> str:
        """Returns `to_dict` as JSON, a row of each list per line."""
        return json_text(self.to_dict())

    def write(self, path: str | Path, *, overwrite: bool = True) -> Path:
        """Writes the report, as JSON or (suffix .html) as a page, and returns the path.

        Raises:
            Mxfp8Error: as `check_report_path`, or the file cannot be written; a file that is there stays as it was.
        """
        path = check_report_path(path, overwrite=overwrite)
        write_text(path, self.to_html() if path.suffix.lower() == ".html" else self.to_json(), overwrite=overwrite)
        return path


@dataclass(frozen=True, kw_only=True)
class RewriteReport(Report):
    """The report of one rewrite."""

    source: str
    output: str | None
    recipe: dict[str, Any]
    sites: tuple[SiteReport, ...]
    fusions: tuple[FusionReport, ...] = ()
    """The fused nodes, in a dry run the planned ones; empty for a program."""
    bytes_before: int
    bytes_after: int | None
    """Size of the model, external data included; None if nothing was written."""
    seconds: float
    notes: tuple[str, ...] = field(default=())
    """Other changes of the model: opset conversion, inlined functions."""
    dry_run: bool = False
    already_rewritten: bool = False
    account: Account = field(default=Account())
    """The bytes of all tensors, before and after; in a dry run, predicted."""

    @property
    def rewritten(self) -> tuple[SiteReport, ...]:
        """The sites that are, or in a dry run would be, rewritten."""
        return tuple(site for site in self.sites if site.decision.quantize)

    @property
    def kept(self) -> tuple[SiteReport, ...]:
        """The sites that stay in high precision."""
        return tuple(site for site in self.sites if not site.decision.quantize)

    @property
    def rewritten_by_reason(self) -> dict[str, tuple[SiteReport, ...]]:
        """The rewritten sites by reason, most frequent first."""
        return _by_reason(self.rewritten)

    @property
    def kept_by_reason(self) -> dict[str, tuple[SiteReport, ...]]:
        """The kept sites by reason, most frequent first."""
        return _by_reason(self.kept)

    @property
    def weight_error(self) -> WeightError | None:
        """Worst and mean error of the packed weights; None when none was packed."""
        by_weight: dict[str, SiteReport] = {}
        for site in self.rewritten:
            if site.relative_l2 is not None:
                by_weight.setdefault(site.packed or site.decision.site.name, site)
        if not by_weight:
            return None
        errors = {site.decision.site.name: site.relative_l2 or 0.0 for site in by_weight.values()}
        # A NaN (a weight that is not finite) is worse than any number, and max() would pass over it.
        worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        return WeightError(mean=sum(errors.values()) / len(errors), worst=errors[worst], worst_site=worst)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything with JSON types only. Numbers that JSON lacks (NaN, infinity) are None."""
        error = self.weight_error
        return {
            "schema": SCHEMA,
            "source": self.source,
            "output": self.output,
            "recipe": _plain(self.recipe),
            "dry_run": self.dry_run,
            "already_rewritten": self.already_rewritten,
            "seconds": self.seconds,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "notes": [*self.notes, *self.account.large_tables()],
            "rewritten": len(self.rewritten),
            "kept": len(self.kept),
            "kept_by_reason": {reason: len(sites) for reason, sites in self.kept_by_reason.items()},
            "weight_error": error.to_dict() if error else None,
            "account": self.account.to_dict(),
            "sites": [site.to_dict() for site in self.sites],
            "fusions": [fusion.to_dict() for fusion in self.fusions],
        }

    def to_html(self) -> str:
        """Returns one self-contained page: nothing fetched, and all there without its script, which sorts tables.

        Of tables with more than `html.MOST_ROWS` rows it has the first, and says how many more the JSON has.
        """
        # Size and notes are in the lead.
        parts = [html.facts(fact for fact in facts(self)[1:] if fact[0] != "note")]
        if self.output and Path(self.source).suffix:  # not a folder that from_hf read, or a model in memory
            verify = f"mxfp8-graph verify {shlex.quote(self.source)} {shlex.quote(self.output)}"
            parts.append(html.text("To measure the error at the outputs", verify))
        if self.account.tensors:
            parts.append(self.account.overview())
        parts.append(html.Table("Why", REASON_HEADER, reason_rows(self)).html())
        header = ("site", *SITE_HEADER[2:5], *WEIGHT_HEADER[:3])
        rows = [(site.row[0], *site.row[2:5], *site.weight_row[:3]) for site in self.sites]
        notes = [_note(site.decision) for site in self.sites]
        parts.append(html.Table("Sites", *filled(header, rows), paler="kept", notes=notes).html())
        if self.fusions:
            fused = [(fusion.kind, fusion.node, ", ".join(fusion.replaced)) for fusion in self.fusions]
            parts.append(html.Table("Fused nodes", FUSION_HEADER, fused).html())
        if self.account.tensors:
            parts.append(self.account.details())
        lead = [f"{headline(self)}: {facts(self)[0][1]}", *(said for label, said in facts(self) if label == "note")]
        return html.page(f"Rewrite of {self.source}", parts, lead=lead, files=filter(None, (self.source, self.output)))


def check_report_path(path: str | Path, models: Iterable[Path] = (), *, overwrite: bool = True) -> Path:
    """Returns `path` if a report can be written there. Ask before the work, not after it.

    Raises:
        Mxfp8Error: another suffix than one of `SUFFIXES`, no such folder, one of `models`, or a file that exists while
            `overwrite` is false.
    """
    path = Path(path)
    # A report must not replace the model that it is about.
    if is_any_of(path, models):
        raise Mxfp8Error(path, "is the model", expected="another file", advice="correct the report's path")
    if path.suffix.lower() not in SUFFIXES:
        what = f"report with suffix {path.suffix!r}"
        raise Mxfp8Error(path, what, expected=" or ".join(SUFFIXES), advice="rename it")
    if is_folder(path) or not is_folder(path.parent):
        what = "a folder" if is_folder(path) else f"folder {path.parent} does not exist"
        raise Mxfp8Error(path, what, expected="a file in an existing folder", advice="correct the report's path")
    if not overwrite and is_taken(path):
        advice = ("pass ", Option("overwrite", True), " or another path")
        raise Mxfp8Error(path, "exists already", expected="a new file", advice=advice)
    return path


def headline(report: RewriteReport) -> str:
    """Returns the outcome in one line."""
    recipe = report.recipe.get("name", "custom")
    if report.already_rewritten:
        return f"already rewritten with recipe {recipe}; {'copied' if report.output else 'nothing to do'}"
    verb = "would be rewritten" if report.dry_run else "rewritten"
    return f"{_counts(report)} {verb} to MXFP8 with recipe {recipe}"


def facts(report: RewriteReport) -> list[tuple[str, str]]:
    """Returns (label, value) pairs: size, weight error, time, notes, and the path of the result."""
    lines = [("size", size(report.bytes_before))]
    if report.bytes_after is not None:
        ratio = f" ({report.bytes_before / report.bytes_after:.2f}x smaller)" if report.bytes_after else ""
        lines = [("size", f"{size(report.bytes_before)} -> {size(report.bytes_after)}{ratio}")]
    if error := report.weight_error:
        mean, worst = (f"{value:.4f} ({sqnr_db(value):.1f} dB)" for value in (error.mean, error.worst))
        lines.append(("weight error", f"relative L2 mean {mean}, worst {worst} at {error.worst_site}"))
    if report.fusions:
        kinds = Counter(fusion.kind for fusion in report.fusions)
        lines.append(("fused", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())))
    lines.append(("time", f"{report.seconds:.1f} s"))
    lines += [("note", note) for note in (*report.notes, *report.account.large_tables())]
    if report.dry_run:
        lines.append(("result", "nothing written (dry run)"))
    elif report.output:
        lines.append(("result", report.output))
    elif report.already_rewritten:
        lines.append(("result", f"nothing written; {report.source} is the result"))
    return lines


def reason_rows(report: RewriteReport) -> list[tuple[str, tuple[str, float], str]]:
    """Returns how many sites were rewritten and kept for which reason, as `REASON_HEADER` has it."""
    return [
        (decision, (str(len(sites)), len(sites)), reason)
        for decision, groups in (("rewritten", report.rewritten_by_reason), ("kept", report.kept_by_reason))
        for reason, sites in groups.items()
    ]


def sizes(site: MatMulSite) -> str:
    """Returns M x N x K, "?" for a size that only a run of the model shows."""
    return " x ".join("?" if size is None else str(size) for size in (site.m, site.n, site.k))


def shape_text(shape: Sequence[int]) -> str:
    """Returns the shape of an array in words: 2 x 16."""
    return " x ".join(map(str, shape)) or "scalar"


def filled(header: Sequence[str], rows: Sequence[Sequence[html.Cell]]) -> html.Columns:
    """Returns a table without its columns that have only empty cells."""
    used = [i for i in range(len(header)) if any(row[i] for row in rows) or not rows]
    return tuple(header[i] for i in used), [tuple(row[i] for i in used) for row in rows]


def _counts(report: RewriteReport) -> str:
    """Returns how many of the matmuls, and of the embeddings if there are any, are rewritten."""
    counts = {"matmuls": [0, 0], "embeddings": [0, 0]}
    for site in report.sites:
        of_kind = counts["embeddings" if site.decision.site.role == "embedding" else "matmuls"]
        of_kind[0] += site.decision.quantize
        of_kind[1] += 1
    parts = [f"{done} of {total} {kind}" for kind, (done, total) in counts.items() if total or kind == "matmuls"]
    return " and ".join(parts)


def _note(decision: Decision) -> str:
    """Returns the module of a site and, if it is kept, the reason."""
    return "; ".join(filter(None, (decision.site.module, "" if decision.quantize else decision.reason)))


def _by_reason(sites: tuple[SiteReport, ...]) -> dict[str, tuple[SiteReport, ...]]:
    groups: dict[str, list[SiteReport]] = {}
    for site in sites:
        groups.setdefault(site.decision.reason, []).append(site)
    return {reason: tuple(group) for reason, group in sorted(groups.items(), key=lambda item: -len(item[1]))}


def _plain(value: Any) -> Any:
    """Returns `value` with JSON types only: tuples as lists, keys as strings, anything unknown as its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return finite(value) if isinstance(value, float) else str(value)
