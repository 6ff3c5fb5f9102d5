"""quantize(..., out=(elements, scales)): the same bytes, in the caller's memory; and the same arguments everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mxfp8_ops import cpu, cuda, numerics
from mxfp8_ops.errors import ShapeError

QUANTIZE = {"numerics": numerics.quantize, "cpu": cpu.quantize}
SHAPES = [((5, 96), -1), ((5, 70), -1), ((3, 40, 48), 1), ((37,), 0), ((0, 64), -1), ((4, 0), 1), ((70, 5), 0)]


def values(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 12, shape))
    return x.astype(numerics.value_dtype(dtype))


def pair(x: np.ndarray, axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """Returns arrays for the result, full of what quantize never writes to all of them."""
    return tuple(np.full_like(codes, 0xAA) for codes in numerics.quantize(x, axis=axis))


@pytest.fixture(params=QUANTIZE)
def quantize(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return QUANTIZE[request.param]


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("dtype", numerics.VALUE_DTYPES)
@pytest.mark.parametrize("kind", [("e4m3", "ceil"), ("e5m2", "floor")], ids="-".join)
def test_the_same_bytes_in_the_callers_arrays(
    quantize: Callable[..., Any], shape: tuple[int, ...], axis: int, dtype: str, kind: tuple[str, str]
) -> None:
    x = values(shape, dtype)
    out, options = pair(x, axis), {"axis": axis, "element_format": kind[0], "scale_rounding": kind[1]}
    got = quantize(x, **options, out=out)
    assert (got[0] is out[0], got[1] is out[1]) == (True, True)
    for codes, expected in zip(out, numerics.quantize(x, **options), strict=True):
        np.testing.assert_array_equal(codes, expected)


def test_x_may_be_strided(quantize: Callable[..., Any]) -> None:
    x = values((64, 80)).T
    out = pair(x)
    quantize(x, out=out)
    for codes, expected in zip(out, numerics.quantize(x), strict=True):
        np.testing.assert_array_equal(codes, expected)


def test_rows_of_larger_arrays_and_a_memory_map(quantize: Callable[..., Any], tmp_path: Any) -> None:
    x = values((4, 64))
    elements = np.memmap(tmp_path / "elements", np.uint8, "w+", shape=(3, 4, 64))
    scales = np.zeros((3, 4, 2), np.uint8)
    quantize(x, out=(elements[1], scales[1]))
    expected = numerics.quantize(x)
    for codes, right in zip((elements, scales), expected, strict=True):
        np.testing.assert_array_equal(codes[1], right)
        assert not codes[0].any()
        assert not codes[2].any()


X = values((4, 64))
CONTIGUOUS = "expected C-contiguous, writeable uint8 of shape"


def read_only(codes: np.ndarray) -> np.ndarray:
    codes.flags.writeable = False
    return codes


def overlapping() -> tuple[np.ndarray, np.ndarray]:
    memory = np.zeros(4 * 64, np.uint8)
    return memory.reshape(4, 64), memory[:8].reshape(4, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda e, s: (e,),
            "out is a tuple, not a pair; expected (elements, scales); pass the pair that quantize returned",
        ),
        (lambda e, s: e, "out is a ndarray, not a pair; expected (elements, scales)"),
        (lambda e, s: (e, None), f"out: scales are a NoneType; {CONTIGUOUS} (4, 2)"),
        (lambda e, s: (e[:3], s), f"out: elements are uint8 of shape (3, 64); {CONTIGUOUS} (4, 64)"),
        (lambda e, s: (e, s.T), f"out: scales are uint8 of shape (2, 4), strided or read-only; {CONTIGUOUS} (4, 2)"),
        (lambda e, s: (e, s[:, :1]), "out: scales are uint8 of shape (4, 1), strided"),
        (lambda e, s: (e.view(np.int8), s), "out: elements are int8 of shape (4, 64);"),
        (lambda e, s: (np.zeros((4, 128), np.uint8)[:, ::2], s), "out: elements are uint8 of shape (4, 64), strided"),
        (lambda e, s: (read_only(e), s), "out: elements are uint8 of shape (4, 64), strided or read-only;"),
        (lambda e, s: overlapping(), "out: elements, scales and x share memory; expected three arrays without"),
        (lambda e, s: (X.view(np.uint8)[:, :64].copy("F"), s), "out: elements are uint8 of shape (4, 64), strided"),
        (lambda e, s: (X.view(np.uint8).ravel()[:256].reshape(4, 64), s), "out: elements, scales and x share memory"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(quantize: Callable[..., Any], change: Any, message: str) -> None:
    before = X.tobytes()
    with pytest.raises(ShapeError) as caught:
        quantize(X, out=change(*pair(X)))
    assert str(caught.value).startswith(f"quantize: {message}")
    assert X.tobytes() == before


# --- One signature ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "more"), [(cpu, {"threads"}), (cuda, {"swizzled", "fast_accumulate", "kept"})])
def test_a_backend_has_the_arguments_of_the_reference_in_its_order_and_some_of_its_own(backend: Any, more: set) -> None:
    shared = [name for name in backend.__all__ if inspect.isfunction(getattr(numerics, name, None))]
    assert "quantize" in shared
    for name in shared:
        theirs = inspect.signature(getattr(backend, name)).parameters.values()
        ours = inspect.signature(getattr(numerics, name)).parameters.values()
        alike = [(p.name, p.kind, p.default) for p in theirs if p.name not in more]
        assert alike == [(p.name, p.kind, p.default) for p in ours], name
