"""ONNX Runtime's CUDA op: com.microsoft.MatMulBlockQuantizedFp8Weight(A, B, b_scale, a_scale, bias) {block_size}.

A is float16 or bfloat16, B float8_e4m3fn [N, K], b_scale float32 [N, ceil(K / 32)]: E8M0 codes are exact in float32.
Activations are never in MXFP8; with a_scale they are in FP8 with one scale, which is no MXFP8.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialect_ops import dialect_of
from mxfp8_graph.onnx_pass.fuse.replacement import in_place_of, is_ours, mxfp8_node
from mxfp8_graph.onnx_pass.graph import MICROSOFT, attribute, dtype_of, label
from mxfp8_graph.tools.dialects import standard
from mxfp8_graph.tools.dialects.decompose import gemm_of
from mxfp8_graph.tools.dialects.edit import Edit, Nodes, dims, heirs, operand, operands, tensor_of
from mxfp8_graph.tools.dialects.qdq import dropped_activation, power_codes, stored_codes
from mxfp8_ops import contract, numerics
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import Option
from mxfp8_ops.formats import BLOCK_SIZE

OP: Final = "MatMulBlockQuantizedFp8Weight"

_DEFAULT_BLOCK: Final = 128

_HALVES: Final = {contract.FLOAT16: "float16", contract.BFLOAT16: "bfloat16"}
"""What the op takes and returns, by onnx.TensorProto.DataType."""


def read(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns MXFP8WeightGemm for one of ONNX Runtime's, or None if it is another node."""
    if dialect_of(node) != "ort-cuda":
        return None
    a, b, scale = operands(node, count=3)
    if operand(node, 3) is not None:
        what = "activations in FP8 with one scale (a_scale)"
        expected = "MXFP8 activations, which have no a_scale"
        raise edit.refuse(node, what, expected=expected, advice="export it without them")
    block = attribute(node, "block_size", _DEFAULT_BLOCK)
    if block != BLOCK_SIZE:
        what, advice = f"block_size {block}", "convert reads MXFP8 only; start from the model that is not quantized"
        raise edit.refuse(node, what, expected=f"{BLOCK_SIZE}, which MXFP8 has", advice=advice)
    elements, scales, codes = tensor_of(b), tensor_of(scale), None
    if scales is not None and scales.dtype == contract.FLOAT:
        codes = power_codes(scales.numpy(), contract.FLOAT8E4M3FN)
    if codes is None or elements is None or elements.dtype != contract.FLOAT8E4M3FN:
        what, expected = "its scales are not stored powers of two", "float8_e4m3fn and scales 2^-127 to 2^127"
        raise edit.refuse(node, what, expected=expected, advice="start from the model that is not quantized")
    if codes.shape != scale_shape(dims(elements), -1):
        what = f"scales {[*codes.shape]} for elements {[*dims(elements)]}"
        expected = f"a scale for {BLOCK_SIZE} elements of K"
        raise edit.refuse(node, what, expected=expected, advice="export the model again")
    edit.counts["ort-cuda", "weights"] += 1
    inputs = [a, b, stored_codes(edit, scale, f"{b.name}_scales", codes)]
    if (bias := operand(node, 4)) is not None:
        inputs.append(edit.cast(node, bias, contract.FLOAT, "float"))
    outputs = heirs(node)
    if (dtype_of(a) or dtype_of(node.outputs[0])) == contract.BFLOAT16:
        return [mxfp8_node(node, contract.WEIGHT_GEMM, inputs, outputs, output_dtype=contract.BFLOAT16)]
    # Float16, or unknown: in float32, and then in the dtype of A (see `weight_gemm_dtype`).
    y = ir.Value(name=edit.fresh(f"{outputs[0].name}_float"))
    gemm = mxfp8_node(node, contract.WEIGHT_GEMM, inputs, [y])
    return [gemm, ir.node("CastLike", [y, a], outputs=outputs, name=y.name)]


def write_product(edit: Edit, node: ir.Node, allow: frozenset[str]) -> Nodes | None:
    """Returns ONNX Runtime's node for a gemm of a stored E4M3 matrix, or None for others."""
    gemm = gemm_of(node)
    if gemm is None or gemm.elements.dtype != contract.FLOAT8E4M3FN:
        return None
    x, dtype = _activation(edit, node, allow, weight_only=gemm.weight_only)
    b, graph, values = gemm.b, gemm.scales.graph, numerics.decode_scale(edit.codes(gemm.codes))
    make = lambda: edit.store(graph, f"{b.name}_b_scale", contract.FLOAT, values)  # noqa: E731
    inputs: list[ir.Value | None] = [x, b, edit.shared(graph, "b_scale", gemm.scales, make=make)]
    if gemm.bias is not None:
        inputs += [None, edit.make("Cast", gemm.bias, wanted=f"{label(node)}_bias", to=dtype)]
    result, outputs = attribute(node, "output_dtype", contract.FLOAT), heirs(node)
    y = outputs if result == dtype else [ir.Value(name=edit.fresh(f"{label(node)}_half"))]
    nodes = [in_place_of(node, OP, inputs, y, domain=MICROSOFT, block_size=BLOCK_SIZE)]
    return nodes if y is outputs else [*nodes, ir.node("Cast", y, {"to": result}, outputs=outputs, name=y[0].name)]


write = standard.write
"""What is left when its own op has taken the products."""


def _activation(edit: Edit, node: ir.Node, allow: frozenset[str], *, weight_only: bool) -> tuple[ir.Value, int]:
    """Returns what A is, and its dtype: float16 or bfloat16, where that is so or may be lost."""
    x = operands(node)[0]
    if not weight_only:
        quantize = x.producer()
        if quantize is None or not is_ours(quantize, contract.QUANTIZE):
            what, advice = "its activation is quantized with stored scales", "convert to qdq or standard"
            raise edit.refuse(node, what, expected="activations that are not", advice=advice)
        dropped_activation(edit, quantize, quantize, allow)
        x = operands(quantize)[0]
    dtype = dtype_of(x) or contract.FLOAT
    rounded = attribute(node, "activation_dtype", contract.FLOAT) == contract.BFLOAT16 != dtype
    results = attribute(node, "output_dtype", contract.FLOAT)
    if dtype in _HALVES and not rounded and (results == dtype or _only_read_as(node, dtype)):
        return x, dtype
    half = contract.BFLOAT16 if rounded else dtype if dtype in _HALVES else contract.FLOAT16
    loss = f"activations and results are rounded to {_HALVES[half]}"
    if "half" not in allow:
        kinds = "of different dtypes" if dtype in _HALVES else "float32"
        what = f"its activations and results are {kinds}, and ONNX Runtime's op takes float16 and bfloat16"
        losing = ("rewrite a float16 model with weights alone in MXFP8, or allow that ", loss, ": ")
        raise edit.refuse(node, what, expected="float16 or bfloat16", advice=(*losing, Option("allow", "half")))
    edit.losses[loss] += 1
    return (x, half) if half == dtype else (edit.cast(node, x, half, "half"), half)


def _only_read_as(node: ir.Node, dtype: int) -> bool:
    y = node.outputs[0]
    users = [user for user in y.consumers() if user.graph is not None]
    casts = (user.op_type == "Cast" and attribute(user, "to", 0) == dtype for user in users)
    return not y.is_graph_output() and all(casts)
