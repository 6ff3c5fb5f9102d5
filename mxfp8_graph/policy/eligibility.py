"""Decides whether a matmul can be rewritten at all, by shapes, ranks and names of dtypes, before any recipe.

All front ends call these functions, so they decide alike and give the same reasons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from mxfp8_graph.policy.plan import Dim
from mxfp8_ops.contract import VALUE_NAMES
from mxfp8_ops.formats import BLOCK_SIZE

MIN_GROUP_OUTPUTS: Final = 16
"""The least output channels of one of several groups: half a panel of the kernels."""

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


def convolution_blocker(shape: Sequence[int], group: int, transposed: bool) -> str | None:
    """Returns the reason why a convolution cannot be rewritten, or None.

    Its weight is [O, C / group, k...], or [C, O / group, k...] if it is `transposed`.
    """
    axes = len(shape) - 2
    if axes not in {1, 2}:
        return f"a convolution over {axes} axes; expected 1 or 2"
    if 0 in shape:
        return f"the weight is empty (shape {list(shape)}); expected sizes above 0"
    if group < 1 or shape[0] % group:
        return f"a weight {list(shape)} in {group} groups; expected as many channels in each"
    channels, outputs = (shape[0] // group, shape[1]) if transposed else (shape[1], shape[0] // group)
    if group == 1:
        return None
    if channels == 1:
        return "depthwise: each output reads one channel, so there are no blocks of 32 channels"
    # A block of X would belong to two groups, and its scale with it. Few outputs do not pay for a pass over X.
    if channels % BLOCK_SIZE or outputs < MIN_GROUP_OUTPUTS:
        expected = f"a multiple of {BLOCK_SIZE} input and at least {MIN_GROUP_OUTPUTS} output channels in each"
        return f"{group} groups of {channels} input and {outputs} output channels; expected {expected}"
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
