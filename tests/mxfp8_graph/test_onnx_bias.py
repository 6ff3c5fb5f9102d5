"""Which Add after a MatMul is its bias, and which is not."""

from __future__ import annotations

import numpy as np
import pytest
from builders import matmul_model, model, node, weight
from onnx import helper, numpy_helper
from oracle import Expected, expect, initializers, kinds, normal, relu, rewrite, run

from mxfp8_graph import Recipe

F32 = np.float32

pytestmark = pytest.mark.usefixtures("runtime")


class TestBias:
    @pytest.mark.parametrize("order", ["h b", "b h"])
    @pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 96), (1,), ()])
    def test_a_following_add_is_absorbed_in_either_order(self, order, shape):
        b = np.asarray(weight(*shape, seed=1), F32)
        nodes = [node("MatMul", "x w", "h", "linear"), node("Add", order, "s"), node("Neg", "s", "y")]
        proto = model(nodes, {"x": (F32, [2, "seq", 64])}, {"y": (F32, [2, "seq", 96])}, {"w": weight(64, 96), "b": b})
        rewritten, report = rewrite(proto)
        x = normal(2, 5, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
        assert report.sites[0].decision.site.has_bias
        expect(x, weight(64, 96).T, b).then(np.negative).check(run(rewritten, {"x": x})[0])

    @pytest.mark.parametrize("shape", [(5, 1), (5, 96), (2, 1, 96), (1, 1, 1, 96)])
    def test_any_other_shape_stays_an_add(self, shape):
        b = weight(*shape, seed=1)
        rank = max(3, len(shape))
        nodes = [node("MatMul", "x w", "h", "linear"), node("Add", "h b", "s"), node("Neg", "s", "y")]
        proto = model(
            nodes, {"x": (F32, [2, 5, 64])}, {"y": (F32, [1, 2, 5, 96][4 - rank :])}, {"w": weight(64, 96), "b": b}
        )
        rewritten, _ = rewrite(proto)
        x = normal(2, 5, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Add": 1, "Neg": 1}
        y = expect(x, weight(64, 96).T)
        total = y.y + b
        Expected(-total, np.broadcast_to(y.bound, total.shape)).check(run(rewritten, {"x": x})[0], roundings=1)

    @pytest.mark.parametrize("second", ["output", "consumer", "subgraph"])
    def test_a_product_that_is_used_elsewhere_keeps_its_add(self, second):
        nodes = [node("MatMul", "x w", "h", "linear"), node("Add", "h b", "s"), node("Neg", "s", "y")]
        outputs = {"y": (F32, ["m", 96])}
        weights: dict[str, np.ndarray] = {"w": weight(64, 96), "b": weight(96, seed=1)}
        if second == "output":
            outputs["h"] = (F32, ["m", 96])
        elif second == "consumer":
            nodes.append(node("Abs", "h", "z"))
            outputs["z"] = (F32, ["m", 96])
        else:
            branch = helper.make_graph(
                [node("Abs", "h", "t")], "branch", [], [helper.make_empty_tensor_value_info("t")]
            )
            nodes.append(helper.make_node("If", ["yes"], ["z"], "if", then_branch=branch, else_branch=branch))
            outputs["z"] = (F32, ["m", 96])
            weights["yes"] = np.array(True)
        recipe = Recipe(name="mxfp8", output_projections=True)
        rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, outputs, weights), recipe)
        x = normal(3, 64)
        assert kinds(rewritten)["Add"] == 1
        y, other = run(rewritten, {"x": x})
        exact = expect(x, weight(64, 96).T)
        (exact if second == "output" else exact.then(np.abs)).check(other)
        Expected(-(exact.y + weights["b"]), exact.bound).check(y, roundings=1)

    def test_a_bias_stored_after_the_matmul_is_there_when_the_gemm_runs(self):
        constant = helper.make_node("Constant", [], ["b"], value=numpy_helper.from_array(weight(96, seed=1)))
        nodes = [node("MatMul", "x w", "h", "linear"), constant, node("Add", "h b", "s"), node("Neg", "s", "y")]
        proto = model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 96])}, {"w": weight(64, 96)})
        rewritten, _ = rewrite(proto)
        x = normal(3, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
        expect(x, weight(64, 96).T, weight(96, seed=1)).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_a_16_bit_bias_is_added_in_float32(self):
        rewritten, _ = rewrite(matmul_model(64, 96, bias=True, dtype=np.float16))
        x, b = normal(2, 5, 64, dtype=np.float16), weight(96, seed=1, dtype=np.float16)
        assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales", "b_f32"]
        y = expect(x, weight(64, 96, dtype=np.float16).T, b, dtype="float16").then(relu)
        y.check(run(rewritten, {"x": x})[0])

    def test_a_residual_add_is_no_bias(self):
        nodes = [node("MatMul", "x w", "h", "linear"), node("Add", "h x", "s"), node("Neg", "s", "y")]
        proto = model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}, {"w": weight(64, 64)})
        assert kinds(rewrite(proto)[0]) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Add": 1, "Neg": 1}
