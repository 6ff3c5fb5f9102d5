"""The report of a rewrite: sites, decisions, reasons, bytes and errors, and the bytes of all tensors."""

from __future__ import annotations

import heapq
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich.filesize import decimal as size  # a number of bytes in words

from mxfp8_graph.policy.plan import NOUNS, Decision, noun_of
from mxfp8_graph.report.base import Data, Report
from mxfp8_graph.report.section import Columns, Head, Section, Tile, byte_size, change, filled, number, shape_text
from mxfp8_ops.formats import element_format

SCHEMA: Final = 2
"""Version of a report's JSON. It grows when a key changes its meaning or goes away."""

_SITE: Final = "name op module subgraph role m n k dtype weight shared_with has_bias"
_DECISION: Final = "quantize kind rule reason activations weight_format scale_rounding"
"""Fields of a site and of its decision that the JSON of a `SiteReport` begins with."""

_MOST_REASONS: Final = 20
"""Reasons that a terminal shows. Patterns that match single sites give a reason for each, perhaps hundreds."""

_HIGH_PRECISION: Final = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True)
class StoredTensor(Data):
    """A tensor that a model stores. Tensors that share their bytes are one, with several names."""

    KEYS = "name shape dtype byte_size reason"

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    byte_size: int
    reason: str = ""
    """The reason why it stays in high precision: its site is kept, or it is the weight of no site."""

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]


@dataclass(frozen=True, kw_only=True)
class Account(Data):
    """The bytes of all tensors of a model and of its rewritten result; in a dry run, the predicted ones."""

    bytes_before: int = 0
    bytes_after: int = 0
    largest_kept: tuple[StoredTensor, ...] = ()
    """The largest tensors in high precision, except weights whose sites are all rewritten."""


def sqnr_db(relative_l2: float) -> float:
    """Returns the signal-to-quantization-noise ratio in dB of a relative L2 error; infinite for an error of 0."""
    return math.inf if relative_l2 == 0 else -20 * math.log10(relative_l2)


@dataclass(frozen=True, kw_only=True)
class SiteReport(Data):
    """The decision on one site, its new nodes, its bytes and its error."""

    KEYS = (
        " ".join([f"{key}=decision.site.{key}" for key in _SITE.split()])
        + " ".join(["", *(f"{key}=decision.{key}" for key in _DECISION.split())])
        + " nodes packed bytes_before bytes_after relative_l2 sqnr_db"
    )

    decision: Decision
    nodes: tuple[str, ...] = ()
    """Names of the nodes that replace it; empty for a kept site, and in a dry run."""
    packed: str | None = None
    """Name of the initializer that holds the packed elements."""
    bytes_after: int = 0
    """Bytes of the packed elements and scales."""
    relative_l2: float | None = None
    """|w - dequantized| / |w| of the static operand; None without one."""

    @property
    def bytes_before(self) -> int:
        """Bytes of the static operand in the original."""
        return self.decision.site.weight_bytes

    @property
    def name(self) -> str:
        """Name of the matmul, embedding or convolution."""
        return self.decision.site.name

    @property
    def kept(self) -> bool:
        """Whether it stays in high precision."""
        return not self.decision.quantize

    @property
    def reason(self) -> str:
        """The reason for the decision, in words."""
        return self.decision.reason

    @property
    def path(self) -> str:
        """Name of the site, with the path of its subgraph."""
        return "/".join(filter(None, (self.decision.site.subgraph, self.decision.site.name)))

    @property
    def sqnr_db(self) -> float | None:
        """The same error as signal-to-quantization-noise ratio in dB."""
        return None if self.relative_l2 is None else sqnr_db(self.relative_l2)


@dataclass(frozen=True, kw_only=True)
class FusionReport(Data):
    """One fused node."""

    kind: str
    """The fused ops: "gemm + gelu"."""
    node: str
    """Its name."""
    replaced: tuple[str, ...]
    """Names of the other nodes that it replaces."""


@dataclass(frozen=True, kw_only=True)
class UnfusedReport(Data):
    """One node that could have been fused."""

    node: str
    """Its name."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class WeightError(Data):
    """Errors of the packed weights, each weight counted once however many sites share it."""

    mean: float
    """Mean of the relative L2 errors."""
    worst: float
    worst_site: str
    """Name of the (first) site whose weight has the worst error."""

    def content(self) -> dict[str, Any]:
        """Returns the values of the JSON by key: the errors, also in dB."""
        mean = {"mean_relative_l2": self.mean, "mean_sqnr_db": sqnr_db(self.mean)}
        worst = {"worst_relative_l2": self.worst, "worst_sqnr_db": sqnr_db(self.worst)}
        return {**mean, **worst, "worst_site": self.worst_site}


@dataclass(frozen=True, kw_only=True)
class RewriteReport(Report):
    """The report of one rewrite."""

    TITLE = "Rewrite of {source}"
    FILES = ("source", "output")
    KEYS = "source output recipe dry_run already_rewritten seconds bytes_before bytes_after advice?"
    """The first keys of the JSON; see `content`."""

    source: str
    output: str | None
    recipe: dict[str, Any]
    sites: tuple[SiteReport, ...]
    fusions: tuple[FusionReport, ...] = ()
    """The fused nodes, in a dry run the planned ones; empty for a program."""
    unfused: tuple[UnfusedReport, ...] = ()
    """Activations, gates and attentions beside rewritten matmuls that stay nodes of their own, and why."""
    bytes_before: int
    bytes_after: int | None
    """Size of the model, external data included; None if nothing was written."""
    seconds: float
    notes: tuple[str, ...] = field(default=())
    """Other changes of the model: opset conversion, inlined functions."""
    dry_run: bool = False
    already_rewritten: bool = False
    account: Account = field(default=Account())
    """The bytes of all tensors, before and after, and the largest in high precision; in a dry run, predicted."""
    advice: str = ""
    """A sentence about a better preset for this processor; empty without one."""

    @property
    def rewritten(self) -> tuple[SiteReport, ...]:
        """The sites that are, or in a dry run would be, rewritten."""
        return tuple(site for site in self.sites if site.decision.quantize)

    @property
    def kept(self) -> tuple[SiteReport, ...]:
        """The sites that stay in high precision."""
        return tuple(site for site in self.sites if not site.decision.quantize)

    @property
    def kept_by_reason(self) -> dict[str, tuple[SiteReport, ...]]:
        """The kept sites by reason, most frequent first."""
        return _by_reason(self.kept)

    @property
    def weight_error(self) -> WeightError | None:
        """Worst and mean error of the packed weights; None when none was packed."""
        # The first site of a weight counts for all: the others have the same error.
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

    def content(self) -> dict[str, Any]:
        """Returns the values of the JSON by key."""
        return {
            "schema": SCHEMA,
            **super().content(),
            "notes": self.notes,
            "rewritten": len(self.rewritten),
            "kept": len(self.kept),
            "kept_by_reason": {reason: len(sites) for reason, sites in self.kept_by_reason.items()},
            "weight_error": self.weight_error,
            "account": self.account,
            "sites": self.sites,
            "fusions": self.fusions,
            "unfused": self.unfused,
        }

    def answer(self) -> str:
        """Returns one sentence: the rewritten matmuls, the size before and after, and a command that checks them."""
        recipe = self.recipe.get("name", "custom")
        if self.already_rewritten:
            what = f"{self.source} is already rewritten with recipe {recipe}"
            return f"{what}; {f'it is copied to {self.output}' if self.output else 'nothing is written'}."
        used = ((site.decision.weight_format, site.decision.activation_format) for site in self.rewritten)
        formats = " and ".join(dict.fromkeys(element_format(name).mx_name for pair in used for name in pair if name))
        what = f"{self._counts()}{formats and f' to {formats}'} with recipe {recipe}"
        if self.dry_run:
            sizes = f"{size(self.account.bytes_before)} to {size(self.account.bytes_after)}"
            return f"Would rewrite {what}: tensors of {sizes}; nothing is written."
        text = f"Rewrote {what}: {size(self.bytes_before)} to {size(self.bytes_after or 0)}"
        return f"{text}; check it with `{command}`." if (command := self._check()) else f"{text}."

    def _check(self) -> str:
        """Returns the command that checks the result; "" if it is not a file."""
        source = Path(self.source)
        if self.output is None or not source.suffix or source.is_dir():  # a model in memory, or a folder of from_hf
            return ""
        return f"mxfp8-graph verify {shlex.quote(self.source)} {shlex.quote(self.output)}"

    def head(self) -> Head:
        """Returns the size, the number of rewritten sites, the error of the weights, and the command that checks it."""
        before, after, what = self.bytes_before, self.bytes_after, "size"
        if after is None:
            before, after, what = self.account.bytes_before, self.account.bytes_after, "tensors"
        tiles = [Tile(what, size(after), size(before), change(before, after))]
        if self.sites:
            first, *others = self._counts().split(" and ")
            count, _, noun = first.rpartition(" ")
            tiles.append(Tile("rewritten", count, note=", ".join([noun, *others])))
        if error := self.weight_error:
            note = f"relative L2, worst {error.worst:.3g}"
            tiles.append(Tile("error of the weights", f"{error.mean:.3g}", note=note))
        good = self.rewritten and not self.advice
        return Head(verdict="good" if good else "warning", tiles=tiles, command=self._check())

    def _counts(self) -> str:
        """Returns the numbers of rewritten sites of each kind: "5 of 6 matmuls and 0 of 1 embeddings"."""
        kinds: dict[str, list[bool]] = {noun: [] for noun in NOUNS}
        for each in self.sites:
            kinds[noun_of(each.decision.site)].append(each.decision.quantize)
        counted = {noun: verdicts for noun, verdicts in kinds.items() if verdicts} or {NOUNS[0]: []}
        return " and ".join(f"{sum(verdicts)} of {len(verdicts)} {noun}s" for noun, verdicts in counted.items())

    def facts(self) -> list[tuple[str, str]]:
        """Returns (label, value) pairs: weight error, fused nodes, time and notes."""
        lines = []
        if error := self.weight_error:
            mean, worst = (f"{each:.4f} ({sqnr_db(each):.1f} dB)" for each in (error.mean, error.worst))
            lines.append(("weight error", f"relative L2 mean {mean}, worst {worst} at {error.worst_site}"))
        if self.fusions:
            kinds = Counter(fusion.kind for fusion in self.fusions)
            lines.append(("fused", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())))
        lines += [("time", f"{self.seconds:.1f} s"), *(("note", note) for note in self.notes)]
        return lines + [("advice", self.advice)] * bool(self.advice)

    def sections(self) -> Iterator[Section]:
        """Yields facts, reasons and the largest tensors in high precision; then all sites and fusions."""
        yield Section(facts=self.facts())
        groups = (("rewritten", _by_reason(self.rewritten)), ("kept", self.kept_by_reason))
        rows = [(verdict, number(len(s), "d"), reason) for verdict, by in groups for reason, s in by.items()]
        yield Section(title="Why", columns=(("decision", "sites", "reason"), rows), most=_MOST_REASONS)
        kept = self.account.largest_kept
        large = [(t.name, shape_text(t.shape), t.dtype, byte_size(t.byte_size), t.reason) for t in kept]
        yield Section(title="Largest in high precision", columns=(("tensor", "shape", "dtype", "bytes", "why"), large))
        yield Section(title="Sites", columns=site_table(sorted(self.sites, key=_error)), detail=True)
        fused = [(fusion.kind, fusion.node, ", ".join(fusion.replaced)) for fusion in self.fusions]
        yield Section(title="Fused nodes", columns=(("kind", "node", "stands also for"), fused), detail=True)
        missed = [(each.node, each.reason) for each in self.unfused]
        yield Section(title="Not fused", columns=(("node", "reason"), missed), detail=True)


def _by_reason(sites: tuple[SiteReport, ...]) -> dict[str, tuple[SiteReport, ...]]:
    groups: dict[str, list[SiteReport]] = {}
    for site in sites:
        groups.setdefault(site.decision.reason, []).append(site)
    # A terminal shows the first rows only, so the most frequent reasons come first.
    return {reason: tuple(group) for reason, group in sorted(groups.items(), key=lambda item: -len(item[1]))}


def _error(site: SiteReport) -> float:
    """Returns a number that sorts sites, the largest error first and those without one last."""
    error = -1.0 if site.relative_l2 is None else site.relative_l2
    return -math.inf if math.isnan(error) else -error


def site_table(sites: Iterable[SiteReport]) -> Columns:
    """Returns header and one row per site: the decision on it, with bytes and errors where it has a packed weight."""
    rows = []
    for each in sites:
        decision, site = each.decision, each.decision.site
        after = byte_size(None if each.relative_l2 is None else each.bytes_after)
        weight = (byte_size(each.bytes_before or None), after, number(each.relative_l2, ".4f"))
        verdict = "rewritten" if decision.quantize else "kept"
        # Some sizes are known only when the model runs.
        sizes = " x ".join("?" if size is None else str(size) for size in (site.m, site.n, site.k))
        rows.append((each.path, site.module, site.op, sizes, verdict, *weight, decision.rule, decision.reason))
    weights = ("before", "after", "relative L2")
    return filled(("site", "module", "op", "M x N x K", "decision", *weights, "rule", "reason"), rows)


def account(decisions: Sequence[Decision], bytes_before: int, after: Iterable[StoredTensor]) -> Account:
    """Returns the account of a rewrite from the bytes of the model's tensors and the tensors of the result."""
    tensors = list(after)
    # A weight that one site packs and another keeps is stored twice: the site that keeps it says why.
    reasons = {d.site.weight: d.reason for d in decisions if not d.quantize}
    rewritten = {d.site.weight for d in decisions if d.quantize} - reasons.keys()
    high = (t for t in tensors if t.dtype in _HIGH_PRECISION and rewritten.isdisjoint(t.names))
    largest = heapq.nlargest(3, high, key=lambda tensor: tensor.byte_size)
    why = (next((reasons[name] for name in t.names if name in reasons), "no weight of a matmul") for t in largest)
    kept = tuple(replace(tensor, reason=reason) for tensor, reason in zip(largest, why, strict=True))
    return Account(bytes_before=bytes_before, bytes_after=sum(t.byte_size for t in tensors), largest_kept=kept)
