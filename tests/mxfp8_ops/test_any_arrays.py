"""Whatever the arrays are, the kernels do as `numpy_nodes` does; and what quantizing must be for any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import DTYPES, arrays, shapes, values, views

from mxfp8_ops import cpu, formats, numerics, numpy_nodes
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


# --- The native functions are those of numerics ------------------------------------------------------------------


@given(arrays((*DTYPES, np.dtype(np.float64))), AXES, FORMATS, ROUNDINGS)
def test_quantize(x: np.ndarray, axis: int, element_format: str, scale_rounding: str) -> None:
    options = {"axis": axis, "element_format": element_format, "scale_rounding": scale_rounding}
    same(outcome(cpu.quantize, x, **options), outcome(numpy_nodes.quantize, x, **options))


@given(st.data(), shapes(), AXES, FORMATS, RESULTS)
def test_dequantize(data: Any, shape: tuple[int, ...], axis: int, element_format: str, dtype: str) -> None:
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
def test_embedding(data: Any, v: int, d: int, b_format: str, dtype: str) -> None:
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
def test_weight_gemm(data: Any, product: Any, b_format: str, dtype: str) -> None:
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


@given(st.data(), st.sampled_from([(3, 70), (1, 32), (2, 3, 33), (0, 31), (5, 0)]), st.sampled_from([0, 1, 7]), FORMATS)
def test_gemm(data: Any, shape: tuple[int, ...], n: int, b_format: str) -> None:
    a, b = (
        numpy_nodes.quantize(data.draw(values(s, calm=True)), element_format=b_format) for s in (shape, (n, shape[-1]))
    )
    a, b = (tuple(data.draw(views(codes)) for codes in operand) for operand in (a, b))
    actual = cpu.gemm(*a, *b, a_format=b_format, b_format=b_format)
    exact = numpy_nodes.gemm(*a, *b, a_format=b_format, b_format=b_format)
    bound = numpy_nodes.gemm_error_bound(*(numpy_nodes.dequantize(*o, element_format=b_format) for o in (a, b)))
    assert (actual.shape, actual.dtype) == (exact.shape, exact.dtype)
    assert (np.isnan(actual) == np.isnan(exact)).all()
    assert (np.abs(actual.astype(np.float64) - exact) <= bound)[np.isfinite(bound)].all()


@given(arrays(least=2, most=2), st.booleans(), FORMATS, ROUNDINGS)
def test_pack(w: np.ndarray, transposed: bool, element_format: str, scale_rounding: str) -> None:
    options = {"element_format": element_format, "scale_rounding": scale_rounding}
    packed = cpu.pack(w, transposed=transposed, **options)
    same((packed.elements, packed.scales), numpy_nodes.quantize(w.T if transposed else w, **options))
    bad = np.argwhere(~np.isfinite(w.astype(np.float32)))
    assert packed.first_nonfinite == (tuple(bad[0].tolist()) if len(bad) else None)


# --- What quantizing must be -------------------------------------------------------------------------------------


@given(values((4, 70)), FORMATS, ROUNDINGS)
def test_quantizing_what_was_dequantized_changes_no_value(x: np.ndarray, element_format: str, rounding: str) -> None:
    once = numpy_nodes.dequantize(
        *numpy_nodes.quantize(x, element_format=element_format, scale_rounding=rounding), element_format=element_format
    )
    assume(np.isfinite(once).all())
    twice = numpy_nodes.dequantize(
        *numpy_nodes.quantize(once, element_format=element_format), element_format=element_format
    )
    assert twice.tobytes() == once.tobytes()


@given(values((8, 32), finite=True), st.integers(0, 31), st.floats(1, 1e6, width=32), FORMATS, ROUNDINGS)
def test_a_larger_value_never_has_a_smaller_scale(
    x: np.ndarray, at: int, factor: float, element_format: str, rounding: str
) -> None:
    larger = x.copy()
    larger[:, at] *= factor
    assume(np.isfinite(larger).all())
    before, after = (
        numpy_nodes.quantize(v, element_format=element_format, scale_rounding=rounding)[1] for v in (x, larger)
    )
    assert (before <= after).all()


@given(values((8, 70), finite=True), FORMATS, ROUNDINGS)
def test_the_error_is_half_a_step_or_what_saturates(x: np.ndarray, element_format: str, rounding: str) -> None:
    fmt = formats.element_format(element_format)
    elements, scales = numpy_nodes.quantize(x, element_format=element_format, scale_rounding=rounding)
    scale = np.repeat(numerics.decode_scale(scales).astype(np.float64), 32, -1)[:, :70]
    error = np.abs(numerics.decode(elements, fmt) * scale - x)
    half_step = np.maximum(np.abs(x) * 2.0 ** -(fmt.mantissa_bits + 1), fmt.min_subnormal / 2 * scale)
    saturates = (elements & 0x7F) == fmt.max_code
    assert (error <= np.where(saturates, np.maximum(half_step, np.abs(x) - fmt.max * scale), half_step)).all()
    if rounding == "ceil":
        assert (np.abs(x) <= fmt.max * scale).all()


@given(values((3, 70), finite=True), FORMATS, ROUNDINGS)
def test_the_sign_of_a_value_is_the_sign_of_its_element(x: np.ndarray, element_format: str, rounding: str) -> None:
    options = {"element_format": element_format, "scale_rounding": rounding}
    (plus, scales), (minus, same_scales) = numpy_nodes.quantize(x, **options), numpy_nodes.quantize(-x, **options)
    assert scales.tolist() == same_scales.tolist()
    # The negative of an INT8 code is its two's complement; a code of NaN has no sign there.
    if formats.element_format(element_format).twos_complement:
        finite = np.repeat(scales != formats.SCALE_NAN, formats.BLOCK_SIZE, -1)[..., : x.shape[-1]]
        plus, minus = plus[finite].view(np.int8), minus[finite].view(np.int8)
        assert (-plus).tolist() == minus.tolist()
    else:
        assert (plus ^ 0x80).tolist() == minus.tolist()
