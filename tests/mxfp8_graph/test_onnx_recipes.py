"""What a recipe chooses: formats, rounding, weight-only, per rule."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from builders import model, neg_model, node, weight
from oracle import Expected, expect, kinds, normal, reasons, relu, rewrite, run

from mxfp8_graph import Recipe, Rule
from mxfp8_ops import contract

F32 = np.float32

SEEN_AS = {
    "mxfp8": {},
    "mxfp8-bf16": {"formats": ("bfloat16", "e4m3")},
    "mxfp8-weight-only": {"weight_only": True},
}
"""What becomes of activations by preset, as `expect` has it."""

pytestmark = pytest.mark.usefixtures("runtime")


class TestRecipes:
    @pytest.mark.parametrize("rounding", ["ceil", "floor", "even"])
    @pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")])
    def test_formats_and_rounding_are_those_of_the_recipe(self, rounding, formats):
        recipe = Recipe(name="r", activations=formats[0], weight_format=formats[1], scale_rounding=rounding)
        rewritten, _ = rewrite(neg_model("MatMul", ("m", 64), ("m", 96), {"w": weight(64, 96)}), recipe)
        x = normal(3, 64)
        y = expect(x, weight(64, 96).T, formats=formats, scale_rounding=rounding).then(np.negative)
        y.check(run(rewritten, {"x": x})[0])

    def test_a_rule_overrides_the_recipe_for_its_sites(self):
        nodes = [
            node("MatMul", "x w", "a", "one"),
            node("Relu", "a", "b"),
            node("MatMul", "b v", "c", "two"),
            node("Neg", "c", "y"),
        ]
        weights = {"w": weight(64, 96), "v": weight(96, 64, seed=1)}
        proto = model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}, weights)
        recipe = Recipe(
            name="r", rules=(Rule(name="two", activations="unchanged", weight_format="e5m2", scale_rounding="floor"),)
        )
        rewritten, report = rewrite(proto, recipe)
        x = normal(3, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Relu": 1, "MXFP8WeightGemm": 1, "Neg": 1}
        assert reasons(report)["two"].startswith("rules.0: name='two' -> quantize, activations=unchanged")
        first = expect(x, weights["w"].T).then(relu)
        second = expect(
            first.y.astype(F32), weights["v"].T, weight_only=True, formats=("", "e5m2"), scale_rounding="floor"
        )
        # What the first gemm may be off, the second one multiplies by at most |w|.
        slack = (first.bound + 2.0**-24 * np.abs(first.y)) @ np.abs(weights["v"].astype(float)) * 1.5
        Expected(-second.y, second.bound + slack).check(run(rewritten, {"x": x})[0])

    @pytest.mark.parametrize("left", [False, True])
    @pytest.mark.parametrize("dtype", [F32, np.float16])
    def test_weight_only_leaves_activations_alone(self, left, dtype):
        w = weight(96, 64, dtype=dtype) if left else weight(64, 96, dtype=dtype)
        x_shape, y_shape = ((64, "m"), (96, "m")) if left else (("m", 64), ("m", 96))
        proto = neg_model("MatMul", x_shape, y_shape, {"w": w}, "w x" if left else "x w", dtype=dtype)
        rewritten, report = rewrite(proto, "mxfp8-weight-only")
        x = normal(3, 64, dtype=dtype)
        more = {**({"Transpose": 2} if left else {}), **({"Cast": 1} if dtype is np.float16 else {})}
        assert kinds(rewritten) == {**more, "MXFP8WeightGemm": 1, "Neg": 1}
        assert reasons(report) == {"linear": "linear, by recipe 'mxfp8-weight-only'"}
        y = expect(x, w if left else w.T, weight_only=True, dtype=np.dtype(dtype).name).then(np.negative)
        actual = run(rewritten, {"x": np.ascontiguousarray(x.T) if left else x})[0]
        y.check(actual.T if left else actual)

    @pytest.mark.parametrize("left", [False, True])
    @pytest.mark.parametrize("dtype", [F32, np.float16, ml_dtypes.bfloat16])
    def test_bfloat16_rounds_activations(self, left, dtype):
        w = weight(96, 64, dtype=dtype) if left else weight(64, 96, dtype=dtype)
        x_shape, y_shape = ((64, "m"), (96, "m")) if left else (("m", 64), ("m", 96))
        proto = neg_model("MatMul", x_shape, y_shape, {"w": w}, "w x" if left else "x w", dtype=dtype)
        rewritten, report = rewrite(proto, "mxfp8-bf16")
        x = normal(3, 64, dtype=dtype)
        more = {**({"Transpose": 2} if left else {}), **({"Cast": 1} if dtype is np.float16 else {})}
        assert kinds(rewritten) == {**more, "MXFP8WeightGemm": 1, "Neg": 1}
        assert reasons(report) == {"linear": "linear, by recipe 'mxfp8-bf16'"}
        (gemm,) = (n for n in rewritten.graph.node if n.op_type == "MXFP8WeightGemm")
        assert {a.name: a.i for a in gemm.attribute}["activation_dtype"] == contract.BFLOAT16
        if dtype is ml_dtypes.bfloat16:  # ONNX Runtime's CPU provider has no bfloat16 Neg
            return
        y = expect(x, w if left else w.T, formats=("bfloat16", "e4m3"), dtype=np.dtype(dtype).name).then(np.negative)
        actual = run(rewritten, {"x": np.ascontiguousarray(x.T) if left else x})[0]
        y.check(actual.T if left else actual)

    def test_a_rule_may_round_the_activations_of_its_sites(self):
        nodes = [node("MatMul", "x w", "a", "one"), node("Relu", "a", "b"), node("MatMul", "b v", "c", "two")]
        weights = {"w": weight(64, 96), "v": weight(96, 64, seed=1)}
        shapes = {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}
        proto = model([*nodes, node("Neg", "c", "y")], *shapes, weights)
        rewritten, report = rewrite(proto, Recipe(rules=(Rule(name="two", activations="bfloat16"),)))
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Relu": 1, "MXFP8WeightGemm": 1, "Neg": 1}
        assert reasons(report)["two"] == "rules.0: name='two' -> quantize, activations=bfloat16"
        assert [s.decision.activations for s in report.sites] == ["e4m3", "bfloat16"]

    @pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-bf16", "mxfp8-weight-only"])
    @pytest.mark.parametrize("before", ["Softmax", "Abs", "Gelu"])
    def test_float16_between_ops_that_onnx_runtime_has_in_float32_only(self, before, recipe):
        """It runs such a node in float32 too, whatever its output_dtype says."""
        nodes = [node(before, "x", "s"), node("MatMul", "s w", "h", "linear"), node("Neg", "h", "y")]
        shapes = {"x": (np.float16, ["m", 64])}, {"y": (np.float16, ["m", 96])}
        weights = {"w": weight(64, 96, dtype=np.float16)}
        rewritten, _ = rewrite(model(nodes, *shapes, weights), recipe)
        x = normal(3, 64, dtype=np.float16)
        result = run(rewritten, {"x": x})[0]
        seen = run(model(nodes[:1], shapes[0], {"s": (np.float16, ["m", 64])}), {"x": x})[0]
        y = expect(seen, weights["w"].T, **SEEN_AS[recipe], dtype="float16").then(np.negative)
        # ONNX Runtime may leave out the roundings to float16 around a node it runs in float32.
        slack = {"mxfp8": 2.0**-4, "mxfp8-bf16": 2.0**-8}.get(recipe, 2.0**-10)
        Expected(y.y, y.bound + slack * np.abs(seen) @ np.abs(weights["w"])).check(result)
