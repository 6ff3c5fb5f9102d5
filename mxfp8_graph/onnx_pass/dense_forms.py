"""MatMul, Gemm, and what ONNX Runtime's optimizer fuses them to (domain com.microsoft).

MatMul(a [..., M, K], b [..., K, N])
Gemm(a, b, c, transA, transB, alpha, beta)
FusedMatMul(a, b, transA, transB, transBatchA, transBatchB, alpha); TransposeMatMul, its older name
FusedMatMulActivation, FusedGemm                 and an activation, which becomes a node of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import onnx_graphsurgeon as gs

from mxfp8_graph.onnx_pass.form import AS_IS, Form, Step, View
from mxfp8_graph.onnx_pass.static_operands import StaticOperands

ACTIVATIONS: Final[Mapping[str, frozenset[str]]] = {
    "Elu": frozenset({"alpha"}),
    "HardSigmoid": frozenset({"alpha", "beta"}),
    "LeakyRelu": frozenset({"alpha"}),
    "Relu": frozenset(),
    "Selu": frozenset({"alpha", "gamma"}),
    "Sigmoid": frozenset(),
    "Softplus": frozenset(),
    "Softsign": frozenset(),
    "Tanh": frozenset(),
    "ThresholdedRelu": frozenset({"alpha"}),
}
"""The standard ops that ONNX Runtime fuses into a product, and the attributes of each."""

_PREFIX: Final = "activation_"


def matmul(node: gs.Node, statics: StaticOperands) -> Form:
    """Reads MatMul."""
    a, b = node.inputs
    return Form(a=a, b=b)


def gemm(node: gs.Node, statics: StaticOperands) -> Form:
    """Reads Gemm."""
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


def fused_matmul(node: gs.Node, statics: StaticOperands) -> Form:
    """Reads FusedMatMul and TransposeMatMul."""
    a, b = node.inputs
    form = Form(
        a=a,
        b=b,
        a_transposed=bool(node.attrs.get("transA", 0)),
        b_transposed=not node.attrs.get("transB", 0),
        alpha=float(node.attrs.get("alpha", 1.0)),
    )
    a_view, b_view = _batch_first(a, node, "transBatchA"), _batch_first(b, node, "transBatchB")
    if a_view is None or b_view is None:
        return replace(form, blocker="its operands' axes are permuted and a rank is unknown; give it shape information")
    return replace(form, a_view=a_view, b_view=b_view)


def fused_matmul_activation(node: gs.Node, statics: StaticOperands) -> Form:
    """Reads FusedMatMulActivation."""
    return _activated(replace(fused_matmul(node, statics), absorbs_add=False), node)


def fused_gemm(node: gs.Node, statics: StaticOperands) -> Form:
    """Reads FusedGemm."""
    return _activated(gemm(node, statics), node)


def _batch_first(tensor: gs.Tensor, node: gs.Node, attribute: str) -> View | None:
    """Returns how [M, batch..., K] becomes [batch..., M, K], if the attribute says so; None if the rank is unknown."""
    if not node.attrs.get(attribute, 0):
        return AS_IS
    if tensor.shape is None:
        return None
    rank = len(tensor.shape)
    return View(perm=(*range(1, rank - 1), 0, rank - 1)) if rank > 2 else AS_IS


def _activated(form: Form, node: gs.Node) -> Form:
    """Returns `form` with the activation that the op names behind it."""
    op = node.attrs.get("activation", "")
    if not op:
        return form
    given = {key.removeprefix(_PREFIX): v for key, v in node.attrs.items() if key.startswith(_PREFIX)}
    if op not in ACTIVATIONS:
        return replace(form, blocker=f"its activation {op!r} is not known; expected one of {', '.join(ACTIVATIONS)}")
    attributes = {key: value for key, value in given.items() if key in ACTIVATIONS[op]}
    return replace(form, after=(Step(op=op, attributes=attributes),))
