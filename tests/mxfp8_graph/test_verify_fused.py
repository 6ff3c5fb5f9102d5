"""verify() judges fused nodes: each against its body, and the whole model against the original."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from attention_models import attention
from builders import matmul_model
from fused_models import activated
from onnx import helper
from oracle import normal
from test_onnx_fuse_gemms import OPS, gated

import mxfp8_graph
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.running.node_check import _Comparison, check_nodes
from mxfp8_graph.running.verify import verify
from mxfp8_ops.nodes.attention import attention_error_bound

F32 = np.float32

MODELS = {
    **{epilogue: activated(*nodes) for epilogue, nodes in OPS.items()},
    "gelu float16": activated(*OPS["gelu"], dtype=np.float16),
    "gate": gated(),
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
        ("gate", "MXFP8GatedGemm", "Y"),
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


@pytest.mark.parametrize(("op", "recipe"), [("MXFP8FusedWeightGemm", "mxfp8-weight-only"), ("MXFP8Quantize", "mxfp8")])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_body_that_gives_another_shape_fails(op: str, recipe: str, rows: int) -> None:
    """One row would pass by broadcasting, where all rows are equal."""
    rewritten, _ = mxfp8_graph.rewrite(matmul_model(), recipe)
    function = next(f for f in rewritten.functions if f.name == op)
    name = function.output[-1]
    maker = next(n for n in function.node if name in n.output)
    maker.output[list(maker.output).index(name)] = "whole"
    bounds = [helper.make_node("Constant", [], [at], value_ints=[x]) for at, x in (("start", 0), ("end", rows))]
    axes = helper.make_node("Constant", [], ["axes"], value_ints=[0])
    cut = helper.make_node("Slice", ["whole", "start", "end", "axes"], [name])
    function.node.extend([*bounds, axes, cut])
    x = rewritten.graph.input[0]
    size = x.type.tensor_type.shape.dim[-1].dim_value
    checks = check_nodes(load(rewritten), {x.name: np.ones((4, 1, size), F32)})
    (failed,) = (check for check in checks if not check.passed)
    assert (failed.op, failed.excess) == (op, np.inf)
    assert "differ in shape; expected none" in str(failed) or failed.has_bound


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize(("rows", "keys"), [(7, 7), (7, 3)])
def test_the_bound_of_an_attention_is_that_of_its_heads(causal: int, past: int, rows: int, keys: int) -> None:
    sizes = {"Q": (2, rows, 48), "K": (2, keys, 16), "V": (2, keys, 32)}
    tensors = {name: normal(*size) for name, size in sizes.items()}
    tensors["mask"] = normal(rows, past + keys)
    pasts = [(2, 2, past, 8), (2, 2, past, 16)] if past else [(0,), (0,)]
    tensors |= {name: normal(*size) for name, size in zip(("pk", "pv"), pasts, strict=True)}
    heads = {"q_num_heads": 6, "kv_num_heads": 2, "is_causal": causal, "scale": 0.5, "activation_dtype": 1}
    node = helper.make_node("MXFP8Attention", list(tensors), ["y", "a", "b"], **heads)
    tensors |= {"y": np.zeros((2, rows, 96), F32), "a": np.zeros(1), "b": np.zeros(1)}
    compared = _Comparison(node, node, tensors.__getitem__)
    whole = attention_error_bound(
        *(tensors[name] for name in ("Q", "K", "V", "mask")),
        (tensors["pk"], tensors["pv"]) if past else None,
        q_num_heads=6, kv_num_heads=2, is_causal=bool(causal), scale=0.5,
    )  # fmt: skip
    np.testing.assert_allclose(compared._attention_bound(), whole, rtol=1e-9)
