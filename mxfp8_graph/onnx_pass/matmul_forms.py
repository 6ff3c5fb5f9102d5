"""How each op multiplies: which input is which operand, and along which axis it contracts.

MatMul, Gemm, FusedMatMul, FusedGemm      dense_forms.py
Einsum                                    einsum.py
Attention of com.microsoft                packed_attention.py

A row of `FORMS` is all that a further op needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import onnx_graphsurgeon as gs

from mxfp8_graph.onnx_model.check_nodes import schema_of
from mxfp8_graph.onnx_model.walk import MICROSOFT, STANDARD
from mxfp8_graph.onnx_pass import dense_forms, einsum, packed_attention
from mxfp8_graph.onnx_pass.form import Form, View
from mxfp8_graph.onnx_pass.picked import Picked
from mxfp8_graph.onnx_pass.static_operands import Static, StaticOperands, permutation
from mxfp8_graph.policy.eligibility import k_last


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
    merged: tuple[int, ...] | None = None
    """What a run-time operand is reshaped to after that, as Reshape takes it; None if it is not."""


Reader = Callable[[gs.Node, StaticOperands], Form | None]
"""How a node multiplies; None if it does not."""


def multiplies(domain: str | None, op: str) -> bool:
    """Whether there is a row for `op` of that domain."""
    return op in _rows(domain)


def form_of(node: gs.Node, statics: StaticOperands) -> Form | None:
    """Returns how `node` multiplies, or None if it does not."""
    read = _rows(node.domain).get(node.op)
    form = read(node, statics) if read else None
    if form is None or node.domain != MICROSOFT or form.blocker:
        return form
    schema = schema_of(node.op, MICROSOFT)
    if schema is None or schema.attributes.keys() >= node.attrs.keys():
        return form
    attribute = min(node.attrs.keys() - schema.attributes.keys())
    return replace(form, blocker=f"its attribute {attribute!r} is not known; expected {', '.join(schema.attributes)}")


def _rows(domain: str | None) -> Mapping[str, Reader]:
    return FORMS if domain in STANDARD else MICROSOFT_FORMS if domain == MICROSOFT else {}


def operands_of(form: Form, statics: StaticOperands) -> tuple[Operand, Operand, bool]:
    """Returns (X, W, whether the weight comes first, so that the gemm computes the transpose of the result)."""
    left, right = statics.resolve(form.a), statics.resolve(form.b)
    if left is not None and right is None:
        x = _run_time(form.b, form.b_transposed, form.b_view, form.rank)
        return x, _static(form.a, left, form.a_transposed, form.a_view), x.rank != 1  # a vector stays as it is
    x = _run_time(form.a, form.a_transposed, form.a_view, form.rank)
    if right is not None:
        return x, _static(form.b, right, form.b_transposed, form.b_view), False
    return x, _run_time(form.b, form.b_transposed, form.b_view, form.rank), False


def _inside(node: gs.Node, statics: StaticOperands) -> Form | None:
    """Reads an op that holds products with static operands and cannot be taken apart."""
    weights = [tensor for tensor in node.inputs[1:] if (static := statics.resolve(tensor)) and len(static.shape) > 1]
    if not weights:
        return None
    reason = (
        f"{node.op} multiplies by it in a fused node; expected MatMul nodes; optimize the model without that fusion"
    )
    return Form(a=node.inputs[0], b=weights[0], blocker=reason)


FORMS: Final[dict[str, Reader]] = {
    "MatMul": dense_forms.matmul,
    "Gemm": dense_forms.gemm,
    "Einsum": einsum.read,
}
"""How to read each op of the default domain that multiplies matrices."""

MICROSOFT_FORMS: Final[dict[str, Reader]] = {
    "FusedMatMul": dense_forms.fused_matmul,
    "TransposeMatMul": dense_forms.fused_matmul,
    "FusedMatMulActivation": dense_forms.fused_matmul_activation,
    "FusedGemm": dense_forms.fused_gemm,
    "Attention": packed_attention.read,
    "DecoderAttention": _inside,
    "DecoderMaskedSelfAttention": _inside,
    "GatedRelativePositionBias": _inside,
    "GemmFastGelu": _inside,
    "GemmFloat8": _inside,
    "LongformerAttention": _inside,
    "MoE": _inside,
    "PackedAttention": _inside,
}
"""The same for ONNX Runtime's own ops."""


def _static(tensor: gs.Tensor, static: Static, transposed: bool, view: View) -> Operand:
    if view.perm is not None and view.perm != tuple(range(len(view.perm))) and not static.lead:
        static = static.then("Transpose", view.perm, shape=View(perm=view.perm).of(static.shape))
    if view.shape is not None and view.shape != static.shape:
        static = static.then("Reshape", view.shape, shape=view.shape)
    shape = k_last(static.shape, transposed)
    return Operand(name=tensor.name, rank=len(static.shape), shape=shape, transposed=transposed, static=static)


def _run_time(tensor: gs.Tensor, transposed: bool, view: View, rank: int | None) -> Operand:
    """Returns an operand computed at run time. A Transpose in front of it and the one it needs become one, or none."""
    if view.perm is not None:
        rank = len(view.perm)
    rank = rank or (None if tensor.shape is None else len(tensor.shape))
    transposed = transposed and rank != 1
    shape = None if tensor.shape is None else k_last(view.of(tuple(tensor.shape)), transposed)
    needed = None if rank is None else k_last(view.perm or range(rank), transposed)
    name = tensor.name
    if needed is not None and needed != tuple(range(len(needed))):
        producer = tensor.inputs[0] if tensor.inputs else None
        if producer is not None and producer.op == "Transpose" and producer.domain in STANDARD:
            before = permutation(producer, len(needed))
            if before is not None:
                name, needed = producer.inputs[0].name, tuple(before[axis] for axis in needed)
    perm = None if needed is None or needed == tuple(range(len(needed))) else needed
    rank = rank if view.shape is None else len(view.shape)
    return Operand(name=name, rank=rank, shape=shape, transposed=transposed, perm=perm, merged=view.shape)
