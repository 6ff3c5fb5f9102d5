"""A gemm and the activation behind it become one node, which applies it to float32 sums before they are stored.

    Gelu(MXFP8Gemm(...))                                  -> MXFP8FusedGemm(..., epilogue "gelu" or "gelu_tanh")
    Relu(MXFP8Gemm(...))                                  -> "relu"
    y * Sigmoid(y), y = MXFP8Gemm(...)                    -> "silu"
    y / sqrt(2) -> Erf -> + 1 -> * y -> * 0.5, and so on  -> "gelu": however it is written, see `elementwise.py`

Likewise MXFP8WeightGemm -> MXFP8FusedWeightGemm.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import onnx

from mxfp8_graph.onnx_pass.fuse.elementwise import activation_of
from mxfp8_graph.onnx_pass.fuse.graph_view import GraphView, attribute
from mxfp8_graph.onnx_pass.fuse.replacement import Replacement, successor
from mxfp8_ops import contract

_FUSED: Final = MappingProxyType(
    {contract.GEMM.name: contract.FUSED_GEMM, contract.WEIGHT_GEMM.name: contract.FUSED_WEIGHT_GEMM}
)


def fuse_activation(view: GraphView, node: onnx.NodeProto) -> Replacement | None:
    """Returns the fused gemm for a gemm with an activation behind it."""
    op = _FUSED.get(node.op_type) if node.domain == contract.DOMAIN else None
    if op is None:
        return None
    dtype = attribute(node, "output_dtype", contract.FLOAT)
    found = activation_of(view, node.output[0], dtype)
    if found is None:
        return None
    epilogue, nodes = found
    fused = successor(node, op, list(node.input), [nodes[-1].output[0]], epilogue=epilogue)
    return Replacement(kind=f"gemm + {epilogue}", node=fused, gone=(node, *nodes))
