"""MXFP8GroupedGemm and MXFP8GroupedWeightGemm: the reference, their bodies on stock ONNX Runtime, and the kernels."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import FORMATS, assert_same, assert_within, random_values
from grids import looped, pairwise
from one_node import Feed, one_node_model, run

from mxfp8_ops import contract, cpu, numerics, numpy_nodes
from mxfp8_ops.contract import BFLOAT16, FLOAT, FLOAT8E4M3FN, FLOAT16, INT64, UINT8

CASES: dict[str, tuple[tuple[int, ...], int, int, Any]] = {
    # shape of A, N, E, experts
    "any order, one row each": ((7, 1, 70), 40, 4, [3, 0, 0, 2, 3, -1, -4]),
    "experts without rows": ((3, 1, 64), 33, 8, [5, 5, 2]),
    "rows without an expert": ((5, 1, 96), 40, 4, [4, 1, 4, 0, 4]),
    "no row has an expert": ((2, 1, 64), 40, 4, [4, 4]),
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


class Case:
    """Operands of a grouped product, and what it must give."""

    def __init__(self, name: str, a_format: str = "e4m3", b_format: str = "e4m3") -> None:
        shape, n, e, experts = CASES[name]
        self.x = random_values(1, *shape)
        self.a = numpy_nodes.quantize(self.x, element_format=a_format)
        self.b = numpy_nodes.quantize(random_values(2, e, n, shape[-1]), element_format=b_format)
        self.experts = np.asarray(experts, np.int64)
        self.weight = numpy_nodes.dequantize(*self.b, element_format=b_format)
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
        bound = numpy_nodes.gemm_error_bound(a, self.weight[self.experts % count], dtype)
        return np.where((self.experts == count)[..., None, None], 0, bound)


def nodes(op: str, case: Case, opset: int = 0, *, x_dtype: int = FLOAT, **attributes: Any) -> np.ndarray:
    """Returns what `op` gives, with the weights as initializers: by its body for an opset, or by the kernel."""
    activations: dict[str, Feed] = {"A": (case.a[0], FLOAT8E4M3FN), "A_scales": (case.a[1], UINT8)}
    if op == contract.GROUPED_WEIGHT_GEMM.name:
        activations = {"X": (case.x.astype(numerics.value_dtype(contract.VALUE_NAMES[x_dtype])), x_dtype)}
    weights = {"B": (case.b[0], FLOAT8E4M3FN), "B_scales": (case.b[1], UINT8)}
    inputs = {**activations, **weights, "experts": (case.experts, INT64)}
    dtype = attributes.setdefault("output_dtype", FLOAT)
    model = one_node_model(op, inputs, {"Y": dtype}, opset or contract.MIN_OPSET, attributes, constants=tuple(weights))
    if not opset:
        del model.functions[:]
    return run(model, inputs, kernels=not opset)[0]


IMPLEMENTATIONS: dict[str, tuple[Any, Any]] = {
    "reference": (numpy_nodes.grouped_gemm, numpy_nodes.grouped_weight_gemm),
    "kernels": (functools.partial(cpu.grouped_gemm, threads=3), functools.partial(cpu.grouped_weight_gemm, threads=3)),
}


@pytest.mark.parametrize("implementation", ["reference", "kernels", 0, 21, 23, 26], ids=lambda at: f"{at or 'node'}")
@looped("name", CASES)
def test_every_case_is_one_product_per_expert(name: str, implementation: str | int) -> None:
    case = Case(name)
    values = numpy_nodes.dequantize(*case.a)
    if isinstance(implementation, int):
        got = [nodes(op, case, implementation) for op in ("MXFP8GroupedGemm", "MXFP8GroupedWeightGemm")]
    else:
        gemm, weight_gemm = IMPLEMENTATIONS[implementation]
        got = [gemm(*case.a, *case.b, case.experts), weight_gemm(case.x, *case.b, case.experts)]
    assert_within(got[0], case.exact(values), case.bound(values))
    assert_within(got[1], case.exact(case.x), case.bound(case.x))


@pytest.mark.parametrize("function", [numpy_nodes.grouped_weight_gemm, cpu.grouped_weight_gemm])
def test_rows_without_an_expert_are_not_read(function: Any) -> None:
    case = Case("rows without an expert")
    case.x[0] = np.nan
    y = function(case.x, *case.b, case.experts)
    assert (y[[0, 2, 4]] == 0).all()
    assert np.isfinite(y).all()


# --- The reference and the function bodies ---------------------------------------------------------------------------


def test_reference_rounds_activations_if_asked() -> None:
    case = Case("any order, one row each")
    got = numpy_nodes.grouped_weight_gemm(case.x, *case.b, case.experts, activation_dtype="bfloat16")
    rounded = case.x.astype(numerics.value_dtype("bfloat16")).astype(np.float32)
    assert_within(got, case.exact(rounded), case.bound(rounded))
    assert (np.abs(got - case.exact(case.x)) > case.bound(case.x)).any()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=contract.VALUE_NAMES.get)
def test_bodies_round_to_the_result_dtype(dtype: int) -> None:
    case = Case("any order, one row each")
    case.x /= 64  # so that float16 holds the results
    got = nodes("MXFP8GroupedWeightGemm", case, 21, output_dtype=dtype)
    assert_within(got, case.exact(case.x), case.bound(case.x, contract.VALUE_NAMES[dtype]))


def test_bodies_round_activations_if_asked() -> None:
    case = Case("any order, one row each")
    rounded = case.x.astype(numerics.value_dtype("bfloat16")).astype(np.float32)
    got = nodes("MXFP8GroupedWeightGemm", case, 21, activation_dtype=BFLOAT16)
    assert_within(got, case.exact(rounded), case.bound(rounded))
    assert (np.abs(got - case.exact(case.x)) > case.bound(case.x)).any()


@pytest.mark.parametrize("index", [5, -5, 2**40])
@pytest.mark.parametrize("op", ["MXFP8GroupedGemm", "MXFP8GroupedWeightGemm"])
def test_bodies_fail_on_an_index_beyond_the_experts(op: str, index: int) -> None:
    case = Case("one expert for all")
    case.experts = np.array([index])
    with pytest.raises(Exception, match="out of data bounds"):
        nodes(op, case, 21)


# --- The processor -------------------------------------------------------------------------------------------------


@looped("name, a_format, b_format, threads", pairwise(name=CASES, a=FORMATS, b=FORMATS, threads=[1, 3]))
def test_kernels_give_the_reference(name: str, a_format: str, b_format: str, threads: int, isa: str) -> None:
    case = Case(name, a_format, b_format)
    values = numpy_nodes.dequantize(*case.a, element_format=a_format)
    both = {"a_format": a_format, "b_format": b_format}
    got = cpu.grouped_gemm(*case.a, *case.b, case.experts, **both, threads=threads)
    assert_within(got, case.exact(values), case.bound(values))


@looped("name, dtype", pairwise(name=CASES, dtype=numerics.VALUE_DTYPES))
def test_weight_only_kernels_give_the_reference(name: str, dtype: str, isa: str) -> None:
    case = Case(name)
    x = (case.x / 64).astype(numerics.value_dtype(dtype))  # so that float16 holds the results
    got = cpu.grouped_weight_gemm(x, *case.b, case.experts, dtype=dtype, threads=2)
    assert got.dtype == x.dtype
    assert_within(got, case.exact(x.astype(np.float32)), case.bound(x.astype(np.float32), dtype))


@looped("dtype", numerics.VALUE_DTYPES)
def test_kernels_round_activations_as_numpy_does(dtype: str, isa: str) -> None:
    # One weight of 1 per output column makes the result the rounded activation itself.
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = (bits.astype(np.uint32) << 16 | np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)[:, None]).view(np.float32)
    x = {"float16": bits.view(np.float16), "bfloat16": bits.view(ml_dtypes.bfloat16)}.get(dtype, wide).reshape(-1, 1, 1)
    one = numpy_nodes.quantize(np.ones((2, 1, 1), np.float32))
    experts = np.arange(len(x)) % 2
    got = cpu.grouped_weight_gemm(x, *one, experts, activation_dtype="bfloat16")
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_same(got, np.where(rounded == 0, np.float32(0), rounded), source=x)  # sums begin with +0


# --- ONNX Runtime with our library -----------------------------------------------------------------------------------


@looped(
    "x_dtype, y_dtype, activation_dtype", pairwise(x=contract.VALUES, y=contract.VALUES, activation=[FLOAT, BFLOAT16])
)
def test_nodes_of_every_dtype(x_dtype: int, y_dtype: int, activation_dtype: int) -> None:
    case = Case("any order, one row each")
    case.x /= 64  # so that float16 holds the results
    attributes = {"output_dtype": y_dtype, "activation_dtype": activation_dtype}
    got = nodes("MXFP8GroupedWeightGemm", case, x_dtype=x_dtype, **attributes).astype(np.float32)
    x = case.x.astype(numerics.value_dtype(contract.VALUE_NAMES[x_dtype]))
    x = x.astype(numerics.value_dtype(contract.VALUE_NAMES[activation_dtype])).astype(np.float32)
    assert_within(got, case.exact(x), case.bound(x, contract.VALUE_NAMES[y_dtype]))


def test_nodes_say_what_is_wrong() -> None:
    case = Case("any order, one row each")
    case.experts = case.experts + 3
    with pytest.raises(Exception, match=r"MXFP8GroupedGemm 'one': expert 6 of 4; expected -4 to 3, or 4 for none; "):
        nodes("MXFP8GroupedGemm", case)
    case = Case("any order, one row each")
    with pytest.raises(Exception, match=r"activation_dtype 10; expected 1 \(float\) or 16 \(bfloat16\)"):
        nodes("MXFP8GroupedWeightGemm", case, activation_dtype=FLOAT16)
    case.x = case.x[:3]
    with pytest.raises(Exception, match=r"expected leading dimensions that broadcast"):
        nodes("MXFP8GroupedWeightGemm", case)
