"""What tests of the kernels share: values that are hard to quantize, and comparisons that say where results differ."""

from __future__ import annotations

import numpy as np
import pytest

FORMATS = ("e4m3", "e5m2")
ROUNDINGS = ("ceil", "floor", "even")


def heavy_tailed(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns Student's t with two degrees of freedom: outliers in every block, as in real weights and activations."""
    return np.random.default_rng(seed).standard_t(2, shape).astype(np.float32)


def random_values(seed: int, *shape: int) -> np.ndarray:
    """Returns float32 values over many magnitudes, so that the order of a sum matters."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape))).astype(np.float32)


def assert_same(
    actual: np.ndarray, expected: np.ndarray, what: str = "values", source: np.ndarray | None = None
) -> None:
    """Fails with the first coordinate whose bits differ, NaN but for its bits, and with the value it came from."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    bits = np.dtype(f"u{actual.itemsize}")
    differ = actual.view(bits) != expected.view(bits)
    if actual.dtype.kind != "u":
        differ &= ~(np.isnan(actual.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
    if differ.any():
        at = tuple(map(int, np.argwhere(differ)[0]))
        got, want = actual.view(bits)[at], expected.view(bits)[at]
        text = f"{what}: {differ.sum()} of {actual.size} differ; at {at} got {got:#x}, expected {want:#x}"
        pytest.fail(text if source is None or source.shape != actual.shape else f"{text}, source {source[at]!r}")


def assert_within(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray, what: str = "values") -> None:
    """Fails with the coordinate that exceeds its bound most; NaN and infinities must be where they are expected."""
    assert actual.shape == expected.shape, what
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        excess = np.abs(actual - expected) - bound
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    excess = np.where(same, -1, np.where(np.isnan(excess), np.inf, excess))
    if excess.size and excess.max() > 0:
        at = np.unravel_index(excess.argmax(), excess.shape)
        off = abs(actual[at] - expected[at])
        pytest.fail(
            f"{what}: at {at} got {actual[at]!r}, expected {expected[at]!r} +- {bound[at]:.3g}, off by {off:.3g}"
        )
