"""Merges the nodes behind a gemm into its node: an activation, the gate of a gated linear unit.

    Gelu(MXFP8Gemm(...))                                  -> MXFP8FusedGemm(..., epilogue "gelu" or "gelu_tanh")
    Relu(MXFP8Gemm(...))                                  -> "relu"
    y * Sigmoid(y), y = MXFP8Gemm(...)                    -> "silu"
    y / sqrt(2) -> Erf -> + 1 -> * y -> * 0.5, and so on  -> "gelu", in any spelling: see `elementwise.py`
    MXFP8FusedGemm(..., epilogue) * up                    -> MXFP8GatedGemm(..., up, ...)

The node applies activation and gate to float32 sums before they are stored. Likewise MXFP8WeightGemm becomes
MXFP8FusedWeightGemm and MXFP8GatedWeightGemm.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.elementwise import activation_of, gemm_epilogue
from mxfp8_graph.onnx_pass.fuse.nodes import fused_with, node_derived_from, row_of, type_of
from mxfp8_graph.onnx_pass.graph import attribute, is_op, only_used_by
from mxfp8_graph.onnx_pass.replacement import Replacement
from mxfp8_ops import contract

_PLAIN: Final = ("Relu", "Gelu")
"""Activations of one node, which an author expects to be fused."""


def fuse_activation(node: ir.Node) -> Replacement | str | None:
    """Returns the fused gemm for a gemm with an activation behind it."""
    op = fused_with(node, "activation")
    if op is None:
        return None
    users = list(node.outputs[0].consumers())
    activation = activation_of(node.outputs[0], attribute(node, "output_dtype", contract.FLOAT), gemm_epilogue)
    if activation is None:
        plain = next((user for user in users if any(is_op(user, name) for name in _PLAIN)), None)
        is_shared = len(users) > 1 or node.outputs[0].is_graph_output()
        return f"the input of its {plain.op_type} is needed elsewhere too" if plain and is_shared else None
    epilogue, nodes = activation
    fused = node_derived_from(node, op, node.inputs, nodes[-1].outputs, epilogue=epilogue)
    return Replacement(kind=f"gemm + {epilogue}", node=fused, gone=(node, *nodes))


def fuse_gate(node: ir.Node) -> Replacement | str | None:
    """Returns the gated gemm for a Mul of an activated gemm and a value of its shape."""
    if not is_op(node, "Mul"):
        return None
    reason = None
    for gate, factor in (node.inputs, reversed(node.inputs)):
        gemm = None if gate is None else gate.producer()
        op = fused_with(gemm, "gate")
        if gate is None or gemm is None or op is None or gemm.graph is not node.graph:
            continue
        # y * y has no factor besides the gemm's own result, which goes away.
        if gate is factor or not only_used_by(gate, (node,)):
            reason = "its activated gemm is needed elsewhere too"
            continue
        # ONNX Runtime may fail to load a float16 node with a float16 factor: see `weight_gemm_dtype`.
        if attribute(gemm, "output_dtype", contract.FLOAT) == contract.FLOAT16:
            reason = "its gemm is in float16"
            continue
        if not _same_shape(gate, factor):
            reason = "the shapes of its two factors differ, or one is unknown"
            continue
        # The gated node has the factor right before the bias, if there is one.
        before = op.at("bias") or 0
        operands = [*gemm.inputs[: before - 1], factor, *gemm.inputs[before - 1 :]]
        fused = node_derived_from(gemm, op, operands, node.outputs)
        kind = f"gemm + {attribute(gemm, 'epilogue', 'none')} + gate"
        return Replacement(kind=kind, node=fused, gone=(gemm, node))
    return reason


def _same_shape(gate: ir.Value, factor: ir.Value | None) -> bool:
    """Whether two values are known to have one shape, so that neither is repeated along an axis."""
    one, other = type_of(gate).shape, type_of(factor).shape
    if one is not None and other is not None and None not in one and None not in other:
        return one == other
    # Without sizes: two gemms of one activation have results of one shape if N is the same.
    return _sources(gate) == _sources(factor) is not None


def _sources(value: ir.Value | None) -> tuple[ir.Value | None, int] | None:
    """Returns (the activation of the gemm that makes `value`, N), or None if that is no gemm of one weight."""
    gemm = None if value is None else value.producer()
    op = row_of(gemm)
    if gemm is None or op is None or not op.is_gemm or op.indices_at is not None:
        return None
    shape = type_of(gemm.inputs[op.packed_at or 0]).shape
    return (gemm.inputs[0], shape[0]) if shape is not None and len(shape) == 2 and isinstance(shape[0], int) else None
