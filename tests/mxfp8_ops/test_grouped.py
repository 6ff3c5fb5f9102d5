"""MXFP8GroupedGemm and MXFP8GroupedWeightGemm: the reference, their bodies on stock ONNX Runtime, and the kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_onnx_functions import assert_within, one_node_model, random_values, run
from test_ort import cast, model, node

from mxfp8_ops import contract, cpu, formats, numerics, ort
from mxfp8_ops.contract import BFLOAT16, FLOAT, FLOAT8E4M3FN, FLOAT16, INT64, UINT8
from mxfp8_ops.errors import ShapeError

CASES: dict[str, tuple[tuple[int, ...], int, int, Any]] = {
    # shape of A, N, E, experts
    "any order, one row each": ((7, 1, 70), 40, 4, [3, 0, 0, 2, 3, -1, -4]),
    "experts without rows": ((3, 1, 64), 33, 8, [5, 5, 2]),
    "rows without an expert": ((5, 1, 96), 40, 4, [4, 1, 4, 0, 4]),
    "nobody has an expert": ((2, 1, 64), 40, 4, [4, 4]),
    "several rows each": ((3, 5, 70), 40, 4, [1, 3, 1]),
    "one expert for all": ((6, 70), 40, 4, 2),
    "no expert for all": ((6, 70), 40, 4, 4),
    "rows broadcast": ((3, 1, 2, 70), 40, 4, [[0, 1], [2, 4], [0, 0]]),
    "experts broadcast": ((2, 3, 1, 70), 40, 4, [[1], [3]]),
    "a single expert": ((3, 1, 64), 40, 1, [0, 1, 0]),
    "no rows": ((0, 1, 64), 40, 4, []),
    "no columns": ((2, 1, 64), 0, 4, [0, 1]),
    "no depth": ((2, 1, 0), 40, 4, [0, 1]),
    "many rows": ((300, 1, 96), 70, 3, [1, 2, 0] * 100),
}
"""Groups that lie together and groups that do not, K that are and are no multiple of 32."""

EVERY_CASE = pytest.mark.parametrize("name", CASES)


class Case:
    """Operands of a grouped product, and what it must give."""

    def __init__(self, name: str, a_format: str = "e4m3", b_format: str = "e4m3") -> None:
        shape, n, e, experts = CASES[name]
        self.x = random_values(1, *shape)
        self.a = numerics.quantize(self.x, element_format=a_format)
        self.b = numerics.quantize(random_values(2, e, n, shape[-1]), element_format=b_format)
        self.experts = np.asarray(experts, np.int64)
        self.weight = numerics.dequantize(*self.b, element_format=b_format)
        """float32 [E, N, K]."""

    def exact(self, a: np.ndarray) -> np.ndarray:
        """Returns what rows `a` give, one product after another, in float64."""
        lead = np.broadcast_shapes(a.shape[:-2], self.experts.shape)
        y = np.zeros((*lead, a.shape[-2], self.weight.shape[1]))
        experts, rows = np.broadcast_to(self.experts, lead), np.broadcast_to(a, (*lead, *a.shape[-2:]))
        for at in np.ndindex(*lead):
            if experts[at] != len(self.weight):
                y[at] = rows[at].astype(np.float64) @ self.weight[experts[at]].T.astype(np.float64)
        return y

    def bound(self, a: np.ndarray, dtype: str = "float32") -> np.ndarray:
        """Returns how far from `exact` float32 sums may be; not at all where there is no expert."""
        count = len(self.weight)
        bound = numerics.gemm_error_bound(a, self.weight[self.experts % count], dtype)
        return np.where((self.experts == count)[..., None, None], 0, bound)


def bodies(op: str, case: Case, opset: int = contract.MIN_OPSET, **attributes: Any) -> np.ndarray:
    """Returns what the function body of `op` gives on stock ONNX Runtime, with the weights as initializers."""
    activations = {"A": (case.a[0], FLOAT8E4M3FN), "A_scales": (case.a[1], UINT8)}
    if op == contract.GROUPED_WEIGHT_GEMM.name:
        activations = {"X": (case.x, FLOAT)}
    weights = {"B": (case.b[0], FLOAT8E4M3FN), "B_scales": (case.b[1], UINT8)}
    inputs = {**activations, **weights, "experts": (case.experts, INT64)}
    dtype = attributes.setdefault("output_dtype", FLOAT)
    return run(one_node_model(op, inputs, {"Y": dtype}, opset, attributes, constants=tuple(weights)), inputs)[0]


# --- The reference -------------------------------------------------------------------------------------------------


@EVERY_CASE
def test_reference_is_one_product_per_expert(name: str) -> None:
    case = Case(name)
    values = numerics.dequantize(*case.a)
    assert_within(numerics.grouped_gemm(*case.a, *case.b, case.experts), case.exact(values), case.bound(values))
    got = numerics.grouped_weight_gemm(case.x, *case.b, case.experts)
    assert_within(got, case.exact(case.x), case.bound(case.x))


def test_reference_gives_zero_where_nobody_multiplies_a_nan() -> None:
    case = Case("rows without an expert")
    case.x[0] = np.nan
    y = numerics.grouped_weight_gemm(case.x, *case.b, case.experts)
    assert (y[[0, 2, 4]] == 0).all()
    assert np.isfinite(y).all()


def test_reference_rounds_activations_if_asked() -> None:
    case = Case("any order, one row each")
    got = numerics.grouped_weight_gemm(case.x, *case.b, case.experts, activation_dtype="bfloat16")
    rounded = case.x.astype(numerics.value_dtype("bfloat16")).astype(np.float32)
    assert_within(got, case.exact(rounded), case.bound(rounded))
    assert (np.abs(got - case.exact(case.x)) > case.bound(case.x)).any()


@pytest.mark.parametrize("index", [5, -5, 2**40, -(2**63)])
def test_reference_refuses_an_index_beyond_the_experts(index: int) -> None:
    case = Case("one expert for all")
    with pytest.raises(ShapeError, match=rf"expert {index} of 4; expected -4 to 3, or 4 for none; "):
        numerics.grouped_gemm(*case.a, *case.b, np.array([[index]]))


@pytest.mark.parametrize(
    ("x", "b", "experts", "message"),
    [
        ((3, 64), (4, 40, 32), (), r"operands \(3, 64\) and \(4, 40, 32\); expected \[\.\.\., M, K\]"),
        ((64,), (4, 40, 64), (), r"operands \(64,\)"),
        ((3, 64), (40, 64), (), r"and \(40, 64\)"),
        ((3, 1, 64), (4, 40, 64), (2,), "leading dimensions that broadcast"),
    ],
)
def test_reference_refuses_shapes_that_do_not_fit(
    x: tuple[int, ...], b: tuple[int, ...], experts: tuple[int, ...], message: str
) -> None:
    weight = numerics.quantize(np.ones(b, np.float32))
    with pytest.raises(ShapeError, match=message):
        numerics.grouped_weight_gemm(np.ones(x, np.float32), *weight, np.zeros(experts, np.int64))


# --- The function bodies -------------------------------------------------------------------------------------------


@EVERY_CASE
def test_bodies_give_the_reference(name: str) -> None:
    case = Case(name)
    values = numerics.dequantize(*case.a)
    assert_within(bodies("MXFP8GroupedGemm", case), case.exact(values), case.bound(values))
    assert_within(bodies("MXFP8GroupedWeightGemm", case), case.exact(case.x), case.bound(case.x))


@pytest.mark.parametrize("opset", [23, 26])
def test_bodies_at_other_opsets(opset: int) -> None:
    case = Case("rows without an expert")
    got = bodies("MXFP8GroupedWeightGemm", case, opset)
    assert_within(got, case.exact(case.x), case.bound(case.x))


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=contract.VALUE_NAMES.get)
def test_bodies_round_to_the_result_dtype(dtype: int) -> None:
    case = Case("any order, one row each")
    case.x /= 64  # so that float16 holds the results
    got = bodies("MXFP8GroupedWeightGemm", case, output_dtype=dtype)
    assert_within(got, case.exact(case.x), case.bound(case.x, contract.VALUE_NAMES[dtype]))


def test_bodies_round_activations_if_asked() -> None:
    case = Case("any order, one row each")
    rounded = case.x.astype(numerics.value_dtype("bfloat16")).astype(np.float32)
    got = bodies("MXFP8GroupedWeightGemm", case, activation_dtype=BFLOAT16)
    assert_within(got, case.exact(rounded), case.bound(rounded))
    assert (np.abs(got - case.exact(case.x)) > case.bound(case.x)).any()


@pytest.mark.parametrize("index", [5, -5, 2**40])
@pytest.mark.parametrize("op", ["MXFP8GroupedGemm", "MXFP8GroupedWeightGemm"])
def test_bodies_fail_on_an_index_beyond_the_experts(op: str, index: int) -> None:
    case = Case("one expert for all")
    case.experts = np.array([index])
    with pytest.raises(Exception, match="out of data bounds"):
        bodies(op, case)


# --- The processor -------------------------------------------------------------------------------------------------


@pytest.fixture(params=cpu.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with cpu.forced_isa(request.param):
        yield request.param


@pytest.mark.parametrize("threads", [1, 3])
@EVERY_CASE
def test_kernels_give_the_reference(name: str, threads: int, isa: str) -> None:
    for a_format, b_format in itertools.product(formats.ELEMENT_FORMATS, formats.ELEMENT_FORMATS):
        case = Case(name, a_format, b_format)
        both = {"a_format": a_format, "b_format": b_format}
        values = numerics.dequantize(*case.a, element_format=a_format)
        got = cpu.grouped_gemm(*case.a, *case.b, case.experts, **both, threads=threads)
        assert_within(got, case.exact(values), case.bound(values))


@pytest.mark.parametrize("dtype", numerics.VALUE_DTYPES)
@EVERY_CASE
def test_weight_only_kernels_give_the_reference(name: str, dtype: str, isa: str) -> None:
    case = Case(name)
    x = (case.x / 64).astype(numerics.value_dtype(dtype))  # so that float16 holds the results
    got = cpu.grouped_weight_gemm(x, *case.b, case.experts, dtype=dtype, threads=2)
    assert got.dtype == x.dtype
    assert_within(got, case.exact(x.astype(np.float32)), case.bound(x.astype(np.float32), dtype))


@pytest.mark.parametrize("dtype", numerics.VALUE_DTYPES)
def test_kernels_round_activations_as_numpy_does(dtype: str, isa: str) -> None:
    # One weight of 1 per output column makes the result the rounded activation itself.
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = (bits.astype(np.uint32) << 16 | np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)[:, None]).view(np.float32)
    x = {"float16": bits.view(np.float16), "bfloat16": bits.view(ml_dtypes.bfloat16)}.get(dtype, wide).reshape(-1, 1, 1)
    one = numerics.quantize(np.ones((2, 1, 1), np.float32))
    experts = np.arange(len(x)) % 2
    got = cpu.grouped_weight_gemm(x, *one, experts, activation_dtype="bfloat16")
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    wrong = np.flatnonzero(~((got == rounded) | (np.isnan(got) & np.isnan(rounded))))
    assert not len(wrong), f"{x[wrong[0]]}: got {got[wrong[0]]}, expected {rounded[wrong[0]]}"


def test_kernels_read_no_row_without_an_expert(isa: str) -> None:
    case = Case("rows without an expert")
    case.x[0] = np.nan
    y = cpu.grouped_weight_gemm(case.x, *case.b, case.experts)
    assert (y[[0, 2, 4]] == 0).all()
    assert np.isfinite(y).all()


def test_kernels_refuse_what_the_reference_refuses() -> None:
    case = Case("one expert for all")
    with pytest.raises(ShapeError, match=r"expert 5 of 4; expected -4 to 3, or 4 for none"):
        cpu.grouped_gemm(*case.a, *case.b, np.array([5]))
    with pytest.raises(ShapeError, match="experts have dtype int32; expected int64"):
        cpu.grouped_gemm(*case.a, *case.b, np.array([1], np.int32))
    with pytest.raises(ShapeError, match="scales have shape"):
        cpu.grouped_gemm(case.a[0], case.a[1][:1], *case.b, case.experts)
    with pytest.raises(ShapeError, match=r"expected \[\.\.\., M, K\] and \[E, N, K\]"):
        cpu.grouped_weight_gemm(case.x[0], *case.b, case.experts)


# --- ONNX Runtime with our library -----------------------------------------------------------------------------------


def kernel(op: str, case: Case, x_dtype: int = FLOAT, **attributes: Any) -> np.ndarray:
    """Returns what the kernel of `op` gives; a float32 result, whatever dtype the node has."""
    quantized = op == contract.GROUPED_GEMM.name
    inputs = {"a": case.a[0], "as": case.a[1]} if quantized else {"x": case.x}
    nodes = [cast("a", "A", FLOAT8E4M3FN)] if quantized else [cast("x", "X", x_dtype)]
    if quantized:
        inputs["a"] = case.a[0].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    nodes += [
        cast("b", "B", FLOAT8E4M3FN),
        node(op, f"{'A as' if quantized else 'X'} B bs experts", "y", **attributes),
        cast("y", "wide", FLOAT),
    ]
    kinds = {"a": FLOAT, "as": UINT8, "x": FLOAT, "experts": INT64}
    inputs["experts"] = case.experts
    ports = {name: (kinds[name], [f"{name}{i}" for i in range(value.ndim)]) for name, value in inputs.items()}
    weights = {"b": case.b[0].view(ml_dtypes.float8_e4m3fn).astype(np.float32), "bs": case.b[1]}
    return ort.session(model(nodes, ports, {"wide": (FLOAT, None)}, **weights)).run(None, inputs)[0]


@EVERY_CASE
def test_nodes_give_the_reference(name: str) -> None:
    case = Case(name)
    values = numerics.dequantize(*case.a)
    assert_within(kernel("MXFP8GroupedGemm", case), case.exact(values), case.bound(values))
    assert_within(kernel("MXFP8GroupedWeightGemm", case), case.exact(case.x), case.bound(case.x))


@pytest.mark.parametrize("y_dtype", contract.VALUES)
@pytest.mark.parametrize("x_dtype", contract.VALUES)
@pytest.mark.parametrize("activation_dtype", [FLOAT, BFLOAT16])
def test_nodes_of_every_dtype(x_dtype: int, y_dtype: int, activation_dtype: int) -> None:
    case = Case("any order, one row each")
    case.x /= 64  # so that float16 holds the results
    attributes = {"output_dtype": y_dtype, "activation_dtype": activation_dtype}
    got = kernel("MXFP8GroupedWeightGemm", case, x_dtype, **attributes)
    x = case.x.astype(numerics.value_dtype(contract.VALUE_NAMES[x_dtype]))
    x = x.astype(numerics.value_dtype(contract.VALUE_NAMES[activation_dtype])).astype(np.float32)
    assert_within(got, case.exact(x), case.bound(x, contract.VALUE_NAMES[y_dtype]))


def test_nodes_say_what_is_wrong() -> None:
    case = Case("any order, one row each")
    case.experts = case.experts + 3
    with pytest.raises(Exception, match=r"MXFP8GroupedGemm 'the_y': expert 6 of 4; expected -4 to 3, or 4 for none; "):
        kernel("MXFP8GroupedGemm", case)
    case = Case("any order, one row each")
    with pytest.raises(Exception, match=r"activation_dtype 10; expected 1 \(float\) or 16 \(bfloat16\)"):
        kernel("MXFP8GroupedWeightGemm", case, activation_dtype=FLOAT16)
    case.x = case.x[:3]
    with pytest.raises(Exception, match=r"expected leading dimensions that broadcast"):
        kernel("MXFP8GroupedWeightGemm", case)
