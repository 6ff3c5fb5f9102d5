"""The portable body of MXFP8Attention, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mxfp8_ops.node import BOOL, FLOAT

if TYPE_CHECKING:
    from mxfp8_ops.function_body import Body


def attention_body(g: Body) -> None:
    """Q, K, V, attn_mask, past_key, past_value -> Y, present_key, present_value."""
    keys, values = (_with_past(g, *names) for names in (("K", "past_key"), ("V", "past_value")))
    q = _split_heads(g, "Q", "q_num_heads")
    sizes = g("Shape", q, end=3, out="of_q")  # [B, Hq, S]
    total = g("Shape", keys, start=2, end=3, out="total")  # [P + T]
    # Query heads that share keys are one matrix [G * S, D], so that no key is repeated.
    heads = {*g.case.attributes["q_num_heads"], *g.case.attributes["kv_num_heads"]}
    shared = None
    if len(heads) > 1:  # no -1: it is ambiguous where another size is 0
        stacked = g("Mul", g("Div", g.vector("q_num_heads"), g.vector("kv_num_heads")), g("Shape", q, start=2, end=3))
        shared = g("Concat", g("Shape", keys, end=2), stacked, axis=0)
    rows = g("Mul", _rounded(g, q), _scale(g, q))
    scores = _product(g, _stacked(g, rows, shared, g("Shape", keys, start=3)), _rounded(g, keys))
    if shared:
        scores = g("Reshape", scores, g("Concat", sizes, total, axis=0), allowzero=1)
    if g.known("attn_mask").present is not False:
        scores = g("Add", scores, _additive_mask(g))
    scores = g.choose("is_causal", lambda g, causal: _seen(g, scores, sizes, total) if causal else scores)
    # ONNX Runtime's Softmax gives NaN for a row with a NaN or Inf, or with only -Inf.
    weights = g("Softmax", scores, axis=-1)
    weights = g.choose("nan_guard", lambda g, guard: _without_nan(g, weights) if guard else weights)
    y = g("MatMul", _stacked(g, _rounded(g, weights), shared, total), _rounded(g, values))
    if shared:
        y = g("Reshape", y, g("Concat", sizes, g("Shape", values, start=3), axis=0), allowzero=1)
    y = g("Transpose", y, perm=[0, 2, 1, 3])
    y = _merged_heads(g, y, values)
    for value, port in ((y, "Y"), (keys, "present_key"), (values, "present_value")):
        g.result(g.like(value, "Q"), port)


def _rounded(g: Body, x: str) -> str:
    """Returns float32 values rounded to activation_dtype."""
    rounded = g.cast(x, "activation_dtype")
    return x if rounded == x else g("Cast", rounded, to=FLOAT)


def _split_heads(g: Body, port: str, heads: str) -> str:
    """Returns an input [B, L, heads * D] as float32 [B, heads, L, D]."""
    count, last = g.vector(heads), g.known(port).last
    if isinstance(number := g.attribute(heads), int) and last is not None:
        shape = g.constant([0, 0, number, last // number])  # 0 keeps the size of the input
        return g("Transpose", g("Reshape", g.floats(port), shape), perm=[0, 2, 1, 3])
    d = g("Div", g("Shape", port, start=2), count)
    shape = g("Concat", g("Shape", port, end=2), count, d, axis=0)
    return g("Transpose", g("Reshape", g.floats(port), shape, allowzero=1), perm=[0, 2, 1, 3])


def _merged_heads(g: Body, y: str, values: str) -> str:
    """Returns y [B, S, Hq, Dv] as [B, S, Hq * Dv]."""
    heads, shared, last = g.attribute("q_num_heads"), g.attribute("kv_num_heads"), g.known("V").last
    if isinstance(heads, int) and isinstance(shared, int) and last is not None:
        return g("Reshape", y, g.constant([0, 0, last // shared * heads]))
    merged = g("Mul", g.vector("q_num_heads"), g("Shape", values, start=3))
    return g("Reshape", y, g("Concat", g("Shape", "Q", end=2), merged, axis=0), allowzero=1)


def _with_past(g: Body, new: str, past: str) -> str:
    """Returns `past` [B, Hkv, P, D] followed by `new` [B, T, Hkv * D], as float32 [B, Hkv, P + T, D]."""
    values, there = _split_heads(g, new, "kv_num_heads"), g.known(past)
    if there.present is False:
        return values
    before = g.floats(past)
    if there.rank != 4:  # it may be an empty vector
        shape = g("Concat", g("Shape", values, end=2), _past_length(g), g("Shape", values, start=3), axis=0)
        before = g("Reshape", before, shape, allowzero=1)
    return g("Concat", before, values, axis=2)


def _past_length(g: Body) -> str:
    """Returns [P], the third dimension of past_key; [0] if past_key has fewer dimensions, which stands for no past."""
    if g.known("past_key").present is False:
        return g.constant([0])
    return g("ReduceSum", g("Shape", "past_key", start=2, end=3), g.constant([0]), keepdims=1)


def _stacked(g: Body, x: str, shared: str | None, last: str) -> str:
    """Returns x [B, Hq, S, last] as [B, Hkv, G * S, last] where heads share keys."""
    if not shared:
        return x
    return g("Reshape", x, g("Concat", shared, last, axis=0), allowzero=1)


def _product(g: Body, q: str, keys: str) -> str:
    """Returns q @ transpose(keys)."""
    if g.known("past_key").present is False:
        return g("MatMul", q, g("Transpose", keys, perm=[0, 1, 3, 2]))
    # ONNX Runtime before 1.24 moves a Transpose up to a past without values, and divides by zero there.
    return g("Einsum", q, keys, equation="bhsd,bhtd->bhst")


def _scale(g: Body, q: str) -> str:
    """Returns the attribute `scale`, or 1 / sqrt(D) where it is 0."""
    scales = g.case.attributes["scale"]
    if 0 not in scales:
        return g.number("scale")
    usual = g("Reciprocal", g("Sqrt", g("Cast", g("Shape", q, start=3), to=FLOAT)))
    if len(scales) == 1:
        return usual
    scale = g.number("scale")
    return g("Where", g("Equal", scale, g.constant(np.float32(0))), usual, scale)


def _additive_mask(g: Body) -> str:
    """Returns the numbers to add to the scores for attn_mask, whether it is boolean or not."""
    dtype, zero, hidden = g.known("attn_mask").dtype, g.constant(np.float32(0)), g.constant(np.float32(-np.inf))
    if dtype == BOOL:
        return g("Where", "attn_mask", zero, hidden)
    if dtype:
        return g.floats("attn_mask")
    mask = g("Cast", "attn_mask", to=FLOAT)
    # 2 becomes 1 only in a boolean's dtype.
    two = g("Cast", g("CastLike", g.constant(np.float32(2)), "attn_mask"), to=FLOAT)
    added = g("Where", g("Equal", mask, zero), hidden, zero)
    return g("Where", g("Less", two, g.constant(np.float32(2))), added, mask)


def _seen(g: Body, scores: str, sizes: str, total: str) -> str:
    """Returns the scores of the keys j that row i may see, j <= P + i, and -Inf for other keys."""
    zero, one = g.constant(0), g.constant(1)
    start = g("Squeeze", _past_length(g))
    i = g("Range", start, g("Add", start, g("Gather", sizes, g.constant(2))), one)
    j = g("Range", zero, g("Squeeze", total), one)
    seen = g("LessOrEqual", j, g("Unsqueeze", i, g.constant([1])))
    return g("Where", seen, scores, g.constant(np.float32(-np.inf)))


def _without_nan(g: Body, weights: str) -> str:
    return g("Where", g("IsNaN", weights), g.constant(np.float32(0)), weights)
