"""How each op multiplies: which input is which operand, and along which axis it contracts.

MatMul(a [..., M, K], b [..., K, N])
Gemm(a, b, c, transA, transB, alpha, beta)

A row of `FORMS` is all that a further op needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import onnx_graphsurgeon as gs

from mxfp8_graph.onnx_model.walk import STANDARD


@dataclass(frozen=True, kw_only=True)
class Form:
    """One matmul as its node states it: alpha * a @ b + beta * c."""

    a: gs.Tensor
    b: gs.Tensor
    a_transposed: bool = False
    """`a` is [..., K, M] instead of [..., M, K]."""
    b_transposed: bool = True
    """`b` is [..., K, N] instead of [..., N, K]."""
    c: gs.Tensor | None = None
    """What the op itself adds."""
    alpha: float = 1.0
    beta: float = 1.0
    rank: int | None = None
    """Rank of both operands, where the op allows only one."""
    absorbs_add: bool = True
    """A bias in an Add after the op may become part of it."""


def form_of(node: gs.Node) -> Form | None:
    """Returns how `node` multiplies, or None if it does not."""
    read = FORMS.get(node.op) if node.domain in STANDARD else None
    return read(node) if read else None


def _matmul(node: gs.Node) -> Form:
    a, b = node.inputs
    return Form(a=a, b=b)


def _gemm(node: gs.Node) -> Form:
    a, b, *c = node.inputs
    return Form(
        a=a,
        b=b,
        a_transposed=bool(node.attrs.get("transA", 0)),
        b_transposed=not node.attrs.get("transB", 0),
        c=c[0] if c and not c[0].is_empty() else None,
        alpha=float(node.attrs.get("alpha", 1.0)),
        beta=float(node.attrs.get("beta", 1.0)),
        rank=2,
        absorbs_add=False,
    )


FORMS: Final[dict[str, Callable[[gs.Node], Form | None]]] = {"MatMul": _matmul, "Gemm": _gemm}
"""How to read each op of the default domain that multiplies matrices."""
