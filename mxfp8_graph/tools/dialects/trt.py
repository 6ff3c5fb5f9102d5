"""TensorRT's dialect: the ops of domain `trt` that modelopt and TransformerEngine export.

TRT_MXFP8DynamicQuantize(x) -> q, scale          {axis = -1, block_size = 32, output_dtype = 17} <-> MXFP8Quantize
TRT_MXFP8QuantizeLinear(x, scale) -> q           a static activation: its scales are stored      <-> QuantizeLinear
TRT_MXFP8DequantizeLinear(q, scale) -> y         {axis = 1, block_size = 32, output_dtype = 1}   <-> MXFP8Dequantize

modelopt writes every attribute, float8 elements and uint8 scales. TransformerEngine writes no attribute, uint8 elements
and uint8 scales, and pads scales to multiples of 128 x 4. TensorRT's parser derives the blocked axis from the shapes,
and so does this file: a default axis that the shapes contradict is no error.

Written nodes follow the rules of TensorRT's parser (onnx-tensorrt, onnxOpImporters.cpp; TensorRT 10 to 11).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialect_ops import blocked_axis, dialect_of, without_padding
from mxfp8_graph.onnx_pass.dialects import TRT, TRT_DEQUANTIZE, TRT_QUANTIZE, TRT_STATIC_QUANTIZE
from mxfp8_graph.onnx_pass.fuse.nodes import in_place_of, is_ours, mxfp8_node
from mxfp8_graph.onnx_pass.graph import attribute, default, dtype_of, is_op
from mxfp8_graph.tools.dialects.edit import (
    Edit,
    Nodes,
    attributes_of,
    dims,
    operand,
    operands,
    replacing_outputs,
    tensor_of,
)
from mxfp8_graph.tools.dialects.gemms import source, take_apart
from mxfp8_graph.tools.dialects.qdq import codes_of, float_scales
from mxfp8_ops import contract
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import Option
from mxfp8_ops.formats import BLOCK_SIZE

_AXES: Final = {TRT_QUANTIZE: -1, TRT_STATIC_QUANTIZE: 1, TRT_DEQUANTIZE: 1}
"""Default axis of each op."""

_E4M3: Final = contract.FLOAT8E4M3FN


def read(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns our nodes for a node of TensorRT, or None for other nodes."""
    if dialect_of(node) != "trt":
        return None
    block, dtype = attribute(node, "block_size", BLOCK_SIZE), attribute(node, "output_dtype", _E4M3)
    edit.require(block == BLOCK_SIZE, node, f"block_size {block}", f"{BLOCK_SIZE}, which MXFP8 has")
    if node.op_type == TRT_DEQUANTIZE:
        return [_dequantize(edit, node)]
    edit.require(dtype == _E4M3, node, f"output_dtype {dtype}", "17 (float8_e4m3fn)", "export it again")
    edit.counts["trt", "activations"] += 1
    axis = attribute(node, "axis", _AXES[node.op_type])
    if node.op_type == TRT_QUANTIZE:
        return [mxfp8_node(node, contract.QUANTIZE, node.inputs, replacing_outputs(node), axis=axis)]
    x, scales = operands(node)
    tensor = tensor_of(scales)
    if tensor is None or tensor.dtype != contract.UINT8:
        expected = "a uint8 tensor of E8M0 codes in the model"
        raise edit.refuse(node, "its scales are not stored", expected, "export it with dynamic activations")
    values = float_scales(edit.codes(tensor), _E4M3)  # ONNX's op takes scales as floats
    floats = edit.store(node.graph, f"{scales.name}_values", contract.FLOAT, values)
    wide = edit.make("Cast", x, wanted=f"{node.outputs[0].name}_x", to=contract.FLOAT)
    return [_quantize_linear(node, "QuantizeLinear", [wide, floats], "", axis)]


def _quantize_linear(node: ir.Node, op: str, inputs: list[ir.Value], domain: str, axis: int) -> ir.Node:
    settings = {"axis": axis, "block_size": BLOCK_SIZE, "output_dtype": _E4M3}
    return in_place_of(node, op, inputs, replacing_outputs(node), domain=domain, **settings)


def _dequantize(edit: Edit, node: ir.Node) -> ir.Node:
    elements, scales = operands(node)
    stored, codes = tensor_of(elements), tensor_of(scales)
    if stored is not None:
        axis, scales = _weight(edit, node, stored)
        edit.counts["trt", "weights"] += 1
    elif (maker := elements.producer()) is not None and maker.op_type in {TRT_QUANTIZE, TRT_STATIC_QUANTIZE}:
        # The defaults of the two ops differ, so the quantize node decides the axis.
        axis = int(attribute(maker, "axis", _AXES[maker.op_type]))
    elif (axis := attribute(node, "axis", None)) is None:
        expected = "an axis, or elements of a quantize node"
        raise edit.refuse(node, "nothing says which axis has the blocks", expected)
    if stored is None and codes is not None and codes.dtype != contract.UINT8:
        raise _unpacked(edit, node, codes)
    dtype = int(attribute(node, "output_dtype", contract.FLOAT))
    edit.require(dtype in contract.VALUES, node, f"output_dtype {dtype}", "1, 10 or 16", "export it again")
    if dtype == contract.FLOAT16 and not edit.float_dtypes - {contract.FLOAT}:
        edit.note("output_dtype is float16, as modelopt writes it, and nothing else in the model: read as float32")
        dtype = contract.FLOAT
    return mxfp8_node(
        node, contract.DEQUANTIZE, [elements, scales], replacing_outputs(node), axis=axis, output_dtype=dtype
    )


def _weight(edit: Edit, node: ir.Node, stored: ir.TensorProtocol) -> tuple[int, ir.Value]:
    """Returns (the blocked axis of a stored weight, negative; its scales), and makes uint8 elements float8."""
    elements, scales = operands(node)
    shape, tensor = dims(stored), tensor_of(scales)
    if stored.dtype not in {contract.UINT8, _E4M3}:
        raise _unpacked(edit, node, stored)
    if tensor is None or tensor.dtype not in {contract.UINT8, ir.DataType.FLOAT8E8M0}:
        raise _unpacked(edit, node, tensor or stored)
    axis = blocked_axis(shape, dims(tensor), attribute(node, "axis", None))
    if axis is None:
        what = f"scales {list(dims(tensor))} for elements {list(shape)}"
        expected = f"one for {BLOCK_SIZE} elements along one axis, perhaps padded to multiples of 128 x 4"
        raise edit.refuse(node, what, expected)
    # TransformerEngine stores E4M3 elements as uint8.
    if stored.dtype == contract.UINT8 and elements.const_value is not None:
        values, kind = edit.codes(stored), ir.DataType(_E4M3)
        elements.const_value = ir.Tensor(values.view(kind.numpy()), dtype=kind, name=stored.name)
        if elements.is_graph_input():
            elements.type = ir.TensorType(kind)
    blocks = scale_shape(shape, axis)
    if dims(tensor) == blocks and tensor.dtype == contract.UINT8:
        return axis, scales
    make = lambda: without_padding(edit.codes(tensor), blocks)  # noqa: E731
    return axis, edit.beside(scales, f"{scales.name}_codes", contract.UINT8, make, blocks)


def _unpacked(edit: Edit, node: ir.Node, tensor: ir.TensorProtocol) -> Exception:
    expected = "stored float8_e4m3fn (or uint8) elements and uint8 E8M0 codes"
    what, advice = f"{tensor.name!r} is {tensor.dtype.name.lower()}", "finish the export, which packs weights last"
    return edit.refuse(node, what, expected, advice)


def _write(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns TensorRT's node for MXFP8Quantize, MXFP8Dequantize or a static activation, or None for any other."""
    if is_op(node, "QuantizeLinear"):
        return _write_static(edit, node)
    if not is_ours(node, contract.QUANTIZE, contract.DEQUANTIZE):
        return None
    ours = attributes_of(node)
    settings = {"axis": ours["axis"], "block_size": BLOCK_SIZE, "output_dtype": ours["output_dtype"]}
    if is_ours(node, contract.QUANTIZE):
        _check_e4m3(edit, node, ours["output_dtype"])
        if (rounding := ours["scale_rounding"]) != "ceil":
            what = f"scale_rounding {rounding!r}, and TensorRT rounds scales of activations up"
            losing = ("rewrite the model with scale_rounding ceil, or lose that with ", Option("allow", "rounding"))
            edit.require("rounding" in edit.allow, node, what, "ceil", losing)
            edit.losses[f"scales of activations are rounded up, not by {rounding!r}"] += 1
        return [
            in_place_of(node, TRT_QUANTIZE, operands(node, count=1), replacing_outputs(node), domain=TRT, **settings)
        ]
    if (stored := default(operands(node)[0])) is not None:
        settings["axis"] = _weight_axis(edit, node, stored, ours["axis"])
    return [in_place_of(node, TRT_DEQUANTIZE, operands(node), replacing_outputs(node), domain=TRT, **settings)]


def _weight_axis(edit: Edit, node: ir.Node, stored: ir.TensorProtocol, axis: int) -> int:
    """Returns the blocked axis of a stored weight, negative; raises ContractError if TensorRT's parser refuses it."""
    _check_e4m3(edit, node, stored.dtype)
    shape, scales = dims(stored), default(operands(node)[1])
    axis = axis % len(shape) - len(shape)
    k, blocks = shape[axis], scale_shape(shape, axis)
    what, expected = f"weight {stored.name!r} has {k} elements along the blocks", f"a multiple of {BLOCK_SIZE}"
    advice = "leave this weight out of the rewrite (--exclude), or convert to qdq or standard"
    edit.require(k % BLOCK_SIZE == 0, node, what, f"{expected}, as TensorRT requires", advice)
    fits = scales is not None and scales.dtype == contract.UINT8 and dims(scales) == blocks
    what, expected = f"other scales of weight {stored.name!r}", f"stored uint8 codes {list(blocks)}"
    edit.require(fits, node, what, f"{expected}, as TensorRT requires", "convert to qdq or standard")
    return axis


def _check_e4m3(edit: Edit, node: ir.Node, dtype: int) -> None:
    advice = "rewrite the model with E4M3, or convert to qdq or standard"
    edit.require(dtype == _E4M3, node, "elements are not float8_e4m3fn", "E4M3, TensorRT's only format", advice)


def _write_static(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns TensorRT's node for a blocked QuantizeLinear with stored powers of two; None for any other."""
    value, scales = operands(node)
    floats, defaults = tensor_of(scales), {"block_size": 0, "output_dtype": 0, "saturate": 1}  # TensorRT's op saturates
    settings = [attribute(node, name, default) for name, default in defaults.items()]
    if settings != [BLOCK_SIZE, _E4M3, 1] or len(node.inputs) != 2 or floats is None or floats.dtype != contract.FLOAT:
        return None
    if (codes := codes_of(edit, floats, _E4M3)) is None:
        return None
    # A dequantize node that reads the result may have the same scales as codes; they are used again.
    read = [operand(user, 1) for user in node.outputs[0].consumers() if user.graph is not None]
    stored = ((value, tensor) for value in read if (tensor := tensor_of(value)) is not None)
    uint8 = ((value, tensor) for value, tensor in stored if tensor.dtype == contract.UINT8)
    known = (value for value, tensor in uint8 if np.array_equal(edit.codes(tensor), codes))
    scales = next(known, None) or edit.beside(scales, f"{scales.name}_codes", contract.UINT8, lambda: codes)
    # Without the Cast to float32 that `read` adds for the standard op.
    x, casts = source(value, ("Cast",))
    if len(casts) != 1 or dtype_of(x) not in contract.VALUES:
        x = value
    return [_quantize_linear(node, TRT_STATIC_QUANTIZE, [x, scales], TRT, attribute(node, "axis", 1))]


WRITE: Final = {"trt": (take_apart, _write)}
