"""fuse(): calls every fusion for every node of every graph."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.attention import fuse_attention
from mxfp8_graph.onnx_pass.fuse.conv import add_stand_ins, fuse_conv_activation, fuse_residual
from mxfp8_graph.onnx_pass.fuse.gemm import fuse_activation, fuse_gate
from mxfp8_graph.onnx_pass.graph import fresh_names, label
from mxfp8_graph.onnx_pass.ops import READERS
from mxfp8_graph.onnx_pass.replacement import apply
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import FusionReport, UnfusedReport
from mxfp8_ops import contract


def fuse(model: ir.Model, recipe: Recipe) -> tuple[tuple[FusionReport, ...], tuple[UnfusedReport, ...]]:
    """Fuses nodes beside matmuls that `recipe` replaced, in place; returns reports of them and of what stays."""
    # Gemms read activations with no more bits than bfloat16, unless the recipe leaves activations unchanged. So
    # attention may round its operands to bfloat16 as well.
    dtype = contract.FLOAT if recipe.activations == "unchanged" else contract.BFLOAT16
    attention = partial(fuse_attention, fresh=fresh_names(model), activation_dtype=dtype)
    # The activation comes first: the gate extends the node that it makes. A residual is added behind the activation of
    # a convolution, or before it.
    convolution = (fuse_conv_activation, fuse_residual, fuse_conv_activation)
    finders = (fuse_activation, fuse_gate, *convolution, attention)
    missed: dict[ir.Node, str] = {}
    fused = apply(model, finders, lambda node: node.op_type in READERS, missed)
    add_stand_ins(model)
    # A node that a later fusion replaced has no graph.
    stays = ((node, reason) for node, reason in missed.items() if node.graph is not None)
    return fused, tuple(UnfusedReport(node=label(node), reason=reason) for node, reason in stays)
