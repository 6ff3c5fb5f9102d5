"""verify() judges fused nodes, each against its body; unpack() reads their weights."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from attention_models import attention
from fused_models import OPS, activated, gated
from grids import looped, pairwise
from models import matmul_model, steps
from onnx import helper, numpy_helper
from oracle import normal, quantized

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


FUSED = {"MXFP8Attention", *(f"MXFP8{kind}{gemm}Gemm" for kind in ("Fused", "Gated") for gemm in ("", "Weight"))}


@looped(
    "name, recipe",
    [
        *((name, "mxfp8") for name in MODELS),
        *pairwise(name=["gelu", "gate"], recipe=["mxfp8-bf16", "mxfp8-weight-only"]),
    ],
)
def test_a_fused_node_is_judged(name: str, recipe: str) -> None:
    model = MODELS[name]
    rewritten, report = mxfp8_graph.rewrite(model, recipe)
    assert report.fusions
    checked = verify(model, rewritten, max_rel_l2=0.1)
    assert (checked.passed, checked.failures) == (True, ())
    assert {check.op for check in checked.nodes} & FUSED


def tamper(model: onnx.ModelProto, op: str, name: str, by: float) -> None:
    """Makes the function body of `op` multiply its value `name`."""
    function = next(f for f in model.functions if f.name == op)
    maker = next(n for n in function.node if name in n.output)
    maker.output[list(maker.output).index(name)] = "tampered"
    added = steps(f"Constant>by|value_float={by}; CastLike by tampered>by_like; Mul tampered by_like>{name}")
    place = list(function.node).index(maker) + 1
    nodes = [*function.node[:place], *added, *function.node[place:]]
    del function.node[:]
    function.node.extend(nodes)


@looped(
    "name, recipe, op, by",
    [
        ("gelu", "mxfp8", "MXFP8FusedGemm", 1.001),
        ("gate", "mxfp8", "MXFP8GatedGemm", 1.001),
        ("attention", "mxfp8-weight-only", "MXFP8Attention", 1.001),
        ("attention", "mxfp8", "MXFP8Attention", 1.05),  # its weights of keys, rounded to bfloat16, are off by 2^-8
    ],
)
def test_a_kernel_that_disagrees_with_its_body_fails(name: str, recipe: str, op: str, by: float) -> None:
    rewritten, _ = mxfp8_graph.rewrite(MODELS[name], recipe)
    tamper(rewritten, op, "Y", by)
    checked = verify(MODELS[name], rewritten)
    assert [check.op for check in checked.nodes if not check.passed] == [op]


@pytest.mark.parametrize(("op", "recipe"), [("MXFP8FusedWeightGemm", "mxfp8-weight-only"), ("MXFP8Quantize", "mxfp8")])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_body_that_gives_another_shape_fails(op: str, recipe: str, rows: int) -> None:
    """One row would pass by broadcasting, where all rows are equal."""
    rewritten, _ = mxfp8_graph.rewrite(matmul_model(), recipe)
    function = next(f for f in rewritten.functions if f.name == op)
    name = function.output[-1]
    maker = next(n for n in function.node if name in n.output)
    maker.output[list(maker.output).index(name)] = "whole"
    function.node.extend(
        steps(f"Constant>first|value_ints=[0]; Constant>end|value_ints=[{rows}]; Slice whole first end first>{name}")
    )
    checks = check_nodes(load(rewritten), {"x": np.ones((4, 1, 64), F32)})
    (failed,) = (check for check in checks if not check.passed)
    assert (failed.op, failed.excess) == (op, np.inf)
    assert "differ in shape; expected none" in str(failed) or failed.has_bound


@looped("causal, past, keys", pairwise(causal=[0, 1], past=[0, 5], keys=[7, 3]))
def test_the_bound_of_an_attention_is_the_bound_of_its_heads(causal: int, past: int, keys: int) -> None:
    rows = 7
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


@looped("name, weights", [("gelu", "w"), ("gate", "gv")])
@looped("recipe", ["mxfp8", "mxfp8-weight-only"])
def test_unpack_reads_the_weights_of_fused_gemms(name: str, weights: str, recipe: str) -> None:
    model = MODELS[name]
    packed = mxfp8_graph.unpack(mxfp8_graph.rewrite(model, recipe)[0])
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert {*packed} == {*weights}
    for each in weights:
        assert packed[each].weight_only is (recipe != "mxfp8")
        np.testing.assert_array_equal(packed[each].dequantize(), quantized(np.ascontiguousarray(stored[each].T)))
