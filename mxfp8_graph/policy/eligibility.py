"""Decides whether a matmul can be rewritten at all, by shapes, ranks and names of dtypes, before any recipe.

All front ends call these functions, so they decide alike and give the same reasons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from mxfp8_graph.policy.plan import Dim
from mxfp8_ops.contract import VALUE_NAMES

BOTH_CONSTANT: Final = "both operands are constant; fold the constants of the model first"


def dtype_blocker(dtype: str | None, advice: str, *, owner: str = "") -> str | None:
    """Returns the reason why a matmul cannot be rewritten if `owner` has this dtype, or None.

    `owner` is an operand, such as "the activation", or "" for the matmul itself.
    """
    # The kernels take these three dtypes. Whether a float64 model may lose precision is for its owner to decide, so the
    # advice is a cast and not a silent one here.
    if dtype in VALUE_NAMES.values():
        return None
    subject = f"{owner} has " if owner else ""
    return f"{subject}dtype {dtype or 'unknown'}; expected float32, float16 or bfloat16; {advice}"


def weight_blocker(shape: Sequence[int]) -> str | None:
    """Returns the reason why a static operand of this shape cannot be packed, or None."""
    if len(shape) < 2:
        return "the static operand is a vector; expected a matrix"
    # An empty weight has no block, and so no largest value to take a scale from.
    if 0 in shape:
        return f"the weight is empty (shape {list(shape)}); expected N and K above 0"
    return None


def is_bias(shape: Sequence[int], dtype: str | None, *, n: Dim, rank: int) -> bool:
    """Whether adding such a static tensor to a result of that rank and N adds one value per column, or one to all."""
    # A tensor with more axes than the result would broadcast it to a larger shape, which the gemm cannot do.
    per_column = not shape or shape[-1] in {1, n}
    return dtype in VALUE_NAMES.values() and math.prod(shape[:-1]) == 1 and len(shape) <= rank and per_column


def sizes(x: Sequence[Any] | None, w: Sequence[Any] | None) -> tuple[Dim, Dim, Dim]:
    """Returns m, n and k of [..., M, K] or [K] times [..., N, K]; m counts all rows. An unknown size is None."""
    n, k = (_dim(w[-2]), _dim(w[-1])) if w is not None and len(w) >= 2 else (None, None)
    return rows(x[:-1]) if x is not None else None, n, k


def k_last(axes: Sequence[Any], transposed: bool = True) -> tuple[Any, ...]:
    """Returns sizes or axes [..., K, N] as [..., N, K] if `transposed`; the axis of a vector stays as it is."""
    return (*axes[:-2], axes[-1], axes[-2]) if transposed and len(axes) >= 2 else tuple(axes)


def rows(lead: Sequence[Any]) -> Dim:
    """Returns the product of dimensions: a number, or text such as "batch*16" with "?" for an unknown one."""
    # One symbolic size makes the whole product text: reports show it, and rules with min_n or max_k skip it.
    dims = ["?" if size is None else size for size in map(_dim, lead)]
    numbers = [size for size in dims if isinstance(size, int)]
    return math.prod(numbers) if len(numbers) == len(dims) else "*".join(str(size) for size in dims if size != 1)


def _dim(size: Any) -> Dim:
    if isinstance(size, int):
        return None if size < 0 else size  # -1 is what some exporters write for a size they do not know
    return None if size is None else str(size)
