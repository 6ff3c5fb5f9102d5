"""Attention ops whose products are rewritten: ONNX's is taken apart, com.microsoft's becomes a gemm and attention.

In com.microsoft's, integers up to 8 are exact in E4M3, and so are sums of their products in float32: Q, K and V are
what they were, and the rest runs on the same kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from attention_models import PAST, feeds, standard
from contrib_models import MICROSOFT, contrib_model, integers
from grids import looped
from models import node, steps
from oracle import initializers, kinds, rewrite, run

import mxfp8_graph
from mxfp8_graph import Recipe

pytestmark = pytest.mark.usefixtures("runtime")

F32 = np.float32

# --- ONNX's Attention is taken apart where a recipe quantizes its products, and only there ---

PRODUCTS = Recipe(activations="e4m3", fp8_dpa=True, min_dim=0)

OPS: dict[str, onnx.ModelProto] = {
    "plain": standard(),
    "in heads": standard(heads=True),
    "a condition": standard("q k v bool_mask"),
    "causal": standard(is_causal=1, scale=0.3),
    "past and present": standard(
        "q k v all_mask past_key past_value", "a pk pv", shapes={"all_mask": ["batch", 1, "rows", "all"]}
    ),
    "opset 24": standard("q k v mask", opset=24),
}


@looped("name", OPS)
def test_the_products_inside_attention_are_quantized(name: str) -> None:
    proto = OPS[name]
    result, report = rewrite(proto, PRODUCTS, fuse=True)
    assert kinds(result)["MXFP8Gemm"] == 3
    assert not kinds(result).keys() & {"Attention", "MXFP8Attention", "MatMul"}
    roles = [site.decision.site.role for site in report.rewritten]
    assert roles == ["attention_scores", "attention_values", "linear"]
    assert "took apart 1 Attention" in report.notes[0]
    inputs = feeds(proto, rows=3, keys=6)
    inputs |= {"all_mask": np.zeros((2, 1, 3, 6 + PAST), np.float32)} if "all_mask" in inputs else {}
    (before, *presents), (after, *others) = run(proto, inputs), run(result, inputs)
    # Q, K, V and weights are each off by 2.6 percent, and so is the linear behind them.
    assert 1e-3 < np.linalg.norm(after - before) / np.linalg.norm(before) < 0.1
    for present, other in zip(presents, others, strict=True):
        np.testing.assert_array_equal(present, other)


def test_one_product_of_attention_is_quantized_alone() -> None:
    result, report = mxfp8_graph.rewrite(standard(), Recipe(attention_values=True, min_dim=0))
    assert [kinds(result)[op] for op in ("MXFP8Gemm", "MatMul", "Softmax")] == [2, 1, 1]
    assert [site.decision.site.role for site in report.kept] == ["attention_scores"]


def test_the_products_have_the_name_and_the_module_of_their_attention() -> None:
    proto = standard(heads=True)
    op = next(each for each in proto.graph.node if each.op_type == "Attention")
    op.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layers.0.attention', 'sdpa']")
    _, report = mxfp8_graph.rewrite(proto, PRODUCTS)
    products = [site.decision.site for site in report.sites if site.decision.site.role != "linear"]
    assert all(site.name.startswith("attention_") for site in products)
    assert {site.module for site in products} == {"layers.0.attention"}


def test_other_nodes_stay_equal_where_attention_is_taken_apart() -> None:
    proto = standard(heads=True)
    result, _ = mxfp8_graph.rewrite(proto, Recipe(fp8_dpa=True, fuse=False, rules=[]))
    after = [each.SerializeToString() for each in result.graph.node]
    kept = [each for each in proto.graph.node if each.op_type not in {"Attention", "MatMul"}]
    assert all(each.SerializeToString() in after for each in kept)


def test_attention_stays_whole_for_other_recipes() -> None:
    result, report = mxfp8_graph.rewrite(standard(), Recipe(fuse=False))
    assert kinds(result)["Attention"] == 1
    assert report.notes == ()


def test_attention_that_onnx_cannot_take_apart_stays_with_a_note() -> None:
    """onnx asks for the dtype of a mask that is not there."""
    proto = standard("q k v - past_key past_value", "a pk pv")
    result, report = mxfp8_graph.rewrite(proto, Recipe(fp8_dpa=True, fuse=False))
    if "Attention" not in kinds(result):
        pytest.skip(f"onnx {onnx.__version__} can")
    assert "the products inside Attention are not quantized: model: onnx's inliner" in report.notes[0]
    assert kinds(result)["MXFP8Gemm"] == 1


# --- com.microsoft Attention with its packed weight: a gemm, and MultiHeadAttention behind it ---

I32 = np.int32
BATCH, LENGTH, HIDDEN, HEADS = 2, 6, 64, 4


def packed(inputs: str = "x w b", sizes: tuple[int, int, int] = (HIDDEN,) * 3, **attributes: Any) -> onnx.ModelProto:
    """y = x + o(Attention(inputs)); values small enough that the softmax is soft."""
    weights = {
        "w": integers(HIDDEN, sum(sizes)) / 32,
        "b": integers(sum(sizes), seed=1) / 8,
        "o": integers(sizes[2], HIDDEN, seed=2) / 32,
    }
    known = {
        "x": ["batch", "length", HIDDEN],
        "lengths": (I32, ["batch"]),
        "both_ends": (I32, ["twice the batch"]),
        "keys": (I32, ["batch", "length"]),
        "pairs": (I32, ["batch", "length", "length"]),
        "square": (I32, ["batch", 1, "most", "most"]),
        "unknown": (I32, None),
        "bias": ["batch", HEADS, "length", "length"],
        "past": [2, "batch", HEADS, "past", HIDDEN // HEADS],
    }
    op = node("Attention", inputs, "a", "attention", domain=MICROSOFT, num_heads=HEADS, **attributes)
    stored = {name: array for name, array in weights.items() if name in op.input or name == "o"}
    ends = {name: known[name] for name in op.input if name in known}
    return contrib_model([op, *steps("o:MatMul a o>r; Add x r>y")], ends, stored)


def packed_feeds(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    keys = np.ones((BATCH, LENGTH), I32)
    keys[0, 3:] = 0
    values = {
        "x": integers(BATCH, LENGTH, HIDDEN, seed=7) / 8,
        "lengths": np.array([4, 6], I32),
        "keys": keys,
        "pairs": np.random.default_rng(3).integers(0, 2, (BATCH, LENGTH, LENGTH)).astype(I32),
        "bias": integers(BATCH, HEADS, LENGTH, LENGTH, seed=8) / 4,
    }
    return {i.name: values[i.name] for i in proto.graph.input}


SAME = {
    "plain": packed(),
    "without a bias": packed("x w"),
    "causal": packed(unidirectional=1),
    "scale": packed(scale=0.25),
    "a length per sequence": packed("x w b lengths"),
    "a mask of keys": packed("x w b keys"),
    "a mask of keys, causal": packed("x w b keys", unidirectional=1),
    "a mask of keys, its own value": packed("x w b keys", mask_filter_value=-3.0),
    "a mask of pairs": packed("x w b pairs"),
    "a bias of scores": packed("x w b - - bias"),
    "a bias of scores and a mask": packed("x w b keys - bias"),
    "values of another size": packed(sizes=(64, 64, 32), qkv_hidden_sizes=[64, 64, 32]),
}


@looped("name", SAME)
def test_packed_attention_becomes_a_gemm_and_multi_head_attention(name: str) -> None:
    proto = SAME[name]
    n = 160 if name == "values of another size" else 192
    rewritten, report = rewrite(proto, mxfp8_graph.Recipe(exclude=("^o$",)))
    site = report.rewritten[0].decision.site
    assert (site.op, site.role, site.n, site.k) == ("Attention", "linear", n, HIDDEN)
    counts = {op: count for op, count in kinds(rewritten).items() if op != "Constant"}
    assert counts == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Split": 1, "MultiHeadAttention": 1, "MatMul": 1, "Add": 1}
    assert "w" not in initializers(rewritten)
    assert site.has_bias == ("b" in initializers(proto))
    if name == "without a bias":  # ONNX Runtime's Attention reads one nevertheless, wherever that is
        proto = packed()
        (b,) = (t for t in proto.graph.initializer if t.name == "b")
        b.CopyFrom(onnx.numpy_helper.from_array(np.zeros(3 * HIDDEN, F32), "b"))
    result, original = run(rewritten, packed_feeds(proto))[0], run(proto, packed_feeds(proto))[0]
    np.testing.assert_allclose(result, original, rtol=1e-5, atol=1e-5)


def test_packed_attention_is_a_linear_weight_only_and_at_the_end() -> None:
    rewritten, report = rewrite(packed(), "mxfp8-weight-only")
    assert [entry.decision.site.role for entry in report.rewritten] == ["linear", "linear"]
    assert kinds(rewritten)["MXFP8WeightGemm"] == 2
    proto = packed()
    del proto.graph.node[1:]
    proto.graph.node[0].output[0] = "y"
    assert mxfp8_graph.rewrite(proto)[1].sites[0].decision.site.role == "linear"


def test_a_mask_that_embed_layer_normalization_makes_is_one_length_per_sequence() -> None:
    # Shape inference knows no shape of that output.
    proto = packed("x w b lengths")
    embed = "com.microsoft.EmbedLayerNormalization ids - word place - g g2 keys>x0 lengths"
    proto.graph.node.insert(0, steps(embed)[0])
    keys = packed("x w b keys").graph.input[1]
    proto.graph.input[1].CopyFrom(keys)  # instead of the lengths
    proto.graph.input.append(keys)
    proto.graph.input[2].name = "ids"
    rng = np.random.default_rng(5)
    for name, shape in (("word", (9, HIDDEN)), ("place", (LENGTH, HIDDEN)), ("g", (HIDDEN,)), ("g2", (HIDDEN,))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(F32), name))
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert len(report.rewritten) == 2
    inputs = {"x": packed_feeds(packed())["x"], "keys": packed_feeds(packed("x w b keys"))["keys"]}
    inputs["ids"] = rng.integers(0, 9, (BATCH, LENGTH)).astype(I32)
    result, original = run(rewritten, inputs)[0], run(proto, inputs)[0]
    assert np.linalg.norm(result - original) < 0.12 * np.linalg.norm(original)


MASK = "expected one of shape [batch], [batch, keys] or [batch, queries, keys]"
KEPT = {
    "both ends of a sequence": (packed("x w b both_ends"), f"its mask is of shape ['twice the batch']; {MASK}"),
    "a square mask": (packed("x w b square"), f"its mask is of shape ['batch', 1, 'most', 'most']; {MASK}"),
    "a mask of unknown rank": (packed("x w b unknown"), f"its mask is of unknown rank; {MASK}"),
    "past": (
        packed("x w b - past", unidirectional=1),
        "it keeps keys and values of past tokens in a packed tensor; expected a model without past and present",
    ),
    "rotary": (
        packed(do_rotary=1),
        "it rotates positions (do_rotary), which MultiHeadAttention does not; expected none",
    ),
    "sizes that contradict the weight": (
        packed(qkv_hidden_sizes=[64, 64, 96]),
        "its heads do not divide its weight [64, 192]; correct the model",
    ),
}


@looped("name", KEPT)
def test_packed_attention_that_multi_head_attention_cannot_compute_is_kept_with_the_reason(name: str) -> None:
    proto, reason = KEPT[name]
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert report.sites[0].decision.reason.startswith(reason)
    assert report.sites[0].decision.site.weight == "w"
    assert kinds(rewritten)["Attention"] == 1


def test_packed_attention_whose_weight_is_computed_is_kept() -> None:
    proto = packed("x v b")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(integers(HIDDEN, 3 * HIDDEN), "w"))
    proto.graph.node.insert(0, node("Mul", "w factor", "v"))
    proto.graph.input.append(onnx.helper.make_tensor_value_info("factor", onnx.TensorProto.FLOAT, []))
    reasons = [entry.decision.reason for entry in mxfp8_graph.rewrite(proto)[1].sites]
    assert reasons[0] == "its weight is computed while the model runs; expected a stored one"
