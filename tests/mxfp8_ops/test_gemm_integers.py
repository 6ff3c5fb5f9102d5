"""Gemms on integers: exact whatever the elements are, among them those that are no integers.

What holds of every gemm is in test_cpu.py; here are the values that these kernels treat apart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from compare import assert_same, assert_within
from grids import instruction_sets, looped, pairwise

from mxfp8_ops import cpu, numpy_nodes

ISAS = [isa for isa in cpu.available_isas() if isa.endswith("_vnni")]
if instruction_sets() != cpu.available_isas():
    ISAS = ISAS[:1]
ONE = np.uint8(0x38)
LARGEST = np.uint8(0x7E)  # 448
FINITE = np.arange(0x7F, dtype=np.uint8)
SMALL = FINITE[FINITE < 32]  # below 2^-3: no integers
LEAST_ROWS = {"avx512_vnni": 9, "avx2_vnni": 12}  # fewer are for gemm_skinny_f32


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest):
    with cpu.forced_isa(request.param):
        yield request.param


def multiply(*operands: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns cpu.gemm of them, and the kernels that ran."""
    with cpu.profiled() as profile:
        y = cpu.gemm(*operands)
        return y, profile.calls()[-1].gemms


def kernels_of(a: np.ndarray, b: np.ndarray, a_scale: int = 127, b_scale: int = 127) -> tuple[str, ...]:
    """Returns the kernels that multiply elements with one scale, after checking the result."""
    scales = [np.full((len(x), -(-x.shape[1] // 32)), scale, np.uint8) for x, scale in ((a, a_scale), (b, b_scale))]
    actual, kernels = multiply(a, scales[0], b, scales[1])
    x, w = (numpy_nodes.dequantize(e, s).astype(np.float64) for e, s in ((a, scales[0]), (b, scales[1])))
    assert_within(actual, x @ w.T, numpy_nodes.gemm_error_bound(x, w))
    return kernels


def ordinary(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Codes of 0.5 to 448, of both signs."""
    rng = np.random.default_rng(seed)
    return rng.integers(48, 0x7F, shape, dtype=np.uint8) | rng.choice([0, 0x80], shape).astype(np.uint8)


def test_elements_that_are_integers_are_multiplied_as_integers(isa):
    assert kernels_of(ordinary((40, 256), 1), ordinary((70, 256), 2)) == ("gemm_int16",)


@looped(
    "rows, magnitude", pairwise(rows=[12, 63, 64], magnitude=FINITE[1:])
)  # B's integers have one bit less from 64 rows on
def test_no_sum_of_a_block_overflows(isa, magnitude, rows):
    """All elements of A alike and of B the largest."""
    for sign in (0, 0x80):
        a, b = np.full((rows, 96), magnitude | sign, np.uint8), np.full((rows, 96), LARGEST)
        kernels_of(a, b)
        kernels_of(b, a)


@looped("rows, count", pairwise(rows=[12, 64], count=range(1, 33)))
def test_no_sum_overflows_however_many_elements_there_are(isa, count, rows):
    """The sum of a block of A decides how many bits its integers have."""
    a, b = np.zeros((rows, 64), np.uint8), np.full((16, 64), LARGEST)
    for magnitude in (0x7E, 0x76, 0x6E):
        a[:, :count] = a[:, 32 : 32 + count] = magnitude
        assert kernels_of(a, b) == ("gemm_int16",)


@looped(
    "rows, operand, code",
    pairwise(rows=[12, 64], operand=["a", "b"], code=[*SMALL[1:], 32, 39, 40, 47, 48, 55, 56, 63, 64]),
)
def test_one_small_element_among_large_ones_is_not_lost(isa, operand, code, rows):
    """Its product must not be lost, whatever it is multiplied with: the large elements meet zeros."""
    others = np.array([0, ONE, LARGEST, 1, 31, 32, 0x80 | 40], np.uint8)
    some = np.full((rows, 64), 0x7B, np.uint8)
    some[5, 9], some[7, 63] = code, code | 0x80
    for other in others:
        rest = np.zeros((rows + 5, 64), np.uint8)
        rest[2:4, 9] = rest[3, 63] = other
        assert kernels_of(*((some, rest) if operand == "a" else (rest[:rows], some))) == ("gemm_int16",)


@looped("shape", [(12, 16, 130), (70, 40, 300), (200, 130, 600), (300, 33, 800)])
def test_small_elements_in_every_chunk_and_panel_are_not_lost(isa, shape):
    """Large elements meet zeros, so that a small product that is lost shows."""
    m, n, k = shape
    a, b = ordinary((m, k), 1), ordinary((n, k), 2)
    a[:, ::2], b[:, 1::2] = 0, 0
    for at in (9, k // 2 + 1, k - 1):
        for elements, others, place in ((a, b, at), (b, a, at - 2)):
            rng = np.random.default_rng(place)
            signs = rng.choice([0, 0x80], len(elements)).astype(np.uint8)
            elements[:, place], others[:, place] = rng.choice(SMALL, len(elements)) | signs, ONE
    assert kernels_of(a, b) == ("gemm_int16",)


def test_every_element_times_every_element_is_exact(isa):
    """One element of each block is not zero, so that each product stands alone."""
    codes = np.array([*FINITE, *(FINITE | 0x80)], np.uint8)
    a, b = np.zeros((len(codes), 32), np.uint8), np.zeros((len(codes), 32), np.uint8)
    for k in (0, 1, 2, 3, 30, 31):
        a[:], b[:] = 0, 0
        a[:, k], b[:, k] = codes, codes
        scales = np.full((len(codes), 1), 127, np.uint8)
        actual, kernels = multiply(a, scales, b, scales)
        values = numpy_nodes.dequantize(codes[:, None], scales)[:, 0].astype(np.float64)
        expected = np.outer(values, values)
        wrong = np.argwhere(actual != expected)
        assert not len(wrong), f"{len(wrong)} products differ: codes {codes[wrong[0]]}, {actual[tuple(wrong[0])]!r}"
        assert "gemm_int16" in kernels


@looped("more, kernel", [(0, "gemm_int16"), (1, "gemm_f32"), (500, "gemm_f32")])
def test_too_many_small_elements_of_a_are_for_another_kernel(isa, more, kernel):
    """A tile has room for one of 24, less one."""
    a, b = np.full((LEAST_ROWS[isa], 256), 0x60, np.uint8), ordinary((16, 256), 2)
    tile = a[: {"avx512_vnni": 9, "avx2_vnni": 6}[isa]]
    tile.reshape(-1)[: tile.size // 24 - 1 + more] = 3
    assert kernels_of(a, b) == (kernel,)


@looped("rows, count", pairwise(rows=[12, 70], count=[11, 12, 13, 14, 100, 256]))
def test_no_small_element_of_a_column_is_lost(isa, count, rows):
    """From 13 of a column on they are integers of their own; the large elements of A meet zeros."""
    rng = np.random.default_rng(count)
    a, b = ordinary((rows, 600), 1), ordinary((40, 600), 2)
    a[rng.random(a.shape) < 0.02] = 9
    for column in (3, 17, 39):
        b[column] = 0
        at = rng.permutation(256)[:count]
        b[column, at] = rng.choice(SMALL, count) | rng.choice([0, 0x80], count).astype(np.uint8)
    assert kernels_of(a, b) == ("gemm_int16",)


@pytest.mark.parametrize(
    ("a_format", "b_format"), [("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2"), (None, "e4m3")]
)
def test_e5m2_and_float32_are_for_another_kernel(isa, a_format, b_format):
    b = np.full((9, 64), ONE), np.full((9, 2), 127, np.uint8)
    with cpu.profiled() as profile:
        if a_format is None:
            cpu.weight_gemm(np.ones((12, 64), np.float32), *b)
        else:
            a = numpy_nodes.quantize(np.ones((12, 64), np.float32), element_format=a_format)
            cpu.gemm(*a, *b, a_format=a_format, b_format=b_format)
        assert profile.calls()[-1].gemms == ("gemm_f32",)


@looped("scales", [(70, 70), (173, 173), (70, 173), (173, 70), (127, 69), (127, 174)])
def test_scales_at_the_ends_of_what_the_kernel_takes_are_exact(isa, scales):
    """Of B it takes any, one by one where a product with them may be no normal number."""
    a, b = ordinary((12, 96), 1), ordinary((17, 96), 2)
    a[3], b[5] = 0, 0
    a[3, 7], b[5, 40] = 1, 2  # small elements alone: not covered by the products of others
    a[:, 40], b[:, 7] = LARGEST, LARGEST
    assert kernels_of(a, b, *scales) == ("gemm_int16",)


@looped("scale", [0, 1, 69, 174, 220])
def test_scales_of_a_beyond_that_are_for_another_kernel(isa, scale):
    assert kernels_of(ordinary((12, 96), 1), ordinary((17, 96), 2), scale, min(254 - scale, 200)) == ("gemm_f32",)


def test_a_nan_is_in_its_row_or_column_and_others_are_the_same(isa):
    rng = np.random.default_rng(0)
    a, b = (numpy_nodes.quantize(rng.standard_normal((rows, 300)).astype(np.float32)) for rows in (40, 50))
    b[0][12, :256] = b[0][20, :256] = 3  # many small elements are integers of their own
    clean = cpu.gemm(*a, *b)
    a[0][3, 299], a[1][17, 2] = 0xFF, 255
    b[0][12, 5], b[0][20, 290], b[1][45, 9] = 0x7F, 0x7F, 255
    y, kernels = multiply(*a, *b)
    assert kernels == ("gemm_int16",)
    nan = np.zeros(y.shape, bool)
    nan[[3, 17]] = nan[:, [12, 20, 45]] = True
    np.testing.assert_array_equal(y, np.where(nan, np.nan, clean))


def test_all_combinations_of_few_rows_and_columns_are_exact(isa):
    """Tiles of one to twelve rows, panels of one register and two, tails of rows and of columns."""
    rng = np.random.default_rng(5)
    for m, n in itertools.product((*range(LEAST_ROWS[isa], 20), 23, 25), (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65)):
        x, w = rng.standard_normal((m, 130)), rng.standard_normal((n, 130))
        a, b = (numpy_nodes.quantize(v.astype(np.float32))[0] for v in (x, w))
        assert kernels_of(a, b) == ("gemm_int16",), (m, n)
    fewer = ordinary((LEAST_ROWS[isa] - 1, 512), 1)
    assert kernels_of(fewer, ordinary((16, 512), 2)) == ("gemm_skinny_f32",)


# --- INT8: a block's sum is exact and added once, so every instruction set gives these bits ---------------------------

HAVE_INT8 = [isa for isa in cpu.available_isas() if isa not in ("portable", "avx512", "amx_bf16")]


@pytest.mark.parametrize("isa", HAVE_INT8)
@pytest.mark.parametrize("codes", [(-128, 128), (-128, -127)], ids=["any", "all -128"])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 5, 64), (7, 33, 1056), (13, 70, 600)])
def test_sums_of_blocks_are_exact_and_added_in_order(isa, codes, m, n, k):
    rng = np.random.default_rng(m)
    a, b = (rng.integers(*codes, (rows, k)).astype(np.int8) for rows in (m, n))
    a_scales, b_scales = (rng.integers(117, 125, (rows, -(-k // 32)), dtype=np.uint8) for rows in (m, n))
    expected = np.zeros((m, n), np.float32)
    for block in range(a_scales.shape[1]):
        x, w = (part[:, 32 * block : 32 * block + 32].astype(np.float64) / 64 for part in (a, b))
        scales = np.ldexp(1.0, a_scales[:, block, None].astype(int) + b_scales[:, block].astype(int) - 254)
        expected = (expected + (x @ w.T) * scales).astype(np.float32)  # in float64 the sum is exact
    with cpu.forced_isa(isa), cpu.profiled() as profile:
        y = cpu.gemm(a.view(np.uint8), a_scales, b.view(np.uint8), b_scales, a_format="int8", b_format="int8")
        assert profile.calls()[-1].gemms == ("gemm_int8",)
    assert_same(y, expected)
