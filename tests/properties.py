"""Shared by the tests of properties: hypothesis with the same examples in every run, and arrays of any kind.

Importing this sets hypothesis up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mxfp8_ops import numerics

settings.register_profile(
    "same examples",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=40,
    # The first example of a kind loads what later ones have; a function's fixtures hold nothing that examples change.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("same examples")

DTYPES = tuple(numerics.VALUE_DTYPES.values())

SPECIAL = np.array(
    [0, -0.0, 2.0**-149, -(2.0**-127), 2.0**-126, 448, 448.00003, 57344, 1.75, 3.4028235e38, -3.4028235e38],
    np.float32,
)
"""Where rules change: zeros, subnormals, maxima of the element formats, the largest float32."""

BAD = np.array([np.nan, np.inf, -np.inf], np.float32)


@st.composite
def values(
    draw: Any, shape: tuple[int, ...], dtype: Any = np.float32, *, finite: bool = False, calm: bool = False
) -> np.ndarray:
    """Draws an array: with heavy tails (always, if `calm`), of any bits, or of special values.

    There are a few NaN and Inf in it, unless `finite`.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="values"))
    kind = "normal" if calm else draw(st.sampled_from(["normal", "bits", "special"]), label="kind")
    least, most = (-20, 10) if calm else (-140, 120)
    if kind == "bits":
        bits = rng.integers(0, 2**32, shape, dtype=np.uint32)
        x = np.where(np.isfinite(bits.view(np.float32)), bits.view(np.float32), np.float32(0))
    elif kind == "special":
        x = rng.choice(SPECIAL, shape)
    else:
        x = rng.standard_t(2, shape) * 2.0 ** draw(st.integers(least, most), label="exponent")
    with np.errstate(all="ignore"):
        x = np.asarray(x, np.float32).astype(dtype)
        x = np.where(np.isfinite(x), x, np.zeros((), dtype))
        if not finite and draw(st.booleans(), label="bad values"):
            x = np.where(rng.random(shape) < 0.02, rng.choice(BAD, shape).astype(dtype), x)
    return np.asarray(x, dtype)


@st.composite
def shapes(draw: Any, least: int = 0, most: int = 4) -> tuple[int, ...]:
    """Draws a shape of up to some thousand values; sizes around one and two blocks, 1 and 0 are as likely as others."""
    rank = draw(st.integers(least, most), label="rank")
    size = st.one_of(st.sampled_from([0, 1, 31, 32, 33, 64, 70]), st.integers(0, 9))
    shape, count = [], 1
    for _ in range(rank):
        shape.append(draw(size.filter(lambda n, so_far=count: n * so_far <= 10_000), label="size"))
        count *= max(shape[-1], 1)
    return tuple(shape)


@st.composite
def views(draw: Any, x: np.ndarray) -> np.ndarray:
    """Draws an array of the same shape and values as `x`, laid out in memory in any other way."""
    order = draw(st.permutations(range(x.ndim)), label="order of axes in memory")
    steps = [draw(st.sampled_from([1, 1, 2, 3, -1, -2]), label="step") for _ in range(x.ndim)]
    stored = np.zeros([x.shape[axis] * abs(steps[axis]) for axis in order], x.dtype)
    view = stored.transpose(np.argsort(order).astype(int))[(..., *(slice(None, None, step) for step in steps))]
    view[...] = x
    return view


@st.composite
def arrays(draw: Any, dtypes: Any = DTYPES, least: int = 0, most: int = 4) -> np.ndarray:
    """Draws an array of any shape, layout, dtype and values."""
    x = draw(values(draw(shapes(least, most)), draw(st.sampled_from(dtypes), label="dtype")))
    return draw(views(x))
