"""What several matmuls share: weights, embeddings, activations."""

from __future__ import annotations

import numpy as np
import pytest
from builders import model, steps, weight
from oracle import Expected, computes, expect, initializers, kinds, normal, reasons, rewrite, run

from mxfp8_graph import Recipe, Rule

F32 = np.float32
LINEAR = "linear, by recipe 'mxfp8'"
X, Y = {"x": (F32, ["m", 64])}, (F32, ["m", 96])
W = weight(64, 96)

pytestmark = pytest.mark.usefixtures("runtime")


def test_two_matmuls_on_one_weight_pack_it_once() -> None:
    nodes = steps("first:MatMul x w>a; Neg a>ya; second:MatMul z w>b; Neg b>yb")
    proto = model(nodes, {**X, "z": X["x"]}, {"ya": Y, "yb": Y}, {"w": W})
    rewritten, report = rewrite(proto)
    assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
    assert [site.decision.site.shared_with for site in report.sites] == [1, 1]
    feeds = {"x": normal(3, 64), "z": normal(3, 64, seed=4)}
    for x, y in zip(feeds.values(), run(rewritten, feeds), strict=True):
        expect(x, W.T).then(np.negative).check(y)


def test_one_weight_used_both_ways_is_packed_along_each_k() -> None:
    nodes = steps("up:MatMul x w>a; Relu a>b; down:Gemm b w>c|transB=1; Neg c>y")
    rewritten, _ = rewrite(model(nodes, X, {"y": (F32, ["m", 64])}, {"w": W}))
    assert [tuple(t.dims) for t in rewritten.graph.initializer] == [(96, 64), (96, 2), (64, 96), (64, 3)]


def test_a_tied_embedding_keeps_its_table_and_the_head_gets_one_packed_copy() -> None:
    nodes = steps("Gather table ids>e; Transpose table>head|perm=[1,0]; lm_head:MatMul e head>logits")
    proto = model(nodes, {"ids": (np.int64, ["m"])}, {"logits": Y}, {"table": weight(96, 64)})
    ids, recipe = np.array([3, 95, 0]), Recipe(name="heads", output_projections=True)
    counts = {"Gather": 1, "MXFP8Quantize": 1, "MXFP8Gemm": 1}
    rewritten, _ = computes(proto, expect(weight(96, 64)[ids], weight(96, 64)), counts, recipe, ids=ids)
    assert initializers(rewritten) == ["table", "table_mxfp8", "table_mxfp8_scales"]


def test_a_weight_used_by_a_kept_site_too_stays_for_it() -> None:
    nodes = steps("quantized:MatMul x w>a; Neg a>ya; kept:MatMul x w>b; Abs b>yb")
    rewritten, report = rewrite(model(nodes, X, {"ya": Y, "yb": Y}, {"w": W}), Recipe(name="mxfp8", exclude=("kept",)))
    x = normal(3, 64)
    assert initializers(rewritten) == ["w", "w_mxfp8", "w_mxfp8_scales"]
    assert reasons(report) == {"quantized": LINEAR, "kept": "excluded by 'kept'"}
    ya, yb = run(rewritten, {"x": x})
    expect(x, W.T).then(np.negative).check(ya)
    np.testing.assert_allclose(yb, np.abs(x.astype(float) @ W), rtol=1e-4, atol=1e-4)


def test_gemms_on_one_activation_share_its_quantize_node_unless_they_want_another_format() -> None:
    weights, x = {n: weight(64, 64, seed=i) for i, n in enumerate("qkv")}, normal(3, 64)
    products = "; ".join(f"{n}:MatMul x {n}>h{n}" for n in weights)
    proto = model(steps(f"{products}; Sum hq hk hv>s; Neg s>y"), X, {"y": (F32, ["m", 64])}, weights)
    parts = [expect(x, w.T) for w in weights.values()]
    total = Expected(-sum(p.y for p in parts), sum(p.bound for p in parts))
    computes(proto, total, {"MXFP8Quantize": 1, "MXFP8Gemm": 3, "Sum": 1, "Neg": 1}, roundings=3, x=x)
    mixed = Recipe(name="mixed", rules=(Rule(name="k", activations="e5m2"),))
    assert kinds(rewrite(proto, mixed)[0]) == {"MXFP8Quantize": 2, "MXFP8Gemm": 3, "Sum": 1, "Neg": 1}
