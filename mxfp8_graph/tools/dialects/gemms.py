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
import onnx
from onnx import helper

from mxfp8_graph.onnx_model.walk import STANDARD
from mxfp8_graph.tools.dialects import restored
from mxfp8_graph.tools.dialects.graph_edit import Nodes, Scope, attribute, like, ours
from mxfp8_graph.tools.dialects.qdq import shared
from mxfp8_ops import contract, onnx_functions

_VIEWS: Final = frozenset({"Identity", "Cast", "Transpose", "Einsum"})
_CASTS: Final = frozenset({"Identity", "Cast"})


class _Weight(NamedTuple):
    """B of a product: names of its elements [..., N, K] and scales, and the dtype of its values."""

    elements: str
    scales: str
    dtype: int


def put_together(scope: Scope, node: onnx.NodeProto) -> Nodes | None:
    """Returns the gemm for a product of dequantized operands, or for the last of its Add and Cast; None for others."""
    if node.domain not in STANDARD:
        return None
    if node.op_type == "Gather":
        return _embedding(scope, node)
    if node.op_type == "Cast":
        before = scope.maker(node.input[0])
        return _ends(scope, before, node) if before is not None and _takes_cast(scope, before) is node else None
    return _ends(scope, node, node) if _takes_cast(scope, node) is None else None


def _ends(scope: Scope, node: onnx.NodeProto, last: onnx.NodeProto) -> Nodes | None:
    """Returns the gemm of a product, or of the Add of its bias, whose result is that of `last`."""
    if node.op_type == "Add":
        for at in range(len(node.input)):
            product = scope.maker(node.input[at])
            if product is not None and _takes_bias(scope, product) is node:
                return _gemm(scope, product, last, node.input[1 - at])
        return None
    if node.op_type == "MatMul" and _takes_bias(scope, node) is None:
        return _gemm(scope, node, last, "")
    if node.op_type == "Gemm" and _is_plain(node):
        bias = node.input[2] if len(node.input) > 2 else ""
        stored = scope.tensor(bias)
        weight = _weight(scope, node)
        elements = None if weight is None else scope.tensor(weight.elements)
        n = None if elements is None else elements.dims[-2]
        if not bias or (stored is not None and list(stored.dims) == [n]):
            return _gemm(scope, node, last, bias)
    return None


def _takes_cast(scope: Scope, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Returns the Cast that alone reads the float32 result of a product with packed weights, or of its Add; or None."""
    y = node.output[0] if node.output else ""
    readers = scope.readers.get(y, [])
    if node.op_type not in {"MatMul", "Gemm", "Add"} or len(readers) != 1 or y in scope.returned:
        return None
    cast = readers[0]
    if cast.op_type != "Cast" or attribute(cast, "to", 0) not in {contract.FLOAT16, contract.BFLOAT16}:
        return None
    if any(reader.op_type == "Cast" for reader in scope.readers.get(cast.output[0], [])):
        return None  # it rounds an activation: see `_activation`
    products = [scope.maker(name) for name in node.input] if node.op_type == "Add" else [node]
    weights = [_weight(scope, each) for each in products if each is not None and each.op_type in {"MatMul", "Gemm"}]
    return cast if [w.dtype for w in weights if w is not None] == [contract.FLOAT] else None


def _embedding(scope: Scope, node: onnx.NodeProto) -> Nodes | None:
    """Returns MXFP8Embedding for a Gather of rows of a stored table, packed along its rows; None for others."""
    source, views = scope.source(node.input[0], _CASTS)
    table = scope.maker(source)
    if table is None or table.domain != contract.DOMAIN or table.op_type != contract.DEQUANTIZE.name:
        return None
    stored, dtype = scope.tensor(table.input[0]), _cast_dtype(table, views)
    along_rows = stored is not None and len(stored.dims) == 2 and attribute(table, "axis", -1) in (-1, 1)
    by_row = attribute(node, "axis", 0) in (0, -2) and scope.edit.dtypes.get(node.input[1]) in contract.INDICES
    if not along_rows or not by_row or dtype is None:
        return None
    inputs = [node.input[1], *table.input]
    return [like(node, ours(contract.EMBEDDING, inputs, node.output, node.name, output_dtype=dtype))]


def _is_plain(node: onnx.NodeProto) -> bool:
    return not attribute(node, "transA", 0) and all(attribute(node, name, 1.0) == 1.0 for name in ("alpha", "beta"))


def _takes_bias(scope: Scope, product: onnx.NodeProto) -> onnx.NodeProto | None:
    """Returns the Add of a stored [N] that alone reads a MatMul with packed weights, or None."""
    y = product.output[0] if product.output else ""
    readers = scope.readers.get(y, [])
    if product.op_type != "MatMul" or len(readers) != 1 or y in scope.returned or scope.maker(y) is not product:
        return None
    add = readers[0]
    others = [name for name in add.input if name != y]
    bias = scope.tensor(others[0]) if add.op_type == "Add" and len(others) == 1 else None
    weight = _weight(scope, product)
    if bias is None or weight is None or len(bias.dims) != 1 or bias.data_type not in contract.VALUES:
        return None
    elements = scope.tensor(weight.elements)
    n = None if elements is None else elements.dims[-2]
    return add if bias.dims[0] == n else None


def _gemm(scope: Scope, product: onnx.NodeProto, last: onnx.NodeProto, bias: str) -> Nodes | None:
    """Returns the gemm of a MatMul or Gemm, whose result is that of `last`; None if it has no packed weight."""
    weight = _weight(scope, product, make=True)
    if weight is None:
        return None
    quantized = _operand(scope, product.input[0])
    b = [weight.elements, weight.scales]
    if last.op_type == "Cast":
        weight = weight._replace(dtype=attribute(last, "to", 0))
    bias = _float(scope, bias) if bias else ""
    inputs = [*b, *([bias] if bias else [])]
    if quantized is not None:
        made = ours(contract.GEMM, [*quantized, *inputs], last.output, product.name, output_dtype=weight.dtype)
        return [like(product, made)]
    x, settings = _activation(scope, product.input[0])
    dtype = onnx_functions.weight_gemm_dtype(weight.dtype)
    y = last.output[0] if dtype == weight.dtype else scope.edit.fresh(f"{last.output[0]}_gemm")
    made = ours(contract.WEIGHT_GEMM, [x, *inputs], [y], product.name, output_dtype=dtype, **settings)
    cast = [helper.make_node("Cast", [y], last.output, name=y, to=weight.dtype)] if dtype != weight.dtype else []
    return [like(product, made), *cast]


def _operand(scope: Scope, name: str) -> list[str] | None:
    """Returns the elements and scales of a left operand that is quantized along its last axis as the model runs."""
    source, views = scope.source(name, _CASTS)
    node = scope.maker(source)
    if node is None or node.domain != contract.DOMAIN or node.op_type != contract.DEQUANTIZE.name:
        return None
    if _cast_dtype(node, views) is None:
        return None
    rank = scope.edit.ranks.get(node.input[0]) or scope.edit.ranks.get(name)
    axis = attribute(node, "axis", -1)
    last = axis == -1 or (rank is not None and axis == rank - 1)
    return [*node.input] if last and scope.tensor(node.input[0]) is None else None


def _activation(scope: Scope, name: str) -> tuple[str, dict[str, int]]:
    """Returns X of a weight-only gemm, without the casts that the node does itself."""
    casts = scope.source(name, _CASTS)[1]
    targets = [attribute(cast, "to", 0) for cast in casts if cast.op_type == "Cast"]
    dtypes = scope.edit.dtypes
    if targets[:1] == [contract.FLOAT]:
        before = casts[0].input[0]
        if targets[:2] == [contract.FLOAT, contract.BFLOAT16] and dtypes.get(casts[1].input[0]) in contract.VALUES:
            return casts[1].input[0], {"activation_dtype": contract.BFLOAT16}
        if dtypes.get(before) in contract.VALUES and not restored.is_marked(casts[0]):
            return before, {}
    return name, {}


def _weight(scope: Scope, product: onnx.NodeProto, *, make: bool = False) -> _Weight | None:
    """Returns the right operand of a product if it is packed along K; what has to be transposed is if `make`."""
    source, views = scope.source(product.input[1], _VIEWS)
    node = scope.maker(source)
    if node is None or node.domain != contract.DOMAIN or node.op_type != contract.DEQUANTIZE.name:
        return None
    stored = scope.tensor(node.input[0])
    rank = len(stored.dims) if stored is not None else scope.edit.ranks.get(node.input[0])
    axis = attribute(node, "axis", -1)
    if rank is None or rank < 2:
        return None
    turns = [view for view in views if view.op_type in {"Transpose", "Einsum"}]
    if not all(_swaps_last_two(view, rank) for view in turns):
        return None
    turned = len(turns) % 2 == 1
    if product.op_type == "Gemm" and attribute(product, "transB", 0):
        turned = not turned
    dtype = _cast_dtype(node, views)
    if dtype is None:
        return None
    if turned:
        return _Weight(node.input[0], node.input[1], dtype) if axis % rank == rank - 1 else None
    if axis % rank != rank - 2 or stored is None or scope.tensor(node.input[1]) is None:
        return None
    elements, scales = [_swapped(scope, name) for name in node.input[:2]] if make else node.input[:2]
    return _Weight(elements, scales, dtype)


def _cast_dtype(node: onnx.NodeProto, views: Nodes) -> int | None:
    """Returns the dtype after casts of dequantized values; None if one but the last rounds, or one is to no float."""
    casts = [attribute(view, "to", 0) for view in views if view.op_type == "Cast"]
    dtypes = [*casts, attribute(node, "output_dtype", contract.FLOAT)]
    if not {*dtypes} <= {*contract.VALUES}:
        return None
    rounding = [dtype for dtype in dtypes[1:] if dtype != contract.FLOAT and dtype != dtypes[0]]
    return None if rounding else dtypes[0]


def _swaps_last_two(view: onnx.NodeProto, rank: int) -> bool:
    if view.op_type == "Einsum":
        return bool(attribute(view, "equation", "") == "...nk->...kn")
    perm = list(attribute(view, "perm", range(rank - 1, -1, -1)))
    return perm == [*range(rank - 2), rank - 1, rank - 2]


def _swapped(scope: Scope, name: str) -> str:
    """Returns the name of a stored tensor of bytes with its last two axes exchanged."""
    owner = scope.owner(name)
    tensor = owner.graph_tensor(name)

    def make(_: Scope) -> str:
        codes = np.ascontiguousarray(np.swapaxes(owner.codes(tensor), -1, -2))
        return owner.store(f"{name}_nk", tensor.data_type, codes)

    return shared(owner, ("nk", name), make)


def _float(scope: Scope, bias: str) -> str:
    tensor = scope.tensor(bias)
    if tensor is None or tensor.data_type == contract.FLOAT:
        return bias
    key = ("float", bias)
    return shared(scope, key, lambda _: scope.make("Cast", bias, wanted=f"{bias}_float", to=contract.FLOAT))
