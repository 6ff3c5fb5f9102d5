"""Einsums that are matmuls: X [batch..., m..., k...] times W [batch..., n..., k...].

"bsk,kn->bsn"       a linear                          "nk,bsk->bns"       the static side first, the result transposed
"bsk,khd->bshd"     N = h * d: heads at once          "bshd,hdk->bsk"     K = h * d
"ebk,enk->ebn"      one matrix per e                  "...k,nk->...n"     any leading dimensions

Before and after the gemm, a Reshape merges or splits labels that form one dimension of the product, and a Transpose
moves labels that are out of order. A static operand needs neither: it is packed in the order of the product.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from mxfp8_graph.onnx_pass.forms import EpilogueNode, Form, Layout, Resolve
from mxfp8_graph.onnx_pass.graph import attribute, shape_of
from mxfp8_graph.onnx_pass.views import Static

_Labels = tuple[str, ...]


class _NoMatMulError(Exception):
    """The equation is not a matmul; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class _Contraction:
    """The labels of "x,w->output", by operand and by dimension of the product."""

    x: _Labels
    w: _Labels
    output: _Labels
    batch: _Labels
    m: _Labels
    n: _Labels
    k: _Labels


def read(node: ir.Node, resolve: Resolve) -> Form:
    """Returns the form of an Einsum, with its static operand last."""
    # The sort is stable: two operands of one kind keep their order.
    operands = sorted((value for value in node.inputs if value is not None), key=lambda v: resolve(v) is not None)
    x, w, equation = operands[0], operands[-1], attribute(node, "equation", "")
    try:
        if len(operands) > 2:
            raise _NoMatMulError(f"it has {len(operands)} operands; expected 2; split it")
        contraction = _contraction(equation, x, w, swapped=x is not node.inputs[0])
        return _form(x, w, resolve(w), contraction)
    except _NoMatMulError as error:
        return Form(a=x, b=w, blocker=f"equation {equation!r}: {error}")


def _form(x: ir.Value, w: ir.Value, static: Static | None, c: _Contraction) -> Form:
    if static is not None and static.repeated_axes:
        raise _NoMatMulError("its static operand is repeated along a dimension; expected it without that")
    # Packing transposes [batch, K, N] itself; only another order needs a permutation.
    in_order = (*c.batch, *c.k, *c.n) == c.w
    wanted = c.w if in_order else (*c.batch, *c.n, *c.k)
    x_layout, w_layout = Layout(perm=_perm(c.x, (*c.batch, *c.m, *c.k))), Layout(perm=_perm(c.w, wanted))
    after: list[EpilogueNode] = []
    # A gemm has one axis each for N and K. Behind a batch, X needs an axis for M, and W one for each M but the last.
    if len(c.n) > 1 or len(c.k) > 1 or (c.batch and len(c.m) != 1):
        sizes = _sizes(x, static, c)
        n, k = (math.prod(sizes[label] for label in labels) for labels in (c.n, c.k))
        # 0 keeps a size, which need not be known.
        lead, no_rows = [0] * len((*c.batch, *c.m)), [1] if c.batch and not c.m else []
        ones = [1] * (len(c.m) - 1) if c.batch else []  # a stack broadcasts along every m but the last
        stack = [*(sizes[label] for label in c.batch), *ones]
        w_layout = Layout(perm=w_layout.perm, shape=(*stack, *((k, n) if in_order else (n, k))))
        if len(c.k) > 1 or no_rows:
            x_layout = Layout(perm=x_layout.perm, shape=(*lead, *no_rows, k))
        if len(c.n) > 1 or no_rows:
            shape = [*lead, *(sizes[label] for label in wanted if label in c.n)]
            after.append(EpilogueNode(op="Reshape", inputs=(ir.tensor(shape, ir.DataType.INT64),)))
    result = (*c.batch, *c.m, *(label for label in wanted if label in c.n))
    if result != c.output:
        after.append(EpilogueNode(op="Transpose", attributes={"perm": _perm(result, c.output)}))
    return Form(
        a=x, b=w, a_layout=x_layout, b_layout=w_layout, b_transposed=in_order, after=tuple(after), absorbs_add=not after
    )


def _sizes(x: ir.Value, static: Static | None, c: _Contraction) -> dict[str, int]:
    """Returns the size of each label of the static operand, to merge dimensions."""
    if static is None:
        raise _NoMatMulError("both operands are computed at run time; expected one label each for M, N and K")
    sizes = dict(zip(c.w, static.shape, strict=True))
    if 0 in sizes.values():
        raise _NoMatMulError("its static operand is empty; expected N and K above 0")
    for label, size in zip(c.x, shape_of(x) or (), strict=False):
        if label in c.k and isinstance(size, int) and size != sizes[label]:
            raise _NoMatMulError(f"its operands disagree on {label!r}, {size} and {sizes[label]}; correct the model")
    return sizes


def _contraction(equation: str, x: ir.Value, w: ir.Value, *, swapped: bool) -> _Contraction:
    """Returns the labels of an equation by dimension; `swapped` if w comes first in the equation."""
    if not isinstance(equation, str):  # onnx_ir leaves bytes that are no UTF-8 as they are
        raise _NoMatMulError("it is no text; correct the model")
    terms, arrow, result = equation.replace(" ", "").partition("->")
    sides = terms.split(",")
    if len(sides) != 2:
        raise _NoMatMulError(f"it has {len(sides)} terms for 2 operands; correct the model")
    if swapped:
        sides.reverse()
    a, b = (_labels(side, value) for side, value in zip(sides, (x, w), strict=True))
    for labels in (a, b):
        if len(set(labels)) < len(labels):
            raise _NoMatMulError("it takes a diagonal; expected each label once per operand")
    output = _expanded(result, max(_dots(a), _dots(b), key=len)) if arrow else _implied(a, b)
    if len(set(output)) < len(output) or not {*output} <= {*a, *b}:
        raise _NoMatMulError("its result has labels twice or that no operand has; correct the model")
    if alone := ({*a} ^ {*b}) - {*output}:
        raise _NoMatMulError(f"it sums over {min(alone)!r} of one operand; expected a sum over labels of both")
    both = {*a} & {*b}
    k = tuple(label for label in b if label in both and label not in output)
    n = tuple(label for label in output if label in b and label not in both)
    if not k:
        raise _NoMatMulError("it is no matmul: it sums over no label of both operands")
    if not n:
        raise _NoMatMulError("it is no matmul: its second operand has no label of its own")
    m = tuple(label for label in output if label in a and label not in both)
    batch = tuple(label for label in output if label in both)
    # W is [batch, K, N] as it is stored: with N in the same order, W needs no permutation.
    if (*batch, *k) == b[: len(batch) + len(k)]:
        n = b[len(batch) + len(k) :]
    return _Contraction(x=a, w=b, output=output, batch=batch, m=m, n=n, k=k)


def _labels(term: str, value: ir.Value) -> _Labels:
    """Returns one label per axis of an operand. The axes of an ellipsis are "0", "1", ..., counted from the last."""
    shape = shape_of(value)
    rank = None if shape is None else len(shape)
    letters = len(term.replace("...", "", 1))
    if rank is None and "..." in term:
        raise _NoMatMulError("the rank behind an ellipsis is unknown; give the model shape information")
    hidden = 0 if rank is None else rank - letters
    if hidden < 0 or (hidden and "..." not in term):
        raise _NoMatMulError(f"it has {letters} labels for an operand of rank {rank}; correct the model")
    return _expanded(term, tuple(str(i) for i in reversed(range(hidden))))


def _expanded(term: str, dots: Sequence[str]) -> _Labels:
    """Returns the labels of a term, with `dots` in place of its ellipsis."""
    before, ellipsis, behind = term.partition("...")
    if not {*before, *behind} <= {*string.ascii_letters}:
        raise _NoMatMulError("it has other characters than letters; correct the model")
    return (*before, *(dots if ellipsis else ()), *behind)


def _dots(labels: _Labels) -> _Labels:
    """Returns the labels that stand for axes behind an ellipsis."""
    return tuple(label for label in labels if label.isdigit())


def _implied(a: _Labels, b: _Labels) -> _Labels:
    """Returns the result's labels of an equation without "->": the ellipsis, then labels that occur once, sorted."""
    once = {*a} ^ {*b}
    return (*max(_dots(a), _dots(b), key=len), *sorted(label for label in once if not label.isdigit()))


def _perm(have: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    return tuple(have.index(label) for label in wanted)
