"""MXFP8Attention: ONNX's Attention on 3-D inputs. The reference keeps all scores in memory, in float64.

attention_sizes.py checks shapes, attention_body.py has the portable body.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from mxfp8_ops import formats, numerics
from mxfp8_ops.checks import check_value_dtype
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.node import BOOL, FLOAT, VALUES, Op, Port
from mxfp8_ops.nodes.attention_body import attention_body
from mxfp8_ops.nodes.attention_sizes import AttentionSizes, attention_sizes
from mxfp8_ops.numerics import Array

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    attention_body,
)
"""Its six inputs and three outputs are all written: ONNX Runtime before 1.27 crashes where a node of ours leaves an
input empty, a body cannot ask whether one is there, and no ONNX Runtime loads a node that has fewer outputs than its
body."""


OPS: Final = (ATTENTION,)
