"""Attention in NumPy: the reference for the kernel and the portable body, and the bound of their error.

Beside `numerics.py`, and like it written to be read: every score is in memory at once, in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from mxfp8_ops import formats, numerics
from mxfp8_ops.checks import AttentionSizes, attention_sizes, check_value_dtype
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.numerics import Array

if TYPE_CHECKING:
    from typing_extensions import Unpack

Floats = npt.NDArray[np.float64]
Past = tuple[Array, Array]
"""Keys [B, Hkv, P, D] and values [B, Hkv, P, Dv]."""

NO_MASK: Final = np.ones(1, np.bool_)
"""The constant for no mask in a node."""

NO_PAST: Final = (0,)
"""The shape of the constant for no past in a node."""

_ROUNDOFF: Final = 2.0**-24
"""Half a unit in the last place of float32, relative."""

_LEAST: Final = 2.0**-126
"""The smallest normal float32: bfloat16 dot products and fast exponentials may take smaller numbers for 0."""

_EXP_UNITS: Final = 8
"""Roundoffs that an exponential may be off by, beside those of its argument."""


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
    """"bfloat16" rounds q, k and v to that first, and allows as much for the weights of the keys; None (the default):
    all are multiplied as they are."""
    nan_guard: bool
    """Rows that see nothing give 0, not NaN."""


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


# Python's error for a misspelt option, or for one that is missing, begins with this name.
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

    Of each head y is softmax(scale * q @ k.T + mask) @ v; head h of q meets head h // (Hq / Hkv) of k and v. Other
    implementations compute in float32, in any order, and differ by at most `attention_error_bound`. A row of scores
    with a NaN or Inf, or of -Inf throughout, makes a row of NaN, or of 0 with `nan_guard`. The effect of a NaN or
    Inf in v on rows that a mask hides it from is not defined.

    Args:
        q: [B, S, Hq * D] float32, float16 or bfloat16.
        k: [B, T, Hkv * D] of that dtype.
        v: [B, T, Hkv * Dv] of that dtype.
        mask: bool, True where a row may see a key, or float32, float16 or bfloat16, added to the scores; broadcasts to
            [B, Hq, S, P + T].
        past: keys [B, Hkv, P, D] and values [B, Hkv, P, Dv] before those of k and v, of the dtype of q.
        **options: see `AttentionOptions`.

    Returns:
        y: [B, S, Hq * Dv] of the dtype of q.
        present_key: [B, Hkv, P + T, D], the keys of the past and k.
        present_value: [B, Hkv, P + T, Dv], the same of the values.

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
    """Returns how far a correct float32 attention may be from the exact one, per value of y, where that is finite.

    A score's error d, absolute, is a weight's relative one: of the dot product (gamma_D of Higham, section 3.1), of the
    mask's sum, of what is subtracted before the exponential, of that itself. With G = sum of p * (e^d - 1), what the
    sum of the weights may be off by, a weight is off by a factor of at most e^d / (1 - G), and 1 + 2^-8 where weights
    may be rounded to bfloat16. To that come the sum over keys, which running sums scale anew now and then; what is
    taken for 0, being below 2^-126; and storing y. No mean of values is further from another than twice the largest.

    Args: as in `attention`; `nan_guard` changes nothing. Compare with its result for float32 inputs of the same
    values: storing y rounds too.

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
    """Returns the sizes of an attention, whose arguments `attention` explains; `heads` are Hq and Hkv.

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
    """Returns x [B, Hkv, ...] with every head repeated for the heads of q that share it."""
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
    """Returns the softmax of each row, and `otherwise` in rows that have none."""
    with np.errstate(invalid="ignore"):
        highest = scores.max(-1, keepdims=True, initial=-np.inf)
        powers = np.exp(scores - highest)
        weights = powers / powers.sum(-1, keepdims=True)
    return np.where(np.isfinite(highest), weights, otherwise)
