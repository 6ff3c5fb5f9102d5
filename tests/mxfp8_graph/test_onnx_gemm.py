"""Gemm in every form: transpositions, alpha, beta, and every shape of C."""

from __future__ import annotations

import numpy as np
import pytest
from builders import gemm_model, model, neg_model, node, weight
from oracle import Expected, expect, kinds, normal, relu, rewrite, run

F32 = np.float32

pytestmark = pytest.mark.usefixtures("runtime")


class TestGemm:
    @pytest.mark.parametrize("trans_a", [0, 1])
    @pytest.mark.parametrize("trans_b", [0, 1])
    @pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.3, 1.7)])
    def test_every_transposition_with_alpha_and_beta_folded(self, trans_a, trans_b, alpha, beta):
        proto = gemm_model(64, 96, transA=trans_a, transB=trans_b, alpha=alpha, beta=beta)
        rewritten, report = rewrite(proto)
        x = normal(3, 64)
        w = weight(96, 64) if trans_b else weight(64, 96).T
        assert kinds(rewritten) == {
            **({"Transpose": 1} if trans_a else {}),
            "MXFP8Quantize": 1,
            "MXFP8Gemm": 1,
            "Relu": 1,
        }
        assert report.sites[0].decision.site.has_bias
        y = expect(x, w * F32(alpha), weight(96, seed=1) * F32(beta)).then(relu)
        y.check(run(rewritten, {"x": np.ascontiguousarray(x.T) if trans_a else x})[0])

    @pytest.mark.parametrize("shape", [(96,), (1, 96), (1,), (), (1, 1)])
    def test_a_bias_per_column_is_absorbed(self, shape):
        c = np.asarray(weight(*shape, seed=1), F32)
        proto = neg_model("Gemm", ("batch", 64), ("batch", 96), {"w": weight(64, 96), "c": c}, "x w c")
        rewritten, _ = rewrite(proto)
        x = normal(3, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
        expect(x, weight(64, 96).T, c).then(np.negative).check(run(rewritten, {"x": x})[0])

    @pytest.mark.parametrize("shape", [(3, 1), (3, 96)])
    @pytest.mark.parametrize("beta", [1.0, 0.5])
    def test_a_c_with_rows_stays_an_add(self, shape, beta):
        c = weight(*shape, seed=1)
        proto = neg_model("Gemm", (3, 64), (3, 96), {"w": weight(64, 96), "c": c}, "x w c", beta=beta)
        rewritten, report = rewrite(proto)
        x = normal(3, 64)
        assert kinds(rewritten)["Add"] == 1
        assert not report.sites[0].decision.site.has_bias
        y = expect(x, weight(64, 96).T)
        Expected(-(y.y + c.astype(float) * beta), y.bound).check(run(rewritten, {"x": x})[0], roundings=2)

    def test_a_c_computed_at_run_time_stays_an_add(self):
        nodes = [node("Gemm", "x w c", "h", "linear", alpha=2.0, beta=3.0), node("Neg", "h", "y")]
        inputs = {"x": (F32, ["batch", 64]), "c": (F32, [96])}
        rewritten, _ = rewrite(model(nodes, inputs, {"y": (F32, ["batch", 96])}, {"w": weight(64, 96)}))
        x, c = normal(3, 64), normal(96, seed=5)
        y = expect(x, weight(64, 96).T * 2)
        Expected(-(y.y + 3.0 * c), y.bound).check(run(rewritten, {"x": x, "c": c})[0], roundings=3)

    @pytest.mark.parametrize("trans_a", [0, 1])
    @pytest.mark.parametrize("trans_b", [0, 1])
    def test_a_static_left_operand(self, trans_a, trans_b):
        w = weight(*((64, 96) if trans_a else (96, 64)))
        x_shape = ("batch", 64) if trans_b else (64, "batch")
        proto = neg_model(
            "Gemm",
            x_shape,
            (96, "batch"),
            {"w": w, "c": weight(96, 1, seed=1)},
            "w x c",
            alpha=0.7,
            transA=trans_a,
            transB=trans_b,
        )
        rewritten, _ = rewrite(proto)
        x = normal(3, 64)
        y = expect(x, (w.T if trans_a else w) * F32(0.7)).then(np.transpose)
        actual = run(rewritten, {"x": x if trans_b else np.ascontiguousarray(x.T)})[0]
        Expected(-(y.y + weight(96, 1, seed=1)), y.bound).check(actual, roundings=1)

    def test_gemm_operands_are_matrices_even_where_their_shape_is_unknown(self):
        nodes = [node("Reshape", "x shape", "x2"), node("Gemm", "x2 w", "h", "linear", transA=1), node("Neg", "h", "y")]
        inputs = {"x": (F32, [64, 3]), "shape": (np.int64, ["rank"])}
        rewritten, _ = rewrite(model(nodes, inputs, {"y": (F32, [3, 96])}, {"w": weight(64, 96)}))
        x = normal(64, 3)
        y = expect(x.T, weight(64, 96).T).then(np.negative)
        y.check(run(rewritten, {"x": x, "shape": np.array([64, 3])})[0])
