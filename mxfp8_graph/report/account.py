"""An account of the bytes of a model's tensors: all of them, before and after, and the largest in high precision."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.report.base import Data
from mxfp8_graph.report.section import Section, byte_size, shape_text

_HIGH_PRECISION: Final = frozenset({"float64", "float32", "float16", "bfloat16"})

_MOST: Final = 3
"""Tensors that an account lists: enough to see what keeps a result large."""


class StoredTensor(NamedTuple):
    """A tensor that a model stores. Tensors that share their bytes are one, with several names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    byte_size: int


@dataclass(frozen=True, kw_only=True)
class KeptTensor(Data):
    """A tensor that the result stores in high precision."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    byte_size: int
    reason: str
    """Why its site is kept; or that it is the weight of no site."""


@dataclass(frozen=True, kw_only=True)
class Account(Data):
    """The bytes of all tensors of a model and of its rewritten result; in a dry run, the predicted ones."""

    bytes_before: int = 0
    bytes_after: int = 0
    largest_kept: tuple[KeptTensor, ...] = ()
    """The largest tensors in high precision, but for those whose sites are all rewritten."""

    def section(self) -> Section:
        """Returns the largest tensors that stay in high precision, as a table."""
        rows = [(t.name, shape_text(t.shape), t.dtype, byte_size(t.byte_size), t.reason) for t in self.largest_kept]
        return Section(
            title="Largest tensors in high precision", columns=(("tensor", "shape", "dtype", "bytes", "why"), rows)
        )


def account(decisions: Sequence[Decision], bytes_before: int, after: Iterable[StoredTensor]) -> Account:
    """Returns the account of a rewrite: `bytes_before` of the model's tensors, and all tensors of the result."""
    tensors = list(after)
    # A weight that one site packs and another keeps is stored twice: the site that keeps it says why.
    reasons = {d.site.weight: d.reason for d in decisions if not d.quantize}
    rewritten = {d.site.weight for d in decisions if d.quantize} - reasons.keys()
    high = (t for t in tensors if t.dtype in _HIGH_PRECISION and rewritten.isdisjoint(t.names))
    kept = [
        KeptTensor(
            name=tensor.names[0],
            shape=tensor.shape,
            dtype=tensor.dtype,
            byte_size=tensor.byte_size,
            reason=next((reasons[name] for name in tensor.names if name in reasons), "no weight of a matmul"),
        )
        for tensor in heapq.nlargest(_MOST, high, key=lambda tensor: tensor.byte_size)
    ]
    bytes_after = sum(tensor.byte_size for tensor in tensors)
    return Account(bytes_before=bytes_before, bytes_after=bytes_after, largest_kept=tuple(kept))
