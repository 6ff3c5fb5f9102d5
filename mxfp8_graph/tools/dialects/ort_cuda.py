"""ONNX Runtime's CUDA op: com.microsoft.MatMulBlockQuantizedFp8Weight(A, B, b_scale, a_scale, bias) {block_size}.

A is float16 or bfloat16, B float8_e4m3fn [N, K], b_scale float32 [N, ceil(K / 32)]: E8M0 codes are exact in float32.
Activations are never in MXFP8; with a_scale they are in FP8 with one scale, which is no MXFP8.
"""

from __future__ import annotations

from typing import Final

import onnx
from onnx import helper

from mxfp8_graph.onnx_model.dialect_ops import dialect_of
from mxfp8_graph.onnx_model.walk import MICROSOFT, node_label
from mxfp8_graph.tools.dialects import standard
from mxfp8_graph.tools.dialects.graph_edit import Nodes, Scope, attribute, like, ours
from mxfp8_graph.tools.dialects.qdq import dropped_activation, power_codes, shared, stored_codes
from mxfp8_ops import contract, numerics
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import Option
from mxfp8_ops.formats import BLOCK_SIZE

OP: Final = "MatMulBlockQuantizedFp8Weight"

_DEFAULT_BLOCK: Final = 128

_HALVES: Final = {contract.FLOAT16: "float16", contract.BFLOAT16: "bfloat16"}
"""What the op takes and returns, by onnx.TensorProto.DataType."""


def read(scope: Scope, node: onnx.NodeProto) -> Nodes | None:
    """Returns MXFP8WeightGemm for one of ONNX Runtime's, or None if it is another node."""
    if dialect_of(node) != "ort-cuda":
        return None
    edit = scope.edit
    a, b, scale, a_scale, bias = [*node.input, *[""] * 5][:5]
    if a_scale:
        what = "activations in FP8 with one scale (a_scale)"
        raise edit.refuse(
            node, what, expected="MXFP8 activations, which have no a_scale", advice="export it without them"
        )
    block = attribute(node, "block_size", _DEFAULT_BLOCK)
    if block != BLOCK_SIZE:
        what, advice = f"block_size {block}", "convert reads MXFP8 only; start from the model that is not quantized"
        raise edit.refuse(node, what, expected=f"{BLOCK_SIZE}, which MXFP8 has", advice=advice)
    elements, scales = scope.tensor(b), scope.tensor(scale)
    codes = None
    if scales is not None and scales.data_type == contract.FLOAT:
        codes = power_codes(scope.values(scales))
    if codes is None or elements is None or elements.data_type != contract.FLOAT8E4M3FN:
        what, expected = "its scales are not stored powers of two", "float8_e4m3fn and scales 2^-127 to 2^127"
        raise edit.refuse(node, what, expected=expected, advice="start from the model that is not quantized")
    if codes.shape != scale_shape(tuple(elements.dims), -1):
        what = f"scales {[*codes.shape]} for elements {[*elements.dims]}"
        expected = f"a scale for {BLOCK_SIZE} elements of K"
        raise edit.refuse(node, what, expected=expected, advice="export the model again")
    dtype = edit.dtypes.get(a) or edit.dtypes.get(node.output[0]) or 0
    edit.counts["ort-cuda", "weights"] += 1
    names = [a, b, stored_codes(scope, scale, f"{b}_scales", codes)]
    if bias:
        key = ("float", bias)
        cast = lambda _: scope.make("Cast", bias, wanted=f"{bias}_float", to=contract.FLOAT)  # noqa: E731
        names.append(shared(scope, key, cast))
    if dtype == contract.BFLOAT16:
        return [like(node, ours(contract.WEIGHT_GEMM, names, node.output, node.name, output_dtype=dtype))]
    # Float16, or unknown: in float32, and then in the dtype of A (see `onnx_functions.weight_gemm_dtype`).
    y = edit.fresh(f"{node.output[0]}_float")
    gemm = like(node, ours(contract.WEIGHT_GEMM, names, [y], node.name))
    return [gemm, helper.make_node("CastLike", [y, a], node.output, name=y)]


def write_product(scope: Scope, node: onnx.NodeProto, allow: frozenset[str]) -> Nodes | None:
    """Returns ONNX Runtime's node for a gemm of a stored E4M3 matrix, or None for others."""
    if node.domain != contract.DOMAIN or node.op_type not in {contract.GEMM.name, contract.WEIGHT_GEMM.name}:
        return None
    at = 2 if node.op_type == contract.GEMM.name else 1
    b, codes = scope.tensor(node.input[at]), scope.tensor(node.input[at + 1])
    if b is None or codes is None or b.data_type != contract.FLOAT8E4M3FN or len(b.dims) != 2:
        return None
    x, dtype = _activation(scope, node, allow)
    edit, label = scope.edit, node_label(node)
    owner = scope.owner(node.input[at + 1])
    values = numerics.decode_scale(scope.codes(codes))
    wanted = f"{node.input[at]}_b_scale"
    scale = shared(owner, ("b_scale", node.input[at + 1]), lambda _: owner.store(wanted, contract.FLOAT, values))
    inputs = [x, node.input[at], scale]
    if len(node.input) > at + 2 and node.input[at + 2]:
        inputs += ["", scope.make("Cast", node.input[at + 2], wanted=f"{label}_bias", to=dtype)]
    result = attribute(node, "output_dtype", contract.FLOAT)
    y = node.output[0] if result == dtype else edit.fresh(f"{label}_half")
    made = helper.make_node(OP, inputs, [y], name=node.name, domain=MICROSOFT, block_size=BLOCK_SIZE)
    cast = [helper.make_node("Cast", [y], node.output, name=y, to=result)] if result != dtype else []
    return [like(node, made), *cast]


write = standard.write
"""What is left when its own op has taken the products."""


def _activation(scope: Scope, node: onnx.NodeProto, allow: frozenset[str]) -> tuple[str, int]:
    """Returns what A is, and its dtype: float16 or bfloat16, where that is so or may be lost."""
    edit, x = scope.edit, node.input[0]
    if node.op_type == contract.GEMM.name:
        quantize = scope.maker(x)
        if quantize is None or quantize.op_type != contract.QUANTIZE.name:
            what, advice = "its activation is quantized with stored scales", "convert to qdq or standard"
            raise edit.refuse(node, what, expected="activations that are not", advice=advice)
        dropped_activation(scope, quantize, quantize, allow)
        x = quantize.input[0]
    dtype = edit.dtypes.get(x, contract.FLOAT)
    rounded = attribute(node, "activation_dtype", contract.FLOAT) == contract.BFLOAT16 != dtype
    results = attribute(node, "output_dtype", contract.FLOAT)
    if dtype in _HALVES and not rounded and (results == dtype or _only_read_as(scope, node, dtype)):
        return x, dtype
    half = contract.BFLOAT16 if rounded else dtype if dtype in _HALVES else contract.FLOAT16
    loss = f"activations and results are rounded to {_HALVES[half]}"
    if "half" not in allow:
        kinds = "of different dtypes" if dtype in _HALVES else "float32"
        what = f"its activations and results are {kinds}, and ONNX Runtime's op takes float16 and bfloat16"
        losing = ("rewrite a float16 model with weights alone in MXFP8, or allow that ", loss, ": ")
        raise edit.refuse(node, what, expected="float16 or bfloat16", advice=(*losing, Option("allow", "half")))
    edit.losses[loss] += 1
    if half == dtype:
        return x, half
    return shared(scope, ("half", x, half), lambda _: scope.make("Cast", x, wanted=f"{x}_half", to=half)), half


def _only_read_as(scope: Scope, node: onnx.NodeProto, dtype: int) -> bool:
    y = node.output[0]
    readers = scope.readers.get(y, [])
    return y not in scope.returned and all(r.op_type == "Cast" and attribute(r, "to", 0) == dtype for r in readers)
