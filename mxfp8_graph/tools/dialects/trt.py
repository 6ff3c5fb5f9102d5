"""TensorRT's dialect: the ops of domain `trt` that modelopt and TransformerEngine export.

TRT_MXFP8DynamicQuantize(x) -> q, scale          {axis = -1, block_size = 32, output_dtype = 17}
TRT_MXFP8QuantizeLinear(x, scale) -> q           a static activation: its scales are stored
TRT_MXFP8DequantizeLinear(q, scale) -> y         {axis = 1, block_size = 32, output_dtype = 1}

modelopt writes every attribute, float8 elements and uint8 scales; TransformerEngine none, uint8 for both, and scales
padded to multiples of 128 x 4. TensorRT's parser finds the blocked axis by the shapes, and so does this: a default that
the shapes contradict is no error.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx
from onnx import helper

from mxfp8_graph.onnx_model.dialect_ops import blocked_axis, dialect_of, without_padding
from mxfp8_graph.onnx_model.dialects import TRT, TRT_DEQUANTIZE, TRT_QUANTIZE, TRT_STATIC_QUANTIZE
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.walk import STANDARD
from mxfp8_graph.tools.dialects import trt_rules
from mxfp8_graph.tools.dialects.graph_edit import Codes, Edit, Nodes, Scope, attribute, like, ours, retype
from mxfp8_graph.tools.dialects.qdq import power_codes, shared, stored_codes
from mxfp8_ops import contract, numerics
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import ContractError, Option
from mxfp8_ops.formats import BLOCK_SIZE
from mxfp8_ops.standard_ops import settings_of

_AXES: Final = {TRT_QUANTIZE: -1, TRT_STATIC_QUANTIZE: 1, TRT_DEQUANTIZE: 1}
"""What the axis is where a node does not say."""


def read(scope: Scope, node: onnx.NodeProto) -> Nodes | None:
    """Returns our nodes for one of TensorRT's, or None if it is another."""
    if dialect_of(node) != "trt":
        return None
    edit = scope.edit
    if attribute(node, "block_size", BLOCK_SIZE) != BLOCK_SIZE:
        what = f"block_size {attribute(node, 'block_size', BLOCK_SIZE)}"
        raise edit.refuse(node, what, expected=f"{BLOCK_SIZE}, which MXFP8 has", advice="export the model again")
    if node.op_type == TRT_DEQUANTIZE:
        return [_dequantize(scope, node)]
    wanted = attribute(node, "output_dtype", contract.FLOAT8E4M3FN)
    if wanted != contract.FLOAT8E4M3FN:
        raise edit.refuse(node, f"output_dtype {wanted}", expected="17 (float8_e4m3fn)", advice="export it again")
    edit.counts["trt", "activations"] += 1
    axis = attribute(node, "axis", _AXES[node.op_type])
    if node.op_type == TRT_QUANTIZE:
        return [like(node, ours(contract.QUANTIZE, node.input, node.output, node.name, axis=axis))]
    return [_quantize_static(scope, node, axis)]


def _quantize_static(scope: Scope, node: onnx.NodeProto, axis: int) -> onnx.NodeProto:
    """Returns ONNX's blocked QuantizeLinear, whose scales are floats: powers of two."""
    tensor = scope.tensor(node.input[1])
    if tensor is None or tensor.data_type != contract.UINT8:
        what, expected = "its scales are not stored", "a uint8 tensor of E8M0 codes in the model"
        raise scope.edit.refuse(node, what, expected=expected, advice="export it with dynamic activations")
    codes = scope.codes(tensor)
    floats = scope.store(f"{node.input[1]}_values", contract.FLOAT, numerics.decode_scale(codes))
    x = scope.make("Cast", node.input[0], wanted=f"{node.output[0]}_x", to=contract.FLOAT)
    settings: dict[str, Any] = {"axis": axis, "block_size": BLOCK_SIZE, "output_dtype": contract.FLOAT8E4M3FN}
    return like(node, helper.make_node("QuantizeLinear", [x, floats], node.output, name=node.name, **settings))


def _dequantize(scope: Scope, node: onnx.NodeProto) -> onnx.NodeProto:
    elements, scales = node.input[:2]
    stored = scope.tensor(elements)
    if stored is None:
        axis = _axis_of_maker(scope, node, elements)
        codes = scope.tensor(scales)
        if codes is not None and codes.data_type != contract.UINT8:
            raise _unpacked(scope, node, codes)
    else:
        axis, scales = _weight(scope, node, stored)
        scope.edit.counts["trt", "weights"] += 1
    dtype = _dtype(scope.edit, node)
    made = ours(contract.DEQUANTIZE, [elements, scales], node.output, node.name, axis=axis, output_dtype=dtype)
    return like(node, made)


def _dtype(edit: Edit, node: onnx.NodeProto) -> int:
    """Returns the dtype of what is dequantized."""
    dtype = int(attribute(node, "output_dtype", contract.FLOAT))
    if dtype not in contract.VALUES:
        raise edit.refuse(node, f"output_dtype {dtype}", expected="1, 10 or 16", advice="export it again")
    if dtype == contract.FLOAT16 and not edit.float_dtypes - {contract.FLOAT}:
        note = "output_dtype is float16, as modelopt writes it, and nothing else in the model: read as float32"
        if note not in edit.opened.notes:
            edit.opened.notes.append(note)
        return contract.FLOAT
    return dtype


def _axis_of_maker(scope: Scope, node: onnx.NodeProto, elements: str) -> int:
    """Returns the blocked axis of what is quantized while the model runs: that of the node that does it."""
    given = attribute(node, "axis", None)
    maker = scope.maker(elements)
    if maker is None or maker.op_type not in {TRT_QUANTIZE, TRT_STATIC_QUANTIZE}:
        if given is None:
            what, expected = "nothing says which axis has the blocks", "an axis, or elements of a quantize node"
            raise scope.edit.refuse(node, what, expected=expected, advice="export the model again")
        return int(given)
    return int(attribute(maker, "axis", _AXES[maker.op_type]))


def _weight(scope: Scope, node: onnx.NodeProto, stored: onnx.TensorProto) -> tuple[int, str]:
    """Returns the blocked axis of a stored weight, negative, and the name of its scales; retypes its elements."""
    edit, dims = scope.edit, tuple(stored.dims)
    scales = scope.tensor(node.input[1])
    if stored.data_type not in {contract.UINT8, contract.FLOAT8E4M3FN}:
        raise _unpacked(scope, node, stored)
    if scales is None or scales.data_type not in {contract.UINT8, onnx.TensorProto.FLOAT8E8M0}:
        raise _unpacked(scope, node, scales or stored)
    axis = blocked_axis(dims, tuple(scales.dims), attribute(node, "axis", None))
    if axis is None:
        what = f"scales {list(scales.dims)} for elements {list(dims)}"
        expected = f"one for {BLOCK_SIZE} elements along one axis, perhaps padded to multiples of 128 x 4"
        raise edit.refuse(node, what, expected=expected, advice="export the model again")
    if stored.data_type == contract.UINT8:
        retype(edit, stored, contract.FLOAT8E4M3FN)
    blocks = scale_shape(dims, axis)
    if tuple(scales.dims) == blocks and scales.data_type == contract.UINT8:
        return axis, node.input[1]
    owner, wanted = scope.owner(node.input[1]), f"{node.input[1]}_codes"

    def make(_: Scope) -> str:
        codes = without_padding(scope.codes(scales), blocks)
        return owner.store(wanted, contract.UINT8, np.ascontiguousarray(codes))

    return axis, shared(owner, ("codes", node.input[1], blocks), make)


def _unpacked(scope: Scope, node: onnx.NodeProto, tensor: onnx.TensorProto) -> Exception:
    what = f"{tensor.name!r} is {onnx.TensorProto.DataType.Name(tensor.data_type).lower()}"
    expected = "stored float8_e4m3fn (or uint8) elements and uint8 E8M0 codes"
    return scope.edit.refuse(node, what, expected=expected, advice="finish the export, which packs weights last")


def write(scope: Scope, node: onnx.NodeProto, allow: frozenset[str]) -> Nodes | None:
    """Returns TensorRT's node for MXFP8Quantize, MXFP8Dequantize or a static activation, or None for any other."""
    edit = scope.edit
    if node.op_type == "QuantizeLinear" and node.domain in STANDARD:
        return _static(scope, node)
    if node.domain != contract.DOMAIN or node.op_type not in {contract.QUANTIZE.name, contract.DEQUANTIZE.name}:
        return None
    given = settings_of(node)
    settings, dtype = {"axis": given["axis"], "block_size": BLOCK_SIZE}, given["output_dtype"]
    if node.op_type == contract.QUANTIZE.name:
        rounding = given["scale_rounding"]
        if dtype != contract.FLOAT8E4M3FN:
            raise _only_e4m3(edit, node)
        if rounding != "ceil":
            if "rounding" not in allow:
                what = f"scale_rounding {rounding!r}, and TensorRT rounds scales of activations up"
                losing = ("rewrite the model with scale_rounding ceil, or lose that with ", Option("allow", "rounding"))
                raise edit.refuse(node, what, expected="ceil", advice=losing)
            edit.losses[f"scales of activations are rounded up, not by {rounding!r}"] += 1
        name, inputs, settings["output_dtype"] = TRT_QUANTIZE, [node.input[0]], dtype
    else:
        stored = scope.tensor(node.input[0])
        if stored is not None:
            _check_weight(edit, node, stored, settings)
        name, inputs, settings["output_dtype"] = TRT_DEQUANTIZE, [*node.input], dtype
    made = helper.make_node(name, inputs, node.output, name=node.name, domain=TRT, **settings)
    return [like(node, made)]


def _static(scope: Scope, node: onnx.NodeProto) -> Nodes | None:
    """Returns TensorRT's node for a blocked QuantizeLinear with stored powers of two; None for any other."""
    floats = scope.tensor(node.input[1])
    blocked = attribute(node, "block_size", 0) == BLOCK_SIZE and len(node.input) == 2
    blocked = blocked and attribute(node, "saturate", 1) == 1  # TensorRT's op saturates
    is_e4m3 = attribute(node, "output_dtype", 0) == contract.FLOAT8E4M3FN
    if floats is None or floats.data_type != contract.FLOAT or not blocked or not is_e4m3:
        return None
    codes = power_codes(scope.values(floats))
    if codes is None:
        return None
    readers = scope.readers.get(node.output[0], [])
    known = [(name, scope.tensor(name)) for reader in readers for name in reader.input[1:2]]
    same = (n for n, t in known if t is not None and t.data_type == contract.UINT8 and _is(scope, t, codes))
    scales = next(same, None) or stored_codes(scope, node.input[1], f"{node.input[1]}_codes", codes)
    x, casts = scope.source(node.input[0], frozenset({"Cast"}))
    if len(casts) != 1 or scope.edit.dtypes.get(x) not in contract.VALUES:
        x = node.input[0]
    settings = {"axis": attribute(node, "axis", 1), "block_size": BLOCK_SIZE, "output_dtype": contract.FLOAT8E4M3FN}
    made = helper.make_node(TRT_STATIC_QUANTIZE, [x, scales], node.output, name=node.name, domain=TRT, **settings)
    return [like(node, made)]


def _is(scope: Scope, stored: onnx.TensorProto, codes: Codes) -> bool:
    return tuple(stored.dims) == codes.shape and np.array_equal(scope.codes(stored), codes)


def _check_weight(edit: Edit, node: onnx.NodeProto, stored: onnx.TensorProto, settings: dict[str, int]) -> None:
    if stored.data_type != contract.FLOAT8E4M3FN:
        raise _only_e4m3(edit, node)
    rank = len(stored.dims)
    settings["axis"] = settings["axis"] % rank - rank
    if (k := stored.dims[settings["axis"]]) % BLOCK_SIZE:
        what = f"weight {stored.name!r} has {k} elements along the blocks"
        advice = "leave this weight out of the rewrite (--exclude), or convert to qdq or standard"
        raise edit.refuse(node, what, expected=f"a multiple of {BLOCK_SIZE}, as TensorRT requires", advice=advice)


def check(opened: OpenedModel) -> None:
    """Raises ContractError if TensorRT's parser would refuse a converted model."""
    if broken := trt_rules.violations(opened.proto):
        what = f"breaks rules of TensorRT's parser: {'; '.join(broken[:5])}"
        expected, advice = "a model that the parser accepts", "convert to qdq or standard"
        raise ContractError(opened.name, what, expected=expected, advice=advice)


def _only_e4m3(edit: Edit, node: onnx.NodeProto) -> Exception:
    advice = "rewrite the model with E4M3, or convert to qdq or standard"
    return edit.refuse(node, "elements are not float8_e4m3fn", expected="E4M3, TensorRT's only format", advice=advice)
