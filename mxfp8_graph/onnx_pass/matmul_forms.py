"""How each op multiplies: which input is which operand, and along which axis it contracts.

MatMul(a [..., M, K], b [..., K, N])
Gemm(a, b, c, transA, transB, alpha, beta)

A row of `FORMS` is all that a further op needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import onnx_graphsurgeon as gs

from mxfp8_graph.onnx_model.walk import STANDARD
from mxfp8_graph.onnx_pass.picked import Picked
from mxfp8_graph.onnx_pass.static_operands import Static, StaticOperands, permutation
from mxfp8_graph.policy.eligibility import k_last


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


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One side of the product."""

    name: str
    rank: int | None
    shape: Sequence[Any] | None
    """Shape with K last; None if it is unknown."""
    transposed: bool = False
    """K is the last axis but one."""
    static: Static | None = None
    picked: Picked | None = None
    """How the weight is picked from the stack that `static` is; None if it is all of it."""
    perm: tuple[int, ...] | None = None
    """What brings K of a run-time operand to the end; None if it is there, or if the rank is unknown."""


def form_of(node: gs.Node) -> Form | None:
    """Returns how `node` multiplies, or None if it does not."""
    read = FORMS.get(node.op) if node.domain in STANDARD else None
    return read(node) if read else None


def operands_of(form: Form, statics: StaticOperands) -> tuple[Operand, Operand, bool]:
    """Returns (X, W, whether the weight comes first, so that the gemm computes the transpose of the result)."""
    left, right = statics.resolve(form.a), statics.resolve(form.b)
    if left is not None and right is None:
        x = _run_time(form.b, form.b_transposed, form.rank)
        return x, _static(form.a, left, form.a_transposed), x.rank != 1  # a vector need not be swapped back
    x = _run_time(form.a, form.a_transposed, form.rank)
    if right is not None:
        return x, _static(form.b, right, form.b_transposed), False
    return x, _run_time(form.b, form.b_transposed, form.rank), False


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


def _static(tensor: gs.Tensor, static: Static, transposed: bool) -> Operand:
    shape = k_last(static.shape, transposed)
    return Operand(name=tensor.name, rank=len(static.shape), shape=shape, transposed=transposed, static=static)


def _run_time(tensor: gs.Tensor, transposed: bool, rank: int | None) -> Operand:
    """Returns an operand computed at run time. A Transpose in front of it and the one it needs become one, or none."""
    rank = rank or (None if tensor.shape is None else len(tensor.shape))
    transposed = transposed and rank != 1
    shape = None if tensor.shape is None else k_last(tensor.shape, transposed)
    if not transposed or rank is None or rank < 2:
        return Operand(name=tensor.name, rank=rank, shape=shape, transposed=transposed)
    producer = tensor.inputs[0] if tensor.inputs else None
    axes = None
    if producer is not None and producer.op == "Transpose" and producer.domain in STANDARD:
        axes = permutation(producer, rank)
    if producer is None or axes is None:
        return Operand(name=tensor.name, rank=rank, shape=shape, transposed=True, perm=k_last(range(rank)))
    perm = k_last(axes)
    name, needed = producer.inputs[0].name, None if perm == tuple(range(rank)) else perm
    return Operand(name=name, rank=rank, shape=shape, transposed=True, perm=needed)
