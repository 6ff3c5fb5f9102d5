"""Quark's dialect: com.amd.quark.MXQuantizeDequantize(x), and its older name com.vai.quantize.MXFixNeuron.

It quantizes and dequantizes at once, weights too, which are stored as floats: so nothing is packed before this reads
it, and nothing is written. Scales are rounded down (OCP), and elements to nearest even, as ours with scale_rounding
"floor". A block with NaN or Inf differs: Quark passes them through, ours is NaN throughout.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialect_ops import dialect_of
from mxfp8_graph.onnx_pass.fuse.replacement import mxfp8_node
from mxfp8_graph.onnx_pass.graph import attribute, dtype_of
from mxfp8_graph.tools.dialects.edit import Edit, Nodes, heirs, operands, tensor_of
from mxfp8_ops import contract, cpu
from mxfp8_ops.formats import BLOCK_SIZE, element_format

_ELEMENTS: Final = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}

_TIES_TO_EVEN: Final = 2
"""The rounding_mode of MXFP8; 0, which is the default, rounds ties away from zero, and 1 upward."""


def read(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns our nodes for one of Quark's, or None if it is another; a stored weight is packed."""
    if dialect_of(node) != "quark":
        return None
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
    x, axis = operands(node)[0], attribute(node, "axis", 1)
    name = _ELEMENTS[dtype]
    code = element_format(name).onnx_dtype
    stored = tensor_of(x)
    if stored is not None and stored.dtype in contract.VALUES:
        values = stored.numpy()
        axis = axis % max(values.ndim, 1) - values.ndim if values.ndim > 1 else -1
        elements, scales = cpu.quantize(values, axis=axis, element_format=name, scale_rounding="floor")
        edit.counts["quark", "weights"] += 1
        packed = [
            edit.store(x.graph, f"{x.name}_mxfp8", code, np.ascontiguousarray(elements)),
            edit.store(x.graph, f"{x.name}_mxfp8_scales", contract.UINT8, np.ascontiguousarray(scales)),
        ]
        return [mxfp8_node(node, contract.DEQUANTIZE, packed, heirs(node), axis=axis, output_dtype=int(stored.dtype))]
    edit.counts["quark", "activations"] += 1
    packed = [ir.Value(name=edit.fresh(f"{x.name}_mxfp8")), ir.Value(name=edit.fresh(f"{x.name}_mxfp8_scales"))]
    settings = {**contract.QUANTIZE.attributes, "axis": axis, "output_dtype": code, "scale_rounding": "floor"}
    quantize = ir.node(
        contract.QUANTIZE.name,
        [x],
        dict(sorted(settings.items())),
        domain=contract.DOMAIN,
        outputs=packed,
        name=edit.fresh(f"{x.name}_quantize"),
    )
    known, outputs = dtype_of(x), heirs(node)
    if known in contract.VALUES:
        return [quantize, mxfp8_node(node, contract.DEQUANTIZE, packed, outputs, axis=axis, output_dtype=known)]
    y = ir.Value(name=edit.fresh(f"{outputs[0].name}_float"))
    whole = mxfp8_node(node, contract.DEQUANTIZE, packed, [y], axis=axis, output_dtype=contract.FLOAT)
    return [quantize, whole, ir.node("CastLike", [y, x], outputs=outputs, name=y.name)]
