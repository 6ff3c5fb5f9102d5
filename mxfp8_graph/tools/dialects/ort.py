"""ONNX Runtime's own products of a stored matrix, in domain com.microsoft: of float8 in CUDA, of integers on CPUs.

MatMulBlockQuantizedFp8Weight(A, B, b_scale, a_scale, bias) {block_size}: "ort-cuda"
    A is float16 or bfloat16, B float8_e4m3fn [N, K], b_scale float32 [N, ceil(K / 32)]: E8M0 codes are exact in
    float32. Activations are never in MXFP8; with a_scale they are in FP8 with one scale, which is no MXFP8.

MatMulNBits(A, B, scales, zero_points, g_idx, bias) {K, N, bits, block_size, accuracy_level}: "nbits"
    With 8 bits, blocks of 32 and zero points of 128, B holds INT8 elements plus 128, uint8 [N, ceil(K / 32), 32], and
    `scales`, [N, ceil(K / 32)], are powers of two: its values equal the values of MXINT8. ONNX Runtime's CPU kernels
    multiply it without our library. It cannot hold E4M3 elements.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialect_ops import dialect_of
from mxfp8_graph.onnx_pass.fuse.replacement import in_place_of, is_ours, mxfp8_node
from mxfp8_graph.onnx_pass.graph import MICROSOFT, attribute, dtype_of, label
from mxfp8_graph.tools.dialects.bodies import standard
from mxfp8_graph.tools.dialects.edit import NOT_MX, OTHER, Codes, Edit, Nodes, dims, operand, operands, tensor_of
from mxfp8_graph.tools.dialects.gemms import Gemm, gemm_of, take_apart
from mxfp8_graph.tools.dialects.qdq import ROUNDED, UNROUNDED, codes_of, float_scales, lose_activations
from mxfp8_ops import contract
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import Option
from mxfp8_ops.formats import BLOCK_SIZE, INT8
from mxfp8_ops.nodes.gemm import weight_gemm_dtype

_E4M3: Final = contract.FLOAT8E4M3FN

_STORED: Final[Mapping[str, tuple[int, int, Container[int], int, str]]] = {
    "ort-cuda": (_E4M3, _E4M3, {contract.FLOAT}, 4, "float8_e4m3fn and scales 2^-127 to 2^127"),
    "nbits": (INT8.onnx_dtype, contract.UINT8, contract.VALUES, 5, "stored uint8 codes, and scales 2^-133 to 2^121"),
}
"""(dtype of elements in our nodes, dtype of B, dtypes of scales, index of the bias, expected B and scales in words)."""

_HALVES: Final = {contract.FLOAT16: "float16", contract.BFLOAT16: "bfloat16"}
"""Names of the dtypes of the CUDA op's activations and results, by onnx.TensorProto.DataType."""

_ZERO: Final = np.uint8(128)
"""The zero point of 8 bits in MatMulNBits: code 128 + i stands for i."""

_INT8_ACTIVATIONS: Final = 4
"""The accuracy_level at which MatMulNBits quantizes activations to int8, in blocks."""

_SUFFIX: Final = "_nbits"


def read(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns MXFP8WeightGemm for one of ONNX Runtime's two ops, or None for other nodes."""
    if (dialect := dialect_of(node)) is None or dialect not in _STORED:
        return None
    kind, held, floats, bias_at, expected = _STORED[dialect]
    (_check_cuda if dialect == "ort-cuda" else _check_nbits)(edit, node)
    a, b, scale = operands(node, count=3)
    elements, scales = tensor_of(b), tensor_of(scale)
    codes = codes_of(edit, scales, kind) if scales is not None and scales.dtype in floats else None
    if codes is None or elements is None or elements.dtype != held:
        raise edit.refuse(node, "its scales are not stored powers of two", expected, OTHER)
    dtype = dtype_of(a) or dtype_of(node.outputs[0])
    to: ir.Value | int | None = None
    if dialect == "nbits":
        packed, dtype = _mxint8(edit, node, codes, elements), dtype or contract.FLOAT
        to = None if weight_gemm_dtype(dtype) == dtype else dtype
    else:
        what, fits = f"scales {[*codes.shape]} for elements {[*dims(elements)]}", scale_shape(dims(elements), -1)
        edit.require(codes.shape == fits, node, what, f"a scale for {BLOCK_SIZE} elements of K")
        packed = [b, edit.beside(scale, f"{b.name}_scales", contract.UINT8, lambda: codes)]
        # A float16 or unknown result is computed in float32 and cast to the dtype of A, see `weight_gemm_dtype`.
        to = None if dtype == contract.BFLOAT16 else a
    edit.counts[dialect, "weights"] += 1
    bias = operand(node, bias_at)
    inputs = [a, *packed, *([] if bias is None else [edit.cast(node, bias, contract.FLOAT, "float")])]
    settings = {} if to is not None else {"output_dtype": dtype}
    make = lambda y: mxfp8_node(node, contract.WEIGHT_GEMM, inputs, y, **settings)  # noqa: E731
    return edit.with_cast(node, f"{node.outputs[0].name}_float", to, make)


def _check_cuda(edit: Edit, node: ir.Node) -> None:
    what, expected = "activations in FP8 with one scale (a_scale)", "MXFP8 activations, which have no a_scale"
    edit.require(operand(node, 3) is None, node, what, expected, "export it without them")
    block, expected = attribute(node, "block_size", 128), f"{BLOCK_SIZE}, which MXFP8 has"
    edit.require(block == BLOCK_SIZE, node, f"block_size {block}", expected, NOT_MX)


def _check_nbits(edit: Edit, node: ir.Node) -> None:
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


def _write_nbits(edit: Edit, node: ir.Node) -> Nodes | None:
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
    return _op(edit, node, [x, b, _scales(edit, gemm, f"{gemm.scales.name}{_SUFFIX}"), *bias], contract.FLOAT, settings)


def _write_cuda(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns ONNX Runtime's node for a gemm of a stored E4M3 matrix, or None for others."""
    gemm = gemm_of(node)
    if gemm is None or gemm.elements.dtype != contract.FLOAT8E4M3FN:
        return None
    x, dtype = _half(edit, node, _float_activation(edit, node))
    inputs: list[ir.Value | None] = [x, gemm.b, _scales(edit, gemm, f"{gemm.b.name}_b_scale")]
    if gemm.bias is not None:
        inputs += [None, edit.make("Cast", gemm.bias, wanted=f"{label(node)}_bias", to=dtype)]
    return _op(edit, node, inputs, dtype, {"block_size": BLOCK_SIZE})


def _op(edit: Edit, node: ir.Node, inputs: list[ir.Value | None], dtype: int, settings: Mapping[str, int]) -> Nodes:
    """Returns ONNX Runtime's op in place of a gemm, with a result of this dtype, and a Cast to the gemm's dtype."""
    op, wanted = ("MatMulBlockQuantizedFp8Weight", "half") if dtype in _HALVES else ("MatMulNBits", "float")
    result = attribute(node, "output_dtype", contract.FLOAT)
    make = lambda y: in_place_of(node, op, inputs, y, domain=MICROSOFT, **settings)  # noqa: E731
    return edit.with_cast(node, f"{label(node)}_{wanted}", None if result == dtype else result, make)


def _scales(edit: Edit, gemm: Gemm, wanted: str) -> ir.Value:
    """Returns the scales of a gemm as floats, called `wanted` or similar."""
    kind = int(gemm.elements.dtype)
    return edit.beside(gemm.scales, wanted, contract.FLOAT, lambda: float_scales(edit.codes(gemm.codes), kind))


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


def _half(edit: Edit, node: ir.Node, x: ir.Value) -> tuple[ir.Value, int]:
    """Returns (A in float16 or bfloat16, that dtype); raises ContractError if the user does not allow the rounding."""
    dtype = dtype_of(x) or contract.FLOAT
    rounded = attribute(node, "activation_dtype", contract.FLOAT) == contract.BFLOAT16 != dtype
    results = attribute(node, "output_dtype", contract.FLOAT)
    if dtype in _HALVES and not rounded and (results == dtype or _only_read_as(node, dtype)):
        return x, dtype
    half = contract.BFLOAT16 if rounded else dtype if dtype in _HALVES else contract.FLOAT16
    loss = f"activations and results are rounded to {_HALVES[half]}"
    kinds = "of different dtypes" if dtype in _HALVES else "float32"
    what = f"its activations and results are {kinds}, and ONNX Runtime's op takes float16 and bfloat16"
    losing = "rewrite a float16 model with weights alone in MXFP8, or allow that "
    edit.require("half" in edit.allow, node, what, "float16 or bfloat16", (losing, loss, ": ", Option("allow", "half")))
    edit.losses[loss] += 1
    return (x, half) if half == dtype else (edit.cast(node, x, half, "half"), half)


def _only_read_as(node: ir.Node, dtype: int) -> bool:
    y = node.outputs[0]
    users = [user for user in y.consumers() if user.graph is not None]
    casts = (user.op_type == "Cast" and attribute(user, "to", 0) == dtype for user in users)
    return not y.is_graph_output() and all(casts)


WRITE: Final = {
    "ort-cuda": (_write_cuda, take_apart, standard),
    "nbits": (_write_nbits, take_apart, standard),
}
"""Steps of each dialect: its own op for products, then standard ops for all other nodes."""
