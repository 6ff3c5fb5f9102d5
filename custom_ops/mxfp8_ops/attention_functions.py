"""The portable body of MXFP8Attention: ONNX's Attention of opset 23, for every opset from 21 on.

A group of query heads that share keys is one matrix [G * S, D], so that no key is repeated. All is computed in float32.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from onnx import TensorProto

from mxfp8_ops.function_body import Body

_LAST: Final = -1


def attention(g: Body) -> None:
    """Q, K, V, attn_mask, past_key, past_value -> Y, present_key, present_value."""
    batch, rows = g("Shape", "Q", end=1, out="batch"), g("Shape", "Q", start=1, end=2, out="rows")
    heads, groups = g.vector("q_num_heads"), g.vector("kv_num_heads")
    past = None if "past_key" in g.absent else _past_length(g)
    keys = _with_past(g, "K", "past_key", groups, past)
    values = _with_past(g, "V", "past_value", groups, past)
    g("CastLike", keys, "Q", out="present_key")
    g("CastLike", values, "Q", out="present_value")

    q = _split_heads(g, _floats(g, "Q"), heads)
    d, total = g("Shape", q, start=3, out="d"), g("Shape", keys, start=2, end=3, out="total")
    stacked = g("Mul", g("Div", heads, groups), rows, out="stacked")  # G * S
    # Stacks of matrices, one for each B and Hkv: ONNX Runtime before 1.24 would move a Transpose of four dimensions up
    # to a past without values, and divides by zero there.
    stacks = g("Mul", batch, groups, out="stacks")
    q = _reshape(g, _rounded(g, q), stacks, stacked, d)
    keys = _reshape(g, _rounded(g, keys), stacks, total, d)
    scores = g("MatMul", q, g("Transpose", keys, perm=[0, 2, 1]))
    scores = _reshape(g, g("Mul", scores, _scale(g, d)), batch, heads, rows, total)
    if "attn_mask" not in g.absent:
        scores = g("Add", scores, _additive_mask(g))
    if g.given is None or g.given["is_causal"]:
        scores = g("Where", _seen(g, rows, past, total), scores, _infinity(g, -1))
    weights = _reshape(g, _rounded(g, _softmax(g, scores)), stacks, stacked, total)
    dv = g("Shape", values, start=3, out="dv")
    values = _reshape(g, _rounded(g, values), stacks, total, dv)
    y = _reshape(g, g("MatMul", weights, values), batch, heads, rows, dv)
    y = _reshape(g, g("Transpose", y, perm=[0, 2, 1, 3]), batch, rows, g("Mul", heads, dv))
    g("CastLike", y, "Q", out="Y")


def _reshape(g: Body, x: str, *sizes: str) -> str:
    return g("Reshape", x, g("Concat", *sizes, axis=0), allowzero=1)


def _infinity(g: Body, sign: int) -> str:
    return g.constant(np.float32(sign * np.inf))


def _floats(g: Body, x: str) -> str:
    return g("Cast", x, to=TensorProto.FLOAT)


def _rounded(g: Body, x: str) -> str:
    """Returns float32 values rounded to activation_dtype; a Cast to float32, the default, changes nothing."""
    return _floats(g, g("Cast", x, to=g.attribute("activation_dtype")))


def _split_heads(g: Body, x: str, heads: str) -> str:
    """Returns x [B, L, heads * D] as [B, heads, L, D]."""
    lead = g("Shape", x, end=2)
    d = g("Div", g("Shape", x, start=2), heads)
    return g("Transpose", _reshape(g, x, lead, heads, d), perm=[0, 2, 1, 3])


def _past_length(g: Body) -> str:
    """Returns [P], the third dimension of past_key; 0 if it has none, which stands for no past."""
    size = g("Shape", "past_key", start=2, end=3)
    return g("ReduceSum", size, g.constant([0]), keepdims=1, out="past")


def _with_past(g: Body, new: str, past: str, groups: str, length: str | None) -> str:
    """Returns `past` [B, Hkv, P, D] and, behind it, `new` [B, T, Hkv * D], as float32 [B, Hkv, P + T, D]."""
    new = _split_heads(g, _floats(g, new), groups)
    if length is None:
        return new
    lead, d = g("Shape", new, end=2), g("Shape", new, start=3)
    sizes = [lead, length, d]
    if g.given is None:  # no more sizes: this fails for a past of more dimensions
        sizes.append(g("Reshape", g("Shape", past, start=4), g.constant([0]), allowzero=1))
    return g("Concat", _reshape(g, _floats(g, past), *sizes), new, axis=2)


def _scale(g: Body, d: str) -> str:
    """Returns the attribute, or 1 / sqrt(D) where that is 0."""
    given = g.number("scale")
    usual = g("Reciprocal", g("Sqrt", _floats(g, d)))
    return g("Where", g("Equal", given, g.constant(np.float32(0))), usual, given)


def _additive_mask(g: Body) -> str:
    """Returns attn_mask as what to add to the scores, whether it is boolean or not."""
    mask = _floats(g, "attn_mask")
    # 2 becomes 1 in a boolean's dtype alone.
    two = _floats(g, g("CastLike", g.constant(np.float32(2)), "attn_mask"))
    added = g("Where", g("Equal", mask, g.constant(np.float32(0))), _infinity(g, -1), g.constant(np.float32(0)))
    return g("Where", g("Less", two, g.constant(np.float32(2))), added, mask)


def _seen(g: Body, rows: str, past: str | None, total: str) -> str:
    """Returns [S, P + T]: whether row i may see key j, which is j <= P + i if is_causal and always if not."""
    zero, one = g.constant(0), g.constant(1)
    start = zero if past is None else g("Squeeze", past)
    i = g("Range", start, g("Add", start, g("Squeeze", rows)), one)
    j = g("Range", zero, g("Squeeze", total), one)
    before = g("LessOrEqual", j, g("Unsqueeze", i, g.constant([1])))
    if g.given is not None:
        return before
    everything = g("Equal", g.number("is_causal"), zero)
    return g("Or", before, everything)


def _softmax(g: Body, scores: str) -> str:
    """Returns the softmax of each row. Rows without one - NaN, Inf, or -Inf throughout - are NaN, or 0 if nan_guard."""
    # ONNX Runtime's Softmax makes numbers of such rows. A sum finds them: 1 for each finite score, NaN for NaN and Inf,
    # 0 for -Inf.
    finite = g("Add", g("Mul", scores, g.constant(np.float32(0))), g.constant(np.float32(1)))
    finite = g("Where", g("Equal", scores, _infinity(g, -1)), g.constant(np.float32(0)), finite)
    good = g("Greater", g("ReduceSum", finite, g.constant([_LAST]), keepdims=1), g.constant(np.float32(0)))
    return g("Where", good, g("Softmax", scores, axis=_LAST), _otherwise(g))


def _otherwise(g: Body) -> str:
    """Returns NaN, or 0 if nan_guard."""
    if g.given is not None:  # ONNX Runtime's symbolic shape inference cannot compute a Where with NaN
        return g.constant(np.float32(0 if g.given["nan_guard"] else np.nan))
    unguarded = g("Equal", g.number("nan_guard"), g.constant(0))
    return g("Where", unguarded, g.constant(np.float32(np.nan)), g.constant(np.float32(0)))
