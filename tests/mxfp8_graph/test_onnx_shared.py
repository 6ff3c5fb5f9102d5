"""What several matmuls share: weights, embeddings, activations."""

from __future__ import annotations

import numpy as np
import pytest
from builders import model, node, weight
from oracle import Expected, expect, initializers, kinds, normal, reasons, rewrite, run

from mxfp8_graph import Recipe, Rule

F32 = np.float32
LINEAR = "linear, by recipe 'mxfp8'"

pytestmark = pytest.mark.usefixtures("runtime")


class TestSharedWeights:
    def test_two_matmuls_on_one_weight_pack_it_once(self):
        nodes = [
            node("MatMul", "x w", "a", "first"),
            node("Neg", "a", "ya"),
            node("MatMul", "z w", "b", "second"),
            node("Neg", "b", "yb"),
        ]
        inputs, outputs = (
            {"x": (F32, ["m", 64]), "z": (F32, ["m", 64])},
            {"ya": (F32, ["m", 96]), "yb": (F32, ["m", 96])},
        )
        rewritten, report = rewrite(model(nodes, inputs, outputs, {"w": weight(64, 96)}))
        x, z = normal(3, 64), normal(3, 64, seed=4)
        assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
        assert [site.decision.site.shared_with for site in report.sites] == [1, 1]
        ya, yb = run(rewritten, {"x": x, "z": z})
        expect(x, weight(64, 96).T).then(np.negative).check(ya)
        expect(z, weight(64, 96).T).then(np.negative).check(yb)

    def test_one_weight_used_both_ways_is_packed_along_each_k(self):
        nodes = [
            node("MatMul", "x w", "a", "up"),
            node("Relu", "a", "b"),
            node("Gemm", "b w", "c", "down", transB=1),
            node("Neg", "c", "y"),
        ]
        rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}, {"w": weight(64, 96)}))
        assert [tuple(t.dims) for t in rewritten.graph.initializer] == [(96, 64), (96, 2), (64, 96), (64, 3)]

    def test_a_tied_embedding_keeps_its_table_and_the_head_gets_one_packed_copy(self):
        nodes = [
            node("Gather", "table ids", "e"),
            node("Transpose", "table", "head", perm=[1, 0]),
            node("MatMul", "e head", "logits", "lm_head"),
        ]
        proto = model(nodes, {"ids": (np.int64, ["m"])}, {"logits": (F32, ["m", 96])}, {"table": weight(96, 64)})
        rewritten, _ = rewrite(proto, Recipe(name="heads", output_projections=True))
        ids = np.array([3, 95, 0])
        assert initializers(rewritten) == ["table", "table_mxfp8", "table_mxfp8_scales"]
        assert kinds(rewritten) == {"Gather": 1, "MXFP8Quantize": 1, "MXFP8Gemm": 1}
        expect(weight(96, 64)[ids], weight(96, 64)).check(run(rewritten, {"ids": ids})[0])

    def test_a_weight_used_by_a_kept_site_too_stays_for_it(self):
        nodes = [
            node("MatMul", "x w", "a", "quantized"),
            node("Neg", "a", "ya"),
            node("MatMul", "x w", "b", "kept"),
            node("Abs", "b", "yb"),
        ]
        outputs = {"ya": (F32, ["m", 96]), "yb": (F32, ["m", 96])}
        proto = model(nodes, {"x": (F32, ["m", 64])}, outputs, {"w": weight(64, 96)})
        rewritten, report = rewrite(proto, Recipe(name="mxfp8", exclude=("kept",)))
        x = normal(3, 64)
        assert initializers(rewritten) == ["w", "w_mxfp8", "w_mxfp8_scales"]
        assert reasons(report) == {"quantized": LINEAR, "kept": "excluded by 'kept'"}
        ya, yb = run(rewritten, {"x": x})
        expect(x, weight(64, 96).T).then(np.negative).check(ya)
        np.testing.assert_allclose(yb, np.abs(x.astype(float) @ weight(64, 96)), rtol=1e-4, atol=1e-4)


class TestSharedQuantize:
    def test_gemms_on_one_activation_share_its_quantize_node(self):
        nodes = [node("MatMul", f"x {n}", f"h{n}", n) for n in "qkv"] + [
            node("Sum", "hq hk hv", "s"),
            node("Neg", "s", "y"),
        ]
        weights = {n: weight(64, 64, seed=i) for i, n in enumerate("qkv")}
        rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}, weights))
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 3, "Sum": 1, "Neg": 1}
        x = normal(3, 64)
        parts = [expect(x, w.T) for w in weights.values()]
        total = Expected(-sum(p.y for p in parts), sum(p.bound for p in parts))
        total.check(run(rewritten, {"x": x})[0], roundings=3)

    def test_gemms_that_want_another_format_do_not(self):
        nodes = [node("MatMul", f"x {n}", f"h{n}", n) for n in "qk"] + [
            node("Sum", "hq hk", "s"),
            node("Neg", "s", "y"),
        ]
        weights = {n: weight(64, 64, seed=i) for i, n in enumerate("qk")}
        recipe = Recipe(name="mixed", rules=(Rule(name="k", activations="e5m2"),))
        proto = model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}, weights)
        assert kinds(rewrite(proto, recipe)[0]) == {"MXFP8Quantize": 2, "MXFP8Gemm": 2, "Sum": 1, "Neg": 1}
