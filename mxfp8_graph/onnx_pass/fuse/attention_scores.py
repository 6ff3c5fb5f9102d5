"""Attention as the graph computes it: scores, masks, softmax, values; or ONNX's op that is all of them.

MatMul(guard(Softmax(mask(scale(MatMul(q, k^T))))), v)
    scale    Mul or Div by numbers, any of them
    mask     Add(scores, mask), Where(condition, scores, lowest), Where(condition, lowest, scores), any of them
    guard    Where(IsNaN(p), 0, p), or none
Attention(q, k, v, mask, past_key, past_value)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import ml_dtypes
import numpy as np
import onnx

from mxfp8_graph.onnx_model.walk import MICROSOFT
from mxfp8_graph.onnx_pass.fuse.attention_heads import (
    Heads,
    Source,
    follow,
    follow_turned,
    shape_of,
    unscaled,
)
from mxfp8_graph.onnx_pass.fuse.graph_view import GraphView, attribute, is_op
from mxfp8_ops import contract

_MOST_MASKS: Final = 3
"""More of them, one on top of the other, are not read."""


@dataclass(frozen=True)
class Mask:
    """What is added to scores."""

    name: str
    """The addend; or which scores count, if there is a `fill`."""
    fill: str = ""
    """What stands in place of a score that does not count."""
    counts: bool = True
    """Scores count where `name` is true, not where it is false."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One attention of a graph."""

    q: Source
    k: Source
    v: Source
    result: str
    """[B, H, S, D]; or [B, S, H * D], if `merged`."""
    inside: tuple[onnx.NodeProto, ...]
    """Nodes that nothing else may need, in order; the last makes the result."""
    masks: tuple[Mask, ...] = ()
    scale: float
    """0 for 1 / sqrt(D)."""
    nan_guard: bool
    is_causal: bool = False
    merged: bool = False


@dataclass(frozen=True)
class _Scores:
    """What a softmax takes: masks, inner first, over factor * product."""

    product: onnx.NodeProto
    factor: float
    turned: bool
    """The product takes k^T, not k."""
    masks: tuple[Mask, ...] = ()


def read(view: GraphView, node: onnx.NodeProto, *, cached: bool) -> Attention | None:
    """Returns the attention that `node`, a Softmax or an Attention, is the middle of; None if there is none.

    Args:
        view: the graph.
        node: any node.
        cached: take what the graph puts in front of K and V for their past.
    """
    if is_op(node, "Softmax"):
        return _decomposed(view, node, cached=cached)
    if is_op(node, "Attention"):
        return _standard(view, node, cached=cached)
    return None


def _decomposed(view: GraphView, softmax: onnx.NodeProto, *, cached: bool) -> Attention | None:
    weights, guarded = _weights(view, softmax.output[0])
    last = next((r for r in view.readers(weights) if is_op(r, "MatMul") and r.input[0] == weights), None)
    scores = _scores(view, softmax.input[0]) if last is not None else None
    if last is None or scores is None or attribute(softmax, "axis", -1) not in (-1, 3):
        return None
    q = follow(view, scores.product.input[0])
    follow_k = follow_turned if scores.turned else follow
    k = follow_k(view, scores.product.input[1], cached=cached)
    v = follow(view, last.input[1], scaled=False, cached=cached)
    if q is None or k is None or v is None:
        return None
    scale = scores.factor * q.factor * k.factor
    if scale == 0 or not math.isfinite(scale):
        return None
    inside = (scores.product, softmax, last)
    return Attention(
        q=q, k=k, v=v, masks=scores.masks, scale=scale, nan_guard=guarded, result=last.output[0], inside=inside
    )


def _weights(view: GraphView, name: str) -> tuple[str, bool]:
    """Returns what V is multiplied by, and whether NaN is replaced by 0 between the softmax, `name`, and that."""
    guarded = False
    while True:
        guard = next((reader for reader in view.readers(name) if _is_guard(view, reader, name)), None)
        cast = next((reader for reader in view.readers(name) if is_op(reader, "Cast")), None)
        if (step := guard or cast) is None:
            return name, guarded
        name, guarded = step.output[0], guarded or guard is not None


def _is_guard(view: GraphView, node: onnx.NodeProto, name: str) -> bool:
    """Whether `node` is Where(IsNaN(name), 0, name)."""
    if not is_op(node, "Where") or node.input[2] != name or view.scalar(node.input[1]) != 0:
        return False
    condition = view.maker(node.input[0])
    return condition is not None and is_op(condition, "IsNaN") and condition.input[0] == name


def _scores(view: GraphView, name: str, masks: int = 0) -> _Scores | None:
    """Returns how the graph makes what a softmax takes; None if not as attention does."""
    unmasked, factor = unscaled(view, name)
    product = view.maker(unmasked)
    if is_op(product, "MatMul"):
        return _Scores(product, factor, turned=True)
    if product is not None and (product.domain, product.op_type) == (MICROSOFT, "FusedMatMul"):
        others = (attribute(product, name, 0) for name in ("transA", "transBatchA", "transBatchB"))
        alpha, turned = attribute(product, "alpha", 1.0), not attribute(product, "transB", 0)
        return None if any(others) else _Scores(product, factor * alpha, turned)
    node = view.maker(name)
    if node is None or masks == _MOST_MASKS:
        return None
    if is_op(node, "Cast") and attribute(node, "to", 0) == contract.FLOAT:
        return _scores(view, node.input[0], masks)
    ways: list[tuple[str, Mask]] = []
    if is_op(node, "Add"):
        ways = [(scores, Mask(mask)) for scores, mask in (node.input, reversed(node.input))]
    elif is_op(node, "Where"):
        condition, true, false = node.input
        ways = [(true, Mask(condition, false))] if _is_lowest(view, false) else []
        ways += [(false, Mask(condition, true, counts=False))] if _is_lowest(view, true) else []
    for scores, mask in ways:
        if (found := _scores(view, scores, masks + 1)) is not None:
            return replace(found, masks=(*found.masks, mask))
    return None


def _is_lowest(view: GraphView, name: str) -> bool:
    """Whether a value is one number next to which no score counts: -Inf or the lowest of its dtype."""
    value = view.constant(name)
    if value is None or value.size != 1 or not np.issubdtype(value.dtype, np.floating):
        return False
    lowest = ml_dtypes.finfo(value.dtype).min  # type: ignore[no-untyped-call]
    return bool(value.reshape(()) <= lowest)


def _standard(view: GraphView, node: onnx.NodeProto, *, cached: bool) -> Attention | None:
    """Reads ONNX's op. Its result is 0 where no score counts, as that of ONNX Runtime's kernel is."""
    q_name, k_name, v_name, mask, past_key, past_value, lengths = [*node.input, *[""] * 7][:7]
    result, present_key, present_value, products = [*node.output, *[""] * 4][:4]
    precision = attribute(node, "softmax_precision", contract.FLOAT)
    if lengths or products or attribute(node, "softcap", 0.0) or precision != contract.FLOAT:
        return None
    if mask and (view.type_of(mask).shape or (1,))[-1] == 1:  # here a mask of fewer keys hides all others
        return None
    is_causal = bool(attribute(node, "is_causal", 0))
    merged = shape_of(view, q_name, 3) is not None
    if merged:
        q = _merged(view, q_name, attribute(node, "q_num_heads", 0))
        k, v = (_merged(view, name, attribute(node, "kv_num_heads", 0)) for name in (k_name, v_name))
    else:
        # With a past, causal means other scores than without.
        cached = cached and not (is_causal or past_key or present_key)
        q, k = follow(view, q_name), follow(view, k_name, cached=cached)
        v = follow(view, v_name, scaled=False, cached=cached)
    if q is None or k is None or v is None:
        return None
    if past_key or present_key:
        k, v = replace(k, past=past_key, present=present_key), replace(v, past=past_value, present=present_value)
    factor, scale = q.factor * k.factor, attribute(node, "scale", 0.0)
    if factor != 1.0:
        scale = factor * (scale or q.heads.size**-0.5)
    masks = (Mask(mask),) if mask else ()
    return Attention(
        q=q, k=k, v=v, masks=masks, scale=scale, nan_guard=True, is_causal=is_causal, result=result, inside=(node,),
        merged=merged,
    )  # fmt: skip


def _merged(view: GraphView, name: str, count: int) -> Source | None:
    """Returns `name` [B, S, H * D] as H = `count` heads."""
    shape = shape_of(view, name, 3)
    batch, length, width = shape or (None, None, None)
    if not isinstance(width, int) or count < 1 or width % count:
        return None
    return Source(name=name, heads=Heads(batch, count, length, width // count), layout="merged")
