"""Products of two activations: kept unless the recipe asks for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import model, node
from oracle import Expected, expect, kinds, normal, refusal, rewrite, run

from mxfp8_graph import Recipe, Rule

F32 = np.float32

pytestmark = pytest.mark.usefixtures("runtime")


class TestProducts:
    """Both operands computed at run time: kept unless the recipe asks for them."""

    ALL = Recipe(name="all", rules=(Rule(op="MatMul"), Rule(op="Gemm")))

    @staticmethod
    def product(op: str = "MatMul", a: Any = (2, 3, 64), b: Any = (2, 64, 40), y: Any = (2, 3, 40), **attributes: Any):
        nodes = [node(op, "a b", "h", "product", **attributes), node("Neg", "h", "y")]
        return model(nodes, {"a": (F32, a), "b": (F32, b)}, {"y": (F32, y)})

    def test_by_default_it_is_kept_with_the_reason(self):
        assert refusal(self.product()) == (
            "both operands are computed at run time; add a rule with quantize: true to quantize it"
        )

    def test_a_rule_quantizes_both_operands_along_k(self):
        rewritten, _ = rewrite(self.product(), Recipe(name="all", rules=(Rule(op="MatMul"),)))
        a, b = normal(2, 3, 64), normal(2, 64, 40, seed=1)
        assert kinds(rewritten) == {"Transpose": 1, "MXFP8Quantize": 2, "MXFP8Gemm": 1, "Neg": 1}
        expect(a, b.swapaxes(-1, -2)).then(np.negative).check(run(rewritten, {"a": a, "b": b})[0])

    def test_broadcast_leading_dimensions(self):
        proto = self.product(a=(2, 1, 3, 64), b=(5, 64, 40), y=(2, 5, 3, 40))
        rewritten, _ = rewrite(proto, Recipe(name="all", rules=(Rule(op="MatMul"),)))
        a, b = normal(2, 1, 3, 64), normal(5, 64, 40, seed=1)
        expect(a, b.swapaxes(-1, -2)).then(np.negative).check(run(rewritten, {"a": a, "b": b})[0])

    def test_the_same_tensor_on_both_sides(self):
        nodes = [node("MatMul", "a a", "h", "square"), node("Neg", "h", "y")]
        proto = model(nodes, {"a": (F32, [64, 64])}, {"y": (F32, [64, 64])})
        rewritten, _ = rewrite(proto, Recipe(name="all", rules=(Rule(op="MatMul"),)))
        a = normal(64, 64)
        expect(a, a.T).then(np.negative).check(run(rewritten, {"a": a})[0])

    @pytest.mark.parametrize("trans_a", [0, 1])
    @pytest.mark.parametrize("trans_b", [0, 1])
    def test_gemm_with_alpha(self, trans_a, trans_b):
        a_shape, b_shape = ((64, 3) if trans_a else (3, 64)), ((40, 64) if trans_b else (64, 40))
        proto = self.product("Gemm", a_shape, b_shape, (3, 40), transA=trans_a, transB=trans_b, alpha=0.3)
        rewritten, _ = rewrite(proto, Recipe(name="all", rules=(Rule(op="Gemm"),)))
        a, b = normal(*a_shape), normal(*b_shape, seed=1)
        y = expect(a.T if trans_a else a, b if trans_b else b.T)
        scaled = Expected(-y.y * float(F32(0.3)), y.bound * 0.3001)
        scaled.check(run(rewritten, {"a": a, "b": b})[0], roundings=1)

    def test_vectors_are_kept_with_the_reason(self):
        reason = refusal(self.product(a=(64,), b=(64, 40), y=(40,)), Recipe(name="all", rules=(Rule(op="MatMul"),)))
        assert reason == "an operand's rank is unknown or below 2; give the model shape information"

    def test_weight_only_keeps_a_product_that_has_no_weight(self):
        recipe = Recipe(name="wo", activations="unchanged", rules=(Rule(op="MatMul"),))
        assert refusal(self.product(), recipe) == (
            "activations: unchanged, and this product has no static weight; set activations: e4m3 for it to quantize it"
        )
