"""ONNX Runtime's own product of a stored matrix of integers, in domain com.microsoft.

MatMulNBits(A, B, scales, zero_points, g_idx, bias) {K, N, bits, block_size, accuracy_level}: "nbits"
    With 8 bits, blocks of 32 and zero points of 128, B holds INT8 elements plus 128, uint8 [N, ceil(K / 32), 32], and
    `scales`, [N, ceil(K / 32)], are powers of two: its values equal the values of MXINT8. ONNX Runtime's CPU kernels
    multiply it without our library. It cannot hold E4M3 elements.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialect_ops import dialect_of
from mxfp8_graph.onnx_pass.fuse.nodes import in_place_of, is_ours, mxfp8_node
from mxfp8_graph.onnx_pass.graph import MICROSOFT, attribute, dtype_of, label
from mxfp8_graph.tools.dialects.bodies import standard
from mxfp8_graph.tools.dialects.edit import OTHER, Codes, Edit, Nodes, dims, operand, operands, tensor_of
from mxfp8_graph.tools.dialects.gemms import gemm_of, take_apart
from mxfp8_graph.tools.dialects.qdq import ROUNDED, UNROUNDED, codes_of, float_scales, lose_activations
from mxfp8_ops import contract
from mxfp8_ops.formats import BLOCK_SIZE, INT8
from mxfp8_ops.nodes.gemm import weight_gemm_dtype

_ZERO: Final = np.uint8(128)
"""The zero point of 8 bits in MatMulNBits: code 128 + i stands for i."""

_INT8_ACTIVATIONS: Final = 4
"""The accuracy_level at which MatMulNBits quantizes activations to int8, in blocks."""

_SUFFIX: Final = "_nbits"


def read(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns MXFP8WeightGemm for a MatMulNBits, or None for other nodes."""
    if dialect_of(node) != "nbits":
        return None
    _check(edit, node)
    a, b, scale = operands(node, count=3)
    elements, scales = tensor_of(b), tensor_of(scale)
    is_float = scales is not None and scales.dtype in contract.VALUES
    codes = codes_of(edit, scales, INT8.onnx_dtype) if is_float else None
    if codes is None or elements is None or elements.dtype != contract.UINT8:
        expected = "stored uint8 codes, and scales 2^-133 to 2^121"
        raise edit.refuse(node, "its scales are not stored powers of two", expected, OTHER)
    packed, dtype = _mxint8(edit, node, codes, elements), dtype_of(a) or dtype_of(node.outputs[0]) or contract.FLOAT
    to = None if weight_gemm_dtype(dtype) == dtype else dtype
    edit.counts["nbits", "weights"] += 1
    bias = operand(node, 5)
    inputs = [a, *packed, *([] if bias is None else [edit.cast(node, bias, contract.FLOAT, "float")])]
    settings = {} if to is not None else {"output_dtype": dtype}
    make = lambda y: mxfp8_node(node, contract.WEIGHT_GEMM, inputs, y, **settings)  # noqa: E731
    return edit.with_cast(node, f"{node.outputs[0].name}_float", to, make)


def _check(edit: Edit, node: ir.Node) -> None:
    is_ordered, zeros = operand(node, 4) is None, operand(node, 3)
    edit.require(is_ordered, node, "an order of columns (g_idx)", "columns in their order", OTHER)
    stored = tensor_of(zeros)
    is_zero = zeros is None or (stored is not None and not np.any(stored.numpy() != _ZERO))
    edit.require(is_zero, node, f"zero points {zeros and zeros.name!r}", f"none, or stored ones of {_ZERO}", OTHER)


def _mxint8(edit: Edit, node: ir.Node, codes: Codes, elements: ir.TensorProtocol) -> list[ir.Value]:
    """Returns the MXINT8 elements and scales of a MatMulNBits; `codes` are the codes of its scales."""
    n, k, b = attribute(node, "N", 0), attribute(node, "K", 0), operands(node)[1]
    blocks = (n, -(-k // BLOCK_SIZE))
    fits = dims(elements) == (*blocks, BLOCK_SIZE) and codes.size == blocks[0] * blocks[1]
    expected = f"{[*blocks, BLOCK_SIZE]} and {[*blocks]}, as N = {n} and K = {k} say"
    edit.require(fits, node, f"B {[*dims(elements)]} and scales {[*codes.shape]}", expected)
    # `unpack` derives the weight's name from this one.
    name = f"{str(b.name).removesuffix(_SUFFIX).removesuffix('_mxfp8')}_mxfp8"
    # Without the padding of the last block; exclusive or with 128 maps uint8 128 + i to int8 i, and back.
    whole = edit.codes(elements).reshape(n, -1)[:, :k] ^ _ZERO
    return [
        edit.beside(b, name, INT8.onnx_dtype, lambda: whole),
        edit.beside(b, f"{name}_scales", contract.UINT8, lambda: codes.reshape(blocks)),
    ]


def _write(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns MatMulNBits for a gemm of a stored INT8 matrix, or None for others."""
    gemm = gemm_of(node)
    if gemm is None:
        return None
    kind, level = gemm.elements.dtype, edit.accuracy_level
    what, expected = f"its weight has {kind.name.lower()} elements", "int8 elements, which MatMulNBits can hold"
    edit.require(kind == INT8.onnx_dtype, node, what, expected, "rewrite with --recipe mxint8")
    loss = "activations are quantized as ONNX Runtime does (accuracy_level 4), not in MXINT8"
    x = _float_activation(edit, node, *([loss] if level == _INT8_ACTIVATIONS else []))
    if attribute(node, "activation_dtype", contract.FLOAT) == contract.BFLOAT16 != dtype_of(x):
        x = edit.cast(node, x, contract.BFLOAT16, "bfloat16")
    # In float32, which has every scale; float16 has 2^-24 to 2^15 only.
    if dtype_of(x) != contract.FLOAT:
        x = edit.cast(node, x, contract.FLOAT, "float")
    if level == _INT8_ACTIVATIONS:
        edit.note(f"ONNX Runtime's {ROUNDED}; accuracy level 0 {UNROUNDED}")
    n, k = dims(gemm.elements)

    def padded() -> Codes:
        # Padding with the code of 0, which adds nothing to a sum.
        elements = edit.codes(gemm.elements) ^ _ZERO
        return np.pad(elements, ((0, 0), (0, -k % BLOCK_SIZE)), constant_values=_ZERO).reshape(n, -1, BLOCK_SIZE)

    b = edit.beside(gemm.b, f"{gemm.b.name}{_SUFFIX}", contract.UINT8, padded)
    bias = [] if gemm.bias is None else [None, None, gemm.bias]
    settings = {"K": k, "N": n, "bits": 8, "block_size": BLOCK_SIZE, "accuracy_level": level}
    floats = lambda: float_scales(edit.codes(gemm.codes), int(kind))  # noqa: E731
    scales = edit.beside(gemm.scales, f"{gemm.scales.name}{_SUFFIX}", contract.FLOAT, floats)
    result = attribute(node, "output_dtype", contract.FLOAT)
    make = lambda y: in_place_of(node, "MatMulNBits", [x, b, scales, *bias], y, domain=MICROSOFT, **settings)  # noqa: E731
    return edit.with_cast(node, f"{label(node)}_float", None if result == contract.FLOAT else result, make)


def _float_activation(edit: Edit, node: ir.Node, *loss: str) -> ir.Value:
    """Returns A of a gemm before it is quantized; raises ContractError if the user does not allow that loss."""
    x = operands(node)[0]
    if contract.OPS[node.op_type].weight_only:
        return x
    quantize, what = x.producer(), "its activation is quantized with stored scales"
    if quantize is None or not is_ours(quantize, contract.QUANTIZE):
        raise edit.refuse(node, what, "activations that are not", "convert to qdq or standard")
    lose_activations(edit, quantize, *loss)
    return operands(quantize)[0]


WRITE: Final = {"nbits": (_write, take_apart, standard)}
"""Steps of each dialect: its own op for products, then standard ops for all other nodes."""
