"""The sizes of an attention, and which shapes fit together."""

from __future__ import annotations

from dataclasses import dataclass

from mxfp8_ops.checks import Shape
from mxfp8_ops.errors import ShapeError


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
