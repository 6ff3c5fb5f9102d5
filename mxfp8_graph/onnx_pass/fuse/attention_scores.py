"""Reads an attention of the graph: scores, masks, softmax, values; or ONNX's op for all of them.

rows(MatMul(guard(Softmax(mask(scale(MatMul(q, k^T))))), v))
    scale    Mul or Div by numbers, any of them
    mask     Add(scores, mask), Where(condition, scores, lowest), Where(condition, lowest, scores), any of them
    guard    Where(IsNaN(p), 0, p), or none
    rows     Where(Equal(ReduceMax(mask), -Inf), 0, y), as `to_onnx` writes it, or none
Attention(q, k, v, mask, past_key, past_value)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.attention_heads import (
    Heads,
    Source,
    follow,
    follow_turned,
    shape_of_rank,
    unscaled,
)
from mxfp8_graph.onnx_pass.fuse.nodes import type_of
from mxfp8_graph.onnx_pass.graph import MICROSOFT, attribute, constant, is_op, made_by, scalar
from mxfp8_ops import contract

_MOST_MASKS: Final = 3
"""More masks on one another are not read. An Add can be read in two ways, scores + mask and mask + scores, so the tries
double with each mask."""

_Value = ir.Value | None


@dataclass(frozen=True)
class Mask:
    """A mask of the scores."""

    value: ir.Value
    """The addend of the scores; with a `fill`, the condition of a Where."""
    fill: _Value = None
    """The value in place of a score that does not count."""
    counts: bool = True
    """Whether scores count where the condition is true; else they count where it is false."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One attention of a graph."""

    q: Source
    k: Source
    v: Source
    result: ir.Value
    """[B, H, S, D]; or [B, S, H * D], if `merged`."""
    inside: tuple[ir.Node, ...]
    """Nodes that nothing else may need, in order; the last makes the result."""
    masks: tuple[Mask, ...] = ()
    scale: float
    """0 for 1 / sqrt(D)."""
    nan_guard: bool
    is_causal: bool = False
    merged: bool = False

    @property
    def operands(self) -> set[ir.Value]:
        """The values that MXFP8Attention is computed from."""
        masks = (each for mask in self.masks for each in (mask.value, mask.fill))
        sources = (each for source in (self.q, self.k, self.v) for each in (source.value, source.past))
        return {each for each in (*masks, *sources) if each is not None}


@dataclass(frozen=True)
class _Scores:
    """The input of a softmax: masks, the inner ones first, on factor * product."""

    product: ir.Node
    factor: float
    turned: bool
    """Whether the second operand of the product is k^T and not k."""
    masks: tuple[Mask, ...] = ()


_UNKNOWN_HEADS: Final = "the heads of Q, K or V come from nodes that are no known way to split them"


def read(node: ir.Node, *, cached: bool) -> Attention | str | None:
    """Returns the attention around `node`, the reason why it has no known form, or None if there is none.

    Args:
        node: any node; only a Softmax or an Attention has an attention around it.
        cached: whether a Concat in front of K and V joins their past to them.
    """
    if is_op(node, "Softmax"):
        return _decomposed(node, cached=cached)
    if is_op(node, "Attention"):
        return _standard(node, cached=cached)
    return None


def _decomposed(softmax: ir.Node, *, cached: bool) -> Attention | str | None:
    weights, guarded = _weights(softmax.outputs[0])
    users = [user for user in weights.consumers() if user.graph is softmax.graph]
    last = next((user for user in users if is_op(user, "MatMul") and user.inputs[0] is weights), None)
    if last is None:
        return None
    scores = _scores(softmax.inputs[0])
    if scores is None:
        return "its scores are not Q times K, scaled by a constant and masked in a known way"
    # Scores have four axes, and 3 is the last.
    if attribute(softmax, "axis", -1) not in (-1, 3):
        return "its softmax is not over the keys"
    q = follow(scores.product.inputs[0])
    follow_k = follow_turned if scores.turned else follow
    k = follow_k(scores.product.inputs[1], cached=cached)
    v = follow(last.inputs[1], scaled=False, cached=cached)
    if q is None or k is None or v is None:
        return _UNKNOWN_HEADS
    scale = scores.factor * q.factor * k.factor
    # The node takes a scale of 0 to mean 1 / sqrt(D).
    if scale == 0 or not math.isfinite(scale):
        return f"its scale is {scale}"
    rows = _row_guard(last.outputs[0], scores.masks)
    inside = (scores.product, softmax, last, *([rows] if rows else []))
    return Attention(
        q=q, k=k, v=v, masks=scores.masks, scale=scale, nan_guard=guarded or rows is not None,
        result=inside[-1].outputs[0], inside=inside,
    )  # fmt: skip


def _weights(value: ir.Value) -> tuple[ir.Value, bool]:
    """Returns (the factor of V, whether a node before it replaces NaN by 0), from the result `value` of the softmax."""
    guarded = False
    while True:
        users = [user for user in value.consumers() if user.graph is value.graph]
        guard = next((user for user in users if _is_guard(user, value)), None)
        cast = next((user for user in users if is_op(user, "Cast")), None)
        if (step := guard or cast) is None:
            return value, guarded
        value, guarded = step.outputs[0], guarded or guard is not None


def _is_guard(node: ir.Node, value: ir.Value) -> bool:
    """Whether `node` is Where(IsNaN(value), 0, value)."""
    if not is_op(node, "Where") or node.inputs[2] is not value or scalar(node.inputs[1]) != 0:
        return False
    condition = made_by(node.inputs[0], "IsNaN")
    return condition is not None and condition.inputs[0] is value


def _row_guard(result: ir.Value, masks: tuple[Mask, ...]) -> ir.Node | None:
    """Returns the node that sets rows of `result` to 0 where a mask hides all keys; None if there is none."""
    hidden = {mask.value for mask in masks if mask.fill is None}
    for node in result.consumers():
        if not is_op(node, "Where") or node.inputs[2] is not result or scalar(node.inputs[1]) != 0:
            continue
        equal = made_by(node.inputs[0], "Equal")
        largest = made_by(equal.inputs[0], "ReduceMax") if equal and scalar(equal.inputs[1]) == -math.inf else None
        # Over the last axis, which stays with size 1.
        axis = scalar(largest.inputs[1]) if largest and len(largest.inputs) > 1 else None
        if largest and axis == -1 and largest.inputs[0] in hidden and attribute(largest, "keepdims", 1) == 1:
            return node
    return None


def _scores(value: _Value, masks: int = 0) -> _Scores | None:
    """Returns the masks, factor and product behind the input of a softmax; None if it has another origin."""
    unmasked, factor = unscaled(value)
    product = None if unmasked is None else unmasked.producer()
    if product is not None and is_op(product, "MatMul"):
        return _Scores(product, factor, turned=True)
    if product is not None and (product.domain, product.op_type) == (MICROSOFT, "FusedMatMul"):
        others = (attribute(product, name, 0) for name in ("transA", "transBatchA", "transBatchB"))
        alpha, turned = attribute(product, "alpha", 1.0), not attribute(product, "transB", 0)
        return None if any(others) else _Scores(product, factor * alpha, turned)
    node = None if value is None else value.producer()
    if node is None or masks == _MOST_MASKS:
        return None
    # Models in 16 bits cast scores to float32 for the softmax, which the kernel computes in float32 anyway.
    if is_op(node, "Cast") and attribute(node, "to", 0) == contract.FLOAT:
        return _scores(node.inputs[0], masks)
    for scores, mask in _ways(node):
        if (inner := _scores(scores, masks + 1)) is not None:
            return replace(inner, masks=(*inner.masks, mask))
    return None


def _ways(node: ir.Node) -> list[tuple[ir.Value, Mask]]:
    """Returns each reading of a node as (scores, a mask on them)."""
    inputs = [each for each in node.inputs if each is not None]
    if is_op(node, "Add"):
        return [(scores, Mask(mask)) for scores, mask in (inputs, reversed(inputs))]
    if not is_op(node, "Where"):
        return []
    condition, true, false = inputs
    ways = [(true, Mask(condition, false))] if _is_lowest(false) else []
    return ways + ([(false, Mask(condition, true, counts=False))] if _is_lowest(true) else [])


def _is_lowest(value: ir.Value) -> bool:
    """Whether a value is one number that hides a score: -Inf or the lowest number of its dtype."""
    array = constant(value)
    if array is None or array.size != 1 or not np.issubdtype(array.dtype, np.floating):
        return False
    lowest = ml_dtypes.finfo(array.dtype).min  # type: ignore[no-untyped-call]
    return bool(array.reshape(()) <= lowest)


def _standard(node: ir.Node, *, cached: bool) -> Attention | str | None:
    """Returns the attention of ONNX's op. Its result is 0 where no score counts, as in ONNX Runtime's kernel."""
    q_value, k_value, v_value, mask, past_key, past_value, lengths = [*node.inputs, *[None] * 7][:7]
    outputs = (output if output.name else None for output in node.outputs[1:])
    present_key, present_value, products = [*outputs, *[None] * 3][:3]
    # MXFP8Attention has no such input and output.
    if lengths or products:
        return "it takes lengths of keys, or returns its scores"
    if not _means_the_same(node):
        return "it has a window, a soft cap or another setting that MXFP8Attention lacks"
    if mask and (type_of(mask).shape or (1,))[-1] == 1:  # here a mask of fewer keys hides all others
        return "its mask is of one key, or of an unknown number"
    is_causal = attribute(node, "is_causal", 0) == 1
    merged = shape_of_rank(q_value, 3) is not None
    if merged:
        q = _merged(q_value, attribute(node, "q_num_heads", 0))
        k, v = (_merged(value, attribute(node, "kv_num_heads", 0)) for value in (k_value, v_value))
    else:
        # With a past, causal means other scores than without.
        cached = cached and not (is_causal or past_key or present_key)
        q, k = follow(q_value), follow(k_value, cached=cached)
        v = follow(v_value, scaled=False, cached=cached)
    if q is None or k is None or v is None:
        return _UNKNOWN_HEADS
    if past_key or present_key:
        k, v = replace(k, past=past_key, present=present_key), replace(v, past=past_value, present=present_value)
    factor, scale = q.factor * k.factor, attribute(node, "scale", 0.0)
    if factor != 1.0:
        # A scale of 0 means the default, which the factor has to multiply.
        scale = factor * (scale or q.heads.size**-0.5)
    masks = (Mask(mask),) if mask else ()
    return Attention(
        q=q, k=k, v=v, masks=masks, scale=scale, nan_guard=True, is_causal=is_causal, result=node.outputs[0],
        inside=(node,), merged=merged,
    )  # fmt: skip


def _means_the_same(node: ir.Node) -> bool:
    """Whether MXFP8Attention has a setting for each attribute of an Attention."""
    # For another integer than 0 and 1, ONNX Runtime reads the lowest 32 bits of is_causal.
    meant: dict[str, tuple[Any, ...]] = {
        "is_causal": (0, 1),
        "softcap": (0.0,),
        "softmax_precision": (contract.FLOAT,),
        "left_window_size": (-1,),
        "right_window_size": (-1,),
    }
    scale = attribute(node, "scale", 1.0)
    settings = ((entry.value, meant.get(name)) for name, entry in node.attributes.items())
    return 0 < scale < math.inf and all(values is None or value in values for value, values in settings)


def _merged(value: _Value, count: int) -> Source | None:
    """Returns a value [B, S, H * D] as a source of H = `count` heads, or None if the width does not divide."""
    shape = shape_of_rank(value, 3)
    batch, length, width = shape or (None, None, None)
    if value is None or not isinstance(width, int) or count < 1 or width % count:
        return None
    return Source(value=value, heads=Heads(batch, count, length, width // count), layout="merged")
