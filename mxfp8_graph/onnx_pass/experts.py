"""Operands of products with experts: weights that are picked from a stack while the model runs, see `picked.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import onnx_graphsurgeon as gs

from mxfp8_graph.onnx_pass.form import AS_IS, Form
from mxfp8_graph.onnx_pass.matmul_forms import Operand, operands_of
from mxfp8_graph.onnx_pass.picked import Picked, picked_of
from mxfp8_graph.onnx_pass.static_operands import Static, StaticOperands
from mxfp8_graph.policy.eligibility import k_last


def operands_with_experts(form: Form, statics: StaticOperands) -> tuple[Operand, Operand, bool]:
    """Returns what `operands_of` does, where neither operand is static but one is picked from a stack: that as well."""
    x, w, swapped = operands_of(form, statics)
    if x.static or w.static:
        return x, w, swapped
    for first in (False, True):
        mine = _mirrored(form) if first else form
        if mine.b_view == AS_IS and (picked := picked_of(mine.b, statics)):
            x = operands_of(mine, statics)[0]
            return x, _operand(mine.b, picked, mine.b_transposed), first
    return x, w, swapped


def stack_of(form: Form, statics: StaticOperands) -> Static | None:
    """Returns the stored weight of a matmul, from which it may be picked; None if it has none."""
    for tensor in (form.b, form.a):
        if static := statics.resolve(tensor):
            return static
    picked = picked_of(form.b, statics) or picked_of(form.a, statics)
    return picked.stack if picked else None


def _operand(tensor: gs.Tensor, picked: Picked, transposed: bool) -> Operand:
    """Returns `tensor` as the weight of a product; `transposed` if it is [..., K, N]."""
    transposed = transposed != picked.flipped
    lead: Sequence[Any] = (None,) * picked.rank if tensor.shape is None else tuple(tensor.shape[:-2])
    shape = (*lead, *k_last(picked.stack.shape[1:], transposed))
    rank = picked.rank + 2
    return Operand(name=tensor.name, rank=rank, shape=shape, transposed=transposed, static=picked.stack, picked=picked)


def _mirrored(form: Form) -> Form:
    """Returns `form` with its operands in each other's place."""
    names = {field.name for field in fields(form)}
    sides = [name for name in names if name == "a" or name.startswith("a_")]
    pairs = [(name, f"b{name[1:]}") for name in sides]
    return replace(form, **{mine: getattr(form, other) for pair in pairs for mine, other in (pair, pair[::-1])})
