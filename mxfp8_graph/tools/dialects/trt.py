"""TensorRT's dialect: the ops of domain `trt` that modelopt and TransformerEngine export.

TRT_MXFP8DynamicQuantize(x) -> q, scale          {axis = -1, block_size = 32, output_dtype = 17}
TRT_MXFP8QuantizeLinear(x, scale) -> q           a static activation: its scales are stored
TRT_MXFP8DequantizeLinear(q, scale) -> y         {axis = 1, block_size = 32, output_dtype = 1}

modelopt writes every attribute, float8 elements and uint8 scales; TransformerEngine none, uint8 for both, and scales
padded to multiples of 128 x 4. TensorRT's parser finds the blocked axis by the shapes, and so does this: a default that
the shapes contradict is no error.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialect_ops import blocked_axis, dialect_of, without_padding
from mxfp8_graph.onnx_pass.dialects import TRT, TRT_DEQUANTIZE, TRT_QUANTIZE, TRT_STATIC_QUANTIZE
from mxfp8_graph.onnx_pass.fuse.replacement import in_place_of, is_ours, mxfp8_node
from mxfp8_graph.onnx_pass.graph import attribute, dtype_of, is_op, name_of
from mxfp8_graph.tools.dialects import trt_rules
from mxfp8_graph.tools.dialects.edit import (
    Codes,
    Edit,
    Nodes,
    dims,
    heirs,
    operand,
    operands,
    settings_of,
    source,
    tensor_of,
)
from mxfp8_graph.tools.dialects.qdq import power_codes, stored_codes
from mxfp8_ops import contract, numerics
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import ContractError, Option
from mxfp8_ops.formats import BLOCK_SIZE

_AXES: Final = {TRT_QUANTIZE: -1, TRT_STATIC_QUANTIZE: 1, TRT_DEQUANTIZE: 1}
"""What the axis is where a node does not say."""


def read(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns our nodes for one of TensorRT's, or None if it is another."""
    if dialect_of(node) != "trt":
        return None
    if attribute(node, "block_size", BLOCK_SIZE) != BLOCK_SIZE:
        what = f"block_size {attribute(node, 'block_size', BLOCK_SIZE)}"
        raise edit.refuse(node, what, expected=f"{BLOCK_SIZE}, which MXFP8 has", advice="export the model again")
    if node.op_type == TRT_DEQUANTIZE:
        return [_dequantize(edit, node)]
    wanted = attribute(node, "output_dtype", contract.FLOAT8E4M3FN)
    if wanted != contract.FLOAT8E4M3FN:
        raise edit.refuse(node, f"output_dtype {wanted}", expected="17 (float8_e4m3fn)", advice="export it again")
    edit.counts["trt", "activations"] += 1
    axis = attribute(node, "axis", _AXES[node.op_type])
    if node.op_type == TRT_QUANTIZE:
        return [mxfp8_node(node, contract.QUANTIZE, node.inputs, heirs(node), axis=axis)]
    return [_quantize_static(edit, node, axis)]


def _quantize_static(edit: Edit, node: ir.Node, axis: int) -> ir.Node:
    """Returns ONNX's blocked QuantizeLinear, whose scales are floats: powers of two."""
    x, scales = operands(node)
    tensor = tensor_of(scales)
    if tensor is None or tensor.dtype != contract.UINT8:
        what, expected = "its scales are not stored", "a uint8 tensor of E8M0 codes in the model"
        raise edit.refuse(node, what, expected=expected, advice="export it with dynamic activations")
    values = numerics.decode_scale(edit.codes(tensor))
    floats = edit.store(node.graph, f"{scales.name}_values", contract.FLOAT, values)
    wide = edit.make("Cast", x, wanted=f"{node.outputs[0].name}_x", to=contract.FLOAT)
    return _quantize_linear(node, "QuantizeLinear", [wide, floats], "", axis)


def _quantize_linear(node: ir.Node, op: str, inputs: list[ir.Value], domain: str, axis: int) -> ir.Node:
    settings = {"axis": axis, "block_size": BLOCK_SIZE, "output_dtype": contract.FLOAT8E4M3FN}
    return in_place_of(node, op, inputs, heirs(node), domain=domain, **settings)


def _dequantize(edit: Edit, node: ir.Node) -> ir.Node:
    elements, scales = operands(node)
    stored = tensor_of(elements)
    if stored is None:
        axis = _axis_of_maker(edit, node, elements)
        codes = tensor_of(scales)
        if codes is not None and codes.dtype != contract.UINT8:
            raise _unpacked(edit, node, codes)
    else:
        axis, scales = _weight(edit, node, stored)
        edit.counts["trt", "weights"] += 1
    dtype = _dtype(edit, node)
    return mxfp8_node(node, contract.DEQUANTIZE, [elements, scales], heirs(node), axis=axis, output_dtype=dtype)


def _dtype(edit: Edit, node: ir.Node) -> int:
    """Returns the dtype of what is dequantized."""
    dtype = int(attribute(node, "output_dtype", contract.FLOAT))
    if dtype not in contract.VALUES:
        raise edit.refuse(node, f"output_dtype {dtype}", expected="1, 10 or 16", advice="export it again")
    if dtype == contract.FLOAT16 and not edit.float_dtypes - {contract.FLOAT}:
        edit.note("output_dtype is float16, as modelopt writes it, and nothing else in the model: read as float32")
        return contract.FLOAT
    return dtype


def _axis_of_maker(edit: Edit, node: ir.Node, elements: ir.Value) -> int:
    """Returns the blocked axis of what is quantized while the model runs: that of the node that does it."""
    axis = attribute(node, "axis", None)
    maker = elements.producer()
    if maker is not None and maker.op_type in {TRT_QUANTIZE, TRT_STATIC_QUANTIZE}:
        return int(attribute(maker, "axis", _AXES[maker.op_type]))
    if axis is None:
        what, expected = "nothing says which axis has the blocks", "an axis, or elements of a quantize node"
        raise edit.refuse(node, what, expected=expected, advice="export the model again")
    return int(axis)


def _weight(edit: Edit, node: ir.Node, stored: ir.TensorProtocol) -> tuple[int, ir.Value]:
    """Returns the blocked axis of a stored weight, negative, and its scales; retypes its elements."""
    elements, scales = operands(node)
    shape, tensor = dims(stored), tensor_of(scales)
    if stored.dtype not in {contract.UINT8, contract.FLOAT8E4M3FN}:
        raise _unpacked(edit, node, stored)
    if tensor is None or tensor.dtype not in {contract.UINT8, ir.DataType.FLOAT8E8M0}:
        raise _unpacked(edit, node, tensor or stored)
    axis = blocked_axis(shape, dims(tensor), attribute(node, "axis", None))
    if axis is None:
        what = f"scales {list(dims(tensor))} for elements {list(shape)}"
        expected = f"one for {BLOCK_SIZE} elements along one axis, perhaps padded to multiples of 128 x 4"
        raise edit.refuse(node, what, expected=expected, advice="export the model again")
    if stored.dtype == contract.UINT8:
        edit.retype(elements, contract.FLOAT8E4M3FN)
    blocks = scale_shape(shape, axis)
    if dims(tensor) == blocks and tensor.dtype == contract.UINT8:
        return axis, scales

    def make() -> ir.Value:
        codes = np.ascontiguousarray(without_padding(edit.codes(tensor), blocks))
        return edit.store(scales.graph, f"{scales.name}_codes", contract.UINT8, codes)

    return axis, edit.shared(scales.graph, "codes", scales, blocks, make=make)


def _unpacked(edit: Edit, node: ir.Node, tensor: ir.TensorProtocol) -> Exception:
    what = f"{tensor.name!r} is {tensor.dtype.name.lower()}"
    expected = "stored float8_e4m3fn (or uint8) elements and uint8 E8M0 codes"
    return edit.refuse(node, what, expected=expected, advice="finish the export, which packs weights last")


def write(edit: Edit, node: ir.Node, allow: frozenset[str]) -> Nodes | None:
    """Returns TensorRT's node for MXFP8Quantize, MXFP8Dequantize or a static activation, or None for any other."""
    if is_op(node, "QuantizeLinear"):
        return _static(edit, node)
    if not is_ours(node, contract.QUANTIZE, contract.DEQUANTIZE):
        return None
    given = settings_of(node)
    settings, dtype = {"axis": given["axis"], "block_size": BLOCK_SIZE}, given["output_dtype"]
    if is_ours(node, contract.QUANTIZE):
        rounding = given["scale_rounding"]
        if dtype != contract.FLOAT8E4M3FN:
            raise _only_e4m3(edit, node)
        if rounding != "ceil":
            if "rounding" not in allow:
                what = f"scale_rounding {rounding!r}, and TensorRT rounds scales of activations up"
                losing = ("rewrite the model with scale_rounding ceil, or lose that with ", Option("allow", "rounding"))
                raise edit.refuse(node, what, expected="ceil", advice=losing)
            edit.losses[f"scales of activations are rounded up, not by {rounding!r}"] += 1
        op, inputs = TRT_QUANTIZE, operands(node, count=1)
    else:
        op, inputs = TRT_DEQUANTIZE, operands(node)
        stored = tensor_of(inputs[0])
        if stored is not None:
            _check_weight(edit, node, stored, settings)
    return [in_place_of(node, op, inputs, heirs(node), domain=TRT, **settings, output_dtype=dtype)]


def _static(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns TensorRT's node for a blocked QuantizeLinear with stored powers of two; None for any other."""
    value, scales = operands(node)
    floats = tensor_of(scales)
    blocked = attribute(node, "block_size", 0) == BLOCK_SIZE and len(node.inputs) == 2
    blocked = blocked and attribute(node, "saturate", 1) == 1  # TensorRT's op saturates
    is_e4m3 = attribute(node, "output_dtype", 0) == contract.FLOAT8E4M3FN
    if floats is None or floats.dtype != contract.FLOAT or not blocked or not is_e4m3:
        return None
    codes = power_codes(floats.numpy(), contract.FLOAT8E4M3FN)
    if codes is None:
        return None
    known = (operand(user, 1) for user in node.outputs[0].consumers() if user.graph is not None)
    same = (each for each in known if each is not None and _is(edit, tensor_of(each), codes))
    scales = next(same, None) or stored_codes(edit, scales, f"{scales.name}_codes", codes)
    x, casts = source(value, ("Cast",))
    if len(casts) != 1 or dtype_of(x) not in contract.VALUES:
        x = value
    return [_quantize_linear(node, TRT_STATIC_QUANTIZE, [x, scales], TRT, attribute(node, "axis", 1))]


def _is(edit: Edit, stored: ir.TensorProtocol | None, codes: Codes) -> bool:
    same = stored is not None and stored.dtype == contract.UINT8 and dims(stored) == codes.shape
    return same and stored is not None and np.array_equal(edit.codes(stored), codes)


def _check_weight(edit: Edit, node: ir.Node, stored: ir.TensorProtocol, settings: dict[str, int]) -> None:
    if stored.dtype != contract.FLOAT8E4M3FN:
        raise _only_e4m3(edit, node)
    shape = dims(stored)
    settings["axis"] = settings["axis"] % len(shape) - len(shape)
    if (k := shape[settings["axis"]]) % BLOCK_SIZE:
        what = f"weight {stored.name!r} has {k} elements along the blocks"
        advice = "leave this weight out of the rewrite (--exclude), or convert to qdq or standard"
        raise edit.refuse(node, what, expected=f"a multiple of {BLOCK_SIZE}, as TensorRT requires", advice=advice)


def check(model: ir.Model) -> None:
    """Raises ContractError if TensorRT's parser would refuse a converted model."""
    if broken := trt_rules.violations(model):
        what = f"breaks rules of TensorRT's parser: {'; '.join(broken[:5])}"
        expected, advice = "a model that the parser accepts", "convert to qdq or standard"
        raise ContractError(name_of(model), what, expected=expected, advice=advice)


def _only_e4m3(edit: Edit, node: ir.Node) -> Exception:
    advice = "rewrite the model with E4M3, or convert to qdq or standard"
    return edit.refuse(node, "elements are not float8_e4m3fn", expected="E4M3, TensorRT's only format", advice=advice)
