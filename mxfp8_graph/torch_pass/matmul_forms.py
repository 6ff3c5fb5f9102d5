"""How each op multiplies: which argument is which operand, and along which axis it contracts.

linear(x, w [N, K], b)                mxfp8::linear_train(x, w [N, K], b)
matmul(a, b [K, N]), mm, bmm, mv
addmm(c, a, b, beta, alpha), baddbmm
grouped_mm(a, b [E, K, N], offs), and transformers' fallback for it
scaled_dot_product_attention(q, k, v): scores = q @ k^T, values = softmax(scores) @ v
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from torch.fx import Node

from mxfp8_graph.torch_program import internals

LINEAR_TRAIN: Final = "mxfp8::linear_train"
LINEARS: Final = frozenset({"linear", LINEAR_TRAIN})
PRODUCTS: Final = frozenset({"matmul", "mm", "bmm", "mv"})
SUMS: Final = frozenset({"addmm", "baddbmm"})
ATTENTION: Final = "scaled_dot_product_attention"
GROUPED: Final = ("grouped_mm", "grouped_mm_fallback")
"""Ends of the names of ops that run one matmul per group of rows, each group with its own weight."""
FUSED: Final = "_scaled_dot_product_"
"""Prefix of the kernels that attention becomes once decomposed."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One matmul as its node states it."""

    a: Node
    """[..., M, K]."""
    b: Node
    b_transposed: bool
    """`b` is [..., K, N]."""
    c: Node | None = None
    """What is added."""
    alpha: float = 1.0
    beta: float = 1.0
    offs: Node | None = None
    """Where the rows of `a` end that are multiplied by each matrix of `b`; None if all are."""


def form_of(node: Node) -> Form | None:
    """Returns how `node` multiplies, or None if it does not."""
    op = internals.op_name(node)
    if op in LINEARS:
        a, b, c = (_node(node, name) for name in ("x" if op == LINEAR_TRAIN else "input", "weight", "bias"))
        return Form(a=a, b=b, c=c, b_transposed=False) if a and b else None
    if op in PRODUCTS:
        a, b = node.args[:2]
        return Form(a=a, b=b, b_transposed=True) if isinstance(a, Node) and isinstance(b, Node) else None
    if op in SUMS:
        c, a, b = node.args[:3]
        if not (isinstance(a, Node) and isinstance(b, Node) and isinstance(c, Node)):
            return None
        alpha, beta = (float(internals.argument(node, name, 1)) for name in ("alpha", "beta"))
        return Form(a=a, b=b, b_transposed=True, c=c if beta else None, alpha=alpha, beta=beta)
    if op.endswith(GROUPED):
        a, b = node.args[:2]
        offs = _node(node, "offs")
        return Form(a=a, b=b, b_transposed=True, offs=offs) if isinstance(a, Node) and isinstance(b, Node) else None
    return None


def is_attention(node: Node) -> bool:
    """Whether `node` holds the two products of attention."""
    op = internals.op_name(node)
    return op == ATTENTION or (op.startswith(FUSED) and not op.endswith("backward"))


def _node(node: Node, name: str) -> Any:
    value = internals.argument(node, name)
    return value if isinstance(value, Node) else None
