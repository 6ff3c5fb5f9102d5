"""Products of dequantized operands, put together as gemms: what runs on the kernels.

    MatMul(MXFP8Dequantize(A), Transpose(MXFP8Dequantize(B)))   -> MXFP8Gemm(A, B)
    MatMul(X, Transpose(MXFP8Dequantize(B)))                    -> MXFP8WeightGemm(X, B)
    MatMul(X, MXFP8Dequantize(B [K, N], blocks along K))        -> the same, the bytes of B transposed
    Gemm with transB, no other transpose and factors of 1       -> the same
    + Add of a stored [N], + Cast                               -> its bias, its output_dtype
    Gather(MXFP8Dequantize(table [V, D]), ids)                  -> MXFP8Embedding(ids, table)

Whatever is quantized in another way, along another axis say, stays MXFP8Dequantize and the standard op.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.replacement import is_ours, mxfp8_node
from mxfp8_graph.onnx_pass.graph import attribute, dtype_of, is_op
from mxfp8_graph.tools.dialects.decompose import is_marked
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


class _Weight(NamedTuple):
    """B of a product: its elements [..., N, K] and scales, and the dtype of its values."""

    elements: ir.Value
    scales: ir.Value
    dtype: int
    n: int | None
    """N of stored elements."""


def put_together(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns the gemm for a product of dequantized operands, or for the last of its Add and Cast; None for others."""
    if is_op(node, "Gather"):
        return _embedding(node)
    if is_op(node, "Cast"):
        before = operands(node)[0].producer()
        return _ends(edit, before, node) if before is not None and _takes_cast(edit, before) is node else None
    return _ends(edit, node, node) if _takes_cast(edit, node) is None else None


def _ends(edit: Edit, node: ir.Node, last: ir.Node) -> Nodes | None:
    """Returns the gemm of a product, or of the Add of its bias, whose result is that of `last`."""
    if is_op(node, "Add"):
        for at, value in enumerate(operands(node)):
            product = value.producer()
            if product is not None and _takes_bias(edit, product) is node:
                return _gemm(edit, product, last, operand(node, 1 - at))
        return None
    if is_op(node, "MatMul") and _takes_bias(edit, node) is None:
        return _gemm(edit, node, last, None)
    if is_op(node, "Gemm") and _is_plain(node):
        bias, weight = operand(node, 2), _weight(edit, node)
        stored, n = tensor_of(bias), None if weight is None else weight.n
        if bias is None or (stored is not None and dims(stored) == (n,)):
            return _gemm(edit, node, last, bias)
    return None


def _takes_cast(edit: Edit, node: ir.Node) -> ir.Node | None:
    """Returns the Cast that alone reads the float32 result of a product with packed weights, or of its Add; or None."""
    cast = sole_user(node.outputs[0]) if is_op(node, "MatMul", "Gemm", "Add") else None
    if cast is None or not is_op(cast, "Cast"):
        return None
    if attribute(cast, "to", 0) not in {contract.FLOAT16, contract.BFLOAT16}:
        return None
    if any(user.op_type == "Cast" and user.graph is not None for user in cast.outputs[0].consumers()):
        return None  # it rounds an activation: see `_activation`
    products = [value.producer() for value in operands(node)] if is_op(node, "Add") else [node]
    weights = [_weight(edit, each) for each in products if each is not None and is_op(each, "MatMul", "Gemm")]
    return cast if [w.dtype for w in weights if w is not None] == [contract.FLOAT] else None


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


def _is_plain(node: ir.Node) -> bool:
    return not attribute(node, "transA", 0) and all(attribute(node, name, 1.0) == 1.0 for name in ("alpha", "beta"))


def _takes_bias(edit: Edit, product: ir.Node) -> ir.Node | None:
    """Returns the Add of a stored [N] that alone reads a MatMul with packed weights, or None."""
    add = sole_user(product.outputs[0]) if is_op(product, "MatMul") else None
    if add is None or not is_op(add, "Add"):
        return None
    others = [value for value in add.inputs if value is not product.outputs[0]]
    bias = tensor_of(others[0]) if len(others) == 1 else None
    weight = _weight(edit, product)
    if bias is None or weight is None or bias.dtype not in contract.VALUES:
        return None
    return add if dims(bias) == (weight.n,) else None


def _gemm(edit: Edit, product: ir.Node, last: ir.Node, bias: ir.Value | None) -> Nodes | None:
    """Returns the gemm of a MatMul or Gemm, whose result is that of `last`; None if it has no packed weight."""
    weight = _weight(edit, product, make=True)
    if weight is None:
        return None
    quantized = _operand(operands(product)[0])
    dtype = attribute(last, "to", 0) if is_op(last, "Cast") else weight.dtype
    stored = tensor_of(bias)
    if bias is not None and stored is not None and stored.dtype != contract.FLOAT:
        bias = edit.cast(last, bias, contract.FLOAT, "float")
    inputs = [weight.elements, weight.scales, *([bias] if bias is not None else [])]
    outputs = heirs(last)
    if quantized is not None:
        return [mxfp8_node(product, contract.GEMM, [*quantized, *inputs], outputs, output_dtype=dtype)]
    x, settings = _activation(operands(product)[0])
    held = weight_gemm_dtype(dtype)
    y = outputs if held == dtype else [ir.Value(name=edit.fresh(f"{outputs[0].name}_gemm"))]
    nodes = [mxfp8_node(product, contract.WEIGHT_GEMM, [x, *inputs], y, output_dtype=held, **settings)]
    return nodes if y is outputs else [*nodes, ir.node("Cast", y, {"to": dtype}, outputs=outputs, name=y[0].name)]


def _operand(value: ir.Value) -> list[ir.Value] | None:
    """Returns the elements and scales of a left operand that is quantized along its last axis as the model runs."""
    origin, views = source(value, CASTS)
    node = origin.producer()
    if node is None or not is_ours(node, contract.DEQUANTIZE) or _cast_dtype(node, views) is None:
        return None
    elements = operands(node)[0]
    rank = rank_of(elements) or rank_of(value)
    axis = attribute(node, "axis", -1)
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


def _weight(edit: Edit, product: ir.Node, *, make: bool = False) -> _Weight | None:
    """Returns the right operand of a product if it is packed along K; what has to be transposed is if `make`."""
    origin, views = source(operands(product)[1], (*CASTS, "Transpose", "Einsum"))
    node = origin.producer()
    if node is None or not is_ours(node, contract.DEQUANTIZE):
        return None
    elements, scales = operands(node)
    stored = tensor_of(elements)
    rank = len(dims(stored)) if stored is not None else rank_of(elements)
    axis = attribute(node, "axis", -1)
    if rank is None or rank < 2:
        return None
    turns = [view for view in views if view.op_type in {"Transpose", "Einsum"}]
    if not all(_swaps_last_two(view, rank) for view in turns):
        return None
    turned = len(turns) % 2 == 1
    if is_op(product, "Gemm") and attribute(product, "transB", 0):
        turned = not turned
    dtype = _cast_dtype(node, views)
    if dtype is None:
        return None
    if turned:
        n = None if stored is None else dims(stored)[-2]
        return _Weight(elements, scales, dtype, n) if axis % rank == rank - 1 else None
    if axis % rank != rank - 2 or stored is None or tensor_of(scales) is None:
        return None
    if make:
        name = str(elements.name)
        # As it was before `qdq.write_product`, so that `unpack` finds the weight by its name.
        wanted = name.removesuffix(KN) if name.endswith(KN) else f"{name}_nk"
        elements, scales = swapped(edit, elements, wanted), swapped(edit, scales, f"{wanted}_scales")
    return _Weight(elements, scales, dtype, dims(stored)[-1])


def _cast_dtype(node: ir.Node, views: Nodes) -> int | None:
    """Returns the dtype after casts of dequantized values; None if one but the last rounds, or one is to no float."""
    casts = [attribute(view, "to", 0) for view in views if view.op_type == "Cast"]
    dtypes = [*casts, attribute(node, "output_dtype", contract.FLOAT)]
    if not {*dtypes} <= {*contract.VALUES}:
        return None
    rounding = [dtype for dtype in dtypes[1:] if dtype != contract.FLOAT and dtype != dtypes[0]]
    return None if rounding else dtypes[0]


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
        codes = np.ascontiguousarray(np.swapaxes(edit.codes(tensor), -1, -2))
        return edit.store(value.graph, wanted, int(tensor.dtype), codes)

    return edit.shared(value.graph, "swapped", value, make=make)
