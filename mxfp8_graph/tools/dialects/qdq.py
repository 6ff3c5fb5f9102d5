"""Standard Q/DQ: DequantizeLinear with a block_size of 32 on stored float8 elements.

Read: scales of FLOAT8E8M0, with or without a Cast, and float scales that are powers of two.
Written: Cast(FLOAT8E8M0 -> float32) + DequantizeLinear of opset 24. ONNX Runtime has no kernel for E8M0 scales, but
runs that; OpenVINO runs both, but no partial blocks. No standard op finds scales while a model runs, so dynamic
activations cannot be said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from mxfp8_graph.onnx_model.walk import STANDARD
from mxfp8_graph.tools.dialects.graph_edit import Codes, Nodes, Scope, attribute, like, ours
from mxfp8_graph.tools.dialects.node_check import check_zero_point
from mxfp8_ops import contract, numerics
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import Option
from mxfp8_ops.formats import BLOCK_SIZE, SCALE_BIAS, SCALE_NAN

E8M0: Final = onnx.TensorProto.FLOAT8E8M0


def read(scope: Scope, node: onnx.NodeProto) -> Nodes | None:
    """Returns MXFP8Dequantize for a blocked DequantizeLinear on float8, or None if it is another node."""
    if node.op_type != "DequantizeLinear" or node.domain not in STANDARD:
        return None
    edit, block = scope.edit, attribute(node, "block_size", 0)
    elements = scope.tensor(node.input[0])
    maker = scope.maker(node.input[0])
    static = (
        maker is not None and maker.op_type == "QuantizeLinear" and edit.dtypes.get(node.input[0]) in contract.ELEMENTS
    )
    if not static and (elements is None or elements.data_type not in contract.ELEMENTS):
        raise edit.refuse(node, "quantized, but not in MXFP8", expected="stored float8 elements", advice=_OTHER)
    if block != BLOCK_SIZE:
        what = f"float8 with block_size {block}" if block else "float8 without blocks"
        raise edit.refuse(node, what, expected=f"block_size {BLOCK_SIZE}, which MXFP8 has", advice=_OTHER)
    source, codes, dtype = _scales(scope, node)
    axis = attribute(node, "axis", 1)
    if elements is not None:
        rank = len(elements.dims)
        axis = axis % rank - rank if rank else -1
        if not rank or codes.shape != scale_shape(tuple(elements.dims), axis):
            what = f"scales {list(codes.shape)} for elements {list(elements.dims)} along axis {axis}"
            raise edit.refuse(node, what, expected=f"one for {BLOCK_SIZE} elements", advice="export the model again")
    tensor = scope.tensor(source)
    is_ours = tensor is not None and tensor.data_type == contract.UINT8  # what `standard` looks up
    edit.counts["standard" if is_ours else "qdq", "activations" if static else "weights"] += 1
    name = source if is_ours else stored_codes(scope, source, f"{node.input[0]}_scales", codes)
    made = ours(contract.DEQUANTIZE, [node.input[0], name], node.output, node.name, axis=axis, output_dtype=dtype)
    return [like(node, made)]


_OTHER: Final = "convert reads MXFP8 only; start from the model that is not quantized"


def stored_codes(scope: Scope, scales: str, wanted: str, codes: Codes) -> str:
    """Returns the name of a tensor of E8M0 codes beside the stored `scales` they are: one for all that read those."""
    owner = scope.owner(scales)
    return shared(owner, ("codes", scales), lambda _: owner.store(wanted, contract.UINT8, codes))


def _scales(scope: Scope, node: onnx.NodeProto) -> tuple[str, Codes, int]:
    """Returns the stored scales of a DequantizeLinear, their E8M0 codes, and the dtype of its result."""
    edit = scope.edit
    check_zero_point(scope, node, _OTHER)
    name, views = scope.source(node.input[1], frozenset({"Identity", "Cast"}))
    casts = [attribute(view, "to", 0) for view in views if view.op_type == "Cast"]
    tensor = scope.tensor(name)
    if tensor is None:
        name, codes = _looked_up(scope, name)
        dtype = contract.FLOAT
    elif tensor.data_type == E8M0:
        codes, dtype = scope.codes(tensor), contract.FLOAT
    elif tensor.data_type in contract.VALUES:
        codes, dtype = power_codes(scope.values(tensor)), tensor.data_type
    else:
        codes, dtype = None, 0
    if codes is not None and not _exact(codes, casts):
        codes = None
    if codes is None:
        what = f"scales {name!r} are not stored powers of two"
        raise edit.refuse(node, what, expected="E8M0 scales, or floats 2^-127 to 2^127", advice=_OTHER)
    dtype = attribute(node, "output_dtype", 0) or (casts[0] if casts else dtype)
    if dtype not in contract.VALUES:
        raise edit.refuse(node, f"a result of dtype {dtype}", expected="float32, float16 or bfloat16", advice=_OTHER)
    return name, codes, dtype


def _exact(codes: Codes, casts: list[int]) -> bool:
    """Whether casts to these dtypes keep the scales; float16 has 2^-24 to 2^15."""
    if not {*casts} <= {*contract.VALUES}:
        return False
    lowest, highest = SCALE_BIAS - 24, SCALE_BIAS + 15
    return contract.FLOAT16 not in casts or bool(np.all((codes >= lowest) & (codes <= highest)))


def _looked_up(scope: Scope, name: str) -> tuple[str, Codes | None]:
    """Returns the codes that `standard` looks up in the table of all scales, and their name; else `name` and None."""
    node = scope.maker(name)
    if node is None or node.op_type != "Gather" or node.domain not in STANDARD:
        return name, None
    table, (codes_name, _) = scope.tensor(node.input[0]), scope.source(node.input[1], frozenset({"Identity", "Cast"}))
    codes = scope.tensor(codes_name)
    if table is None or codes is None or codes.data_type != contract.UINT8 or list(table.dims) != [256]:
        return name, None
    same = np.array_equal(scope.values(table), table_of_scales(), equal_nan=True)
    return (codes_name, scope.codes(codes)) if same else (name, None)


def table_of_scales() -> npt.NDArray[np.float32]:
    """Returns the float32 value of every E8M0 code, [256]."""
    return numerics.decode_scale(np.arange(256, dtype=np.uint8))


def power_codes(scales: npt.NDArray[np.floating]) -> Codes | None:
    """Returns the E8M0 codes of scales that are powers of two (or NaN), or None if one is not."""
    values = np.asarray(scales, np.float64)
    mantissa, exponent = np.frexp(np.where(np.isnan(values), 0.5, values))
    codes = exponent - 1 + SCALE_BIAS
    if np.any(mantissa != 0.5) or (codes.size and (codes.min() < 0 or codes.max() >= SCALE_NAN)):
        return None
    return np.where(np.isnan(values), SCALE_NAN, codes).astype(np.uint8)


def write(scope: Scope, node: onnx.NodeProto, allow: frozenset[str]) -> Nodes | None:
    """Returns standard ops for MXFP8Dequantize, or None for other nodes."""
    if node.domain != contract.DOMAIN or node.op_type not in {contract.QUANTIZE.name, contract.DEQUANTIZE.name}:
        return None
    dynamic = node if node.op_type == contract.QUANTIZE.name else scope.maker(node.input[0])
    if dynamic is not None and dynamic.op_type == contract.QUANTIZE.name:
        return dropped_activation(scope, node, dynamic, allow)
    codes = scope.tensor(node.input[1])
    if codes is None:
        what, advice = "its scales are computed while the model runs", "convert to standard"
        raise scope.edit.refuse(node, what, expected="stored scales: Q/DQ has no others", advice=advice)
    scales = shared(scope, ("e8m0", node.input[1]), lambda owner: _e8m0(owner, node, codes))
    return dequantize_linear(scope, node, scales)


def shared(scope: Scope, key: tuple[object, ...], make: Callable[[Scope], str]) -> str:
    """Returns what `make(scope)` returned for this key in this graph, made at first use."""
    if key not in scope.shared:
        scope.shared[key] = make(scope)
    return scope.shared[key]


def _e8m0(scope: Scope, node: onnx.NodeProto, codes: onnx.TensorProto) -> str:
    owner = scope.owner(node.input[1])
    key = ("e8m0 tensor", node.input[1])
    name = shared(owner, key, lambda _: owner.store(f"{node.input[0]}_e8m0", E8M0, scope.codes(codes)))
    return scope.make("Cast", name, wanted=f"{name}_float", to=contract.FLOAT)


def dequantize_linear(scope: Scope, node: onnx.NodeProto, scales: str) -> Nodes:
    """Returns DequantizeLinear with float32 `scales` in place of an MXFP8Dequantize, and a Cast to its dtype."""
    dtype, axis = attribute(node, "output_dtype", contract.FLOAT), attribute(node, "axis", -1)
    output = node.output[0] if dtype == contract.FLOAT else scope.edit.fresh(f"{node.output[0]}_float")
    settings = {"axis": axis, "block_size": BLOCK_SIZE}
    inputs = [node.input[0], scales]
    made = [like(node, helper.make_node("DequantizeLinear", inputs, [output], name=node.name, **settings))]
    if dtype != contract.FLOAT:
        made.append(helper.make_node("Cast", [output], node.output, name=output, to=dtype))
    return made


def dropped_activation(
    scope: Scope, node: onnx.NodeProto, quantize: onnx.NodeProto, allow: frozenset[str]
) -> Nodes | None:
    """Returns the values themselves in place of those quantized while the model runs, where that loss is allowed."""
    if "activations" not in allow:
        what = "quantizes at run time, which this dialect cannot express"
        losing = ("convert to standard or trt, or lose that with ", Option("allow", "activations"))
        raise scope.edit.refuse(quantize, what, expected="weights alone in MXFP8", advice=losing)
    if node is quantize:
        scope.edit.losses["activations are not quantized any more"] += 1
        return None  # nothing reads it when the others are replaced
    dtype = attribute(node, "output_dtype", contract.FLOAT)
    return [helper.make_node("Cast", [quantize.input[0]], node.output, name=node.name, to=dtype)]
