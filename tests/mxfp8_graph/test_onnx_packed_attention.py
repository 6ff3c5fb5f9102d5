"""com.microsoft Attention with its packed weight: a gemm, and MultiHeadAttention behind it.

Integers up to 8 are exact in E4M3, and so are sums of their products in float32: Q, K and V are what they were, and the
rest runs on the same kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from builders import node, steps
from grids import looped
from oracle import initializers, kinds, rewrite, run
from test_onnx_contrib import MICROSOFT, contrib_model, integers

import mxfp8_graph

F32, I32 = np.float32, np.int32
BATCH, LENGTH, HIDDEN, HEADS = 2, 6, 64, 4

pytestmark = pytest.mark.usefixtures("runtime")


def attention(inputs: str = "x w b", sizes: tuple[int, int, int] = (HIDDEN,) * 3, **attributes: Any) -> onnx.ModelProto:
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
    names = inputs.split(" ")
    op = node("Attention", "x", "a", "attention", domain=MICROSOFT, num_heads=HEADS, **attributes)
    op.input[:] = ["" if name == "-" else name for name in names]
    stored = {k: v for k, v in weights.items() if k in names or k == "o"}
    inputs = {name: known[name] for name in names if name in known}
    return contrib_model([op, *steps("o:MatMul a o>r; Add x r>y")], inputs, stored)


def feeds(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
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
    "plain": attention(),
    "without a bias": attention("x w"),
    "causal": attention(unidirectional=1),
    "scale": attention(scale=0.25),
    "a length per sequence": attention("x w b lengths"),
    "a mask of keys": attention("x w b keys"),
    "a mask of keys, causal": attention("x w b keys", unidirectional=1),
    "a mask of keys, its own value": attention("x w b keys", mask_filter_value=-3.0),
    "a mask of pairs": attention("x w b pairs"),
    "a bias of scores": attention("x w b - - bias"),
    "a bias of scores and a mask": attention("x w b keys - bias"),
    "values of another size": attention(sizes=(64, 64, 32), qkv_hidden_sizes=[64, 64, 32]),
}


@looped("name", SAME)
def test_it_becomes_a_gemm_and_multi_head_attention(name: str) -> None:
    proto = SAME[name]
    n = 160 if name == "values of another size" else 192
    rewritten, report = rewrite(proto, mxfp8_graph.Recipe(exclude=("^o$",)))
    packed = report.rewritten[0].decision.site
    assert (packed.op, packed.role, packed.n, packed.k) == ("Attention", "linear", n, HIDDEN)
    counts = {op: count for op, count in kinds(rewritten).items() if op != "Constant"}
    assert counts == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Split": 1, "MultiHeadAttention": 1, "MatMul": 1, "Add": 1}
    assert "w" not in initializers(rewritten)
    assert packed.has_bias == ("b" in initializers(proto))
    if name == "without a bias":  # ONNX Runtime's Attention reads one nevertheless, wherever that is
        proto = attention()
        (b,) = (t for t in proto.graph.initializer if t.name == "b")
        b.CopyFrom(onnx.numpy_helper.from_array(np.zeros(3 * HIDDEN, F32), "b"))
    result, original = run(rewritten, feeds(proto))[0], run(proto, feeds(proto))[0]
    np.testing.assert_allclose(result, original, rtol=1e-5, atol=1e-5)


def test_weight_only_and_an_attention_at_the_end() -> None:
    rewritten, report = rewrite(attention(), "mxfp8-weight-only")
    assert [entry.decision.site.role for entry in report.rewritten] == ["linear", "linear"]
    assert kinds(rewritten)["MXFP8WeightGemm"] == 2
    proto = attention()
    del proto.graph.node[1:]
    proto.graph.node[0].output[0] = "y"
    assert mxfp8_graph.rewrite(proto)[1].sites[0].decision.site.role == "linear"


def test_lengths_from_an_embedding_of_unknown_shape() -> None:
    """EmbedLayerNormalization gives one length per sequence, whatever shape inference knows of it."""
    proto = attention("x w b lengths")
    embed = node("EmbedLayerNormalization", "ids t word place t2 g g2 keys", "x0 lengths", domain=MICROSOFT)
    embed.input[:] = ["ids", "", "word", "place", "", "g", "g2", "keys"]
    proto.graph.node.insert(0, embed)
    keys = attention("x w b keys").graph.input[1]
    proto.graph.input[1].CopyFrom(keys)  # instead of the lengths
    proto.graph.input.append(keys)
    proto.graph.input[2].name = "ids"
    rng = np.random.default_rng(5)
    for name, shape in (("word", (9, HIDDEN)), ("place", (LENGTH, HIDDEN)), ("g", (HIDDEN,)), ("g2", (HIDDEN,))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(F32), name))
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert len(report.rewritten) == 2
    given = {"x": feeds(attention())["x"], "keys": feeds(attention("x w b keys"))["keys"]}
    given["ids"] = rng.integers(0, 9, (BATCH, LENGTH)).astype(I32)
    result, original = run(rewritten, given)[0], run(proto, given)[0]
    assert np.linalg.norm(result - original) < 0.12 * np.linalg.norm(original)


MASK = "expected one of shape [batch], [batch, keys] or [batch, queries, keys]"
KEPT = {
    "both ends of a sequence": (attention("x w b both_ends"), f"its mask is of shape ['twice the batch']; {MASK}"),
    "a square mask": (attention("x w b square"), f"its mask is of shape ['batch', 1, 'most', 'most']; {MASK}"),
    "a mask of unknown rank": (attention("x w b unknown"), f"its mask is of unknown rank; {MASK}"),
    "past": (
        attention("x w b - past", unidirectional=1),
        "it keeps keys and values of past tokens in a packed tensor; expected a model without past and present",
    ),
    "rotary": (
        attention(do_rotary=1),
        "it rotates positions (do_rotary), which MultiHeadAttention does not; expected none",
    ),
    "sizes that contradict the weight": (
        attention(qkv_hidden_sizes=[64, 64, 96]),
        "its heads do not divide its weight [64, 192]; correct the model",
    ),
}


@looped("name", KEPT)
def test_what_multi_head_attention_does_not_know_is_kept_with_the_reason(name: str) -> None:
    proto, reason = KEPT[name]
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert report.sites[0].decision.reason.startswith(reason)
    assert report.sites[0].decision.site.weight == "w"
    assert kinds(rewritten)["Attention"] == 1


def test_a_weight_that_is_computed_is_kept() -> None:
    proto = attention("x v b")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(integers(HIDDEN, 3 * HIDDEN), "w"))
    proto.graph.node.insert(0, node("Mul", "w factor", "v"))
    proto.graph.input.append(onnx.helper.make_tensor_value_info("factor", onnx.TensorProto.FLOAT, []))
    reasons = [entry.decision.reason for entry in mxfp8_graph.rewrite(proto)[1].sites]
    assert reasons[0] == "its weight is computed while the model runs; expected a stored one"
