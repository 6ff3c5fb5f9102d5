"""Gemms and lookups, and the products of dequantized operands that say the same in standard ops.

    MXFP8Gemm(A, B)        <-> MatMul(MXFP8Dequantize(A), Transpose(MXFP8Dequantize(B)))
    MXFP8WeightGemm(X, B)  <-> MatMul(X, Transpose(MXFP8Dequantize(B))), X rounded to bfloat16 where the node does that
    MXFP8Embedding(ids, B) <-> Gather(MXFP8Dequantize(B), ids)
    their bias [N], their output_dtype <-> Add, Cast

Products are of float32 values, as in the nodes. Read, but never written:

    MatMul(X, MXFP8Dequantize(B [K, N], blocks along K)): the bytes of B are transposed
    Gemm with transB, no other transpose and factors of 1

What is quantized in another way, along another axis say, stays MXFP8Dequantize and the standard op.

`standard` is the dialect of these products and of bodies alone, of opset 21: for ONNX Runtime without our library,
OpenVINO and onnx's ReferenceEvaluator. Weights are Cast and Mul, which ONNX Runtime computes once per session.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.replacement import in_place_of, is_ours, mxfp8_node, row_of
from mxfp8_graph.onnx_pass.graph import attribute, dtype_of, is_op, label
from mxfp8_graph.tools.dialects.bodies import is_marked, standard
from mxfp8_graph.tools.dialects.edit import (
    CASTS,
    Edit,
    Nodes,
    dims,
    heirs,
    operand,
    operands,
    rank_of,
    sole_user,
    source,
    tensor_of,
)
from mxfp8_ops import contract
from mxfp8_ops.nodes.gemm import weight_gemm_dtype

KN: Final = "_kn"
"""Ends the name of elements that `convert` has written as [K, N]."""


class Gemm(NamedTuple):
    """What a gemm of a stored matrix [N, K] has."""

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
        return [in_place_of(node, "Gather", [table, node.inputs[op.indices_at]], heirs(node))]
    elements, values = operands(node, op.packed_at)[0], _dequantized(edit, node, op.packed_at)
    rank = rank_of(elements)

    def make() -> ir.Value:
        wanted = f"{elements.name}_transposed"
        if rank is None:
            return edit.make("Einsum", values, wanted=wanted, equation="...nk->...kn")
        return edit.make("Transpose", values, wanted=wanted, perm=[*range(rank - 2), rank - 1, rank - 2])

    return product(edit, node, edit.shared(node.graph, "transposed", values, make=make))


def product(edit: Edit, node: ir.Node, b: ir.Value) -> Nodes:
    """Returns MatMul(A, b) + bias in the dtype of a gemm, for the values `b` [..., K, N] of its B."""
    row = contract.OPS[node.op_type]
    a = _float_activation(edit, node) if row.weight_only else _dequantized(edit, node, 0)
    dtype, bias = attribute(node, "output_dtype", contract.FLOAT), operand(node, (row.packed_at or 0) + 2)
    steps: list[tuple[str, list[ir.Value], dict[str, int]]] = []
    if bias is not None:
        steps.append(("Add", [bias], {}))
    if dtype != contract.FLOAT:
        steps.append(("Cast", [], {"to": dtype}))
    between = [ir.Value(name=edit.fresh(f"{label(node)}_{name}")) for name in ("product", "sum")[: len(steps)]]
    results = [*([value] for value in between), heirs(node)]
    nodes = [in_place_of(node, "MatMul", [a, b], results[0])]
    for (op, others, settings), x, y in zip(steps, results[:-1], results[1:], strict=True):
        name = edit.fresh(f"{label(node)}_{op.lower()}")
        nodes.append(ir.node(op, [*x, *others], settings, outputs=y, name=name))
    return nodes


def _dequantized(edit: Edit, node: ir.Node, at: int, dtype: int = contract.FLOAT) -> ir.Value:
    """Returns the values of the operand whose elements are input `at`; one node for all that read it."""
    elements, scales = operands(node, at)
    settings = {**contract.DEQUANTIZE.attributes, "axis": -1, "output_dtype": dtype}

    def make() -> ir.Value:
        op, wanted = contract.DEQUANTIZE.name, f"{elements.name}_values"
        return edit.make(op, elements, scales, wanted=wanted, domain=contract.DOMAIN, **dict(sorted(settings.items())))

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
    """B of a product: its elements [..., N, K] and scales, and the dtype of its values."""

    elements: ir.Value
    scales: ir.Value
    dtype: int
    n: int | None
    """N of stored elements."""
    is_kn: bool
    """Whether elements and scales are stored [..., K, N]."""


def put_together(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns the gemm for a product of dequantized operands, its Add and its Cast; None for other nodes."""
    if is_op(node, "Gather"):
        return _embedding(node)
    weight = _weight(node) if is_op(node, "MatMul", "Gemm") else None
    if weight is None:
        return None
    last, bias = node, operand(node, 2)
    stored = tensor_of(bias)
    if node.op_type == "Gemm":
        factors = [attribute(node, name, 1.0) for name in ("alpha", "beta")]
        if attribute(node, "transA", 0) or factors != [1.0, 1.0]:
            return None
        if bias is not None and (stored is None or dims(stored) != (weight.n,)):
            return None
    elif (add := sole_user(node.outputs[0])) is not None and is_op(add, "Add"):
        others = [value for value in add.inputs if value is not node.outputs[0]]
        stored = tensor_of(others[0]) if len(others) == 1 else None
        if stored is not None and stored.dtype in contract.VALUES and dims(stored) == (weight.n,):
            last, bias = add, others[0]
    dtype = weight.dtype
    cast = sole_user(last.outputs[0])
    if cast is not None and dtype == contract.FLOAT and _rounds(cast):
        last, dtype = cast, attribute(cast, "to", 0)
    if bias is not None and stored is not None and stored.dtype != contract.FLOAT:
        bias = edit.cast(last, bias, contract.FLOAT, "float")
    return _gemm(edit, node, last, [*_nk(edit, weight), *([] if bias is None else [bias])], dtype)


def _rounds(node: ir.Node) -> bool:
    """Whether a node casts the result of a product to its output_dtype, rather than an activation (`_activation`)."""
    is_half = is_op(node, "Cast") and attribute(node, "to", 0) in {contract.FLOAT16, contract.BFLOAT16}
    users = (user for user in node.outputs[0].consumers() if user.graph is not None)
    return is_half and not any(user.op_type == "Cast" for user in users)


def _gemm(edit: Edit, product: ir.Node, last: ir.Node, weight: list[ir.Value], dtype: int) -> Nodes:
    """Returns the gemm of a product with a packed weight and perhaps a bias, whose result is that of `last`."""
    a = operands(product)[0]
    if (quantized := _quantized(a)) is not None:
        return [mxfp8_node(product, contract.GEMM, [*quantized, *weight], heirs(last), output_dtype=dtype)]
    x, settings = _activation(a)
    held = weight_gemm_dtype(dtype)
    settings = {**settings, "output_dtype": held}
    make = lambda y: mxfp8_node(product, contract.WEIGHT_GEMM, [x, *weight], y, **settings)  # noqa: E731
    return edit.ending(last, f"{last.outputs[0].name}_gemm", None if held == dtype else dtype, make)


def _embedding(node: ir.Node) -> Nodes | None:
    """Returns MXFP8Embedding for a Gather of rows of a stored table, packed along its rows; None for others."""
    values, ids = operands(node)
    origin, views = source(values, CASTS)
    table = origin.producer()
    if table is None or not is_ours(table, contract.DEQUANTIZE):
        return None
    stored, dtype = tensor_of(operands(table)[0]), _cast_dtype(table, views)
    along_rows = stored is not None and len(dims(stored)) == 2 and attribute(table, "axis", -1) in (-1, 1)
    by_row = attribute(node, "axis", 0) in (0, -2) and dtype_of(ids) in contract.INDICES
    if not along_rows or not by_row or dtype is None:
        return None
    return [mxfp8_node(node, contract.EMBEDDING, [ids, *operands(table)], heirs(node), output_dtype=dtype)]


def _quantized(value: ir.Value) -> list[ir.Value] | None:
    """Returns the elements and scales of a left operand that is quantized along its last axis as the model runs."""
    origin, views = source(value, CASTS)
    node = origin.producer()
    if node is None or not is_ours(node, contract.DEQUANTIZE) or _cast_dtype(node, views) is None:
        return None
    elements, axis = operands(node)[0], attribute(node, "axis", -1)
    rank = rank_of(elements) or rank_of(value)
    last = axis == -1 or (rank is not None and axis == rank - 1)
    return operands(node) if last and tensor_of(elements) is None else None


def _activation(value: ir.Value) -> tuple[ir.Value, dict[str, int]]:
    """Returns X of a weight-only gemm, without the casts that the node does itself."""
    casts = source(value, CASTS)[1]
    targets = [attribute(cast, "to", 0) for cast in casts if cast.op_type == "Cast"]
    if targets[:1] == [contract.FLOAT]:
        x, *rounded = (operands(cast)[0] for cast in casts[:2])
        if targets[:2] == [contract.FLOAT, contract.BFLOAT16] and dtype_of(rounded[0]) in contract.VALUES:
            return rounded[0], {"activation_dtype": contract.BFLOAT16}
        if dtype_of(x) in contract.VALUES and not is_marked(casts[0]):
            return x, {}
    return value, {}


def _weight(product: ir.Node) -> _Weight | None:
    """Returns the right operand of a product if it is packed along K."""
    origin, views = source(operands(product)[1], (*CASTS, "Transpose", "Einsum"))
    node = origin.producer()
    if node is None or not is_ours(node, contract.DEQUANTIZE):
        return None
    elements, scales = operands(node)
    stored, rank, dtype = tensor_of(elements), rank_of(elements), _cast_dtype(node, views)
    turns = [view for view in views if view.op_type in {"Transpose", "Einsum"}]
    if rank is None or rank < 2 or dtype is None or not all(_swaps_last_two(view, rank) for view in turns):
        return None
    turned = bool(len(turns) % 2) != bool(is_op(product, "Gemm") and attribute(product, "transB", 0))
    if attribute(node, "axis", -1) % rank != (rank - 1 if turned else rank - 2):
        return None
    if not turned and (stored is None or tensor_of(scales) is None):
        return None
    n = None if stored is None else dims(stored)[-2 if turned else -1]
    return _Weight(elements, scales, dtype, n, is_kn=not turned)


def _nk(edit: Edit, weight: _Weight) -> list[ir.Value]:
    """Returns the elements and scales of a weight, transposed if they are [..., K, N]."""
    if not weight.is_kn:
        return [weight.elements, weight.scales]
    name = str(weight.elements.name)
    # As it was before `qdq.write_product`, so that `unpack` finds the weight by its name.
    wanted = name.removesuffix(KN) if name.endswith(KN) else f"{name}_nk"
    return [swapped(edit, weight.elements, wanted), swapped(edit, weight.scales, f"{wanted}_scales")]


def _cast_dtype(node: ir.Node, views: Nodes) -> int | None:
    """Returns the dtype after casts of dequantized values; None if one but the last rounds, or one is to no float."""
    casts = [attribute(view, "to", 0) for view in views if view.op_type == "Cast"]
    dtypes = [*casts, attribute(node, "output_dtype", contract.FLOAT)]
    rounding = {*dtypes[1:]} - {contract.FLOAT, dtypes[0]}
    return None if rounding or not {*dtypes} <= {*contract.VALUES} else dtypes[0]


def _swaps_last_two(view: ir.Node, rank: int) -> bool:
    if view.op_type == "Einsum":
        return bool(attribute(view, "equation", "") == "...nk->...kn")
    perm = list(attribute(view, "perm", range(rank - 1, -1, -1)))
    return perm == [*range(rank - 2), rank - 1, rank - 2]


def swapped(edit: Edit, value: ir.Value, wanted: str) -> ir.Value:
    """Returns a stored tensor of bytes with its last two axes exchanged, called `wanted` or alike."""

    def make() -> ir.Value:
        tensor = value.const_value if value.const_value is not None else tensor_of(value)
        if tensor is None:  # the caller has seen that it is stored
            raise TypeError(value)
        return edit.store(value.graph, wanted, int(tensor.dtype), np.swapaxes(edit.codes(tensor), -1, -2))

    return edit.shared(value.graph, "swapped", value, make=make)


WRITE: Final = {"standard": (take_apart, standard)}
