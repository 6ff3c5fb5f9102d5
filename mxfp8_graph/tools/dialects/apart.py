"""Our gemms and fused nodes, taken apart into MXFP8Quantize, MXFP8Dequantize and standard ops.

    MXFP8FusedGemm, MXFP8NormQuantize, MXFP8Attention ... -> the nodes of their bodies
    MXFP8Gemm(A, B)        -> MatMul(MXFP8Dequantize(A), Transpose(MXFP8Dequantize(B)))
    MXFP8WeightGemm(X, B)  -> MatMul(X, Transpose(MXFP8Dequantize(B))), X rounded to bfloat16 where the node does that
    MXFP8Embedding(ids, B) -> Gather(MXFP8Dequantize(B), ids)

Products are of float32 values, as in the nodes.
"""

from __future__ import annotations

from typing import Final

import onnx
from onnx import helper

from mxfp8_graph.onnx_model.walk import node_label
from mxfp8_graph.tools.dialects.graph_edit import Nodes, Scope, attribute, like, ours
from mxfp8_graph.tools.dialects.qdq import shared
from mxfp8_graph.tools.dialects.restored import taken_apart
from mxfp8_ops import contract

_PLAIN: Final = frozenset(
    {*(op.name for op in (contract.QUANTIZE, contract.DEQUANTIZE)), contract.GEMM.name, contract.WEIGHT_GEMM.name}
    | {contract.EMBEDDING.name, contract.GROUPED_GEMM.name, contract.GROUPED_WEIGHT_GEMM.name}
)
"""Nodes that are no composition of others."""


def unfuse(scope: Scope, node: onnx.NodeProto) -> Nodes | None:
    """Returns the nodes that a fused node stands for, or None if it is none."""
    if node.domain != contract.DOMAIN or node.op_type in _PLAIN:
        return None
    return taken_apart(scope, node)


def take_apart(scope: Scope, node: onnx.NodeProto) -> Nodes | None:
    """Returns dequantized operands and a standard product in place of a gemm or a lookup; None for other nodes."""
    if node.domain != contract.DOMAIN:
        return None
    if node.op_type == contract.GEMM.name:
        return _product(scope, node, _dequantized(scope, node, 0), 2)
    if node.op_type == contract.WEIGHT_GEMM.name:
        return _product(scope, node, _activation(scope, node), 1)
    if node.op_type == contract.EMBEDDING.name:
        dtype = attribute(node, "output_dtype", contract.FLOAT)
        table = _dequantized(scope, node, 1, dtype)
        return [like(node, helper.make_node("Gather", [table, node.input[0]], node.output, name=node.name))]
    return None


def _dequantized(scope: Scope, node: onnx.NodeProto, at: int, dtype: int = contract.FLOAT) -> str:
    """Returns the values of the operand whose elements are input `at`; one node for all that read it."""
    elements, scales = node.input[at : at + 2]

    def make(_: Scope) -> str:
        name = scope.edit.fresh(f"{elements}_values")
        made = ours(contract.DEQUANTIZE, [elements, scales], [name], name, axis=-1, output_dtype=dtype)
        scope.before.append(made)
        return name

    return shared(scope, (contract.DEQUANTIZE.name, elements, scales, dtype), make)


def _activation(scope: Scope, node: onnx.NodeProto) -> str:
    """Returns the float32 values that a weight-only gemm multiplies."""
    x, dtype = node.input[0], attribute(node, "activation_dtype", contract.FLOAT)
    if dtype == contract.FLOAT and scope.edit.dtypes.get(x) == contract.FLOAT:
        return x
    if dtype != contract.FLOAT:
        x = shared(scope, ("cast", x, dtype), lambda _: scope.make("Cast", x, wanted=f"{x}_rounded", to=dtype))
    key = ("cast", x, contract.FLOAT)
    return shared(scope, key, lambda _: scope.make("Cast", x, wanted=f"{x}_float", to=contract.FLOAT))


def _product(scope: Scope, node: onnx.NodeProto, a: str, at: int) -> Nodes:
    """Returns MatMul(a, transpose(B)) + bias in the dtype of `node`, whose input `at` has the elements of B."""
    edit, label = scope.edit, node_label(node)
    b = _transposed(scope, node, at)
    dtype = attribute(node, "output_dtype", contract.FLOAT)
    bias = node.input[at + 2] if len(node.input) > at + 2 else ""
    steps = [("Add", bias)] * bool(bias) + [("Cast", "")] * (dtype != contract.FLOAT)
    y = edit.fresh(f"{label}_product") if steps else node.output[0]
    nodes = [like(node, helper.make_node("MatMul", [a, b], [y], name=node.name))]
    for number, (op, other) in enumerate(steps, 1):
        before, y = y, node.output[0] if number == len(steps) else edit.fresh(f"{label}_sum")
        settings = {"to": dtype} if op == "Cast" else {}
        inputs = [before, other] if other else [before]
        nodes.append(helper.make_node(op, inputs, [y], name=edit.fresh(f"{label}_{op.lower()}"), **settings))
    return nodes


def _transposed(scope: Scope, node: onnx.NodeProto, at: int) -> str:
    """Returns the values of B [..., N, K] as [..., K, N]."""
    values = _dequantized(scope, node, at)
    stored = scope.tensor(node.input[at])
    rank = len(stored.dims) if stored is not None else scope.edit.ranks.get(node.input[at])

    def make(_: Scope) -> str:
        wanted = f"{node.input[at]}_transposed"
        if rank is None:
            return scope.make("Einsum", values, wanted=wanted, equation="...nk->...kn")
        perm = [*range(rank - 2), rank - 1, rank - 2]
        return scope.make("Transpose", values, wanted=wanted, perm=perm)

    return shared(scope, ("transposed", values), make)
