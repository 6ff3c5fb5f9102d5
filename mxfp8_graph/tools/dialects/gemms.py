"""Gemms and lookups <-> products of dequantized operands in standard ops, with the same values.

    MXFP8Gemm(A, B)        <-> MatMul(MXFP8Dequantize(A), Transpose(MXFP8Dequantize(B)))
    MXFP8WeightGemm(X, B)  <-> MatMul(X, Transpose(MXFP8Dequantize(B))), X rounded to bfloat16 where the node does that
    MXFP8Embedding(ids, B) <-> Gather(MXFP8Dequantize(B), ids)
    their bias [N], their output_dtype <-> Add, Cast

Products are of float32 values, as in the nodes. Read, but never written:

    MatMul(X, MXFP8Dequantize(B [K, N], blocks along K)): the bytes of B are transposed
    Gemm with transB, no other transpose and factors of 1

An operand with blocks along another axis, for example, stays MXFP8Dequantize and the standard op.

The dialect `standard` has only these products and bodies, in opset 21: for ONNX Runtime without our library, OpenVINO
and onnx's ReferenceEvaluator. Weights are Cast and Mul, which ONNX Runtime computes once per session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.nodes import in_place_of, is_ours, mxfp8_node, row_of
from mxfp8_graph.onnx_pass.graph import attribute, dtype_of, is_op, label
from mxfp8_graph.tools.dialects.bodies import standard
from mxfp8_graph.tools.dialects.edit import (
    Edit,
    Nodes,
    dims,
    marks,
    operand,
    operands,
    rank_of,
    replacing_outputs,
    tensor_of,
)
from mxfp8_ops import contract
from mxfp8_ops.nodes.gemm import weight_gemm_dtype

CASTS: Final = ("Identity", "Cast")

_TURNS: Final = ("Transpose", "Einsum")

KN: Final = "_kn"
"""Suffix of the name of elements that `convert` wrote as [K, N]."""


class Gemm(NamedTuple):
    """The operands of a gemm of a stored matrix [N, K]."""

    b: ir.Value
    scales: ir.Value
    bias: ir.Value | None
    elements: ir.TensorProtocol
    codes: ir.TensorProtocol


def gemm_of(node: ir.Node) -> Gemm | None:
    """Returns the parts of a gemm of one stored matrix that is not fused; None for other nodes."""
    op = row_of(node)
    if op is None or op.packed_at is None or not op.is_gemm or not op.is_plain or op.indices_at is not None:
        return None
    b, scales = operands(node, op.packed_at)
    elements, codes = tensor_of(b), tensor_of(scales)
    if elements is None or codes is None or len(dims(elements)) != 2:
        return None
    return Gemm(b, scales, operand(node, op.packed_at + 2), elements, codes)


def take_apart(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns dequantized operands and a standard product in place of a gemm or a lookup; None for other nodes."""
    op = row_of(node)
    if op is None or op.packed_at is None or not op.is_plain or op.is_gemm != (op.indices_at is None):
        return None
    if op.indices_at is not None:
        table = _dequantized(edit, node, op.packed_at, attribute(node, "output_dtype", contract.FLOAT))
        return [in_place_of(node, "Gather", [table, node.inputs[op.indices_at]], replacing_outputs(node))]
    elements, values = operands(node, op.packed_at)[0], _dequantized(edit, node, op.packed_at)
    rank = rank_of(elements)

    def make() -> ir.Value:
        wanted = f"{elements.name}_transposed"
        if rank is None:  # Transpose needs the rank, Einsum does not
            return edit.make("Einsum", values, wanted=wanted, equation="...nk->...kn")
        return edit.make("Transpose", values, wanted=wanted, perm=[*range(rank - 2), rank - 1, rank - 2])

    return product(edit, node, edit.shared(node.graph, "transposed", values, make=make))


def product(edit: Edit, node: ir.Node, b: ir.Value) -> Nodes:
    """Returns MatMul(A, b) + bias in the dtype of a gemm, for the values `b` [..., K, N] of its B."""
    row = contract.OPS[node.op_type]
    a = _float_activation(edit, node) if row.weight_only else _dequantized(edit, node, 0)
    dtype, bias = attribute(node, "output_dtype", contract.FLOAT), operand(node, (row.packed_at or 0) + 2)
    # As in the node, the bias is added in float32, before the cast.
    steps: list[tuple[str, list[ir.Value], dict[str, int]]] = []
    if bias is not None:
        steps.append(("Add", [bias], {}))
    if dtype != contract.FLOAT:
        steps.append(("Cast", [], {"to": dtype}))
    between = [ir.Value(name=edit.fresh(f"{label(node)}_{name}")) for name in ("product", "sum")[: len(steps)]]
    results = [*([value] for value in between), replacing_outputs(node)]
    nodes = [in_place_of(node, "MatMul", [a, b], results[0])]
    for (op, others, settings), x, y in zip(steps, results[:-1], results[1:], strict=True):
        name = edit.fresh(f"{label(node)}_{op.lower()}")
        nodes.append(ir.node(op, [*x, *others], settings, outputs=y, name=name))
    return nodes


def _dequantized(edit: Edit, node: ir.Node, at: int, dtype: int = contract.FLOAT) -> ir.Value:
    """Returns the values of the operand whose elements are input `at`; all nodes that read it share one node."""
    elements, scales = operands(node, at)
    settings = {**contract.DEQUANTIZE.attributes, "axis": -1, "output_dtype": dtype}

    def make() -> ir.Value:
        op, wanted = contract.DEQUANTIZE.name, f"{elements.name}_values"
        return edit.make(op, elements, scales, wanted=wanted, domain=contract.DOMAIN, **settings)

    return edit.shared(node.graph, "values", elements, scales, dtype, make=make)


def _float_activation(edit: Edit, node: ir.Node) -> ir.Value:
    """Returns the float32 values that a weight-only gemm multiplies."""
    x, dtype = operands(node)[0], attribute(node, "activation_dtype", contract.FLOAT)
    if dtype != contract.FLOAT:
        x = edit.cast(node, x, dtype, "rounded")
    elif dtype_of(x) == contract.FLOAT:
        return x
    return edit.cast(node, x, contract.FLOAT, "float")


class _Weight(NamedTuple):
    """B of a product, or a table: its elements [..., N, K] and scales, and the dtype of its values."""

    elements: ir.Value
    scales: ir.Value
    dtype: int
    n: int | None
    """N of stored elements."""
    is_kn: bool
    """Whether elements and scales are stored [..., K, N]."""


def put_together(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns the gemm for a product of dequantized operands, its Add and its Cast; None for other nodes."""
    weight = _weight(node) if is_op(node, "MatMul", "Gemm", "Gather") else None
    if weight is None:
        return None
    if node.op_type == "Gather":
        return _embedding(node, weight)
    last, bias, dtype = node, operand(node, 2), weight.dtype
    stored = tensor_of(bias)
    if node.op_type == "Gemm":
        factors = [attribute(node, name, 1.0) for name in ("alpha", "beta")]
        # Our gemm has neither factors nor a transposed activation, and its bias is one value per column.
        if attribute(node, "transA", 0) or factors != [1.0, 1.0]:
            return None
        if bias is not None and (stored is None or dims(stored) != (weight.n,)):
            return None
    elif (add := sole_user(node.outputs[0])) is not None and is_op(add, "Add"):
        others = [value for value in add.inputs if value is not node.outputs[0]]
        stored = tensor_of(others[0]) if len(others) == 1 else None
        if stored is not None and stored.dtype in contract.VALUES and dims(stored) == (weight.n,):
            last, bias = add, others[0]
    cast = sole_user(last.outputs[0])
    if cast is not None and dtype == contract.FLOAT and _rounds(cast):
        last, dtype = cast, attribute(cast, "to", 0)
    if bias is not None and stored is not None and stored.dtype != contract.FLOAT:
        bias = edit.cast(last, bias, contract.FLOAT, "float")
    packed, a = [*_nk(edit, weight), *([] if bias is None else [bias])], operands(node)[0]
    if (quantized := _quantized(a)) is not None:
        return [mxfp8_node(node, contract.GEMM, [*quantized, *packed], replacing_outputs(last), output_dtype=dtype)]
    x, rounds = _activation(a)
    settings = {"output_dtype": weight_gemm_dtype(dtype), **({"activation_dtype": contract.BFLOAT16} if rounds else {})}
    to = None if weight_gemm_dtype(dtype) == dtype else dtype
    make = lambda y: mxfp8_node(node, contract.WEIGHT_GEMM, [x, *packed], y, **settings)  # noqa: E731
    return edit.with_cast(last, f"{last.outputs[0].name}_gemm", to, make)


def _embedding(node: ir.Node, table: _Weight) -> Nodes | None:
    """Returns MXFP8Embedding for a Gather of rows of a stored matrix, packed along its rows; None for others."""
    ids = operands(node)[1]
    is_matrix = table.n is not None and rank_of(table.elements) == 2
    if not is_matrix or attribute(node, "axis", 0) not in (0, -2) or dtype_of(ids) not in contract.INDICES:
        return None
    inputs = [ids, table.elements, table.scales]
    return [mxfp8_node(node, contract.EMBEDDING, inputs, replacing_outputs(node), output_dtype=table.dtype)]


def _rounds(node: ir.Node) -> bool:
    """Whether a node casts the result of a product to its output_dtype, rather than an activation (`_activation`)."""
    is_half = is_op(node, "Cast") and attribute(node, "to", 0) in {contract.FLOAT16, contract.BFLOAT16}
    users = (user for user in node.outputs[0].consumers() if user.graph is not None)
    return is_half and not any(user.op_type == "Cast" for user in users)


def _quantized(value: ir.Value) -> list[ir.Value] | None:
    """Returns the elements and scales of a left operand that is quantized along its last axis at run time, or None."""
    if (origin := _dequantize(value, CASTS)) is None:
        return None
    elements, axis = operands(origin[0])[0], attribute(origin[0], "axis", -1)
    last = axis in {-1, (rank_of(elements) or rank_of(value) or 0) - 1}
    return operands(origin[0]) if last and tensor_of(elements) is None else None


def _activation(value: ir.Value) -> tuple[ir.Value, bool]:
    """Returns (X of a weight-only gemm, without the casts that the node computes itself; whether it rounds X)."""
    casts = source(value, CASTS)[1]
    targets = [attribute(cast, "to", 0) for cast in casts if cast.op_type == "Cast"]
    if targets[:1] == [contract.FLOAT]:
        x, *rounded = (operands(cast)[0] for cast in casts[:2])
        if targets[:2] == [contract.FLOAT, contract.BFLOAT16] and dtype_of(rounded[0]) in contract.VALUES:
            return rounded[0], True
        if dtype_of(x) in contract.VALUES and not marks(casts[0]):
            return x, False
    return value, False


def _weight(user: ir.Node) -> _Weight | None:
    """Returns the right operand of a product if its blocks are along K, or a table if they are along its last axis."""
    is_table = is_op(user, "Gather")
    origin = _dequantize(operands(user)[0 if is_table else 1], CASTS if is_table else (*CASTS, *_TURNS))
    if origin is None:
        return None
    node, views, dtype = origin
    elements, scales = operands(node)
    stored, rank = tensor_of(elements), rank_of(elements)
    turns = [view for view in views if view.op_type in _TURNS]
    if rank is None or rank < 2 or not all(_swaps_last_two(view, rank) for view in turns):
        return None
    # An odd number of transposes turns stored [N, K] into the [K, N] of a product; a table is read as [N, K].
    turned = (len(turns) + is_table + attribute(user, "transB", 0)) % 2 == 1
    if attribute(node, "axis", -1) % rank != (rank - 1 if turned else rank - 2):
        return None
    # Stored as [K, N], it must be transposed here, which needs its bytes.
    if not turned and (stored is None or tensor_of(scales) is None):
        return None
    n = None if stored is None else dims(stored)[-2 if turned else -1]
    return _Weight(elements, scales, dtype, n, is_kn=not turned)


def _nk(edit: Edit, weight: _Weight) -> list[ir.Value]:
    """Returns the elements and scales of a weight, transposed if they are [..., K, N]."""
    if not weight.is_kn:
        return [weight.elements, weight.scales]
    name = str(weight.elements.name)
    # The name before `qdq.WRITE` changed it, so that `unpack` returns the weight under its own name.
    wanted = name.removesuffix(KN) if name.endswith(KN) else f"{name}_nk"
    return [swapped(edit, weight.elements, wanted), swapped(edit, weight.scales, f"{wanted}_scales")]


def _dequantize(value: ir.Value, ops: Sequence[str]) -> tuple[ir.Node, Nodes, int] | None:
    """Returns the MXFP8Dequantize behind views, the views, and the dtype after their casts.

    None if there is no such node, if a cast is to no float, or if a cast before the last one rounds.
    """
    origin, views = source(value, ops)
    node = origin.producer()
    if node is None or not is_ours(node, contract.DEQUANTIZE):
        return None
    casts = [attribute(view, "to", 0) for view in views if view.op_type == "Cast"]
    dtypes = [*casts, attribute(node, "output_dtype", contract.FLOAT)]
    rounding = {*dtypes[1:]} - {contract.FLOAT, dtypes[0]}
    return None if rounding or not {*dtypes} <= {*contract.VALUES} else (node, views, dtypes[0])


def sole_user(value: ir.Value) -> ir.Node | None:
    """Returns the one node that uses a value, new nodes aside; None if there are more, or for outputs of the graph."""
    users = [user for user in value.consumers() if user.graph is not None]
    return users[0] if len(users) == 1 and users[0].graph is value.graph and not value.is_graph_output() else None


def source(value: ir.Value, ops: Sequence[str]) -> tuple[ir.Value, Nodes]:
    """Returns (the value behind views by these ops, the views), with the outermost view first."""
    views: Nodes = []
    while (node := value.producer()) is not None and is_op(node, *ops) and (origin := operand(node, 0)) is not None:
        views.append(node)
        value = origin
    return value, views


def _swaps_last_two(view: ir.Node, rank: int) -> bool:
    if view.op_type == "Einsum":
        return bool(attribute(view, "equation", "") == "...nk->...kn")
    perm = list(attribute(view, "perm", range(rank - 1, -1, -1)))
    return perm == [*range(rank - 2), rank - 1, rank - 2]


def swapped(edit: Edit, value: ir.Value, wanted: str) -> ir.Value:
    """Returns a stored tensor of bytes with its last two axes exchanged, called `wanted` or similar."""
    tensor = tensor_of(value)
    assert tensor is not None  # callers check that it is stored
    return edit.beside(value, wanted, int(tensor.dtype), lambda: np.swapaxes(edit.codes(tensor), -1, -2))


WRITE: Final = {"standard": (take_apart, standard)}
