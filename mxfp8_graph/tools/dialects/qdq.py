"""Standard Q/DQ: DequantizeLinear with a block_size of 32 on stored float8 or int8 elements; and Quark's form of it.

Read: scales of FLOAT8E8M0, with or without a Cast, and float scales that are powers of two.
Written: Cast(FLOAT8E8M0 -> float32) + DequantizeLinear of opset 24 for float8 elements. ONNX Runtime has no kernel for
E8M0 scales, but runs that; OpenVINO runs both, but no partial blocks. No standard op computes scales while a model
runs, so this dialect cannot express dynamic activations.

MXINT8 elements are integers times 2^-6. DequantizeLinear multiplies the integers, so its scales, stored as float32,
include the 2^-6. A gemm of a stored INT8 matrix becomes MatMul(A, DequantizeLinear(B [K, N], axis = 0)), which ONNX
Runtime 1.31 runs as one MatMulNBits (its qdq_selectors.cc). With [N, K] and a Transpose, it decodes B in every run; a
subgraph that reads B of an outer graph has that form.

Quark's com.amd.quark.MXQuantizeDequantize(x), formerly com.vai.quantize.MXFixNeuron, quantizes and dequantizes at once.
Its weights are stored as floats, so reading packs them; this form is not written. Scales are rounded down (OCP), and
elements to nearest even, as ours with scale_rounding "floor". A block with NaN or Inf differs: Quark passes these
through, ours is all NaN.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialect_ops import dialect_of
from mxfp8_graph.onnx_pass.fuse.nodes import in_place_of, is_ours, mxfp8_node
from mxfp8_graph.onnx_pass.graph import attribute, dtype_of, is_op, settings_of
from mxfp8_graph.tools.dialects.edit import (
    NOT_MX,
    Codes,
    Edit,
    Nodes,
    check_zero_point,
    dims,
    operands,
    replacing_outputs,
    tensor_of,
)
from mxfp8_graph.tools.dialects.gemms import CASTS, KN, gemm_of, product, source, swapped, take_apart
from mxfp8_ops import contract, cpu, numerics
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import Option
from mxfp8_ops.formats import BLOCK_SIZE, ELEMENT_FORMATS, INT8, SCALE_BIAS, SCALE_NAN, element_format

E8M0: Final = int(ir.DataType.FLOAT8E8M0)

_SHIFTS: Final = {row.onnx_dtype: row.mantissa_bits if row.twos_complement else 0 for row in ELEMENT_FORMATS.values()}
"""Dtype of the elements -> log2 of (scale in MX / scale of DequantizeLinear)."""

ROUNDED: Final = "MatMulNBits rounds activations to int8 (accuracy_level 4), a relative L2 error of 0.0055"
"""Measured with linears of 2048 x 2048 and normal data, against float64: docs/other_tools.md."""

UNROUNDED: Final = "keeps float32 (3e-07) and is slower"

_QUARK: Final = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
"""Element formats by Quark's names."""

_TIES_TO_EVEN: Final = 2
"""The rounding_mode of MXFP8 in Quark; 0, which is the default, rounds ties away from zero, and 1 upward."""


def read(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns our nodes for a blocked DequantizeLinear or for a node of Quark, or None for other nodes."""
    if dialect_of(node) == "quark":
        return _read_quark(edit, node)
    if not is_op(node, "DequantizeLinear"):
        return None
    value, scale = operands(node)
    block, elements = attribute(node, "block_size", 0), tensor_of(value)
    # Behind a QuantizeLinear with stored scales, it has the elements of a static activation.
    static = is_op(value.producer(), "QuantizeLinear") and dtype_of(value) in contract.ELEMENTS
    kind = int(elements.dtype) if elements is not None else dtype_of(value) if static else 0
    edit.require(kind in _SHIFTS, node, "quantized, but not in MXFP8", "stored float8 or int8 elements", NOT_MX)
    what = f"{'int8' if _SHIFTS[kind] else 'float8'} {f'with block_size {block}' if block else 'without blocks'}"
    edit.require(block == BLOCK_SIZE, node, what, f"block_size {BLOCK_SIZE}, which MXFP8 has", NOT_MX)
    scale, codes, dtype = _scales(edit, node, scale, kind)
    axis = attribute(node, "axis", 1)
    if elements is not None:
        shape = dims(elements)
        axis = axis % len(shape) - len(shape) if shape else -1
        what = f"scales {list(codes.shape)} for elements {list(shape)} along axis {axis}"
        fits = shape and codes.shape == scale_shape(shape, axis)
        edit.require(fits, node, what, f"one for {BLOCK_SIZE} elements")
    edit.counts["qdq", "activations" if static else "weights"] += 1
    inputs = [value, edit.beside(scale, f"{value.name}_scales", contract.UINT8, lambda: codes, _SHIFTS[kind])]
    return [mxfp8_node(node, contract.DEQUANTIZE, inputs, replacing_outputs(node), axis=axis, output_dtype=dtype)]


def _scales(edit: Edit, node: ir.Node, scale: ir.Value, kind: int) -> tuple[ir.Value, Codes, int]:
    """Returns (stored scales of a DequantizeLinear, their E8M0 codes in MX, dtype of its result).

    `kind` is the dtype of its elements.
    """
    check_zero_point(edit, node, NOT_MX)
    value, views = source(scale, CASTS)
    casts, tensor = [attribute(view, "to", 0) for view in views if view.op_type == "Cast"], tensor_of(value)
    codes, shift = codes_of(edit, tensor, kind), _SHIFTS[kind]
    exponents = np.zeros(1) if codes is None else codes.astype(int) - SCALE_BIAS - shift
    in_float16 = np.all((exponents >= -24) & (exponents <= 15))  # the powers of two of float16
    if codes is None or not {*casts} <= {*contract.VALUES} or (contract.FLOAT16 in casts and not in_float16):
        what = f"scales {value.name!r} are not stored powers of two"
        expected = f"E8M0 scales, or floats 2^{-SCALE_BIAS - shift} to 2^{SCALE_BIAS - shift}"
        raise edit.refuse(node, what, expected, NOT_MX)
    stored = int(tensor.dtype) if tensor is not None and tensor.dtype != E8M0 else contract.FLOAT
    dtype = attribute(node, "output_dtype", 0) or [*casts, stored][0]
    is_float = dtype in contract.VALUES
    edit.require(is_float, node, f"a result of dtype {dtype}", "float32, float16 or bfloat16", NOT_MX)
    return value, codes, dtype


def codes_of(edit: Edit, scales: ir.TensorProtocol | None, kind: int) -> Codes | None:
    """Returns the E8M0 codes in MX of the stored scales of elements of dtype `kind`.

    None if they are not stored, have another dtype than scales, or one is neither a power of two nor NaN.
    """
    if scales is None or scales.dtype not in {E8M0, *contract.VALUES}:
        return None
    numbers = numerics.decode_scale(edit.codes(scales)) if scales.dtype == E8M0 else scales.numpy()
    values = np.asarray(numbers, np.float64)
    mantissa, exponent = np.frexp(np.where(np.isnan(values), 0.5, values))
    codes = exponent - 1 + SCALE_BIAS + _SHIFTS[kind]
    if np.any(mantissa != 0.5) or (codes.size and (codes.min() < 0 or codes.max() >= SCALE_NAN)):
        return None
    return np.where(np.isnan(values), SCALE_NAN, codes).astype(np.uint8)


def float_scales(codes: Codes, kind: int) -> npt.NDArray[np.float32]:
    """Returns the float32 scales of DequantizeLinear on elements of dtype `kind`, from E8M0 codes in MX."""
    # Powers of two down to 2^-133, a subnormal: exact.
    return numerics.decode_scale(codes) * np.float32(2.0 ** -_SHIFTS[kind])


def _read_quark(edit: Edit, node: ir.Node) -> Nodes:
    """Returns our nodes for a node of Quark; a stored weight is packed."""
    dtype, block = attribute(node, "element_dtype", "int8"), attribute(node, "block_size", BLOCK_SIZE)
    is_known, expected = dtype in _QUARK and block == BLOCK_SIZE, f"fp8_e4m3 or fp8_e5m2 in blocks of {BLOCK_SIZE}"
    edit.require(is_known, node, f"{dtype} in blocks of {block}", expected, NOT_MX)
    ties, scales = attribute(node, "rounding_mode", 0), attribute(node, "scale_dtype", "e8m0")
    what, expected = f"rounding_mode {ties}, scales of {scales}", f"{_TIES_TO_EVEN} (ties to even) and e8m0"
    is_known = (ties, scales) == (_TIES_TO_EVEN, "e8m0")
    edit.require(is_known, node, what, expected, "quantize the model again with those")
    x, axis = operands(node)[0], attribute(node, "axis", 1)
    stored, known, names = tensor_of(x), dtype_of(x), (f"{x.name}_mxfp8", f"{x.name}_mxfp8_scales")
    code, before = element_format(_QUARK[dtype]).onnx_dtype, Nodes()
    if stored is not None and stored.dtype in contract.VALUES:
        values, known = stored.numpy(), int(stored.dtype)
        axis = axis % max(values.ndim, 1) - values.ndim if values.ndim > 1 else -1
        arrays = cpu.quantize(values, axis=axis, element_format=_QUARK[dtype], scale_rounding="floor")
        kinds = (code, contract.UINT8)
        packed = [edit.store(x.graph, *each) for each in zip(names, kinds, arrays, strict=True)]
    else:
        packed = [ir.Value(name=edit.fresh(name)) for name in names]
        changes = {"axis": axis, "output_dtype": code, "scale_rounding": "floor"}
        name, op = edit.fresh(f"{x.name}_quantize"), contract.QUANTIZE.name
        settings = settings_of({**contract.QUANTIZE.attributes, **changes})
        before = [ir.Node(contract.DOMAIN, op, [x], settings, outputs=packed, name=name)]
    edit.counts["quark", "activations" if before else "weights"] += 1
    held = {"axis": axis, "output_dtype": known if known in contract.VALUES else contract.FLOAT}
    make = lambda y: mxfp8_node(node, contract.DEQUANTIZE, packed, y, **held)  # noqa: E731
    return before + edit.with_cast(node, f"{node.outputs[0].name}_float", None if known in contract.VALUES else x, make)


def _write_product(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns MatMul(A, DequantizeLinear(B [K, N])) for a gemm of a stored INT8 matrix, or None for others."""
    gemm = gemm_of(node)
    if gemm is None or gemm.elements.dtype != INT8.onnx_dtype:
        return None
    if any(user.graph is not gemm.b.graph for user in (node, *gemm.b.consumers())):
        # ONNX Runtime 1.31 refuses the form below: it looks for B in the graph of the MatMul only.
        edit.note(f"{gemm.b.name}: a subgraph reads it, so ONNX Runtime decodes it at every run; nbits avoids that")
        return None
    exact = f"the session option session.qdq_matmulnbits_accuracy_level = 0 {UNROUNDED}"
    edit.note(f"ONNX Runtime 1.31 and later: {ROUNDED}; {exact}")

    def make() -> ir.Value:
        elements = swapped(edit, gemm.b, f"{gemm.b.name}{KN}")
        floats = float_scales(edit.codes(gemm.codes).T, INT8.onnx_dtype)
        scales = edit.store(gemm.b.graph, f"{elements.name}_scales", contract.FLOAT, floats)
        wanted = f"{elements.name}_values"
        return edit.make("DequantizeLinear", elements, scales, wanted=wanted, axis=0, block_size=BLOCK_SIZE)

    # One node serves all gemms of a weight. ONNX Runtime then fuses none of them, but a node for each would not be
    # fused either, and one is decoded once.
    values = edit.shared(node.graph, "values", gemm.b, gemm.scales, make=make)
    if values.consumers():
        edit.note(f"{gemm.b.name}: several gemms read it, so ONNX Runtime decodes it at every run; nbits avoids that")
    return product(edit, node, values)


def _write(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns standard ops for MXFP8Dequantize, or None for other nodes."""
    if is_ours(node, contract.QUANTIZE):
        lose_activations(edit, node)
        return None  # it is unused after the other replacements
    if not is_ours(node, contract.DEQUANTIZE):
        return None
    value, scales = operands(node)
    dtype, axis = attribute(node, "output_dtype", contract.FLOAT), attribute(node, "axis", -1)
    quantize = value.producer()
    if quantize is not None and is_ours(quantize, contract.QUANTIZE):
        lose_activations(edit, quantize, "")
        return [
            ir.node("Cast", operands(quantize, count=1), {"to": dtype}, outputs=replacing_outputs(node), name=node.name)
        ]
    codes = tensor_of(scales)
    if codes is None:
        what, expected = "its scales are computed while the model runs", "stored scales: Q/DQ has no others"
        raise edit.refuse(node, what, expected, "convert to standard")
    elements, whole = tensor_of(value), edit.codes(codes)
    kind = int(elements.dtype if elements is not None else dtype_of(value) or contract.FLOAT8E4M3FN)
    if _SHIFTS[kind]:
        # E8M0 lacks the smallest of these scales, which a block of zeros has. ONNX Runtime fuses only stored floats.
        name = f"{value.name}_scales_float"
        stored = edit.beside(scales, name, contract.FLOAT, lambda: float_scales(whole, kind))
    else:
        stored = edit.beside(scales, f"{value.name}_e8m0", E8M0, lambda: whole)
        stored = edit.cast(node, stored, contract.FLOAT, "float")
    inputs = [value, stored]
    settings = {"axis": axis, "block_size": BLOCK_SIZE}
    make = lambda y: in_place_of(node, "DequantizeLinear", inputs, y, **settings)  # noqa: E731
    return edit.with_cast(node, f"{node.outputs[0].name}_float", None if dtype == contract.FLOAT else dtype, make)


def lose_activations(edit: Edit, quantize: ir.Node, loss: str = "activations are not quantized any more") -> None:
    """Counts the loss of a quantization at run time; raises ContractError if the user does not allow it."""
    what = "quantizes at run time, which this dialect cannot express"
    losing = ("convert to standard or trt, or lose that with ", Option("allow", "activations"))
    edit.require("activations" in edit.allow, quantize, what, "weights alone in MXFP8", losing)
    if loss:
        edit.losses[loss] += 1


WRITE: Final = {"qdq": (_write_product, take_apart, _write)}
