"""An account of all bytes of a model's tensors: the users of each, its outcome, and the reason. No graph library.

A stored tensor (an initializer, a constant, a parameter, a buffer) is counted once, however many nodes use it. The
first of these that fits is its outcome:

    rewritten          a matmul that uses it was rewritten
    quantized already  it is of 8 bits or less, or an op for quantized weights uses it
    kept               the weight of a matmul that was kept, for the site's reason
    other op           the weight of an op that is no matmul: a lookup, a convolution, a recurrent layer, any other
    small              biases, normalization weights and other vectors
    other              shapes, indices, scalars, and what nothing uses
    new                what the rewrite added and that stands for no other tensor
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

from rich.filesize import decimal as size

from mxfp8_graph.policy.plan import ROLE_SETTINGS, Decision
from mxfp8_graph.report.base import Data
from mxfp8_graph.report.section import Cell, Columns, Section, byte_size, column_sum

Outcome = Literal["rewritten", "quantized already", "kept", "other op", "small", "other", "new"]

MOST_ROWS: Final = 7
"""Groups that a terminal shows."""

MOST_OPS: Final = 4
"""Ops that `counted` names; the others are one more number."""

_FLOATS: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
_WIDE: Final = frozenset({"int64", "uint64", "int32", "uint32", "int16", "uint16", "bool", "string", "complex64"})

_NO_MATMUL: Final = "no matmul"

_LARGE: Final = 0.25
"""Share of the result's bytes from which on `Account.large_tables` names a table."""

_LEAST_SHARE: Final = 0.1
"""Share of a model's bytes from which on `Account.elsewhere` speaks of them."""


@dataclass(frozen=True, kw_only=True)
class OpKinds:
    """The op names of a front end, by what the ops do with a weight."""

    lookups: frozenset[str]
    convolutions: frozenset[str]
    recurrent: frozenset[str]
    quantized: frozenset[str]
    """Ops whose weights are stored quantized."""

    def describe(self, op: str) -> str:
        """Returns the kind of an op that is no matmul, in words."""
        kinds = (
            (self.lookups, "a lookup"),
            (self.convolutions, "a convolution"),
            (self.recurrent, "a recurrent layer"),
        )
        return next((f"{what}, {_NO_MATMUL}" for ops, what in kinds if op in ops), _NO_MATMUL)


class Use(NamedTuple):
    """One node that reads a stored tensor, at once or through views."""

    node: int
    """A number that no other node of the model has."""
    op: str
    """Op type of the node, in the host's words."""
    what: str = ""
    """Kind of an op that is no matmul, as `OpKinds.describe` returns it; empty for a matmul."""
    quantized: bool = False
    """Whether the op takes weights that are stored quantized."""
    decision: Decision | None = None
    """The decision on the node, if it is a matmul and the tensor one of its operands."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor(Data):
    """One tensor that the model stores, with its bytes in the result."""

    KEYS = "name also_called dtype shape bytes_before bytes_kept bytes_after outcome reason used_by sites"

    name: str
    also_called: tuple[str, ...] = ()
    """Other names of the same data."""
    dtype: str
    shape: tuple[int, ...]
    bytes_before: int
    """0 if the model did not have it."""
    bytes_kept: int
    """Bytes of the tensor itself in the result."""
    bytes_new: int = 0
    """Bytes of the tensors that replace it: elements, scales, a bias in float32."""
    uses: tuple[Use, ...] = ()

    @property
    def bytes_after(self) -> int:
        """Bytes in the result."""
        return self.bytes_kept + self.bytes_new

    @property
    def outcome(self) -> Outcome:
        """The category of the tensor in the account, see the top of this module."""
        return self._verdict[0]

    @property
    def reason(self) -> str:
        """The reason for the outcome, in words."""
        return self._verdict[1]

    @property
    def holders(self) -> tuple[Use, ...]:
        """The uses that `outcome` is about."""
        return self._verdict[2]

    @property
    def used_by(self) -> dict[str, int]:
        """How many times each op uses it."""
        return dict(Counter(use.op for use in self.uses))

    @property
    def sites(self) -> list[str]:
        """Names of the matmuls that it is an operand of."""
        return list(dict.fromkeys(use.decision.site.name for use in self.uses if use.decision))

    @cached_property
    def _verdict(self) -> tuple[Outcome, str, tuple[Use, ...]]:
        sites = tuple(use for use in self.uses if use.decision)
        taken = tuple(use for use in sites if use.decision and use.decision.quantize)
        if taken and taken[0].decision:
            return "rewritten", taken[0].decision.reason + self._also(taken), taken
        # Before the kinds below: what the rewrite added has no use in the model that it came from.
        if not self.bytes_before:
            return "new", "added to the model", ()
        if by := tuple(use for use in self.uses if use.quantized):
            return "quantized already", f"quantized already, by {by[0].op}", by
        if sites and sites[0].decision:
            return "kept", sites[0].decision.reason + self._also(sites), sites
        # [1, N, 1] is a vector too: exporters store biases so.
        vector = sum(length != 1 for length in self.shape) < 2
        # Dtypes of 8 bits or less are those of quantized weights; a list of them would miss the next one.
        if not vector and self.dtype not in _FLOATS | _WIDE:
            return "quantized already", f"quantized already, in {self.dtype}", self.uses
        if not self.uses:
            return "other", "nothing uses it", ()
        if self.dtype not in _FLOATS:
            return "other", "shapes, indices and other constants", self.uses
        # A lookup or a convolution says more about a tensor than an op of unknown kind.
        known_first = sorted(self.uses, key=lambda use: use.what == _NO_MATMUL)
        if not vector and (by := tuple(use for use in known_first if use.what)):
            return "other op", f"{by[0].op}: {by[0].what}", by
        return "small", "biases, normalization weights and other vectors", self.uses

    def _also(self, sites: tuple[Use, ...]) -> str:
        """Returns the other users of the weight of these sites, if the weight stays because of them."""
        others = counted(use for use in self.uses if use not in sites)
        if not others or not self.bytes_kept:
            return ""
        return f"; stays as it is too, for {others}" if self.bytes_new else f"; also used by {others}"


@dataclass(frozen=True, kw_only=True)
class Group(Data):
    """The tensors with the same outcome and the same reason."""

    outcome: Outcome
    reason: str
    tensors: int
    """How many there are."""
    used_by: str
    """Numbers of nodes by op, in words: "24 MatMul, 2 Gemm"."""
    bytes_before: int
    """Bytes in the model."""
    bytes_after: int
    """Bytes in the result."""


@dataclass(frozen=True)
class Account(Data):
    """All stored tensors of a model and of its rewritten result; in a dry run, the predicted ones."""

    KEYS = "bytes_before bytes_after groups tensors"

    make: Callable[[], Iterable[StoredTensor]] = tuple
    """Returns the tensors. It is called on first access, so that writing a model does not wait for its report."""

    @cached_property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """Every tensor, once."""
        return tuple(self.make())

    @property
    def bytes_before(self) -> int:
        """Bytes of all tensors that the model stores."""
        return sum(tensor.bytes_before for tensor in self.tensors)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors that the result stores."""
        return sum(tensor.bytes_after for tensor in self.tensors)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The tensors by outcome and reason: what was rewritten first, then what takes most bytes in the result."""
        by_verdict: dict[tuple[Outcome, str], list[StoredTensor]] = {}
        for tensor in self.tensors:
            by_verdict.setdefault((tensor.outcome, tensor.reason), []).append(tensor)
        groups = [
            Group(
                outcome=outcome,
                reason=reason,
                tensors=len(tensors),
                used_by=counted(use for tensor in tensors for use in tensor.holders),
                bytes_before=sum(tensor.bytes_before for tensor in tensors),
                bytes_after=sum(tensor.bytes_after for tensor in tensors),
            )
            for (outcome, reason), tensors in by_verdict.items()
        ]
        return tuple(sorted(groups, key=lambda g: (g.outcome != "rewritten", -g.bytes_after, -g.bytes_before)))

    def section(self) -> Section:
        """Returns the groups in words, of a single weight also its name; and the total."""
        names = {(tensor.outcome, tensor.reason): f" ({tensor.name})" for tensor in self.tensors}
        rows: list[tuple[Cell, ...]] = []
        for group in self.groups:
            single = group.tensors == 1 and group.outcome not in {"small", "other", "new"}
            used_by = group.used_by + (names[group.outcome, group.reason] if single else "")
            if group.bytes_before or group.bytes_after:
                rows.append((group.outcome, *_sizes(group), used_by, group.reason))
        return Section(
            title="Where the bytes are",
            columns=(("weights", "before", "after", "used by", "why"), rows),
            total=("total", *_sizes(self), "", ""),
            bar="after",
            most=MOST_ROWS,
            rest=lambda rows: f", {size(int(column_sum(rows, 1)))} before and {size(int(column_sum(rows, 2)))} after",
        )

    def table(self) -> Columns:
        """Returns a row per tensor."""
        rows = [(t.name, t.dtype, *_sizes(t), t.outcome, counted(t.uses), t.reason) for t in self.tensors]
        return ("tensor", "dtype", "before", "after", "weights", "used by", "why"), rows

    def large_tables(self) -> list[str]:
        """Returns notes on embedding tables that take much of the result, with the options that pack them."""
        notes, total = [], self.bytes_after
        for tensor in (tensor for tensor in self.tensors if tensor.bytes_kept > _LARGE * total):
            decisions = [use.decision for use in tensor.uses if use.decision and not use.decision.quantize]
            fields = {field: f"set {field}: true" for field in ROLE_SETTINGS.values()}
            wanted = [next((f for f, advice in fields.items() if advice in d.reason), "") for d in decisions]
            if all(wanted) and any(decision.site.role == "embedding" for decision in decisions):
                options = " ".join(f"--set {field}=true" for field in dict.fromkeys(wanted))
                share = f"{size(tensor.bytes_kept)} of {size(total)}"
                notes.append(f"the embedding table {tensor.name} ({share}) stays {tensor.dtype}: {options} packs it")
        packed = any(tensor.bytes_new for tensor in self.tensors)  # not in a program to train
        return notes if packed else []

    def elsewhere(self) -> str:
        """Returns the shares of the model that other ops than matmuls use, in words; "" if all are small."""
        total = self.bytes_before
        by_op: dict[str, list[StoredTensor]] = {}
        for tensor in self.tensors:
            # Kept matmuls have reasons of their own in the list of sites.
            if tensor.outcome in {"other op", "quantized already"}:
                by_op.setdefault(tensor.holders[0].op if tensor.holders else "", []).append(tensor)
        parts = []
        for tensors in sorted(by_op.values(), key=lambda group: -sum(t.bytes_before for t in group)):
            group_bytes = sum(tensor.bytes_before for tensor in tensors)
            if group_bytes >= _LEAST_SHARE * total:
                nodes = counted(use for tensor in tensors for use in tensor.holders)
                which = "which is no matmul" if tensors[0].outcome == "other op" else "quantized already"
                parts.append(f"{group_bytes / total:.0%} of its {size(total)} are in {nodes}, {which}")
        return "; ".join(parts)


def counted(uses: Iterable[Use]) -> str:
    """Returns how many nodes of which ops, most frequent first: "24 MatMul, 2 Gemm"."""
    # By node: one that reads a tensor twice is one user.
    ops = Counter({use.node: use.op for use in uses}.values()).most_common()
    shown = ops if len(ops) <= MOST_OPS else ops[: MOST_OPS - 1]
    others = sum(count for _, count in ops[len(shown) :])
    return ", ".join([*(f"{count} {op}" for op, count in shown), *([f"{others} others"] if others else [])])


def _sizes(part: StoredTensor | Group | Account) -> tuple[Cell, Cell]:
    return byte_size(part.bytes_before), byte_size(part.bytes_after)
