"""A gemm quantizes what its activation gives, where nothing else reads that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from builders import node, weight
from fused_models import activated, both_ways, feeds_of, kinds_fused
from grids import looped
from onnx import helper, numpy_helper
from oracle import kinds, run
from test_onnx_fuse_gemms import OPS

from mxfp8_ops import contract, onnx_functions
from mxfp8_ops.onnx_functions import settings_of

pytestmark = pytest.mark.usefixtures("runtime")


def between(
    *after: onnx.NodeProto, epilogue: str = "gelu", outputs: Sequence[str] = ("z",), dtype: Any = np.float32
) -> onnx.ModelProto:
    """Returns z = -(f(x @ w + b) @ down), and what `after` makes of y = f(x @ w + b)."""
    nodes = [*OPS[epilogue], node("MatMul", "y down", "d", "down"), node("Neg", "d", "z"), *after]
    proto = activated(*nodes, outputs=outputs, dtype=dtype)
    proto.graph.initializer.append(numpy_helper.from_array(weight(96, 64, seed=2, dtype=dtype), "down"))
    return proto


def quantizing(model: onnx.ModelProto) -> onnx.NodeProto:
    (found,) = (n for n in model.graph.node if n.op_type == "MXFP8GemmQuantize")
    return found


def apart(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with the node as the two that it stands for."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    whole = quantizing(copy)
    given = {name: value for name, value in settings_of(whole).items() if name in contract.GEMM_QUANTIZE.attributes}
    at = list(copy.graph.node).index(whole)
    settings = {**contract.QUANTIZE.attributes, **given}
    del settings["epilogue"]
    domain = contract.DOMAIN
    two = [
        helper.make_node("MXFP8FusedGemm", whole.input, ["values"], domain=domain, epilogue=given["epilogue"]),
        helper.make_node("MXFP8Quantize", ["values"], whole.output[:2], domain=domain, **settings),
    ]
    nodes = [*copy.graph.node[:at], *two, *copy.graph.node[at + 1 :]]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    del copy.functions[:]
    copy.functions.extend(onnx_functions.functions(copy))
    return copy


@looped("epilogue, recipe", [("relu", "ocp"), *((epilogue, "mxfp8") for epilogue in OPS)])
def test_what_an_activation_gives_is_quantized_by_the_gemm(epilogue: str, recipe: str) -> None:
    proto = between(epilogue=epilogue)
    fused, plain, report = both_ways(proto, recipe)
    assert kinds(fused) == {"MXFP8Quantize": 1, "MXFP8GemmQuantize": 1, "MXFP8Gemm": 1, "Neg": 1}
    assert kinds_fused(report) == [f"gemm + {epilogue}", f"gemm + {epilogue} + quantize"]
    node_of, before = quantizing(fused), [n for n in plain.graph.node if n.op_type == "MXFP8Quantize"][-1]
    for name in ("scale_rounding", "output_dtype"):
        assert settings_of(node_of).get(name) == settings_of(before).get(name)
    assert node_of.name == "linear"
    feeds = feeds_of(proto)
    for one, other in zip(run(fused, feeds), run(apart(fused), feeds), strict=True):
        np.testing.assert_array_equal(one, other)


def test_two_gemms_share_what_is_quantized() -> None:
    proto = between(node("MatMul", "y down", "t", "other"), outputs=("z", "t"))
    fused, _, _ = both_ways(proto)
    assert kinds(fused) == {"MXFP8Quantize": 1, "MXFP8GemmQuantize": 1, "MXFP8Gemm": 2, "Neg": 1}


NEAR_MISSES = {
    "it is an output": between(outputs=("z", "y")),
    "something else reads it": between(node("Neg", "y", "n"), outputs=("z", "n")),
    "float16 is between": between(dtype=np.float16),
}


@looped("case", NEAR_MISSES)
def test_what_else_is_needed_is_quantized_apart(case: str) -> None:
    fused, _, report = both_ways(NEAR_MISSES[case])
    assert kinds_fused(report) == ["gemm + gelu"]
    assert kinds(fused)["MXFP8Quantize"] == 2


def test_weight_only_gemms_quantize_nothing() -> None:
    fused, _, report = both_ways(between(), "mxfp8-weight-only")
    assert kinds_fused(report) == ["gemm + gelu"]
    assert kinds(fused) == {"MXFP8FusedWeightGemm": 1, "MXFP8WeightGemm": 1, "Neg": 1}
