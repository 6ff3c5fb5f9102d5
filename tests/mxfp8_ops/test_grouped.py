"""MXFP8GroupedGemm and MXFP8GroupedWeightGemm: the reference, their bodies on stock ONNX Runtime, and the kernels."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import FORMATS, assert_within
from grids import looped, pairwise
from grouped_cases import CASES, Case
from one_node import Feed, one_node_model, run
from ort_models import check_fault

from mxfp8_ops import contract, cpu, numerics, numpy_nodes
from mxfp8_ops.contract import FLOAT, FLOAT8E4M3FN, INT64, UINT8


def nodes(op: str, case: Case, opset: int = 0) -> np.ndarray:
    """Returns what `op` gives, with the weights as initializers: by its body for an opset, or by the kernel."""
    inputs: dict[str, Feed] = {"A": (case.a[0], FLOAT8E4M3FN), "A_scales": (case.a[1], UINT8)}
    if op == contract.GROUPED_WEIGHT_GEMM.name:
        inputs = {"X": (case.x, FLOAT)}
    inputs |= {"B": (case.b[0], FLOAT8E4M3FN), "B_scales": (case.b[1], UINT8), "experts": (case.experts, INT64)}
    model = one_node_model(op, inputs, {"Y": FLOAT}, opset or contract.MIN_OPSET, {}, constants=("B", "B_scales"))
    if not opset:
        del model.functions[:]
    return run(model, inputs, kernels=not opset)[0]


OF_NODES = {
    f"{opset or 'node'}": tuple(
        functools.partial(nodes, op, opset=opset) for op in ("MXFP8GroupedGemm", "MXFP8GroupedWeightGemm")
    )
    for opset in (0, 21, 23, 26)
}


@pytest.mark.parametrize("implementation", ["reference", *OF_NODES])
@looped("name", CASES)
def test_every_case_is_one_product_per_expert(name: str, implementation: str) -> None:
    case = Case(name)
    values = numpy_nodes.dequantize(*case.a)
    if implementation == "reference":
        gemm = numpy_nodes.grouped_gemm(*case.a, *case.b, case.experts)
        weight_gemm = numpy_nodes.grouped_weight_gemm(case.x, *case.b, case.experts)
    else:
        gemm, weight_gemm = (node(case) for node in OF_NODES[implementation])
    assert_within(gemm, case.exact(values), case.bound(values))
    assert_within(weight_gemm, case.exact(case.x), case.bound(case.x))


@pytest.mark.parametrize("function", [numpy_nodes.grouped_weight_gemm, cpu.grouped_weight_gemm])
def test_rows_without_an_expert_are_not_read(function: Any) -> None:
    case = Case("rows without an expert")
    case.x[0] = np.nan
    y = function(case.x, *case.b, case.experts)
    assert (y[[0, 2, 4]] == 0).all()
    assert np.isfinite(y).all()


@pytest.mark.parametrize("function", [numpy_nodes.grouped_weight_gemm, cpu.grouped_weight_gemm])
def test_activations_are_rounded_if_asked(function: Any) -> None:
    case = Case("any order, one row each")
    got = function(case.x, *case.b, case.experts, activation_dtype="bfloat16")
    rounded = case.x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_within(got, case.exact(rounded), case.bound(rounded))
    assert (np.abs(got - case.exact(case.x)) > case.bound(case.x)).any()


# --- The processor -------------------------------------------------------------------------------------------------


@looped(
    "name, a_format, b_format, dtype, threads",
    pairwise(name=CASES, a=FORMATS, b=FORMATS, dtype=numerics.VALUE_DTYPES, threads=[1, 3]),
)
def test_kernels_give_the_reference(
    name: str, a_format: str, b_format: str, dtype: str, *, threads: int, isa: str
) -> None:
    case = Case(name, a_format, b_format)
    values = numpy_nodes.dequantize(*case.a, element_format=a_format)
    both = {"a_format": a_format, "b_format": b_format}
    got = cpu.grouped_gemm(*case.a, *case.b, case.experts, **both, threads=threads)
    assert_within(got, case.exact(values), case.bound(values))
    x = (case.x / 64).astype(numerics.value_dtype(dtype))  # so that float16 holds the results
    got = cpu.grouped_weight_gemm(x, *case.b, case.experts, b_format=b_format, dtype=dtype, threads=threads)
    assert got.dtype == x.dtype
    assert_within(got, case.exact(x.astype(np.float32)), case.bound(x.astype(np.float32), dtype))


X = np.ones((3, 1, 64), np.float32)
FAULTS = {
    "expert": (
        "GroupedWeightGemm",
        {},
        {"x": X, "be": X.swapaxes(0, 1), "bs": X.swapaxes(0, 1)[..., :2], "experts": np.array([0, 1, 2])},
        "expert 2 of 1; expected -1 to 0, or 1 for none; ",
    ),
    "rows of experts": (
        "GroupedWeightGemm",
        {},
        {"x": X, "be": X.swapaxes(0, 1), "bs": X.swapaxes(0, 1)[..., :2], "experts": np.array([0, 0])},
        r"operands .*; expected leading dimensions that broadcast",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_node_names_what_does_not_fit(fault: str) -> None:
    check_fault(*FAULTS[fault])
