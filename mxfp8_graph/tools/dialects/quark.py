"""Quark's dialect: com.amd.quark.MXQuantizeDequantize(x), and its older name com.vai.quantize.MXFixNeuron.

It quantizes and dequantizes at once, weights too, which are stored as floats: so nothing is packed before this reads
it, and nothing is written. Scales are rounded down (OCP), and elements to nearest even, as ours with scale_rounding
"floor". A block with NaN or Inf differs: Quark passes them through, ours is NaN throughout.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
from onnx import helper

from mxfp8_graph.onnx_model.dialect_ops import dialect_of
from mxfp8_graph.tools.dialects.graph_edit import Nodes, Scope, attribute, like, ours
from mxfp8_ops import contract, cpu
from mxfp8_ops.formats import BLOCK_SIZE, element_format

_ELEMENTS: Final = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}

_TIES_TO_EVEN: Final = 2
"""The rounding_mode of MXFP8; 0, which is the default, rounds ties away from zero, and 1 upward."""


def read(scope: Scope, node: onnx.NodeProto) -> Nodes | None:
    """Returns our nodes for one of Quark's, or None if it is another; a stored weight is packed."""
    if dialect_of(node) != "quark":
        return None
    edit = scope.edit
    dtype = attribute(node, "element_dtype", "int8")
    block = attribute(node, "block_size", BLOCK_SIZE)
    if dtype not in _ELEMENTS or block != BLOCK_SIZE:
        what, expected = f"{dtype} in blocks of {block}", f"fp8_e4m3 or fp8_e5m2 in blocks of {BLOCK_SIZE}"
        advice = "convert reads MXFP8 only; start from the model that is not quantized"
        raise edit.refuse(node, what, expected=expected, advice=advice)
    ties, scales = attribute(node, "rounding_mode", 0), attribute(node, "scale_dtype", "e8m0")
    if (ties, scales) != (_TIES_TO_EVEN, "e8m0"):
        what, expected = f"rounding_mode {ties}, scales of {scales}", f"{_TIES_TO_EVEN} (ties to even) and e8m0"
        raise edit.refuse(node, what, expected=expected, advice="quantize the model again with those")
    x, axis = node.input[0], attribute(node, "axis", 1)
    name = _ELEMENTS[dtype]
    code = element_format(name).onnx_dtype
    stored = scope.tensor(x)
    if stored is not None and stored.data_type in contract.VALUES:
        values = scope.values(stored)
        axis = axis % max(values.ndim, 1) - values.ndim if values.ndim > 1 else -1
        elements, scales = cpu.quantize(values, axis=axis, element_format=name, scale_rounding="floor")
        edit.counts["quark", "weights"] += 1
        owner = scope.owner(x)
        names = [
            owner.store(f"{x}_mxfp8", code, np.ascontiguousarray(elements)),
            owner.store(f"{x}_mxfp8_scales", contract.UINT8, np.ascontiguousarray(scales)),
        ]
        settings = {"axis": axis, "output_dtype": stored.data_type}
        return [like(node, ours(contract.DEQUANTIZE, names, node.output, node.name, **settings))]
    edit.counts["quark", "activations"] += 1
    names = [edit.fresh(f"{x}_mxfp8"), edit.fresh(f"{x}_mxfp8_scales")]
    settings = {"axis": axis, "output_dtype": code, "scale_rounding": "floor"}
    quantize = ours(contract.QUANTIZE, [x], names, edit.fresh(f"{x}_quantize"), **settings)
    known = edit.dtypes.get(x)
    y = node.output[0] if known in contract.VALUES else edit.fresh(f"{node.output[0]}_float")
    settings = {"axis": axis, "output_dtype": known if known in contract.VALUES else contract.FLOAT}
    made = [quantize, like(node, ours(contract.DEQUANTIZE, names, [y], node.name, **settings))]
    return made if y == node.output[0] else [*made, helper.make_node("CastLike", [y, x], node.output, name=y)]
