"""Matmuls inside If, Loop and Scan, and inside model-local functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from builders import calling, choose, local_function, model, node, steps, subgraph, value, weight
from onnx import helper, numpy_helper
from oracle import GEMM, Expected, computes, expect, initializers, kinds, normal, quantized, reasons, rewrite, run

import mxfp8_graph
from mxfp8_graph import NothingEligibleError, Recipe
from mxfp8_ops.errors import ContractError

pytestmark = pytest.mark.usefixtures("runtime")
F32 = np.float32
X, Y, YES = {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 96])}, {"yes": (np.bool_, [])}
W, V, ZERO = weight(64, 96), weight(64, 96, seed=1), np.zeros((3, 96), F32)
ROWS = normal(3, 64)


def if_model(then: onnx.GraphProto, other: onnx.GraphProto, before: str = "", **weights: np.ndarray) -> Any:
    """y = -(then if yes else other)."""
    nodes = [*(steps(before) if before else ()), choose(then, other), node("Neg", "h", "y")]
    return model(nodes, {**X, **YES}, Y, weights)


def inner(proto: onnx.ModelProto | onnx.GraphProto) -> list[onnx.GraphProto]:
    """Returns the subgraphs of the first control-flow node, sorted by name: then_branch comes after else_branch."""
    nodes = proto.graph.node if isinstance(proto, onnx.ModelProto) else proto.node
    holder = next(n for n in nodes if any(a.HasField("g") for a in n.attribute))
    return [a.g for a in sorted(holder.attribute, key=lambda a: a.name) if a.HasField("g")]


def check(rewritten: onnx.ModelProto, *, yes: np.ndarray | None = None, no: np.ndarray | None = None) -> None:
    """Fails unless the branches give minus x times these weights [K, N]."""
    for flag, w in ((True, yes), (False, no)):
        if w is not None:
            expect(ROWS, w.T).then(np.negative).check(run(rewritten, {"x": ROWS, "yes": np.array(flag)})[0])


class TestIf:
    def test_outer_weights_stay_outside_and_are_packed_once(self):
        branches = [subgraph(f"mm_{t}:MatMul x w>{t}", t) for t in "ab"]
        rewritten, report = rewrite(if_model(*branches, w=W))
        assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
        assert [kinds(g) for g in inner(rewritten)] == [GEMM, GEMM]
        assert [s.decision.site.subgraph for s in report.sites] == ["choose/else_branch", "choose/then_branch"]
        check(rewritten, yes=W, no=W)

    def test_inner_weights_stay_inside_and_those_of_one_name_apart(self):
        then, other = subgraph("one:MatMul x w1>a", "a", w1=W), subgraph("two:MatMul x w2>b", "b", w2=V)
        rewritten, _ = rewrite(if_model(then, other))
        names = [[t.name for t in g.initializer] for g in inner(rewritten)]
        assert names == [["w2_mxfp8", "w2_mxfp8_scales"], ["w1_mxfp8", "w1_mxfp8_scales"]]
        check(rewritten, yes=W, no=V)
        then, other = (subgraph("mm:MatMul x w>a", "a", w=w) for w in (W, V))
        for opset in (21, 13):  # a conversion keeps them apart too
            proto = if_model(then, other)
            proto.opset_import[0].version = opset
            rewritten, report = rewrite(proto)
            assert [(s.decision.site.name, s.decision.site.shared_with) for s in report.sites] == [
                ("mm", 0),
                ("mm#2", 0),
            ]
            check(rewritten, yes=W, no=V)

    def test_a_weight_that_only_the_other_branch_still_uses_stays_there(self):
        then, other = subgraph("packed:MatMul x w>a", "a", w=W), subgraph("kept:MatMul x w>a", "a", w=V)
        rewritten, _ = rewrite(if_model(then, other), Recipe(name="mxfp8", exclude=("kept",)))
        y = run(rewritten, {"x": ROWS, "yes": np.array(False)})[0]
        np.testing.assert_allclose(y, -ROWS.astype(float) @ V, rtol=1e-4, atol=1e-4)

    def test_edits_on_both_sides_of_the_border_all_arrive(self):
        deep = choose(subgraph("deep:MatMul b v>c", "c"), subgraph("deep2:MatMul b v>d", "d"), "e")
        nodes = [*steps("outer:MatMul x w>a; Relu a>b"), deep, *steps("after:MatMul e w>f; Neg f>y")]
        proto = model(nodes, {**X, **YES}, Y, {"w": W, "v": weight(96, 64, seed=1)})
        rewritten, report = rewrite(proto)
        assert len(report.rewritten) == 4
        assert kinds(rewritten) == {"MXFP8Quantize": 2, "MXFP8Gemm": 2, "Relu": 1, "If": 1, "Neg": 1}
        assert [kinds(g) for g in inner(rewritten)] == [GEMM, GEMM]

    def test_nested_branches_see_the_weights_of_both_levels(self):
        deep = [subgraph(f"mm_{t}:MatMul x {w}>{t}", t) for w, t in (("w0", "a"), ("w1", "b"))]
        middle = subgraph([choose(*deep, "c", "inner"), node("Identity", "c", "d")], "d", w1=V)
        rewritten, report = rewrite(if_model(middle, subgraph("mm_e:MatMul x w0>e", "e"), w0=W))
        then = "choose/then_branch/inner"
        assert [s.decision.site.subgraph for s in report.sites] == [
            "choose/else_branch", f"{then}/else_branch", f"{then}/then_branch",
        ]  # fmt: skip
        assert initializers(rewritten) == ["w0_mxfp8", "w0_mxfp8_scales"]
        assert [t.name for t in inner(rewritten)[1].initializer] == ["w1_mxfp8", "w1_mxfp8_scales"]
        check(rewritten, yes=W, no=W)

    def test_a_bias_is_absorbed_inside_a_branch_and_not_across_its_border(self):
        then = subgraph("Transpose w>wt; mm:MatMul x wt>a; Add a b>s", "s", w=weight(96, 64))
        other, b = subgraph("Identity zero>z", "z"), weight(96, seed=1)
        y = expect(ROWS, weight(96, 64), b).then(np.negative)
        rewritten, _ = computes(if_model(then, other, b=b, zero=ZERO), y, x=ROWS, yes=np.array(True))
        assert [kinds(g) for g in inner(rewritten)] == [{"Identity": 1}, GEMM]
        proto = if_model(subgraph("Add h0 b>t", "t"), other, "mm:MatMul x w>h0", w=W, b=b, zero=ZERO)
        y = expect(ROWS, W.T)
        _, report = computes(proto, Expected(-(y.y + b), y.bound), roundings=1, x=ROWS, yes=np.array(True))
        assert not report.sites[0].decision.site.has_bias

    def test_a_subgraph_rule_matches_the_path(self):
        branches = [subgraph(f"mm_{t}:MatMul x w>{t}", t) for t in "ab"]
        rules = [{"subgraph": "else_branch", "quantize": False}]
        recipe = Recipe.model_validate({"name": "mxfp8", "rules": rules})
        rewritten, report = rewrite(if_model(*branches, w=W), recipe)
        assert [kinds(g) for g in inner(rewritten)] == [{"MatMul": 1}, GEMM]
        assert reasons(report)["mm_b"] == "kept by rules.0: subgraph='else_branch' -> keep"


def loop_model(body: str, w: np.ndarray) -> onnx.ModelProto:
    """y = -(state after 3 rounds of state -> next), state [m, 64]."""
    inputs = [value("i", np.int64, []), value("go", np.bool_, []), value("state", F32, ["m", 64])]
    loop = node("Loop", "rounds yes x", "h", "loop", body=subgraph(f"{body}; Identity go>on", "on next", inputs))
    weights = {"w": w, "rounds": np.array(3), "yes": np.array(True)}
    return model([loop, node("Neg", "h", "y")], X, {"y": (F32, ["m", 64])}, weights)


class TestLoopAndScan:
    def test_a_matmul_in_a_loop_is_rewritten(self):
        w, state = weight(64, 64), ROWS
        rewritten, report = rewrite(loop_model("mm:MatMul state w>next", w))
        assert kinds(inner(rewritten)[0]) == {**GEMM, "Identity": 1}
        assert [s.decision.site.subgraph for s in report.sites] == ["loop/body"]
        actual = run(rewritten, {"x": state})[0]
        # Requantizing each round's float32 state: predict with the same float32 states, kept apart from rounding ties.
        for _ in range(3):
            state = (quantized(state) @ quantized(np.ascontiguousarray(w.T)).T).astype(F32)
        np.testing.assert_allclose(actual, -state, rtol=0, atol=0.05 * np.abs(state).max())

    def test_a_state_that_feeds_the_next_round_is_no_output_projection(self):
        proto = loop_model("mm:MatMul state w>next", weight(64, 64))
        proto.graph.node[0].output[0] = "y"
        del proto.graph.node[1]
        onnx.checker.check_model(proto)
        assert reasons(rewrite(proto)[1]) == {"mm": "linear, by recipe 'mxfp8'"}

    def test_an_outer_activation_is_quantized_inside(self):
        one = expect(ROWS, weight(64, 64).T)
        total = Expected(-(ROWS + 3 * one.y), 3 * one.bound)
        computes(loop_model("mm:MatMul x w>p; Add state p>next", weight(64, 64)), total, roundings=4, x=ROWS)

    def test_a_matmul_in_a_scan_is_rewritten(self):
        rewritten, report = rewrite(scan_model())
        assert [s.decision.site.subgraph for s in report.sites] == ["scan/body"]
        x = normal(5, 64)
        total, rows = run(rewritten, {"x": x})
        each = expect(x, weight(64, 64).T)
        each.then(np.negative).check(rows)
        Expected(-each.y.sum(0), each.bound.sum(0)).check(total, roundings=5)


def scan_model() -> onnx.ModelProto:
    """Returns a model whose rows are multiplied by a Scan, which gives them and their sum."""
    inputs = [value("sum", F32, [64]), value("row", F32, [64])]
    body = subgraph("mm:MatMul row w>p; Add sum p>next; Neg p>out", "next out", inputs, w=weight(64, 64))
    scan = node("Scan", "zero x", "total rows", "scan", num_scan_inputs=1, body=body)
    outputs = {"y": (F32, [64]), "rows": (F32, [5, 64])}
    return model([scan, node("Neg", "total", "y")], {"x": (F32, [5, 64])}, outputs, {"zero": np.zeros(64, F32)})


LINEAR = local_function("Linear", "a b", "inner:MatMul a b>r")
TWICE = local_function("Twice", "a", "Add a a>r")


def function_model(functions: Sequence[onnx.FunctionProto], nodes: Any, n: int = 96, **weights: np.ndarray) -> Any:
    """Returns a model of x [m, 64] and y [m, n] whose nodes call these functions."""
    nodes = steps(nodes) if isinstance(nodes, str) else nodes
    return calling(model(nodes, X, {"y": (F32, ["m", n])}, weights, checked=False), *functions)


NEGATED = expect(ROWS, W.T).then(np.negative)
DOUBLED = Expected(2 * expect(ROWS, W.T).y, 2 * expect(ROWS, W.T).bound)
NEG: Mapping[str, int] = {**GEMM, "Neg": 1}


class TestFunctions:
    def test_a_function_that_holds_a_matmul_is_inlined_where_it_is_called(self):
        proto = function_model([LINEAR], "Linear x w>h; Neg h>y", w=W)
        rewritten, report = computes(proto, NEGATED, NEG, x=ROWS)
        assert report.notes == ("inlined local functions: Linear",)
        assert {f.name for f in rewritten.functions} == {"MXFP8Quantize", "MXFP8Gemm"}

    def test_each_call_has_its_own_weight_also_in_branches(self):
        nodes = "Linear x w>a; Relu a>b; Linear b v>h; Neg h>y"
        rewritten, report = rewrite(function_model([LINEAR], nodes, 64, w=W, v=weight(96, 64, seed=1)))
        assert [s.decision.site.weight for s in report.sites] == ["w", "v"]
        calls = [subgraph([node("Linear", f"x {w}", t, domain="local")], t) for w, t in (("w", "s"), ("v", "t"))]
        proto = function_model([LINEAR], [choose(*calls), node("Neg", "h", "y")], w=V, v=W, yes=np.array(False))
        rewritten, _ = computes(proto, NEGATED, x=ROWS)
        assert [kinds(g) for g in inner(rewritten)] == [GEMM, GEMM]

    def test_a_function_that_calls_one_that_holds_a_matmul_is_inlined(self):
        outer = local_function("Block", "a b", [node("Linear", "a b", "t", domain="local"), node("Abs", "t", "r")])
        proto = function_model([LINEAR, outer], "Block x w>h; Neg h>y", w=W)
        _, report = computes(proto, expect(ROWS, W.T).then(np.abs).then(np.negative), x=ROWS)
        assert report.notes == ("inlined local functions: Linear, Block",)

    def test_a_weight_or_an_if_inside_a_function_is_inlined(self):
        constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(W))
        fixed = local_function("Fixed", "a", [constant, node("MatMul", "a w", "r", "inner")])
        computes(function_model([fixed], "Fixed x>h; Neg h>y"), NEGATED, NEG, x=ROWS)
        branches = [subgraph(f"mm_{t}:MatMul a b>{t}", t) for t in "st"]
        body = [node("If", "c", "r", then_branch=branches[0], else_branch=branches[1])]
        proto = function_model(
            [local_function("Choose", "a b c", body)], "Choose x w c>h; Neg h>y", w=W, c=np.array(True)
        )
        computes(proto, NEGATED, x=ROWS)

    def test_functions_without_a_matmul_stay_even_of_an_opset_whose_ops_are_the_same(self):
        old = local_function("Linear", "a b", "inner:MatMul a b>r", opset=17)
        for linear, other in ((LINEAR, TWICE), (old, local_function("Twice", "a", "Add a a>r", opset=18))):
            proto = function_model([linear, other], "Linear x w>h; Twice h>y", w=W)
            rewritten, _ = computes(proto, DOUBLED, {**GEMM, "Twice": 1}, x=ROWS)
            assert rewritten.functions[0] == other

    def test_functions_of_another_opset_whose_ops_differ_are_an_error(self):
        proto = function_model([LINEAR], "Linear x w>h; Neg h>y", w=W)
        body = "ReduceSum a>s|axes=[0]; Add a s>t; MatMul t b>r"
        proto.functions[0].CopyFrom(local_function("Linear", "a b", body, opset=11))
        with pytest.raises(ContractError) as caught:
            mxfp8_graph.rewrite(proto)
        assert str(caught.value) == (
            "model: local function 'Linear' is of opset 11, in which Add is another than in the model's opset 21; "
            "expected one opset for both; export the model again"
        )

    def test_a_function_without_a_call_gives_no_site(self):
        with pytest.raises(NothingEligibleError, match="no MatMul or Gemm in the model"):
            mxfp8_graph.rewrite(function_model([LINEAR], "Neg x>y", 64))
