"""The fused nodes: their kernels against the reference on every instruction set, and bad values in their bodies."""

from __future__ import annotations

import numpy as np
import pytest
from compare import assert_within, heavy_tailed
from grids import looped, pairwise
from one_node import one_node_model, run
from ort_models import check_fault

from mxfp8_ops import contract, cpu, numerics, numpy_nodes
from mxfp8_ops.contract import FLOAT
from mxfp8_ops.nodes.fused_gemm import FUNCTIONS, UNIT

ONE = numpy_nodes.quantize(np.eye(1, 32, dtype=np.float32))
"""A weight that multiplies the first value of a row by 1: the sum is that value."""

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning")


SHAPES = [
    *((1, 1, 1), (1, 67, 40), (3, 16, 0), (4, 96, 64), (17, 130, 33), (40, 320, 64), (64, 65, 96), (200, 48, 70)),
    *((300, 100, 64), (0, 5, 8), (5, 0, 8)),
]


def as_sums(values: np.ndarray) -> np.ndarray:
    """Returns an X whose products with ONE are `values`."""
    return np.pad(np.float32(values)[:, None], ((0, 0), (0, 31)))


# --- epilogues -----------------------------------------------------------------------------------------------------


@looped("epilogue", contract.EPILOGUES)
def test_an_epilogue_is_within_its_error_of_the_exact_function(isa, epilogue):
    rng = np.random.default_rng(0)
    ends = np.float32([5.25, -5.25, 87, -87, 88.4, -88.4, 89, -89, 3e38, -3e38, 2.0**-126, -(2.0**-149)])
    values = np.concatenate(
        [
            *(np.linspace(-end, end, 50_001) for end in (6, 12, 100)),
            np.ldexp(rng.standard_normal(50_000), rng.integers(-149, 127, 50_000)),
            *(np.nextafter(ends, np.float32(to)) for to in (-np.inf, np.inf)),
            ends,
        ]
    ).astype(np.float32)
    row = FUNCTIONS[epilogue]
    sums = values.astype(np.float64)
    bound = row.error * UNIT * np.abs(sums) + 2.0**-149
    assert_within(
        cpu.fused_weight_gemm(as_sums(values), *ONE, epilogue=epilogue)[:, 0], row.function(sums), bound, epilogue
    )


@looped("epilogue", contract.EPILOGUES)
def test_no_epilogue_exceeds_its_argument_or_is_steeper_than_it_says(epilogue):
    x = np.linspace(-20, 20, 1_000_001)
    y = FUNCTIONS[epilogue].function(x)
    assert (np.abs(y) <= np.abs(x)).all()
    steepest = np.abs(np.diff(y) / np.diff(x)).max()
    assert FUNCTIONS[epilogue].steepest - 0.01 < steepest <= FUNCTIONS[epilogue].steepest * (1 + 1e-9)


@looped("epilogue", contract.EPILOGUES)
def test_bad_sums_are_as_bad_as_the_composition_makes_them(isa, epilogue):
    x = as_sums(np.float32([np.nan, np.inf, -np.inf, 0, -0.0]))
    expected = numpy_nodes.fused_weight_gemm(x, *ONE, epilogue=epilogue)
    np.testing.assert_array_equal(cpu.fused_weight_gemm(x, *ONE, epilogue=epilogue), expected)
    assert np.isnan(expected[0, 0])
    assert expected[1, 0] == np.inf


@looped("epilogue", contract.EPILOGUES)
def test_a_body_gives_bad_values_where_the_reference_does(epilogue):
    x = as_sums(np.float32([np.nan, np.inf, -np.inf, 300, -300]))
    inputs = {"X": (x, FLOAT), "B": (ONE[0], contract.FLOAT8E4M3FN), "B_scales": (ONE[1], contract.UINT8)}
    model = one_node_model("MXFP8FusedWeightGemm", inputs, {"Y": FLOAT}, 23, {"epilogue": epilogue})
    got, expected = run(model, inputs)[0], numpy_nodes.fused_weight_gemm(x, *ONE, epilogue=epilogue)
    finite = np.isfinite(expected)
    assert np.isfinite(got).tolist() == finite.tolist(), (got, expected)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=0, atol=1e-5)


# --- gemms ---------------------------------------------------------------------------------------------------------


def check_gemm(
    shape: tuple[int, int, int], epilogue: str, dtype: str = "float32", factor_dtype: str | None = "float32"
) -> None:
    m, n, k = shape
    small = np.float32(0.1)  # float16 has to hold the results
    a, b = numpy_nodes.quantize(small * heavy_tailed((m, k))), numpy_nodes.quantize(small * heavy_tailed((n, k), 1))
    factor = None if factor_dtype is None else (small * heavy_tailed((m, n), 2)).astype(factor_dtype)
    bias = None if factor_dtype == "bfloat16" else heavy_tailed((n,), 3)
    x, w = numpy_nodes.dequantize(*a), numpy_nodes.dequantize(*b)
    options = {"factor": factor, "epilogue": epilogue}
    bound = numpy_nodes.fused_gemm_error_bound(x, w, dtype, bias, **options)
    got = cpu.fused_gemm(*a, *b, bias, dtype=dtype, **options)
    what = f"{shape} {epilogue} {dtype} factor {factor_dtype}"
    assert_within(got, numpy_nodes.fused_gemm(*a, *b, bias, **options), bound, what)
    got = cpu.fused_weight_gemm(x, *b, bias, dtype=dtype, **options)
    assert_within(got, numpy_nodes.fused_weight_gemm(x, *b, bias, **options), bound, f"weight {what}")


@looped(
    "epilogue, dtype, factor",
    pairwise(epilogue=contract.EPILOGUES, dtype=numerics.VALUE_DTYPES, factor=[None, *numerics.VALUE_DTYPES]),
)
def test_fused_gemms_are_within_the_bound_for_every_dtype(isa, epilogue, dtype, factor):
    check_gemm((5, 70, 96), epilogue, dtype, factor)


@looped("epilogue, shape", pairwise(epilogue=contract.EPILOGUES, shape=SHAPES))
def test_fused_gemms_are_within_the_bound_in_every_kernel(isa, epilogue, shape):
    check_gemm(shape, epilogue)


def test_fused_gemms_broadcast_leading_dimensions(isa):
    a, b = numpy_nodes.quantize(heavy_tailed((2, 1, 3, 40))), numpy_nodes.quantize(heavy_tailed((4, 5, 40), 1))
    factor = heavy_tailed((2, 4, 3, 5), 2)
    options = {"epilogue": "gelu", "factor": factor}
    bound = numpy_nodes.fused_gemm_error_bound(numpy_nodes.dequantize(*a), numpy_nodes.dequantize(*b), **options)
    assert_within(cpu.fused_gemm(*a, *b, **options), numpy_nodes.fused_gemm(*a, *b, **options), bound, "batched")


def test_a_fused_gemm_of_a_vector_rounds_its_activation(isa):
    x, b, factor = heavy_tailed((40,)), numpy_nodes.quantize(heavy_tailed((5, 40), 1)), heavy_tailed((10,), 2)[::2]
    options = {"epilogue": "silu", "factor": factor}
    rounded = x.astype(numerics.value_dtype("bfloat16"))
    got = cpu.fused_weight_gemm(x, *b, activation_dtype="bfloat16", **options)
    bound = numpy_nodes.fused_gemm_error_bound(rounded, numpy_nodes.dequantize(*b), **options)
    assert_within(got, numpy_nodes.fused_weight_gemm(x, *b, activation_dtype="bfloat16", **options), bound, "vector")
    assert_within(got, numpy_nodes.fused_weight_gemm(rounded, *b, **options), bound, "vector")


def test_the_bound_catches_another_epilogue():
    x, b = heavy_tailed((8, 64)), numpy_nodes.quantize(heavy_tailed((8, 64), 1))
    exact = numpy_nodes.fused_weight_gemm(x, *b, epilogue="gelu")
    wrong = np.abs(exact - numpy_nodes.fused_weight_gemm(x, *b, epilogue="gelu_tanh"))
    assert (wrong > numpy_nodes.fused_gemm_error_bound(x, numpy_nodes.dequantize(*b), epilogue="gelu")).any()


X = np.ones((3, 64), np.float32)
FAULTS = {
    "epilogue": (
        "FusedWeightGemm",
        {"epilogue": "swish"},
        {"x": X, "be": X, "bs": X[:, :2]},
        f"epilogue 'swish'; expected {', '.join(contract.EPILOGUES[:-1])} or {contract.EPILOGUES[-1]};",
    ),
    "factor": (
        "GatedWeightGemm",
        {},
        {"x": X, "be": X, "bs": X[:, :2], "factor": X[0, :7]},
        r"factor has shape \(7,\); expected \(3, 3\), .* of the result; broadcast it first",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_node_names_what_does_not_fit(fault):
    check_fault(*FAULTS[fault])
