"""The product of an activated gemm and another value becomes part of the gemm: the gate of a gated linear unit.

MXFP8FusedGemm(..., epilogue) * up              -> MXFP8GatedGemm(..., up, ...)
MXFP8FusedWeightGemm(..., epilogue) * up        -> MXFP8GatedWeightGemm(..., up, ...)
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import onnx

from mxfp8_graph.onnx_pass.fuse.graph_view import GraphView, attribute, is_op
from mxfp8_graph.onnx_pass.fuse.replacement import Replacement, successor
from mxfp8_ops import contract

_GATED: Final = MappingProxyType(
    {contract.FUSED_GEMM.name: contract.GATED_GEMM, contract.FUSED_WEIGHT_GEMM.name: contract.GATED_WEIGHT_GEMM}
)


def fuse_gate(view: GraphView, node: onnx.NodeProto) -> Replacement | None:
    """Returns the gated gemm for a Mul of an activated gemm and a value of its shape."""
    if not is_op(node, "Mul"):
        return None
    for gate, factor in (node.input, reversed(node.input)):
        gemm = view.maker(gate)
        op = _GATED.get(gemm.op_type) if gemm is not None and gemm.domain == contract.DOMAIN else None
        if gemm is None or op is None or gate == factor or not view.is_between(gate, node):
            continue
        if attribute(gemm, "output_dtype", contract.FLOAT) == contract.FLOAT16 or not _same_shape(view, gate, factor):
            # A float16 factor and a float16 result: see `onnx_functions.weight_gemm_dtype`.
            continue
        before = op.at("bias") or 0
        operands = [*gemm.input[: before - 1], factor, *gemm.input[before - 1 :]]
        fused = successor(gemm, op, operands, list(node.output))
        kind = f"gemm + {attribute(gemm, 'epilogue', 'none')} + gate"
        return Replacement(kind=kind, node=fused, gone=(gemm, node))
    return None


def _same_shape(view: GraphView, gate: str, factor: str) -> bool:
    """Whether two values surely have one shape, so that neither is repeated along an axis."""
    one, other = (view.type_of(name).shape for name in (gate, factor))
    if one is not None and other is not None and None not in one and None not in other:
        return one == other
    return _sources(view, gate) == _sources(view, factor) is not None


def _sources(view: GraphView, name: str) -> tuple[str, int] | None:
    """Returns the activation that a gemm of one weight multiplies, and the size of its result's last axis."""
    gemm = view.maker(name)
    op = contract.OPS.get(gemm.op_type) if gemm is not None and gemm.domain == contract.DOMAIN else None
    if gemm is None or op is None or not op.is_gemm or op.quantizes or op.at("experts") is not None:
        return None
    shape = view.type_of(gemm.input[op.at("B") or 0]).shape
    return (gemm.input[0], shape[0]) if shape is not None and len(shape) == 2 and isinstance(shape[0], int) else None
