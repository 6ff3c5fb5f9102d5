"""scaled_dot_product_attention as the two matmuls it computes, for recipes that want either quantized.

    scores = matmul(query, key^T) * scale, masked
    values = matmul(dropout(softmax(scores)), value)

The node itself becomes the values product and keeps its name; the scores product is called NAME_scores.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch.fx import Node

from mxfp8_graph.policy.eligibility import k_last
from mxfp8_graph.torch_pass import internals, ops
from mxfp8_graph.torch_pass.build import Builder
from mxfp8_graph.torch_pass.program import Program

_ATEN: Final = torch.ops.aten


def scores_name(node: Node) -> str:
    """Returns the name of the scores product of an attention node."""
    return f"{node.name}_scores"


def obstacle(node: Node) -> str | None:
    """Returns the reason why an attention node cannot be split into its matmuls, or None."""
    if internals.op_name(node) != ops.ATTENTION:
        return f"{internals.op_name(node)} is one fused kernel; export without decomposing attention"
    return None


def expand(program: Program, node: Node) -> None:
    """Replaces an attention node by its two matmuls and the softmax between them."""
    build = Builder(program, node)
    dtype = node.meta["val"].dtype
    query, key, value = (build.cast(internals.argument(node, name), dtype) for name in ("query", "key", "value"))
    # The kernel shares each key head between several query heads; a matmul needs as many on both sides.
    if internals.argument(node, "enable_gqa", False):
        key, value = (_repeated(build, query, tensor) for tensor in (key, value))
    transposed = build.permute(key, k_last(range(key.meta["val"].dim())))
    scores = build.add(scores_name(node), _ATEN.matmul.default, query, transposed)
    # Reports and rules keep the name of the op that the source program calls.
    program.labels[scores] = program.labels[node] = ops.ATTENTION
    scale = internals.argument(node, "scale")
    factor = 1.0 / math.sqrt(int(query.meta["val"].shape[-1])) if scale is None else float(scale)
    masked = _masked(build, node, build.add(f"{node.name}_scaled", _ATEN.mul.Tensor, scores, factor))
    # Where a mask hides all keys from a row, the row is 0; a plain softmax and its gradients would be NaN.
    softmax = _ATEN.softmax.int if internals.argument(node, "attn_mask") is None else _ATEN._safe_softmax.default
    weights = build.add(f"{node.name}_softmax", softmax, masked, -1)
    # True: the node's own probability is 0 outside of training, see `training_mode`.
    if dropped := internals.argument(node, "dropout_p", 0.0):
        weights = build.add(f"{node.name}_dropout", _ATEN.dropout.default, weights, dropped, True)
    # In place, so that users, metadata and the program's signature keep referring to the node.
    node.target = _ATEN.matmul.default
    node.args, node.kwargs = (weights, value), {}
    _relax_views(node)


def _relax_views(node: Node) -> None:
    """Turns the views of an attention result into reshapes, which copy where they must.

    Kernels of attention lay out their result by position and head; a matmul lays it out by head, so a view may not fit.
    """
    for user in node.users:
        if user.target is _ATEN.view.default:
            user.target = _ATEN.reshape.default
        elif internals.op_name(user) in {"transpose", "permute"}:
            _relax_views(user)


def _repeated(build: Builder, query: Node, tensor: Node) -> Node:
    """Returns keys or values with as many heads as the query."""
    times = int(query.meta["val"].shape[-3]) // int(tensor.meta["val"].shape[-3])
    if times == 1:
        return tensor
    return build.add(f"{tensor.name}_heads", _ATEN.repeat_interleave.self_int, tensor, times, -3)


def _masked(build: Builder, node: Node, scores: Node) -> Node:
    """Returns the scores with the node's mask applied, if it has one."""
    mask = internals.argument(node, "attn_mask")
    value = scores.meta["val"]
    if internals.argument(node, "is_causal", False):
        sizes = [build.size(scores, -2), build.size(scores, -1)]
        ones = build.add(f"{node.name}_ones", _ATEN.ones.default, sizes, dtype=torch.bool, device=value.device)
        mask = build.add(f"{node.name}_causal", _ATEN.tril.default, ones)
    if mask is None:
        return scores
    # True in a Boolean mask keeps a key, so the other keys are filled; a float mask is added.
    if mask.meta["val"].dtype == torch.bool:
        hidden = build.add(f"{node.name}_hidden", _ATEN.logical_not.default, mask)
        return build.add(f"{node.name}_masked", _ATEN.masked_fill.Scalar, scores, hidden, -math.inf)
    return build.add(f"{node.name}_masked", _ATEN.add.Tensor, scores, mask)
