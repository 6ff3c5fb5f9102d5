"""quantize(..., out=(elements, scales)): the same bytes, in the caller's memory; and the same arguments everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from grids import looped, pairwise

from mxfp8_ops import cpu, cuda, numerics, numpy_nodes

QUANTIZE = {"numerics": numpy_nodes.quantize, "cpu": cpu.quantize}
SHAPES = [((5, 96), -1), ((5, 70), -1), ((3, 40, 48), 1), ((37,), 0), ((0, 64), -1), ((4, 0), 1), ((70, 5), 0)]


def values(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 12, shape))
    return x.astype(numerics.value_dtype(dtype))


def pair(x: np.ndarray, axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """Returns arrays for the result, full of what quantize never writes to all of them."""
    return tuple(np.full_like(codes, 0xAA) for codes in numpy_nodes.quantize(x, axis=axis))


@pytest.fixture(params=QUANTIZE)
def quantize(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return QUANTIZE[request.param]


@looped(
    "shape_and_axis, dtype, kind",
    pairwise(shape_and_axis=SHAPES, dtype=[*numerics.VALUE_DTYPES], kind=[("e4m3", "ceil"), ("e5m2", "floor")]),
)
def test_the_same_bytes_in_the_callers_arrays(
    quantize: Callable[..., Any], shape_and_axis: tuple[tuple[int, ...], int], dtype: str, kind: tuple[str, str]
) -> None:
    (shape, axis) = shape_and_axis
    x = values(shape, dtype)
    out, options = pair(x, axis), {"axis": axis, "element_format": kind[0], "scale_rounding": kind[1]}
    got = quantize(x, **options, out=out)
    assert (got[0] is out[0], got[1] is out[1]) == (True, True)
    for codes, expected in zip(out, numpy_nodes.quantize(x, **options), strict=True):
        np.testing.assert_array_equal(codes, expected)


def test_x_may_be_strided(quantize: Callable[..., Any]) -> None:
    x = values((64, 80)).T
    out = pair(x)
    quantize(x, out=out)
    for codes, expected in zip(out, numpy_nodes.quantize(x), strict=True):
        np.testing.assert_array_equal(codes, expected)


def test_rows_of_larger_arrays_and_a_memory_map(quantize: Callable[..., Any], tmp_path: Any) -> None:
    x = values((4, 64))
    elements = np.memmap(tmp_path / "elements", np.uint8, "w+", shape=(3, 4, 64))
    scales = np.zeros((3, 4, 2), np.uint8)
    quantize(x, out=(elements[1], scales[1]))
    expected = numpy_nodes.quantize(x)
    for codes, right in zip((elements, scales), expected, strict=True):
        np.testing.assert_array_equal(codes[1], right)
        assert not codes[0].any()
        assert not codes[2].any()


# --- One signature ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "more"), [(cpu, {"threads"}), (cuda, set())])
def test_a_backend_has_the_arguments_of_the_reference_in_its_order_and_some_of_its_own(backend: Any, more: set) -> None:
    shared = [name for name in backend.__all__ if inspect.isfunction(getattr(numpy_nodes, name, None))]
    assert "quantize" in shared
    for name in shared:
        theirs = inspect.signature(getattr(backend, name)).parameters.values()
        ours = inspect.signature(getattr(numpy_nodes, name)).parameters.values()
        alike = [(p.name, p.kind, p.default) for p in theirs if p.name not in more]
        assert alike == [(p.name, p.kind, p.default) for p in ours], name
