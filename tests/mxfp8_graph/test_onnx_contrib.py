"""ONNX Runtime's own ops (domain com.microsoft): their products are rewritten, or kept with the reason.

Integers up to 8 are exact in E4M3, and so are sums of their products in float32: what is rewritten gives what ONNX
Runtime gives for the original, to the bit, up to what stands behind the product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from contrib_models import MICROSOFT, contrib_model, integers
from grids import looped, pairwise
from models import node, value
from oracle import GEMM, kinds, refusal, rewrite, run

import mxfp8_graph
from mxfp8_graph import Recipe, Rule
from mxfp8_graph.policy.plan import MatMulSite

F32 = np.float32

pytestmark = pytest.mark.usefixtures("runtime")


def product(op: str, x: Any, w: np.ndarray, inputs: str = "x w", **attributes: Any) -> onnx.ModelProto:
    """y = -op(inputs)."""
    weights = {"w": w, **({"c": integers(96, seed=3)} if "c" in inputs.split() else {})}
    nodes = [node(op, inputs, "h", "linear", domain=MICROSOFT, **attributes), node("Neg", "h", "y")]
    return contrib_model(nodes, {"x": x}, weights)


def gives_the_same(
    proto: onnx.ModelProto, nodes: dict[str, int] | None, recipe: Any = "mxfp8", **feeds: np.ndarray
) -> MatMulSite:
    """Fails unless a model has these nodes when it is rewritten and gives the same to the bit; returns its site."""
    rewritten, report = rewrite(proto, recipe)
    assert nodes is None or kinds(rewritten) == nodes
    assert np.array_equal(run(rewritten, feeds)[0], run(proto, feeds)[0])
    return report.sites[0].decision.site


@looped(
    "op, alpha, trans_a, trans_b",
    pairwise(op=["FusedMatMul", "TransposeMatMul"], alpha=[1.0, 0.125], trans_a=[0, 1], trans_b=[0, 1]),
)
def test_a_fused_matmul_with_a_static_right_side(op: str, alpha: float, trans_a: int, trans_b: int) -> None:
    w, x = integers(96, 70) if trans_b else integers(70, 96), integers(2, 70, 3) if trans_a else integers(2, 3, 70)
    settings = {"alpha": alpha, "transA": trans_a, "transB": trans_b}
    proto = product(op, ["b", 70, "s"] if trans_a else ["b", "s", 70], w, **settings)
    site = gives_the_same(proto, {**({"Transpose": 1} if trans_a else {}), **GEMM, "Neg": 1}, x=x)
    assert (site.op, site.role, site.n, site.k) == (op, "linear", 96, 70)


@looped("trans_a", [0, 1])
def test_a_fused_matmul_with_a_static_left_side(trans_a: int) -> None:
    w = integers(70, 96) if trans_a else integers(96, 70)
    proto = product("FusedMatMul", ["b", 70, "s"], w, "w x", transA=trans_a, alpha=0.5)
    gives_the_same(proto, {"Transpose": 2, **GEMM, "Neg": 1}, x=integers(2, 70, 3))


@looped("trans_a", [0, 1])
def test_a_fused_matmul_whose_batches_do_not_come_first(trans_a: int) -> None:
    shape = (64, 4, 3) if trans_a else (3, 4, 64)
    attributes = {"transBatchA": 1, "transBatchB": 1, "transA": trans_a}
    proto = product("FusedMatMul", list(shape), integers(64, 4, 96), **attributes)
    site = gives_the_same(proto, None, x=integers(*shape))
    assert (site.n, site.k) == (96, 64)


def test_a_fused_matmul_of_two_activations() -> None:
    nodes = "product:com.microsoft.FusedMatMul a b>h|alpha=0.5 transB=1; Neg h>y"
    proto = contrib_model(nodes, {"a": [2, 3, 64], "b": [2, 40, 64]}, {})
    recipe, b = Recipe(name="all", rules=(Rule(op="FusedMatMul"),)), integers(2, 40, 64, seed=1)
    counts = {"MXFP8Quantize": 2, "MXFP8Gemm": 1, "Constant": 1, "Mul": 1, "Neg": 1}
    gives_the_same(proto, counts, recipe, a=integers(2, 3, 64), b=b)


def test_fused_matmuls_around_a_softmax_have_the_roles_of_scores_and_values() -> None:
    nodes = (
        "scores:com.microsoft.FusedMatMul q k>s|alpha=0.125 transB=1; Softmax s>p; "
        "values:com.microsoft.FusedMatMul p v>a; Neg a>y"
    )
    proto = contrib_model(nodes, {name: ["b", 2, "s", 64] for name in "qkv"}, {})
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(proto)
    assert [d.site.role for d in caught.value.decisions] == ["attention_scores", "attention_values"]


def test_a_fused_op_that_cannot_be_read_is_kept_with_the_reason() -> None:
    proto = product("FusedMatMul", None, integers(64, 4, 96), transBatchA=1, transBatchB=1)
    assert refusal(proto).endswith("a rank is unknown; give it shape information")
    proto = product("FusedGemm", ["m", 64], integers(64, 96), activation="Mish")
    assert refusal(proto).startswith("its activation 'Mish' is not known; expected one of Elu, HardSigmoid")


ACTIVATIONS = {
    **{op: {} for op in ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign")},
    "LeakyRelu": {"alpha": 0.25},
    "Elu": {"alpha": 0.5},
    "ThresholdedRelu": {"alpha": 2.0},
    "HardSigmoid": {"alpha": 0.125, "beta": 0.25},
    "Selu": {"alpha": 1.5, "gamma": 1.25},
}


@looped("op", ACTIVATIONS)
def test_a_fused_gemm_gets_its_activation_back(op: str) -> None:
    numbers = {f"activation_{name}": number for name, number in ACTIVATIONS[op].items()}
    settings = {"activation": op, "alpha": 0.125, "transB": 1, **numbers}
    proto, x = product("FusedGemm", ["m", 64], integers(96, 64), "x w c", **settings), integers(3, 64)
    rewritten, report = rewrite(proto)
    assert kinds(rewritten) == {**GEMM, op: 1, "Neg": 1}
    assert report.sites[0].decision.site.has_bias
    np.testing.assert_allclose(run(rewritten, {"x": x})[0], run(proto, {"x": x})[0], rtol=1e-5, atol=1e-6)


def test_a_fused_matmul_activation_gets_its_activation_back() -> None:
    """ONNX Runtime runs the op on DirectML alone; the reference is NumPy."""
    settings = {"activation": "LeakyRelu", "activation_alpha": 0.25, "alpha": 0.5, "transB": 1}
    rewritten, _ = rewrite(product("FusedMatMulActivation", ["m", 64], integers(96, 64), **settings))
    assert kinds(rewritten) == {**GEMM, "LeakyRelu": 1, "Neg": 1}
    h = 0.5 * (integers(3, 64) @ integers(96, 64).T)
    assert np.array_equal(run(rewritten, {"x": integers(3, 64)})[0], -np.where(h < 0, 0.25 * h, h).astype(F32))


def test_an_activation_ends_an_output_projection() -> None:
    """Tanh(Gemm) -> output is a linear, as it is where the two are separate; without it, an output projection."""
    for settings, role in (({"activation": "Tanh"}, "linear"), ({}, "output_projection")):
        pooler = node("FusedGemm", "x w", "y", "pooler", domain=MICROSOFT, **settings)
        proto = contrib_model([pooler], {"x": ["m", 64]}, {"w": integers(64, 96)})
        _, report = mxfp8_graph.rewrite(proto, Recipe(output_projections=True))
        assert report.sites[0].decision.site.role == role


@pytest.mark.parametrize("opset", [14, 21])
def test_linears_around_fused_ops_of_an_encoder_layer_are_rewritten(opset: int) -> None:
    nodes = (
        "up:MatMul x up>h; com.microsoft.BiasGelu h b>g; down:MatMul g down>d; "
        "com.microsoft.SkipLayerNormalization d x s s>n; LayerNormalization n s s>l; SimplifiedLayerNormalization l s>y"
    )
    weights = {"up": integers(64, 96) / 64, "down": integers(96, 64, seed=1) / 64}
    weights |= {"b": integers(96), "s": integers(64)}
    proto = contrib_model(nodes, {"x": ["b", "s", 64]}, weights, opset=opset)
    rewritten, report = mxfp8_graph.rewrite(proto, mxfp8_graph.Recipe(fuse=False))
    assert [entry.decision.site.role for entry in report.rewritten] == ["linear", "linear"]
    assert [entry.decision.site.has_bias for entry in report.rewritten] == [True, False]
    left = {"Gelu": 1, "SkipLayerNormalization": 1, "LayerNormalization": 1, "SimplifiedLayerNormalization": 1}
    assert kinds(rewritten) == {"MXFP8Quantize": 2, "MXFP8Gemm": 2, **left}
    x = integers(2, 3, 64) / 8
    result, original = run(rewritten, {"x": x})[0], run(proto, {"x": x})[0]
    assert np.linalg.norm(result - original) < 0.12 * np.linalg.norm(original)


def test_a_cache_that_is_returned_makes_no_output_projection() -> None:
    nodes = (
        "q:MatMul x q>q0; k:MatMul x k>k0; v:MatMul x v>v0; "
        "com.microsoft.GroupQueryAttention q0 k0 v0 - - n t>a y z|num_heads=4 kv_num_heads=4; Neg a>w"
    )
    weights = {letter: integers(64, 64, seed=seed) for seed, letter in enumerate("qkv")}
    inputs = {"x": ["b", "s", 64], "n": (np.int32, ["b"]), "t": (np.int32, [])}
    proto = contrib_model(nodes, inputs, weights)
    proto.graph.output.append(value("w", F32, None))
    _, report = mxfp8_graph.rewrite(proto)
    assert [entry.decision.site.role for entry in report.rewritten] == ["linear"] * 3


INSIDE = {
    "DecoderAttention": "x x w v", "MoE": "x x w", "GatedRelativePositionBias": "x x x w", "GemmFastGelu": "x w",
    "LongformerAttention": "x w", "DecoderMaskedSelfAttention": "x w", "PackedAttention": "x w", "GemmFloat8": "x w",
}  # fmt: skip


@looped("op", INSIDE)
def test_an_op_that_multiplies_inside_is_kept_and_named(op: str) -> None:
    weights = {name: integers(64, 64) for name in "vw" if name in INSIDE[op].split()}
    proto = contrib_model(f"fused:com.microsoft.{op} {INSIDE[op]}>h; Neg h>y", {"x": ["b", "s", 64]}, weights)
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(proto)
    (decision,) = caught.value.decisions
    assert (decision.site.weight, decision.site.weight_bytes) == ("w", 64 * 64 * 4)
    assert decision.reason == (
        f"{op} multiplies by it in a fused node; expected MatMul nodes; optimize the model without that fusion"
    )
