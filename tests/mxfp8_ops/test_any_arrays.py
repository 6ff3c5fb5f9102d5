"""Whatever the arrays are, the kernels and `numpy_nodes` give the same arrays or the same errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from grids import looped, pairwise
from hypothesis import given
from hypothesis import strategies as st
from properties import DTYPES, arrays, shapes, values, views

from mxfp8_ops import cpu, cuda, formats, numerics, numpy_nodes
from mxfp8_ops.errors import Mxfp8Error

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning")

AXES = st.integers(-5, 4)
FORMATS = st.sampled_from([*formats.ELEMENT_FORMATS])
ROUNDINGS = st.sampled_from(formats.SCALE_ROUNDINGS)
RESULTS = st.sampled_from([*numerics.VALUE_DTYPES])


def outcome(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Returns what a function returns, or the class and message of the error it raises."""
    try:
        return function(*arguments, **options)
    except Mxfp8Error as error:
        return type(error), str(error)


def same(actual: Any, expected: Any) -> None:
    """Fails unless both are the same error, or arrays of the same shapes, dtypes and bytes (NaN but for its bits)."""
    if isinstance(expected, tuple) and isinstance(expected[0], type):
        assert actual == expected
        return
    for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (actual, expected)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        differ = one.view(f"u{one.itemsize}") != other.view(f"u{one.itemsize}")
        if one.dtype != np.uint8:
            differ &= ~(np.isnan(one.astype(np.float32)) & np.isnan(other.astype(np.float32)))
        assert not differ.any(), f"at {np.argwhere(differ)[0]}: {one[differ][0]!r}, expected {other[differ][0]!r}"


@given(arrays((*DTYPES, np.dtype(np.float64))), AXES, FORMATS, ROUNDINGS)
def test_quantize_gives_what_the_reference_gives(
    x: np.ndarray, axis: int, element_format: str, scale_rounding: str
) -> None:
    options = {"axis": axis, "element_format": element_format, "scale_rounding": scale_rounding}
    same(outcome(cpu.quantize, x, **options), outcome(numpy_nodes.quantize, x, **options))


@given(st.data(), shapes(), AXES, FORMATS, RESULTS)
def test_dequantize_gives_what_the_reference_gives(
    data: Any, shape: tuple[int, ...], axis: int, element_format: str, dtype: str
) -> None:
    rng = np.random.default_rng(len(shape))
    blocks = [*shape]
    if -len(shape) <= axis < len(shape) and not data.draw(st.booleans(), label="wrong scales"):
        blocks[axis] = -(-blocks[axis] // 32)
    elements, scales = (data.draw(views(rng.integers(0, 256, s, dtype=np.uint8))) for s in (shape, blocks))
    options = {"axis": axis, "element_format": element_format, "dtype": dtype}
    same(
        outcome(cpu.dequantize, elements, scales, **options),
        outcome(numpy_nodes.dequantize, elements, scales, **options),
    )


@given(st.data(), st.integers(0, 9), st.sampled_from([0, 1, 31, 32, 33, 70]), FORMATS, RESULTS)
def test_embedding_gives_what_the_reference_gives(data: Any, v: int, d: int, b_format: str, dtype: str) -> None:
    rng = np.random.default_rng(v)
    wrong = data.draw(st.booleans(), label="wrong indices")
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3), label="shape of the indices")
    index = data.draw(st.sampled_from([np.int32, np.int64, np.int64, np.uint8]), label="dtype of the indices")
    ids = data.draw(views(rng.integers(-v - wrong, max(v, 1) + wrong, shape).astype(index)))
    table = [data.draw(views(rng.integers(0, 256, (v, n), dtype=np.uint8))) for n in (d, -(-d // 32))]
    options = {"b_format": b_format, "dtype": dtype}
    same(outcome(cpu.embedding, ids, *table, **options), outcome(numpy_nodes.embedding, ids, *table, **options))


@st.composite
def products(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """Draws the shapes of x, weight and bias: mostly ones that fit together."""
    sizes = st.sampled_from([0, 1, 2, 3, 5, 31, 32, 33, 70])
    m, n, k, other = (draw(sizes, label=name) for name in ("M", "N", "K", "another"))
    leading = draw(st.lists(st.sampled_from([0, 1, 2, 3]), max_size=2), label="leading")
    x = draw(st.sampled_from([(*leading, m, k), (m, k), (k,), (*leading, m, other), ()]), label="x")
    weight = draw(st.sampled_from([(n, k), (n, k), (*leading, n, k), (2, n, k), (1, n, k), (k,)]), label="weight")
    return x, weight, draw(st.sampled_from([None, None, (n,), (other,), (1, n)]), label="bias")


@given(st.data(), products(), FORMATS, RESULTS)
def test_weight_gemm_gives_what_the_reference_gives(data: Any, product: Any, b_format: str, dtype: str) -> None:
    x_shape, shape, bias_shape = product
    x = data.draw(views(data.draw(values(x_shape, data.draw(st.sampled_from(DTYPES)), calm=True))))
    b = tuple(
        data.draw(views(c)) for c in numpy_nodes.quantize(data.draw(values(shape, calm=True)), element_format=b_format)
    )
    bias = None if bias_shape is None else data.draw(values(bias_shape, calm=True))
    actual = outcome(cpu.weight_gemm, x, *b, bias, b_format=b_format, dtype=dtype)
    exact = outcome(numpy_nodes.weight_gemm, x, *b, bias, b_format=b_format)
    if isinstance(exact, tuple):
        same(actual, exact)
        return
    assert (actual.shape, actual.dtype) == (exact.shape, numerics.value_dtype(dtype))
    bound = numpy_nodes.gemm_error_bound(x, numpy_nodes.dequantize(*b, element_format=b_format), dtype, bias)
    actual = actual.astype(np.float64)
    assert np.isnan(actual[np.isnan(bound)]).all()  # a NaN in the row or in the weight
    fits = np.abs(exact) < (60_000 if dtype == "float16" else 1e38)
    excess = (np.abs(actual - exact) - bound)[fits & np.isfinite(bound)]
    assert (excess <= 0).all(), f"{excess.max()} beyond the bound"


@given(arrays(least=2, most=2), st.booleans(), FORMATS, ROUNDINGS)
def test_pack_gives_what_the_reference_gives(
    w: np.ndarray, transposed: bool, element_format: str, rounding: str
) -> None:
    options = {"element_format": element_format, "scale_rounding": rounding}
    packed = cpu.pack(w, transposed=transposed, **options)
    same((packed.elements, packed.scales), numpy_nodes.quantize(w.T if transposed else w, **options))
    bad = np.argwhere(~np.isfinite(w.astype(np.float32)))
    assert packed.first_nonfinite == (tuple(bad[0].tolist()) if len(bad) else None)


# --- quantize(..., out=(elements, scales)) ---------------------------------------------------------------------------

SHAPES = [((5, 96), -1), ((5, 70), -1), ((3, 40, 48), 1), ((37,), 0), ((0, 64), -1), ((4, 0), 1), ((70, 5), 0)]


@pytest.mark.parametrize("quantize", [numpy_nodes.quantize, cpu.quantize], ids=["reference", "kernels"])
@looped(
    "shape_and_axis, dtype, kind, order",
    pairwise(shape=SHAPES, dtype=numerics.VALUE_DTYPES, kind=[("e4m3", "ceil"), ("e5m2", "floor")], order="CF"),
)
def test_quantize_writes_the_same_bytes_into_given_arrays(
    quantize: Callable[..., Any], shape_and_axis: tuple[tuple[int, ...], int], dtype: str, kind: Any, order: str
) -> None:
    (shape, axis), (element_format, scale_rounding) = shape_and_axis, kind
    x = np.random.default_rng(0).standard_normal(shape).astype(numerics.value_dtype(dtype), order)
    options = {"axis": axis, "element_format": element_format, "scale_rounding": scale_rounding}
    expected = numpy_nodes.quantize(x, **options)
    rooms = [np.full((3, *codes.shape), 0xAA, np.uint8) for codes in expected]  # with arrays before and behind
    out = tuple(room[1] for room in rooms)
    got = quantize(x, **options, out=out)
    assert all(one is other for one, other in zip(got, out, strict=True))
    for room, codes in zip(rooms, expected, strict=True):
        np.testing.assert_array_equal(room[1], codes)
        assert (room[::2] == 0xAA).all()


@pytest.mark.parametrize(("backend", "more"), [(cpu, {"threads", "weight"}), (cuda, set())])
def test_a_backend_has_the_arguments_of_the_reference_in_its_order_and_some_of_its_own(backend: Any, more: set) -> None:
    shared = [name for name in backend.__all__ if inspect.isfunction(getattr(numpy_nodes, name, None))]
    assert "quantize" in shared
    for name in shared:
        theirs = inspect.signature(getattr(backend, name)).parameters.values()
        ours = inspect.signature(getattr(numpy_nodes, name)).parameters.values()
        alike = [(p.name, p.kind, p.default) for p in theirs if p.name not in more]
        assert alike == [(p.name, p.kind, p.default) for p in ours], name
