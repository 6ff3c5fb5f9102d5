"""ONNX Runtime's com.microsoft.MatMulNBits(A, B, scales, zero_points, g_idx, bias) with the bytes of MXINT8.

With 8 bits, blocks of 32 and zero points of 128, B holds INT8 elements plus 128, uint8 [N, ceil(K / 32), 32], and
`scales`, [N, ceil(K / 32)], are powers of two: the values are those of MXINT8, exactly. ONNX Runtime's CPU kernels
multiply it without our library. E4M3 elements have no place in it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialect_ops import dialect_of
from mxfp8_graph.onnx_pass.fuse.replacement import in_place_of, is_ours, mxfp8_node
from mxfp8_graph.onnx_pass.graph import MICROSOFT, attribute, dtype_of, label
from mxfp8_graph.tools.dialects import standard
from mxfp8_graph.tools.dialects.decompose import gemm_of
from mxfp8_graph.tools.dialects.edit import Codes, Edit, Nodes, dims, heirs, operand, operands, tensor_of
from mxfp8_graph.tools.dialects.qdq import ROUNDED, UNROUNDED, dropped_activation, float_scales, power_codes
from mxfp8_ops import contract
from mxfp8_ops.formats import BLOCK_SIZE, INT8
from mxfp8_ops.nodes.gemm import weight_gemm_dtype

OP: Final = "MatMulNBits"

_ZERO: Final = 128
"""The zero point of 8 bits: code 128 + i stands for i."""

_INT8_ACTIVATIONS: Final = 4
"""The accuracy_level at which ONNX Runtime quantizes activations to int8, in blocks."""

_LOSS: Final = "activations are quantized as ONNX Runtime does (accuracy_level 4), not in MXINT8"

_SUFFIX: Final = "_nbits"

_ADVICE: Final = "start from the model that is not quantized"


def read(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns MXFP8WeightGemm for one of ONNX Runtime's whose weight is MXINT8, or None if it is another node."""
    if dialect_of(node) != "nbits":
        return None
    a, b, scale = operands(node, count=3)
    if operand(node, 4) is not None:
        raise edit.refuse(node, "an order of columns (g_idx)", expected="columns in their order", advice=_ADVICE)
    zeros = operand(node, 3)
    stored_zeros = tensor_of(zeros)
    if zeros is not None and (stored_zeros is None or np.any(stored_zeros.numpy() != _ZERO)):
        what = f"zero points {zeros.name!r}"
        raise edit.refuse(node, what, expected=f"none, or stored ones of {_ZERO}", advice=_ADVICE)
    n, k = attribute(node, "N", 0), attribute(node, "K", 0)
    blocks = (n, -(-k // BLOCK_SIZE))
    elements, scales = tensor_of(b), tensor_of(scale)
    codes = None
    if scales is not None and scales.dtype in contract.VALUES:
        codes = power_codes(scales.numpy(), INT8.onnx_dtype)
    if codes is None or elements is None or elements.dtype != contract.UINT8:
        what, expected = "its scales are not stored powers of two", "stored uint8 codes, and scales 2^-133 to 2^121"
        raise edit.refuse(node, what, expected=expected, advice=_ADVICE)
    if dims(elements) != (*blocks, BLOCK_SIZE) or codes.size != blocks[0] * blocks[1]:
        what = f"B {[*dims(elements)]} and scales {[*codes.shape]}"
        expected = f"{[*blocks, BLOCK_SIZE]} and {[*blocks]}, as N = {n} and K = {k} say"
        raise edit.refuse(node, what, expected=expected, advice="export the model again")
    edit.counts["nbits", "weights"] += 1
    whole, graph = edit.codes(elements).reshape(n, -1)[:, :k] ^ np.uint8(_ZERO), b.graph
    packed = [
        edit.shared(graph, "elements", b, make=lambda: _store(edit, b, "", INT8.onnx_dtype, whole)),
        edit.shared(graph, "codes", b, make=lambda: _store(edit, b, "_scales", contract.UINT8, codes.reshape(blocks))),
    ]
    bias = operand(node, 5)
    inputs = [a, *packed, *([] if bias is None else [edit.cast(node, bias, contract.FLOAT, "float")])]
    outputs, dtype = heirs(node), dtype_of(a) or dtype_of(node.outputs[0]) or contract.FLOAT
    if weight_gemm_dtype(dtype) == dtype:
        return [mxfp8_node(node, contract.WEIGHT_GEMM, inputs, outputs, output_dtype=dtype)]
    y = ir.Value(name=edit.fresh(f"{outputs[0].name}_float"))
    gemm = mxfp8_node(node, contract.WEIGHT_GEMM, inputs, [y])
    return [gemm, ir.node("Cast", [y], {"to": dtype}, outputs=outputs, name=y.name)]


def _store(edit: Edit, b: ir.Value, ending: str, dtype: int, codes: Codes) -> ir.Value:
    # The name from which `unpack` finds that of the weight.
    name = str(b.name).removesuffix(_SUFFIX).removesuffix("_mxfp8")
    return edit.store(b.graph, f"{name}_mxfp8{ending}", dtype, np.ascontiguousarray(codes))


def write_product(edit: Edit, node: ir.Node, allow: frozenset[str], accuracy_level: int) -> Nodes | None:
    """Returns ONNX Runtime's node for a gemm of a stored INT8 matrix, or None for others."""
    gemm = gemm_of(node)
    if gemm is None:
        return None
    b, scales, elements, codes = gemm.b, gemm.scales, gemm.elements, gemm.codes
    if elements.dtype != INT8.onnx_dtype:
        what, advice = f"its weight has {elements.dtype.name.lower()} elements", "rewrite with --recipe mxint8"
        raise edit.refuse(node, what, expected="int8 elements, which MatMulNBits can hold", advice=advice)
    x = operands(node)[0]
    if not gemm.weight_only:
        quantize = x.producer()
        if quantize is None or not is_ours(quantize, contract.QUANTIZE):
            what, advice = "its activation is quantized with stored scales", "convert to qdq or standard"
            raise edit.refuse(node, what, expected="activations that are not", advice=advice)
        loss = {"loss": _LOSS} if accuracy_level == _INT8_ACTIVATIONS else {}
        dropped_activation(edit, quantize, quantize, allow, **loss)
        x = operands(quantize)[0]
    if attribute(node, "activation_dtype", contract.FLOAT) == contract.BFLOAT16 != dtype_of(x):
        x = edit.cast(node, x, contract.BFLOAT16, "bfloat16")
    # In float32, whose exponents reach every scale; float16 has 2^-24 to 2^15.
    if dtype_of(x) != contract.FLOAT:
        x = edit.cast(node, x, contract.FLOAT, "float")
    n, k = dims(elements)
    packed = [
        edit.shared(b.graph, "nbits", b, make=lambda: _codes_of(edit, b, edit.codes(elements))),
        edit.shared(scales.graph, "nbits", scales, make=lambda: _scales_of(edit, scales, edit.codes(codes))),
    ]
    inputs = [x, *packed, *([] if gemm.bias is None else [None, None, gemm.bias])]
    settings = {"K": k, "N": n, "bits": 8, "block_size": BLOCK_SIZE, "accuracy_level": accuracy_level}
    if accuracy_level == _INT8_ACTIVATIONS:
        edit.note(f"ONNX Runtime's {ROUNDED}; accuracy level 0 {UNROUNDED}")
    result, outputs = attribute(node, "output_dtype", contract.FLOAT), heirs(node)
    y = outputs if result == contract.FLOAT else [ir.Value(name=edit.fresh(f"{label(node)}_float"))]
    nodes = [in_place_of(node, OP, inputs, y, domain=MICROSOFT, **settings)]
    return nodes if y is outputs else [*nodes, ir.node("Cast", y, {"to": result}, outputs=outputs, name=y[0].name)]


def _codes_of(edit: Edit, b: ir.Value, elements: Codes) -> ir.Value:
    n, k = elements.shape
    padded = np.pad(elements ^ np.uint8(_ZERO), ((0, 0), (0, -k % BLOCK_SIZE)), constant_values=_ZERO)
    return edit.store(b.graph, f"{b.name}{_SUFFIX}", contract.UINT8, padded.reshape(n, -1, BLOCK_SIZE))


def _scales_of(edit: Edit, scales: ir.Value, codes: Codes) -> ir.Value:
    return edit.store(scales.graph, f"{scales.name}{_SUFFIX}", contract.FLOAT, float_scales(codes, INT8.onnx_dtype))


write = standard.write
"""What is left when its own op has taken the products."""
