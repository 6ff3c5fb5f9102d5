"""MXFP8Attention: ONNX's Attention on 3-D inputs. The reference keeps all scores in memory, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from mxfp8_ops import formats, numerics
from mxfp8_ops.checks import Shape, check_value_dtype
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.node import BOOL, FLOAT, VALUES, Op, Port
from mxfp8_ops.numerics import Array

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mxfp8_ops.function_body import Body

Floats = npt.NDArray[np.float64]
Past = tuple[Array, Array]
"""Keys [B, Hkv, P, D] and values [B, Hkv, P, Dv]."""
NO_MASK: Final = np.ones(1, np.bool_)
"""The constant that stands for no mask in a node."""
NO_PAST: Final = (0,)
"""The shape of the constant that stands for no past in a node."""
_ROUNDOFF: Final = 2.0**-24
"""Half a unit in the last place of float32, relative."""
_LEAST: Final = 2.0**-126
"""The smallest normal float32: bfloat16 dot products and fast exponentials may take smaller numbers for 0."""
_EXP_UNITS: Final = 8
"""The largest error of an exponential, in roundoffs, without the error of its argument."""


class _Heads(TypedDict):
    q_num_heads: int
    """Hq."""
    kv_num_heads: int
    """Hkv, of which Hq is a multiple."""


class AttentionOptions(_Heads, total=False):
    """The options of `attention` in every backend."""

    is_causal: bool
    """Row i sees key j of the P + T only if j <= P + i."""
    scale: float
    """Factor of the scores; 0 (the default) stands for 1 / sqrt(D)."""
    activation_dtype: str | None
    """"bfloat16" rounds q, k and v to bfloat16 first, and permits this rounding of the weights of the keys too; None
    (the default) leaves all as they are."""
    nan_guard: bool
    """Rows that see no key give 0, not NaN."""


class AttentionSettings(NamedTuple):
    """`AttentionOptions` with their defaults."""

    q_num_heads: int
    kv_num_heads: int
    is_causal: bool = False
    scale: float = 0.0
    activation_dtype: str | None = None
    nan_guard: bool = False

    @property
    def heads(self) -> tuple[int, int]:
        """Hq and Hkv."""
        return self.q_num_heads, self.kv_num_heads


# Python's error for a misspelt or missing option begins with this name.
AttentionSettings.__new__.__qualname__ = "attention"


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    past: Past | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array, Array]:
    """Returns (y, present_key, present_value) of ONNX's Attention, with scores and sums in float64.

    For each head, y is softmax(scale * q @ k.T + mask) @ v; head h of q uses head h // (Hq / Hkv) of k and v. Other
    implementations compute in float32, in any order, and differ by at most `attention_error_bound`. If a row of scores
    has a NaN or Inf, or only -Inf, the row of y is NaN, or 0 with `nan_guard`. If a mask hides a NaN or Inf in v from
    a row, its effect on this row is undefined.

    Args:
        q: [B, S, Hq * D] float32, float16 or bfloat16.
        k: [B, T, Hkv * D] of the dtype of q.
        v: [B, T, Hkv * Dv] of the dtype of q.
        mask: bool, True where a row may see a key, or float32, float16 or bfloat16, added to the scores; broadcasts to
            [B, Hq, S, P + T].
        past: the keys [B, Hkv, P, D] and values [B, Hkv, P, Dv] before k and v, of the dtype of q.
        **options: see `AttentionOptions`.

    Returns:
        y: [B, S, Hq * Dv] of the dtype of q.
        present_key: [B, Hkv, P + T, D], the keys of the past and k.
        present_value: [B, Hkv, P + T, Dv], the values of the past and v.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        ContractError: unknown activation_dtype.

    Source: ONNX operator Attention, version 23, with 3-D inputs.
    """
    settings = AttentionSettings(**options)
    sizes = check_attention("attention", (q, k, v), mask, past, settings.heads)
    present_key, present_value = _presents(k, v, past, sizes)
    scored = _scored(q, present_key, mask, sizes, settings)
    with np.errstate(invalid="ignore", over="ignore"):
        weights = _softmax(scored.scores, 0.0 if settings.nan_guard else np.nan)
        y = weights @ _of_q_heads(_operand(present_value, settings.activation_dtype), sizes)
        y = y.swapaxes(1, 2).reshape(sizes.y).astype(np.float32).astype(q.dtype)
    return y, present_key, present_value


def attention_error_bound(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    past: Past | None = None,
    **options: Unpack[AttentionOptions],
) -> Floats:
    """Returns the largest error of a correct float32 attention, for each value of y that is finite.

    The absolute error d of a score is the relative error of its weight. It has four parts: the dot product (gamma_D of
    Higham, section 3.1), the sum with the mask, the subtraction before the exponential, and the exponential. With
    G = sum of p * (e^d - 1), the largest error of the sum of the weights, a weight is wrong by a factor of at most
    e^d / (1 - G), and by a factor of 1 + 2^-8 where weights may be rounded to bfloat16. Three more errors follow: the
    sum over keys, which running sums scale again at times; numbers below 2^-126, which may count as 0; and the store
    of y. Two means of values differ by at most twice the largest magnitude.

    Args: as in `attention`; `nan_guard` changes nothing. Compare a result with `attention` for float32 inputs of the
    same values: the store of y rounds too.

    Returns:
        [B, S, Hq * Dv].
    """
    settings = AttentionSettings(**options)
    sizes = check_attention("attention", (q, k, v), mask, past, settings.heads)
    present_key, present_value = _presents(k, v, past, sizes)
    scored = _scored(q, present_key, mask, sizes, settings)
    values = np.abs(_of_q_heads(_operand(present_value, settings.activation_dtype), sizes))
    weights = _softmax(scored.scores, 0.0)
    off = np.expm1(np.where(weights > 0, scored.errors, 0.0))
    of_sum = (weights * off).sum(-1, keepdims=True)
    terms = 2 * sizes.total + 32  # additions, and scalings of running sums
    growth = (1 + terms * _ROUNDOFF) ** 2 * (1 + (2.0**-8 if settings.activation_dtype else 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(of_sum < 1, (1 + off) * growth / (1 - of_sum) - 1, np.inf)
        error = np.where(weights > 0, weights * factor, 0.0) @ values
    error += _LEAST * (values.sum(-2, keepdims=True) + sizes.total + 1)
    error = np.fmin(error, 2 * values.max(-2, keepdims=True, initial=0)).swapaxes(1, 2).reshape(sizes.y)
    store = numerics.error_bound(q.dtype.name)
    size = (weights @ values).swapaxes(1, 2).reshape(sizes.y) + error
    return np.asarray(error + size * store.store + store.tiny, np.float64)


def check_attention(
    where: str, operands: tuple[Array, Array, Array], mask: Array | None, past: Past | None, heads: tuple[int, int]
) -> AttentionSizes:
    """Returns the sizes of an attention with these arguments (see `attention`); `heads` are Hq and Hkv.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    q, k, v = operands
    check_value_dtype(where, q.dtype)
    past_key, past_value = past or (None, None)
    for name, other in (("k", k), ("v", v), ("past key", past_key), ("past value", past_value)):
        if other is not None and other.dtype != q.dtype:
            raise ShapeError(
                where, f"{name} has dtype {other.dtype}", expected=f"{q.dtype}, that of q", advice="cast one"
            )
    if mask is not None and mask.dtype != np.bool_:
        check_value_dtype(where, mask.dtype)
    pasts = (NO_PAST, NO_PAST) if past is None else (past[0].shape, past[1].shape)
    return attention_sizes(
        where, (q.shape, k.shape, v.shape), NO_MASK.shape if mask is None else mask.shape, pasts, heads
    )


class _Scored(NamedTuple):
    scores: Floats
    """[B, Hq, S, P + T], mask included."""
    errors: Floats
    """The error of a float32 implementation, at most: of the score, and of the steps up to its exponential."""


def _presents(k: Array, v: Array, past: Past | None, sizes: AttentionSizes) -> Past:
    """Returns k and v as [B, Hkv, P + T, ...], behind the past."""
    split = (sizes.batch, sizes.keys, sizes.kv_heads)
    key, value = (x.reshape(*split, d).swapaxes(1, 2) for x, d in ((k, sizes.d), (v, sizes.dv)))
    if past is not None:
        key, value = np.concatenate([past[0], key], 2), np.concatenate([past[1], value], 2)
    return np.ascontiguousarray(key), np.ascontiguousarray(value)


def _operand(x: Array, activation_dtype: str | None) -> Floats:
    if formats.activation_dtype(activation_dtype) is formats.BFLOAT16:
        x = x.astype(numerics.value_dtype("bfloat16"))
    return x.astype(np.float64)


def _of_q_heads(x: Floats, sizes: AttentionSizes) -> Floats:
    """Returns x [B, Hkv, ...] as [B, Hq, ...]: each head once for every head of q that shares it."""
    return np.repeat(x, sizes.q_heads // sizes.kv_heads, 1)


def _scored(
    q: Array, present_key: Array, mask: Array | None, sizes: AttentionSizes, settings: AttentionSettings
) -> _Scored:
    activation_dtype = settings.activation_dtype
    scale = settings.scale or 1 / max(sizes.d, 1) ** 0.5
    queries = _operand(q, activation_dtype).reshape(sizes.batch, sizes.rows, sizes.q_heads, sizes.d).swapaxes(1, 2)
    keys = _of_q_heads(_operand(present_key, activation_dtype), sizes).swapaxes(-1, -2)
    with np.errstate(invalid="ignore", over="ignore"):
        scores = scale * (queries @ keys)
        if mask is not None:
            scores = scores + (np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask.astype(np.float64))
        if settings.is_causal:
            seen = np.arange(sizes.total) <= sizes.past + np.arange(sizes.rows)[:, None]
            scores = np.where(seen, scores, -np.inf)
        products = np.abs(queries) @ np.abs(keys) * ((sizes.d + 4) * _ROUNDOFF)
        flushed = _LEAST * (np.abs(queries).sum(-1)[..., None] + np.abs(keys).sum(-2)[..., None, :] + sizes.d)
        below = scores.max(-1, keepdims=True, initial=-np.inf) - scores
        errors = abs(scale) * (products + flushed) + _ROUNDOFF * (2 * np.abs(scores) + 4 * below + _EXP_UNITS)
    return _Scored(np.broadcast_to(scores, sizes.scores), np.broadcast_to(errors, sizes.scores))


def _softmax(scores: Floats, otherwise: float) -> Floats:
    """Returns the softmax of each row, and `otherwise` in rows without a finite maximum."""
    with np.errstate(invalid="ignore"):
        highest = scores.max(-1, keepdims=True, initial=-np.inf)
        powers = np.exp(scores - highest)
        weights = powers / powers.sum(-1, keepdims=True)
    return np.where(np.isfinite(highest), weights, otherwise)


# --- Shapes


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of an attention: Q [B, S, Hq * D], K [B, T, Hkv * D], V [B, T, Hkv * Dv] behind P keys of the past."""

    batch: int
    rows: int
    """S"""
    keys: int
    """T, the keys of K"""
    past: int
    """P"""
    q_heads: int
    kv_heads: int
    d: int
    dv: int

    @property
    def total(self) -> int:
        """P + T."""
        return self.past + self.keys

    @property
    def scores(self) -> Shape:
        """[B, Hq, S, P + T], the shape that a mask broadcasts to."""
        return self.batch, self.q_heads, self.rows, self.total

    @property
    def y(self) -> Shape:
        """[B, S, Hq * Dv]."""
        return self.batch, self.rows, self.q_heads * self.dv


def attention_sizes(
    where: str, operands: tuple[Shape, Shape, Shape], mask: Shape, pasts: tuple[Shape, Shape], heads: tuple[int, int]
) -> AttentionSizes:
    """Returns the sizes of an attention whose tensors have these shapes.

    The shapes are in the order of the arguments of `attention`. Without a past, both `pasts` are [0]. `heads` are Hq
    and Hkv.

    Raises:
        ShapeError: the shapes do not fit together.
    """
    sizes = _unmasked_sizes(where, operands, pasts, heads)
    expected = [(sizes.batch, sizes.kv_heads, sizes.past, d) for d in (sizes.d, sizes.dv)]
    # [0] stands for no past: nodes write all of their inputs (ATTENTION says why).
    if pasts != ((0,), (0,)) and pasts != (expected[0], expected[1]):
        raise ShapeError(
            where,
            f"past_key {pasts[0]} and past_value {pasts[1]}",
            expected=f"[B, Hkv, P, D] and [B, Hkv, P, Dv] with B = {sizes.batch}, Hkv = {sizes.kv_heads}, "
            f"D = {sizes.d} and Dv = {sizes.dv}, or both [0] for no past",
            advice="pass the present_key and present_value of the step before",
        )
    # NumPy's rule compares sizes from the last one; a mask may have fewer dimensions than the scores.
    fitting = zip(reversed(mask), reversed(sizes.scores), strict=False)
    if len(mask) > len(sizes.scores) or any(size not in (1, full) for size, full in fitting):
        raise ShapeError(
            where, f"attn_mask has shape {mask}", expected=f"one that broadcasts to {sizes.scores}", advice="reshape it"
        )
    return sizes


def _unmasked_sizes(
    where: str, operands: tuple[Shape, Shape, Shape], pasts: tuple[Shape, Shape], heads: tuple[int, int]
) -> AttentionSizes:
    """Returns the sizes of an attention whose mask and past are not checked."""
    (q, k, v), (q_heads, kv_heads) = operands, heads
    # Grouped-query attention: q_heads / kv_heads query heads share one head of keys, so the division has no remainder.
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise ShapeError(
            where,
            f"{q_heads} heads of Q and {kv_heads} of K and V",
            expected="1 or more of each, and for Q a multiple of the number for K and V",
            advice="correct q_num_heads and kv_num_heads",
        )
    fits = len(q) == len(k) == len(v) == 3 and q[0] == k[0] == v[0] and k[1] == v[1]
    if not fits or q[2] % q_heads or k[2] % kv_heads or v[2] % kv_heads or q[2] // q_heads != k[2] // kv_heads:
        raise ShapeError(
            where,
            f"Q {q}, K {k} and V {v} with {q_heads} and {kv_heads} heads",
            expected="[B, S, Hq * D], [B, T, Hkv * D] and [B, T, Hkv * Dv]",
            advice="merge the heads into the last dimension, and use one head size for Q and K",
        )
    past = pasts[0][2] if len(pasts[0]) == 4 else 0
    return AttentionSizes(q[0], q[1], k[1], past, q_heads, kv_heads, q[2] // q_heads, v[2] // kv_heads)


# --- The portable body, in float32


def _attention_body(g: Body) -> None:
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


# --- The contract


ATTENTION: Final = Op(
    "MXFP8Attention",
    (
        Port("Q", VALUES, "[B, S, Hq * D]"),
        Port("K", VALUES, "[B, T, Hkv * D]", like="Q"),
        Port("V", VALUES, "[B, T, Hkv * Dv]", like="Q"),
        Port("attn_mask", (*VALUES, BOOL), "broadcasts to [B, Hq, S, P + T]; absent: [1]", has_stand_in=True),
        Port("past_key", VALUES, "[B, Hkv, P, D]; absent: [0]", like="Q", has_stand_in=True),
        Port("past_value", VALUES, "[B, Hkv, P, Dv]; absent: [0]", like="Q", has_stand_in=True),
    ),
    (
        Port("Y", VALUES, "[B, S, Hq * Dv]", like="Q"),
        Port("present_key", VALUES, "[B, Hkv, P + T, D]", optional=True, like="Q"),
        Port("present_value", VALUES, "[B, Hkv, P + T, Dv]", optional=True, like="Q"),
    ),
    MappingProxyType(
        {
            "q_num_heads": 1,
            "kv_num_heads": 1,
            "is_causal": 0,
            "scale": 0.0,
            "activation_dtype": FLOAT,
            "nan_guard": 0,
        }
    ),
    "Computes ONNX's Attention on 3-D inputs. A constant that changes nothing stands for an absent mask or past.",
    _attention_body,
)
"""Its six inputs and three outputs are all written: ONNX Runtime before 1.27 crashes where a node of ours leaves an
input empty, a body cannot ask whether one is there, and no ONNX Runtime loads a node that has fewer outputs than its
body."""


OPS: Final = (ATTENTION,)
