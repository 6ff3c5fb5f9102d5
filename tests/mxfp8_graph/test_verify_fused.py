"""verify() judges fused nodes: each against its body, and the whole model against the original."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from attention_models import attention
from fused_models import activated, normalized
from onnx import helper
from oracle import normal
from test_onnx_fuse_gemms import OPS, gated
from test_onnx_fuse_norms import FORMS, sum_model
from test_onnx_fuse_quantize import between

import mxfp8_graph
from mxfp8_graph.checking.node_check import check_nodes
from mxfp8_graph.checking.verify import verify

F32 = np.float32
NORM = FORMS["LayerNormalization"]

MODELS = {
    **{epilogue: activated(*nodes) for epilogue, nodes in OPS.items()},
    "gelu float16": activated(*OPS["gelu"], dtype=np.float16),
    "gelu between": between(),
    "gate": gated(),
    "layer": normalized(*NORM[1], **NORM[2]),
    "layer float16": normalized(*NORM[1], **NORM[2], dtype=np.float16),
    "rms": normalized(*FORMS["Div"][1], **FORMS["Div"][2]),
    "add": sum_model(outputs=("y", "t")),
    "attention": attention(),
    "attention float16": attention(dtype=np.float16),
}


def fused_ops(report: Any) -> set[str]:
    return {check.op for check in report.nodes} - {"MXFP8Quantize", "MXFP8Gemm", "MXFP8WeightGemm"}


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_node_is_judged(name: str) -> None:
    model = MODELS[name]
    rewritten, report = mxfp8_graph.rewrite(model)
    assert report.fusions
    checked = verify(model, rewritten, max_rel_l2=0.1)
    assert (checked.passed, checked.failures) == (True, ())
    assert fused_ops(checked) <= {n.op_type for n in rewritten.graph.node}
    assert fused_ops(checked)


def test_a_norm_in_bfloat16_which_onnx_runtime_cannot_multiply() -> None:
    """So there is no original to compare with, but the nodes are judged."""
    rewritten, _ = mxfp8_graph.rewrite(normalized(*NORM[1], **NORM[2], dtype=ml_dtypes.bfloat16))
    assert rewritten.graph.node.pop().op_type == "Neg"
    checks = check_nodes(rewritten, {"x": normal(5, 64, dtype=ml_dtypes.bfloat16)}, None, "model")
    assert [check.op for check in checks if check.passed] == ["MXFP8NormQuantize", "MXFP8Gemm"]


@pytest.mark.parametrize("recipe", ["mxfp8-bf16", "mxfp8-weight-only"])
@pytest.mark.parametrize("name", ["gelu", "gate"])
def test_a_fused_weight_only_node_is_judged(name: str, recipe: str) -> None:
    rewritten, _ = mxfp8_graph.rewrite(MODELS[name], recipe)
    checked = verify(MODELS[name], rewritten, max_rel_l2=0.1)
    assert checked.passed
    assert fused_ops(checked)


def tamper(model: onnx.ModelProto, op: str, name: str, by: float) -> None:
    """Makes the function body of `op` multiply its value `name`."""
    function = next(f for f in model.functions if f.name == op)
    maker = next(n for n in function.node if name in n.output)
    maker.output[list(maker.output).index(name)] = "tampered"
    added = [
        helper.make_node("Constant", [], ["by"], value_float=by),
        helper.make_node("CastLike", ["by", "tampered"], ["by_like"]),
        helper.make_node("Mul", ["tampered", "by_like"], [name]),
    ]
    place = list(function.node).index(maker) + 1
    nodes = [*function.node[:place], *added, *function.node[place:]]
    del function.node[:]
    function.node.extend(nodes)


@pytest.mark.parametrize(
    ("name", "op", "value"),
    [
        ("gelu", "MXFP8FusedGemm", "Y"),
        ("gelu between", "MXFP8GemmQuantize", "Y"),
        ("gate", "MXFP8GatedGemm", "Y"),
        ("layer", "MXFP8NormQuantize", "normalized"),
        ("add", "MXFP8AddNormQuantize", "normalized"),
        ("add", "MXFP8AddNormQuantize", "sum"),
    ],
)
def test_a_kernel_that_disagrees_with_its_body(name: str, op: str, value: str) -> None:
    rewritten, _ = mxfp8_graph.rewrite(MODELS[name])
    tamper(rewritten, op, value, 1.001)
    checked = verify(MODELS[name], rewritten)
    assert [check.op for check in checked.nodes if not check.passed] == [op]


@pytest.mark.parametrize(("recipe", "by"), [("mxfp8-weight-only", 1.001), ("mxfp8", 1.05)])
def test_an_attention_that_disagrees_with_its_body(recipe: str, by: float) -> None:
    """Rounded to bfloat16, weights of keys may be off by 2^-8 each."""
    rewritten, _ = mxfp8_graph.rewrite(MODELS["attention"], recipe)
    tamper(rewritten, "MXFP8Attention", "Y", by)
    checked = verify(MODELS["attention"], rewritten)
    assert [check.op for check in checked.nodes if not check.passed] == ["MXFP8Attention"]
