"""How ids pick rows of a table: which input is which.

Gather(table [V, D], ids [...], axis 0)         -> [..., D]
GatherND(table [V, D], ids [..., 1])            -> [..., D]

In a `Form` the table is b, [N, K] = [V, D], and the ids are a. Tables of another rank are none: vectors have no rows,
and stacks of matrices are experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import onnx
import onnx_graphsurgeon as gs

from mxfp8_graph.onnx_model.walk import STANDARD
from mxfp8_graph.onnx_pass.form import Form
from mxfp8_graph.onnx_pass.matmul_forms import Operand
from mxfp8_graph.onnx_pass.static_operands import Static, StaticOperands, dtype_of
from mxfp8_graph.policy import eligibility

_LOOKUPS: Final = ("Gather", "GatherND")

_FLOATS: Final = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}
)
"""What a table of numbers holds; one of integers is a shape, or a table of further indices."""


@dataclass(frozen=True, kw_only=True)
class Lookup(Form):
    """A node whose ids pick rows of a table."""

    ids: Operand
    """Shape [...]."""
    squeezed: bool
    """The node takes ids [..., 1]."""


def looks_up(domain: str | None, op: str) -> bool:
    """Whether an op may look up rows of a table."""
    return op in _LOOKUPS and domain in STANDARD


def lookup_of(node: gs.Node, statics: StaticOperands) -> Lookup | None:
    """Returns how `node` looks up rows of a table that is known before the model runs, or None if it does not."""
    if not looks_up(node.domain, node.op):
        return None
    table, ids = node.inputs
    if not (statics.is_constant(table) or table.name in statics.overridable):
        return None
    static = statics.resolve(table)
    shape, dtype = (static.shape, static.dtype) if static else (table.shape, dtype_of(table))
    if shape is None or len(shape) != 2 or dtype not in _FLOATS:
        return None
    squeezed, lead = node.op == "GatherND", ids.shape
    if squeezed and lead is not None:
        lead = lead[:-1]
    return Lookup(
        a=ids,
        b=table,
        b_transposed=False,
        absorbs_add=False,
        ids=Operand(name=ids.name, rank=None if lead is None else len(lead), shape=lead),
        squeezed=squeezed,
        blocker=_unfit(node, static, statics),
    )


def _unfit(node: gs.Node, static: Static | None, statics: StaticOperands) -> str | None:
    """Returns why the node does not pick rows while the model runs, or None."""
    ids = node.inputs[1]
    if node.op == "Gather" and node.attrs.get("axis", 0) not in {0, -2}:
        return "it picks columns of its table; expected rows (axis 0)"
    if node.op == "GatherND":
        last = ids.shape[-1] if ids.shape else None
        if node.attrs.get("batch_dims", 0) or last != 1:
            return "it picks single values of its table, or how many is unknown; expected rows (ids [..., 1])"
    if statics.is_constant(ids):
        return "its ids are constant; fold the constants of the model first"
    return eligibility.weight_blocker(static.shape) if static else None
