"""The rules of shapes, dtypes and scales, once for every backend.

They take shapes, or arrays of NumPy or CuPy; torch, whose shapes may be symbolic, passes shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from mxfp8_ops.errors import ShapeError
from mxfp8_ops.formats import BLOCK_SIZE, VALUE_DTYPES

Shape = tuple[int, ...]

INDEX_DTYPES: Final = ("int32", "int64")
"""The dtypes of indices into a table."""


def scale_count(k: int) -> int:
    """Returns ceil(k / 32), the number of scales of `k` values."""
    return -(-k // BLOCK_SIZE)


def scale_shape(shape: Shape, axis: int) -> Shape:
    """Returns the shape of the scales of elements of that shape, blocked along an axis they have."""
    # A partial last block has a scale of its own: hence ceil, not floor.
    sizes = [*shape]
    sizes[axis] = scale_count(sizes[axis])
    return tuple(sizes)


def split_at(shape: Shape, axis: int) -> tuple[int, int, int]:
    """Returns `shape` as (outer, K, inner): K is that of `axis` (0..rank-1), the others what is before and after it."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def normalize_axis(where: str, ndim: int, axis: int) -> int:
    """Returns `axis` as 0..ndim-1.

    Raises:
        ShapeError: there is no such axis.
    """
    if not -ndim <= axis < ndim:
        raise ShapeError(
            where, f"axis {axis} of a {ndim}-D tensor", expected=f"{-ndim} <= axis < {ndim}", advice="correct the axis"
        )
    return axis % ndim


def dtype_name(dtype: Any) -> str:
    """Returns "float32" for that dtype of NumPy, CuPy or torch."""
    # By name and not by np.dtype(dtype): that raises for torch's dtypes, and importing torch here would cost seconds.
    return getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")


def check_value_dtype(where: str, dtype: Any) -> None:
    """Raises ShapeError unless `dtype`, of NumPy, CuPy or torch, is one of `formats.VALUE_DTYPES`."""
    if (name := dtype_name(dtype)) not in VALUE_DTYPES:
        raise ShapeError(
            where, f"dtype {name}", expected=f"one of {', '.join(VALUE_DTYPES)}", advice="cast the tensor first"
        )


def check_scales(where: str, elements: Shape, scales: Shape, axis: int) -> None:
    """Raises ShapeError unless scales of that shape have one code per block along `axis`, which such elements have."""
    expected = scale_shape(elements, axis)
    if scales != expected:
        raise ShapeError(
            where,
            f"scales have shape {scales}",
            expected=f"{expected} for elements {elements} blocked along axis {axis % len(elements)}",
            advice="pass the scales that quantize returned",
        )


def check_codes(where: str, elements: Any, scales: Any, axis: int) -> None:
    """Raises ShapeError unless both arrays are uint8 and `scales` fits `elements`, see `check_scales`."""
    check_scales(where, elements.shape, scales.shape, axis)
    for name, codes in (("elements", elements), ("scales", scales)):
        if codes.dtype != np.uint8:
            raise ShapeError(
                where, f"{name} have dtype {codes.dtype}", expected="uint8 codes", advice="pass .view(numpy.uint8)"
            )


def check_out(where: str, out: Any, x: Any, scales: Shape, library: Any) -> tuple[Any, Any]:
    """Returns `out`, the arrays that the elements and scales of `x` are to be written to.

    Args:
        where: the op, for errors.
        out: the argument of the caller.
        x: an array of NumPy or CuPy.
        scales: shape of the scales.
        library: the module that `x` is an array of.

    Raises:
        ShapeError: they are not two C-contiguous, writeable uint8 arrays of these shapes, or share memory.
    """
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        expected, advice = "(elements, scales)", "pass the pair that quantize returned"
        raise ShapeError(where, f"out is a {type(out).__name__}, not a pair", expected=expected, advice=advice)
    for name, codes, shape in (("elements", out[0], x.shape), ("scales", out[1], scales)):
        what, expected = f"a {type(codes).__name__}", f"uint8 of shape {shape}"
        if isinstance(codes, library.ndarray):
            usable = codes.flags.c_contiguous and getattr(codes.flags, "writeable", True)  # CuPy's all are
            what = f"{codes.dtype} of shape {codes.shape}{'' if usable else ', strided or read-only'}"
        if what != expected:
            expected = f"C-contiguous, writeable {expected}"
            raise ShapeError(where, f"out: {name} are {what}", expected=expected, advice="pass other arrays")
    # A kernel reads x while it writes: with common memory it would read its own output. may_share_memory compares
    # bounds only, so views that interleave are refused too; the exact test can take exponential time.
    if any(library.may_share_memory(*pair) for pair in (out, (out[0], x), (out[1], x))):
        what, expected = "out: elements, scales and x share memory", "three arrays without common memory"
        raise ShapeError(where, what, expected=expected, advice="pass other arrays")
    return out[0], out[1]


def embedding_shape(where: str, indices: Any, b: Shape) -> Shape:
    """Returns the shape of the rows of b [V, D] that `indices` [...] name: [..., D].

    Args:
        where: the op, for errors.
        indices: an array of NumPy, CuPy or torch.
        b: shape of the table.

    Raises:
        ShapeError: the indices are neither int32 nor int64, or the table is not a matrix.
    """
    if (name := dtype_name(indices.dtype)) not in INDEX_DTYPES:
        raise ShapeError(
            where,
            f"indices have dtype {name}",
            expected=f"one of {', '.join(INDEX_DTYPES)}",
            advice="cast the indices first",
        )
    if len(b) != 2:
        raise ShapeError(
            where, f"a table of shape {b}", expected="[V, D], one row for each index", advice="reshape the table"
        )
    return (*indices.shape, b[1])


def check_indices(where: str, indices: Any, rows: int) -> None:
    """Raises ShapeError, which names the first that is wrong, unless all indices are within -rows..rows-1.

    Args:
        where: the op, for errors.
        indices: a NumPy array.
        rows: how many there are to name.
    """
    # Both signs are legal: ONNX Gather counts negative indices from the end.
    wrong = np.argwhere((indices < -rows) | (indices >= rows))
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise ShapeError(
            where,
            f"index {int(indices[at])} at {at}",
            expected=f"{-rows} to {rows - 1}, for a table of {rows} rows" if rows else "none: the table has no rows",
            advice="pass ids that the table has",
        )


def check_gemm_shapes(where: str, x: Shape, b: Shape, bias: Shape | None) -> None:
    """Raises ShapeError unless x [..., M, K] (or [K]), b [..., N, K] and bias [N] have the same K and N."""
    # The second operand has K last too, as nn.Linear stores a weight: blocks of both are then contiguous in memory.
    if len(x) < 1 or len(b) < 2 or x[-1] != b[-1]:
        raise ShapeError(
            where,
            f"operands {x} and {b}",
            expected="[..., M, K] and [..., N, K] with the same K",
            advice="store the second operand with K last",
        )
    if bias is not None and bias != (b[-2],):
        raise ShapeError(
            where, f"bias has shape {bias}", expected=f"({b[-2]},), one value per output column", advice="reshape it"
        )


def gemm_shape(
    where: str, x: Shape, b: Shape, bias: Shape | None, broadcast: Callable[..., Any] = np.broadcast_shapes
) -> Shape:
    """Returns the shape of x [..., M, K] (or [K]) times b [..., N, K] transposed: [..., M, N] (or [..., N]).

    Args:
        where: the op, for errors.
        x: shape of the first operand.
        b: shape of the second; leading dimensions broadcast as in `numpy.matmul`.
        bias: shape of the bias, or None.
        broadcast: how leading dimensions combine; torch.broadcast_shapes knows symbolic ones.

    Raises:
        ShapeError: they do not fit together.
    """
    check_gemm_shapes(where, x, b, bias)
    # One weight for all rows: nothing broadcasts.
    if len(b) == 2:
        return (*x[:-1], b[0])
    try:
        leading = broadcast(x[:-2], b[:-2])
    except (ValueError, RuntimeError):  # NumPy raises the first, torch the second
        raise ShapeError(
            where, f"operands {x} and {b}", expected="leading dimensions that broadcast", advice="reshape one"
        ) from None
    return (*leading, *x[-2:-1], b[-2])  # x[-2:-1] is empty for a vector: it has no M


def grouped_shape(
    where: str, x: Shape, b: Shape, experts: Shape, broadcast: Callable[..., Any] = np.broadcast_shapes
) -> Shape:
    """Returns the shape of x [..., M, K] times the transposes of b [E, N, K] that experts [...] pick: [..., M, N].

    Args:
        where: the op, for errors.
        x: shape of the first operand.
        b: shape of the matrices that are picked from.
        experts: shape of the indices; it broadcasts with the leading dimensions of `x`.
        broadcast: as in `gemm_shape`.

    Raises:
        ShapeError: they do not fit together.
    """
    if len(x) < 2 or len(b) != 3 or x[-1] != b[-1]:
        raise ShapeError(
            where,
            f"operands {x} and {b}",
            expected="[..., M, K] and [E, N, K] with the same K",
            advice="store each expert's weight with K last",
        )
    # As if every index had picked its matrix: a stack of weights [..., N, K].
    return gemm_shape(where, x, (*experts, *b[1:]), None, broadcast)


def check_experts(where: str, experts: Any, count: int) -> Any:
    """Returns indices of experts as 0..count, where `count` stands for no expert.

    Args:
        where: the op, for errors.
        experts: int64 array; -1 is the last expert, as in ONNX Gather, and `count` is none.
        count: how many experts there are.

    Raises:
        ShapeError: another dtype, or an index beyond -count..count.
    """
    if experts.dtype != np.int64:
        raise ShapeError(where, f"experts have dtype {experts.dtype}", expected="int64", advice="cast them")
    if ((experts < -count) | (experts > count)).any():
        beyond = experts[(experts < -count) | (experts > count)][0]
        raise ShapeError(
            where,
            f"expert {int(beyond)} of {count}",
            expected=f"{-count} to {count - 1}, or {count} for none",
            advice="correct the indices",
        )
    # `count` itself passes: it stands for no expert, and no index of Gather could say that.
    return experts + count * (experts < 0)


def check_factor(where: str, factor: Any, y: Shape) -> None:
    """Raises ShapeError unless `factor` is an array of values of the shape `y` of what it multiplies."""
    # No broadcasting: the kernels read the factor at the place of each result.
    check_value_dtype(where, factor.dtype)
    if factor.shape != y:
        raise ShapeError(
            where, f"factor has shape {factor.shape}", expected=f"{y}, that of the result", advice="broadcast it first"
        )


def check_norm(where: str, x: Any, scale: Any, bias: Any, residual: Any) -> None:
    """Raises ShapeError unless x [..., K], scale [K], bias [K] and a residual like `x` fit together.

    Args:
        where: the op, for errors.
        x: an array.
        scale: a float32 array.
        bias: the same, or None.
        residual: an array, or None.
    """
    if len(x.shape) < 1:
        raise ShapeError(where, "a scalar", expected="[..., K]", advice="reshape it")
    # float32 whatever the dtype of x: the C ABI takes these as float pointers, and they are small.
    for name, row in (("scale", scale), ("bias", bias)):
        if row is not None and (row.shape, row.dtype) != (x.shape[-1:], np.float32):
            raise ShapeError(
                where,
                f"{name} is {row.dtype} of shape {row.shape}",
                expected=f"float32 of shape {x.shape[-1:]}",
                advice="broadcast or cast it first",
            )
    # The residual does not broadcast: the kernels read it value by value beside x.
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ShapeError(
            where,
            f"a residual that is {residual.dtype} of shape {residual.shape}",
            expected=f"{x.dtype} of shape {x.shape}, as the input",
            advice="broadcast or cast it first",
        )


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
    """Returns the sizes of an attention of tensors of these shapes.

    Args:
        where: the op, for errors.
        operands: q [B, S, Hq * D], k [B, T, Hkv * D] and v [B, T, Hkv * Dv].
        mask: broadcasts to [B, Hq, S, P + T].
        pasts: those of past_key [B, Hkv, P, D] and past_value [B, Hkv, P, Dv], or both [0], for none.
        heads: Hq and Hkv.

    Raises:
        ShapeError: they do not fit together.
    """
    sizes = _unmasked_sizes(where, operands, pasts, heads)
    expected = [(sizes.batch, sizes.kv_heads, sizes.past, d) for d in (sizes.d, sizes.dv)]
    # [0] stands for no past: nodes write all of their inputs (contract.ATTENTION says why).
    if pasts != ((0,), (0,)) and pasts != (expected[0], expected[1]):
        raise ShapeError(
            where,
            f"past_key {pasts[0]} and past_value {pasts[1]}",
            expected=f"[B, Hkv, P, D] and [B, Hkv, P, Dv] with B = {sizes.batch}, Hkv = {sizes.kv_heads}, "
            f"D = {sizes.d} and Dv = {sizes.dv}, or both [0] for no past",
            advice="pass the present_key and present_value of the step before",
        )
    # NumPy's rule: sizes are compared from the last one; a mask may have fewer dimensions than the scores.
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
