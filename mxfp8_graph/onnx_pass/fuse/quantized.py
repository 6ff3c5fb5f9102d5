"""A gemm, the activation behind it and the quantization of what that gives become one node.

    MXFP8Quantize(MXFP8FusedGemm(..., epilogue))    -> elements, scales, "" = MXFP8GemmQuantize(..., epilogue)

So what a feed-forward network has between its two gemms is quantized before it leaves the cache.
"""

from __future__ import annotations

import onnx

from mxfp8_graph.onnx_pass.fuse.graph_view import GraphView, attribute
from mxfp8_graph.onnx_pass.fuse.norm_forms import is_last
from mxfp8_graph.onnx_pass.fuse.replacement import Replacement, successor
from mxfp8_ops import contract


def fuse_quantize(view: GraphView, node: onnx.NodeProto) -> Replacement | None:
    """Returns the gemm that quantizes, for a quantization of what a fused gemm gives and nothing else reads."""
    if node.domain != contract.DOMAIN or node.op_type != contract.QUANTIZE.name:
        return None
    name: str = node.input[0]
    gemm = view.maker(name)
    if gemm is None or gemm.domain != contract.DOMAIN or gemm.op_type != contract.FUSED_GEMM.name:
        return None
    if attribute(gemm, "output_dtype", contract.FLOAT) != contract.FLOAT or not view.is_between(name, node):
        return None
    if not is_last(view, name, attribute(node, "axis", -1)):
        return None
    defaults = {name: contract.QUANTIZE.attributes[name] for name in ("output_dtype", "scale_rounding")}
    settings = {name: attribute(node, name, default) for name, default in defaults.items()}
    fused = successor(gemm, contract.GEMM_QUANTIZE, list(gemm.input), [*node.output, ""], **settings)
    kind = f"gemm + {attribute(gemm, 'epilogue', 'none')} + quantize"
    return Replacement(kind=kind, node=fused, gone=(gemm, node))
