"""The reference numerics, against written-out vectors, ml_dtypes, exact arithmetic and torchao."""

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same, random_values
from grids import looped, pairwise
from scale_definition import boundary_values, codes_by_definition

from mxfp8_ops import numerics, numpy_nodes
from mxfp8_ops.formats import E4M3, E5M2, ELEMENT_FORMATS, SCALE_ROUNDINGS, ElementFormat

E3M4 = ElementFormat(
    name="e3m4", numpy_name="float8_e3m4", exponent_bits=3, mantissa_bits=4, bias=3, max_code=0x6F,
    onnx_name="FLOAT8E3M4", onnx_dtype=99, cuda_name="E3M4", cuda_data_type=-1, safetensors_name="F8_E3M4",
)  # fmt: skip
"""A format that we do not have: a row is all that the reference needs."""
FORMATS = looped("fmt", [E4M3, E5M2, E3M4])

FLT_MAX = float(np.finfo(np.float32).max)
ABOVE_1_75 = float(np.nextafter(np.float32(1.75), np.float32(2)))
UPPER_PATTERNS = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
"""Every sign, exponent and leading 7 mantissa bits of a float32: all of bfloat16."""


def block(*values: float) -> np.ndarray:
    """Returns a block of 32 values: the given ones, then zeros."""
    x = np.zeros(32, np.float32)
    x[: len(values)] = values
    return x


def random_bits(seed: int, n: int) -> np.ndarray:
    """Returns float32 values of uniformly random bits, NaN and Inf among them."""
    return np.random.default_rng(seed).integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)


# --- Vectors -----------------------------------------------------------------------------------------------------

VECTORS = [
    ("at the maximum", [1.75, -1.7, 0.3, 0.1], "ceil", 119, "7e fe 6a 5d"),
    ("above the maximum", [1.85, -1.8, 0.3, 0.1], "ceil", 120, "77 f6 62 55"),
    ("above the maximum, saturating", [1.85, -1.8, 0.3, 0.1], "floor", 119, "7e fe 6a 5d"),
    ("one bit above the maximum", [ABOVE_1_75, -1, 0.1], "ceil", 120, "76 f0 55"),
    ("one bit above the maximum times 1024", [458752.03125, -1000, 3], "ceil", 138, "76 b0 01"),
    # The two above: torchao 0.18, modelopt and auto-round take log2(amax / 448) in float32, and answer one less.
    ("near two", [1.95, -1.8, 0.3, 0.1], "floor", 119, "7e fe 6a 5d"),
    ("near two", [1.95, -1.8, 0.3, 0.1], "even", 120, "78 f6 62 55"),
    ("near two", [1.95, -1.8, 0.3, 0.1], "ceil", 120, "78 f6 62 55"),
    ("scale code 0 is exact", [448 * 2.0**-127, 2.0**-120, 2.0**-126], "ceil", 0, "7e 70 40"),
    ("largest float32", [FLT_MAX, -1e38, 1], "ceil", 247, "78 e9 00"),
    ("ties", [256, 1.0625, 1.1875, -1.0625, 17, 19, 2.0**-10, 3 * 2.0**-10, -(2.0**-10)], "ceil", 127,
     "78 38 3a b8 58 5a 00 02 80"),
    ("NaN poisons", [np.nan, 1, -2, 448], "ceil", 255, "7f " * 32),
    ("Inf poisons", [np.inf, 1, -2, 448], "ceil", 255, "7f " * 32),
    ("-Inf poisons", [1, -np.inf, -2, 448], "floor", 255, "7f " * 32),
    ("minus zero", [-0.0] * 32, "ceil", 0, "80 " * 32),
    ("zero", [], "ceil", 0, "00 " * 32),
]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "scale_rounding", "scale", "elements"),
    [pytest.param(*vector, id=f"{name}, {vector[1]}") for name, *vector in VECTORS],
)
def test_a_written_out_block_has_these_codes(
    values: list[float], scale_rounding: str, scale: int, elements: str
) -> None:
    got, scales = numpy_nodes.quantize(block(*values), scale_rounding=scale_rounding)
    expected = bytes.fromhex(elements)
    assert scales.tolist() == [scale]
    assert got.tobytes()[: len(expected)].hex(" ") == expected.hex(" ")


@looped("scale_rounding, bad", pairwise(rounding=SCALE_ROUNDINGS, bad=[np.nan, -np.nan, np.inf, -np.inf]))
def test_a_bad_value_poisons_its_block_and_no_other_in_e5m2(bad: float, scale_rounding: str) -> None:
    x = np.concatenate([block(1), block(1, bad, -0.0), block(1)])
    elements, scales = numpy_nodes.quantize(x, element_format="e5m2", scale_rounding=scale_rounding)
    assert scales[1] == 255
    assert set(elements[32:64]) == {0x7F}
    assert scales[0] == scales[2] < 255
    assert np.isnan(numpy_nodes.dequantize(elements, scales, element_format="e5m2")[32:64]).all()


# --- Elements ----------------------------------------------------------------------------------------------------


@FORMATS
def test_decode_of_all_codes_is_ml_dtypes(fmt: ElementFormat) -> None:
    codes = np.arange(256, dtype=np.uint8)
    got, expected = numerics.decode(codes, fmt), codes.view(fmt.numpy_name).astype(np.float32)
    for code in codes:
        same = got[code].tobytes() == expected[code].tobytes() or (np.isnan(got[code]) and np.isnan(expected[code]))
        assert same, f"code {code:#04x}: got {got[code]!r}, expected {expected[code]!r}"


def halfway(fmt: ElementFormat) -> np.ndarray:
    """Returns the values in the middle of neighbouring elements, with their own neighbours, of both signs."""
    codes = np.arange(fmt.max_code, dtype=np.uint8)  # each with the next one up
    middle = (numerics.decode(codes, fmt) + numerics.decode(codes + np.uint8(1), fmt)) / np.float32(2)
    ends = np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(np.inf))
    return np.concatenate([*ends, *(-values for values in ends)])


@FORMATS
def test_encode_is_ml_dtypes_but_saturates(fmt: ElementFormat) -> None:
    in_range = np.random.default_rng(1).uniform(-1.25 * fmt.max, 1.25 * fmt.max, 1 << 18).astype(np.float32)
    x = np.concatenate([UPPER_PATTERNS, random_bits(0, 1 << 18), in_range, halfway(fmt)])
    with np.errstate(all="ignore"):
        expected = np.clip(x, -fmt.max, fmt.max).astype(fmt.numpy_name).view(np.uint8)
    expected = np.where(np.isnan(x), np.uint8(0x7F), expected)
    assert_same(numerics.encode(x, fmt), expected, source=x)


def test_decode_scale_is_a_power_of_two_down_to_the_subnormal_one() -> None:
    values = numerics.decode_scale(np.arange(256, dtype=np.uint8))
    assert [Fraction(float(v)) for v in values[:255]] == [Fraction(2) ** (s - 127) for s in range(255)]
    assert np.isnan(values[255])


BFLOAT16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)


@looped("fmt, rounding", itertools.product(ELEMENT_FORMATS, SCALE_ROUNDINGS))
def test_the_reference_is_the_definition(fmt: str, rounding: str) -> None:
    for x in (boundary_values(), BFLOAT16.astype(np.float32)):
        elements, scales = numpy_nodes.quantize(x[:, None], element_format=fmt, scale_rounding=rounding)
        expected = codes_by_definition(x[:, None], ELEMENT_FORMATS[fmt], rounding)
        assert_same(scales, expected[1], "scales", x[:, None])
        assert_same(elements, expected[0], "elements", x[:, None])


@pytest.mark.parametrize(("rounding", "last"), [("ceil", 0x7F0000), ("even", 0x7F7FFF), ("floor", 0x7FFFFF)])
def test_a_subnormal_amax_takes_the_smallest_scale_that_the_definition_allows(rounding: str, last: int) -> None:
    """By fractions: with INT8, scale code 0 holds 127/64 * 2^-127, which has the bits 0x7f0000."""
    amax = np.array([last, last + 1], np.uint32).view(np.float32)
    scales = numpy_nodes.quantize(amax[:, None], element_format="int8", scale_rounding=rounding)[1]
    assert scales[:, 0].tolist() == [0, 1]
    exact = [Fraction(float(value)) for value in amax]
    if rounding == "ceil":
        assert exact[0] == Fraction(127, 64) * Fraction(1, 2**127)
    if rounding == "even":  # the mantissa of 2^-127 has units of 2^-133
        assert [int(value * 2**133 + Fraction(1, 2)) for value in exact] == [127, 128]


# --- Blocks and shapes -------------------------------------------------------------------------------------------


@looped("k", [1, 31, 32, 33, 70])
def test_a_partial_block_is_as_if_zero_padded(k: int) -> None:
    x = random_values(0, 3, k)
    padded = np.zeros((3, -(-k // 32) * 32), np.float32)
    padded[:, :k] = x
    elements, scales = numpy_nodes.quantize(x)
    padded_elements, padded_scales = numpy_nodes.quantize(padded)
    assert_same(elements, padded_elements[:, :k], source=x)
    assert scales.tolist() == padded_scales.tolist()


# --- Values ------------------------------------------------------------------------------------------------------


@looped("fmt", [E4M3, E5M2])
def test_dequantize_is_exact_for_every_code_at_the_edges_of_the_scale(fmt: ElementFormat) -> None:
    codes = np.arange(256, dtype=np.uint8)
    elements = codes.view(fmt.numpy_name).astype(np.float64)
    for s in (0, 1, 2, 126, 127, 128, 253, 254):
        values = numpy_nodes.dequantize(codes, np.full(8, s, np.uint8), element_format=fmt.name)
        for code, element, value in zip(range(256), elements, values, strict=True):
            if not np.isfinite(element):
                assert np.isnan(value) if np.isnan(element) else value == element
                continue
            exact = Fraction(element) * Fraction(2) ** (s - 127)
            if abs(exact) > Fraction(FLT_MAX):
                assert value == np.copysign(np.inf, element), f"code {code:#04x} scale {s}"
            elif exact.denominator <= 1 << 149:  # float32 holds it
                assert Fraction(float(value)) == exact, f"code {code:#04x} scale {s}: {value!r}"
                assert np.signbit(value) == bool(code & 0x80)


# --- Gemm --------------------------------------------------------------------------------------------------------


def test_a_small_gemm_has_the_results_of_a_hand_calculation() -> None:
    a = numpy_nodes.quantize(np.float32([[1, 2, 3], [0, -1, 0.5]]))
    b = numpy_nodes.quantize(np.float32([[1, 1, 1], [2, 0, -4]]))
    bias = np.float32([10, 20])
    assert numpy_nodes.gemm(*a, *b).tolist() == [[6, -10], [-0.5, -2]]
    assert numpy_nodes.gemm(*a, *b, bias).tolist() == [[16, 10], [9.5, 18]]
    assert numpy_nodes.gemm(a[0][0], a[1][0], *b, bias).tolist() == [16, 10]


def test_weight_gemm_uses_x_as_it_is() -> None:
    x = np.float32([[1 + 2.0**-20, 0, 0]])  # not an element: quantizing it would lose the small part
    b = numpy_nodes.quantize(np.float32([[1, 1, 1], [2, 0, -4]]))
    assert numpy_nodes.weight_gemm(x, *b).tolist() == [[1 + 2.0**-20, 2 + 2.0**-19]]


# --- The error bound ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def operands() -> tuple[np.ndarray, np.ndarray]:
    """Dequantized x [16, 2048] and weight [24, 2048]."""
    x, weight = random_values(0, 16, 2048), random_values(1, 24, 2048)
    return numpy_nodes.dequantize(*numpy_nodes.quantize(x)), numpy_nodes.dequantize(*numpy_nodes.quantize(weight))


def accumulate(x: np.ndarray, weight: np.ndarray, dtype: type) -> np.ndarray:
    """Returns x @ weight.T, one product after the other in `dtype`."""
    total = np.zeros((len(x), len(weight)), dtype)
    for k in range(x.shape[-1]):
        total = (total + (x[:, k, None] * weight[:, k]).astype(dtype)).astype(dtype)
    return total.astype(np.float64)


def test_float32_sums_in_any_order_stay_within_the_bound(operands) -> None:
    x, weight = operands
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    bound = numpy_nodes.gemm_error_bound(x, weight)
    rng = np.random.default_rng(0)
    orders = [np.arange(2048), np.argsort(-np.abs(x).max(0)), rng.permutation(2048), rng.permutation(2048)]
    for order in orders:
        error = np.abs(accumulate(x[:, order], weight[:, order], np.float32) - exact)
        assert (error > 0).any(), "the sums were exact: this data proves nothing"
        assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"


def test_bfloat16_sums_break_the_bound(operands) -> None:
    x, weight = operands
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    error = np.abs(accumulate(x, weight, ml_dtypes.bfloat16) - exact)
    assert (error > numpy_nodes.gemm_error_bound(x, weight)).mean() > 0.5


@looped("dtype", numerics.VALUE_DTYPES)
def test_the_bound_allows_the_rounding_of_the_result_and_little_more(operands, dtype: str) -> None:
    x, weight = operands[0] / 64, operands[1] / 64  # inside the range of float16
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    bound = numpy_nodes.gemm_error_bound(x, weight, dtype)
    stored = accumulate(x, weight, np.float32).astype(numerics.value_dtype(dtype)).astype(np.float64)
    assert (np.abs(stored - exact) <= bound).all()
    magnitude = np.abs(x).astype(np.float64) @ np.abs(weight).T.astype(np.float64)
    assert (bound < 0.01 * magnitude).all()


def test_the_bound_covers_a_large_bias_and_products_that_underflow() -> None:
    x, weight = np.full((1, 64), 1.5 * 2.0**-80, np.float32), np.full((1, 64), 2.0**-70, np.float32)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.abs(accumulate(x, weight, np.float32) - exact) > 0
    assert np.abs(accumulate(x, weight, np.float32) - exact) <= numpy_nodes.gemm_error_bound(x, weight)
    x, weight, bias = np.float32([[1 / 3]]), np.float32([[1]]), np.float32([1e6])
    error = abs(float(x[0, 0] + bias[0]) - (float(x[0, 0]) + 1e6))
    assert numpy_nodes.gemm_error_bound(x, weight) < error <= numpy_nodes.gemm_error_bound(x, weight, bias=bias)


# --- torchao -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@looped(
    "element_format, rule",
    pairwise(fmt=ELEMENT_FORMATS, rule=[("ceil", "RCEIL"), ("floor", "FLOOR"), ("even", "EVEN")]),
)
def test_torchao_gives_the_same_bytes_where_it_is_right(element_format: str, rule: tuple[str, str]) -> None:
    """Finite data with scale codes above 0.

    torchao 0.18 scales by 1 or 2^-126 where the code is 0 (2^-127), and keeps Inf as a large finite value.
    """
    scale_rounding, mode = rule
    torch = pytest.importorskip("torch")
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    finite = np.sort(np.abs(UPPER_PATTERNS[np.isfinite(UPPER_PATTERNS)]))[: 65024 // 64 * 64].reshape(-1, 64)
    signs = np.random.default_rng(0).choice(np.float32([-1, 1]), finite.shape)
    x = np.concatenate([finite * signs, random_values(0, 1024, 64)])
    elements, scales = numpy_nodes.quantize(x, element_format=element_format, scale_rounding=scale_rounding)
    dtype = getattr(torch, ELEMENT_FORMATS[element_format].numpy_name)
    theirs = mx_tensor.to_mx(torch.from_numpy(x), dtype, 32, getattr(mx_tensor.ScaleCalculationMode, mode))
    their_scales, their_elements = (t.view(torch.uint8).numpy() for t in theirs)
    assert (scales > 0).sum() > 2000
    assert_same(their_scales, scales)
    rows = (scales > 0).all(-1)
    assert_same(their_elements[rows], elements[rows], source=x[rows])
