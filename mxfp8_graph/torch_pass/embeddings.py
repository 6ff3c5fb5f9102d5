"""Ops whose ids pick rows of a table: which argument is the table, and which are the ids.

embedding(w [V, D], ids [...])                  -> [..., D]
index_select(w [V, D], 0, ids [S]), w[ids]      -> [..., D]
embedding_bag(w [V, D], ids, offsets)           adds up rows: reported, never rewritten

In a `Form` the table is b, [N, K] = [V, D], and the ids are a. A table has two axes: vectors have no rows,
and stacks of matrices are experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.fx import Node

from mxfp8_graph.torch_pass.matmul_forms import Form
from mxfp8_graph.torch_pass.static_operands import StaticOperands
from mxfp8_graph.torch_program import internals

_BAGS: Final = internals.op_names("embedding_bag _embedding_bag _embedding_bag_forward_only")
_RENORM: Final = "embedding_renorm"
"""Scales rows of a table down to max_norm; its in-place form writes to the table."""


@dataclass(frozen=True, kw_only=True)
class Lookup(Form):
    """A node whose ids pick rows of a table."""

    unfit: str | None
    """Why the node does not just pick rows while the program runs, or None."""


def lookup_of(node: Node, statics: StaticOperands) -> Lookup | None:
    """Returns how `node` looks up rows of a stored table, or None if it does not."""
    table, ids = _operands(node)
    if not _has(table, lambda v: v.dim() == 2 and v.is_floating_point()):
        return None
    if not _has(ids, lambda v: v.dtype in {torch.int32, torch.int64}):
        return None
    # embedding_renorm writes to the table, so a packed copy would miss its changes; the site is reported with that
    # reason.
    renormed = internals.op_name(table) == _RENORM
    # A table that is computed from inputs is an activation, and its lookup no site at all.
    if not (renormed or statics.is_constant(table) or statics.writer_of(table)):
        return None
    unfit = None
    if renormed:
        unfit = "its table is changed by embedding_renorm (max_norm) while the program runs; expected it fixed"
    elif internals.op_name(node) in _BAGS:
        unfit = "an EmbeddingBag adds up the rows it picks; expected an Embedding, and a sum after it"
    elif statics.is_constant(ids):
        unfit = "its ids are constant; fold the constants of the model first"
    return Lookup(a=ids, b=table, b_transposed=False, unfit=unfit)


def _operands(node: Node) -> tuple[Any, Any]:
    """Returns the table and the ids of an op that picks along the first axis, or (None, None)."""
    op = internals.op_name(node)
    if op == "embedding" or op in _BAGS:
        return internals.argument(node, "weight"), internals.argument(node, "indices")
    if op == "index_select" and internals.argument(node, "dim") == 0:
        return internals.argument(node, "self"), internals.argument(node, "index")
    if op == "index":
        # Several indices pick single elements of the table, not rows.
        ids, *rest = internals.argument(node, "indices")
        return (None, None) if any(rest) else (internals.argument(node, "self"), ids)
    return None, None


def _has(node: Any, wanted: Any) -> bool:
    """Whether the value of `node` is one tensor for which `wanted` is true."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and bool(wanted(value))
