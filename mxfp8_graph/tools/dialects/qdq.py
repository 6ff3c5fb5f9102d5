"""Standard Q/DQ: DequantizeLinear with a block_size of 32 on stored float8 or int8 elements.

Read: scales of FLOAT8E8M0, with or without a Cast, and float scales that are powers of two.
Written: Cast(FLOAT8E8M0 -> float32) + DequantizeLinear of opset 24 for float8 elements. ONNX Runtime has no kernel for
E8M0 scales, but runs that; OpenVINO runs both, but no partial blocks. No standard op finds scales while a model runs,
so dynamic activations cannot be said.

DequantizeLinear multiplies int8 elements as integers; those of MXINT8 are integers times 2^-6, which goes into its
scales, stored as float32. A gemm of a stored INT8 matrix becomes MatMul(A, DequantizeLinear(B [K, N], axis = 0)), which
ONNX Runtime 1.31 runs as one MatMulNBits (its qdq_selectors.cc). [N, K] and Transpose it decodes at every run.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.replacement import in_place_of, is_ours, mxfp8_node
from mxfp8_graph.onnx_pass.graph import attribute, dtype_of, is_op
from mxfp8_graph.tools.dialects.decompose import gemm_of, product
from mxfp8_graph.tools.dialects.edit import CASTS, Codes, Edit, Nodes, dims, heirs, operands, source, tensor_of
from mxfp8_graph.tools.dialects.gemms import KN, swapped
from mxfp8_graph.tools.dialects.node_check import check_zero_point
from mxfp8_ops import contract, numerics
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import Option
from mxfp8_ops.formats import BLOCK_SIZE, ELEMENT_FORMATS, INT8, SCALE_BIAS, SCALE_NAN

E8M0: Final = int(ir.DataType.FLOAT8E8M0)

_SHIFTS: Final = {row.onnx_dtype: row.mantissa_bits if row.twos_complement else 0 for row in ELEMENT_FORMATS.values()}
"""By how many powers of two a scale of DequantizeLinear is below that of MX, by the dtype of the elements."""

ROUNDED: Final = "MatMulNBits rounds activations to int8 (accuracy_level 4), a relative L2 error of 0.0055"
"""Measured with linears of 2048 x 2048 and normal data, against float64: docs/other_tools.md."""

UNROUNDED: Final = "keeps float32 (3e-07) and is slower"

_EXACT: Final = f"the session option session.qdq_matmulnbits_accuracy_level = 0 {UNROUNDED}"

_OTHER: Final = "convert reads MXFP8 only; start from the model that is not quantized"


def read(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns MXFP8Dequantize for a blocked DequantizeLinear on float8, or None if it is another node."""
    if not is_op(node, "DequantizeLinear"):
        return None
    value, scale = operands(node)
    block, elements = attribute(node, "block_size", 0), tensor_of(value)
    static = is_op(value.producer(), "QuantizeLinear") and dtype_of(value) in contract.ELEMENTS
    if not static and (elements is None or elements.dtype not in contract.ELEMENTS):
        raise edit.refuse(node, "quantized, but not in MXFP8", expected="stored float8 or int8 elements", advice=_OTHER)
    kind = int(elements.dtype if elements is not None else dtype_of(value) or 0)
    if block != BLOCK_SIZE:
        name = "int8" if _SHIFTS[kind] else "float8"
        what = f"{name} with block_size {block}" if block else f"{name} without blocks"
        raise edit.refuse(node, what, expected=f"block_size {BLOCK_SIZE}, which MXFP8 has", advice=_OTHER)
    scale, codes, dtype = _scales(edit, node, scale, kind)
    axis = attribute(node, "axis", 1)
    if elements is not None:
        shape = dims(elements)
        axis = axis % len(shape) - len(shape) if shape else -1
        if not shape or codes.shape != scale_shape(shape, axis):
            what = f"scales {list(codes.shape)} for elements {list(shape)} along axis {axis}"
            raise edit.refuse(node, what, expected=f"one for {BLOCK_SIZE} elements", advice="export the model again")
    edit.counts["qdq", "activations" if static else "weights"] += 1
    scales = stored_codes(edit, scale, f"{value.name}_scales", codes, _SHIFTS[kind])
    return [mxfp8_node(node, contract.DEQUANTIZE, [value, scales], heirs(node), axis=axis, output_dtype=dtype)]


def stored_codes(edit: Edit, scales: ir.Value, wanted: str, codes: Codes, shift: int = 0) -> ir.Value:
    """Returns E8M0 codes, stored beside the stored `scales` that they are: one tensor for all that read those."""
    graph = scales.graph
    return edit.shared(graph, "codes", scales, shift, make=lambda: edit.store(graph, wanted, contract.UINT8, codes))


def _scales(edit: Edit, node: ir.Node, scale: ir.Value, kind: int) -> tuple[ir.Value, Codes, int]:
    """Returns the stored scales of a DequantizeLinear on elements of dtype `kind`, their E8M0 codes as MX has them, and
    the dtype of its result.
    """
    check_zero_point(edit, node, _OTHER)
    value, views = source(scale, CASTS)
    casts = [attribute(view, "to", 0) for view in views if view.op_type == "Cast"]
    tensor = tensor_of(value)
    codes, dtype = None, contract.FLOAT
    if tensor is not None and tensor.dtype == E8M0:
        codes = power_codes(numerics.decode_scale(edit.codes(tensor)), kind)
    elif tensor is not None and tensor.dtype in contract.VALUES:
        codes, dtype = power_codes(tensor.numpy(), kind), int(tensor.dtype)
    if codes is None or not _exact(codes, casts, _SHIFTS[kind]):
        what = f"scales {value.name!r} are not stored powers of two"
        least, most = -SCALE_BIAS - _SHIFTS[kind], SCALE_BIAS - _SHIFTS[kind]
        expected = f"E8M0 scales, or floats 2^{least} to 2^{most}"
        raise edit.refuse(node, what, expected=expected, advice=_OTHER)
    dtype = attribute(node, "output_dtype", 0) or (casts[0] if casts else dtype)
    if dtype not in contract.VALUES:
        raise edit.refuse(node, f"a result of dtype {dtype}", expected="float32, float16 or bfloat16", advice=_OTHER)
    return value, codes, dtype


def _exact(codes: Codes, casts: list[int], shift: int) -> bool:
    """Whether casts to these dtypes keep the scales; float16 has 2^-24 to 2^15."""
    if not {*casts} <= {*contract.VALUES}:
        return False
    lowest, highest = SCALE_BIAS + shift - 24, SCALE_BIAS + shift + 15
    return contract.FLOAT16 not in casts or bool(np.all((codes >= lowest) & (codes <= highest)))


def float_scales(codes: Codes, kind: int) -> npt.NDArray[np.float32]:
    """Returns what DequantizeLinear multiplies elements of dtype `kind` by, for their E8M0 codes."""
    # Powers of two down to 2^-133, a subnormal: exact.
    return numerics.decode_scale(codes) * np.float32(2.0 ** -_SHIFTS[kind])


def power_codes(scales: npt.NDArray[np.floating], kind: int) -> Codes | None:
    """Returns the E8M0 codes of which `float_scales` are these, powers of two or NaN; None if one is not."""
    values = np.asarray(scales, np.float64)
    mantissa, exponent = np.frexp(np.where(np.isnan(values), 0.5, values))
    codes = exponent - 1 + SCALE_BIAS + _SHIFTS[kind]
    if np.any(mantissa != 0.5) or (codes.size and (codes.min() < 0 or codes.max() >= SCALE_NAN)):
        return None
    return np.where(np.isnan(values), SCALE_NAN, codes).astype(np.uint8)


def write_product(edit: Edit, node: ir.Node, _: frozenset[str]) -> Nodes | None:
    """Returns MatMul(A, DequantizeLinear(B [K, N])) for a gemm of a stored INT8 matrix, or None for others."""
    gemm = gemm_of(node)
    if gemm is None or gemm.elements.dtype != INT8.onnx_dtype:
        return None
    edit.note(f"ONNX Runtime 1.31 and later: {ROUNDED}; {_EXACT}")

    def make() -> ir.Value:
        elements = swapped(edit, gemm.b, f"{gemm.b.name}{KN}")
        floats = np.ascontiguousarray(float_scales(edit.codes(gemm.codes).T, INT8.onnx_dtype))
        scales = edit.store(gemm.b.graph, f"{elements.name}_scales", contract.FLOAT, floats)
        wanted = f"{elements.name}_values"
        return edit.make("DequantizeLinear", elements, scales, wanted=wanted, axis=0, block_size=BLOCK_SIZE)

    # One for all gemms of a weight: ONNX Runtime fuses none of them, with a node for each neither, and decodes it once.
    values = edit.shared(node.graph, "values", gemm.b, gemm.scales, make=make)
    if values.consumers():
        edit.note(f"{gemm.b.name}: several gemms read it, so ONNX Runtime decodes it at every run; nbits avoids that")
    return product(edit, node, values)


def write(edit: Edit, node: ir.Node, allow: frozenset[str]) -> Nodes | None:
    """Returns standard ops for MXFP8Dequantize, or None for other nodes."""
    if not is_ours(node, contract.QUANTIZE, contract.DEQUANTIZE):
        return None
    value = operands(node)[0]
    quantize = node if is_ours(node, contract.QUANTIZE) else value.producer()
    if quantize is not None and is_ours(quantize, contract.QUANTIZE):
        return dropped_activation(edit, node, quantize, allow)
    scales = operands(node)[1]
    codes = tensor_of(scales)
    if codes is None:
        what, advice = "its scales are computed while the model runs", "convert to standard"
        raise edit.refuse(node, what, expected="stored scales: Q/DQ has no others", advice=advice)
    graph, elements, whole = scales.graph, tensor_of(value), edit.codes(codes)
    kind = int(elements.dtype if elements is not None else dtype_of(value) or contract.FLOAT8E4M3FN)
    if _SHIFTS[kind]:
        # E8M0 lacks the least of them (a block of zeros has that), and ONNX Runtime fuses stored floats alone.
        make = lambda: edit.store(graph, f"{value.name}_scales_float", contract.FLOAT, float_scales(whole, kind))  # noqa: E731
        return dequantize_linear(edit, node, edit.shared(graph, "float", scales, make=make))
    make = lambda: edit.store(graph, f"{value.name}_e8m0", E8M0, whole)  # noqa: E731
    e8m0 = edit.shared(graph, "e8m0", scales, make=make)
    return dequantize_linear(edit, node, edit.cast(node, e8m0, contract.FLOAT, "float"))


def dequantize_linear(edit: Edit, node: ir.Node, scales: ir.Value) -> Nodes:
    """Returns DequantizeLinear with float32 `scales` in place of an MXFP8Dequantize, and a Cast to its dtype."""
    dtype, axis = attribute(node, "output_dtype", contract.FLOAT), attribute(node, "axis", -1)
    outputs = heirs(node)
    y = outputs if dtype == contract.FLOAT else [ir.Value(name=edit.fresh(f"{outputs[0].name}_float"))]
    inputs = [*operands(node, count=1), scales]
    nodes = [in_place_of(node, "DequantizeLinear", inputs, y, axis=axis, block_size=BLOCK_SIZE)]
    return nodes if y is outputs else [*nodes, ir.node("Cast", y, {"to": dtype}, outputs=outputs, name=y[0].name)]


def dropped_activation(
    edit: Edit,
    node: ir.Node,
    quantize: ir.Node,
    allow: frozenset[str],
    loss: str = "activations are not quantized any more",
) -> Nodes | None:
    """Returns the values themselves in place of those quantized while the model runs, where that loss is allowed."""
    if "activations" not in allow:
        what = "quantizes at run time, which this dialect cannot express"
        losing = ("convert to standard or trt, or lose that with ", Option("allow", "activations"))
        raise edit.refuse(quantize, what, expected="weights alone in MXFP8", advice=losing)
    if node is quantize:
        edit.losses[loss] += 1
        return None  # nothing reads it when the others are replaced
    dtype = attribute(node, "output_dtype", contract.FLOAT)
    return [ir.node("Cast", operands(quantize, count=1), {"to": dtype}, outputs=heirs(node), name=node.name)]
