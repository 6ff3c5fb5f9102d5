"""Matmuls inside If, Loop and Scan, and inside model-local functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from builders import model, node, value, weight
from onnx import helper, numpy_helper
from oracle import Expected, expect, initializers, kinds, normal, quantized, reasons, rewrite, run

import mxfp8_graph
from mxfp8_graph import NothingEligibleError, Recipe
from mxfp8_ops.errors import ContractError

pytestmark = pytest.mark.usefixtures("runtime")
F32 = np.float32
X, Y = {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 96])}


def graph(
    nodes: Sequence[onnx.NodeProto], output: str, weights: Mapping[str, np.ndarray] | None = None, inputs: Any = ()
) -> onnx.GraphProto:
    """Returns a subgraph; `output` may name several, their types are left to inference."""
    return helper.make_graph(
        list(nodes),
        "body",
        list(inputs),
        [helper.make_empty_tensor_value_info(name) for name in output.split()],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )


def either(then: onnx.GraphProto, other: onnx.GraphProto, output: str = "h", name: str = "choose") -> onnx.NodeProto:
    return helper.make_node("If", ["yes"], [output], name, then_branch=then, else_branch=other)


def if_model(then: onnx.GraphProto, other: onnx.GraphProto, weights: Mapping[str, np.ndarray] | None = None) -> Any:
    """y = -(then if yes else other)."""
    nodes = [either(then, other), node("Neg", "h", "y")]
    return model(nodes, {**X, "yes": (np.bool_, [])}, Y, weights)


def inner(proto: onnx.ModelProto | onnx.GraphProto, index: int = 0) -> list[onnx.GraphProto]:
    """Returns the subgraphs of the first control-flow node, sorted by name: then_branch comes after else_branch."""
    nodes = proto.graph.node if isinstance(proto, onnx.ModelProto) else proto.node
    holder = next(n for n in nodes if any(a.HasField("g") for a in n.attribute))
    return [a.g for a in sorted(holder.attribute, key=lambda a: a.name) if a.HasField("g")]


QUANTIZED = {"MXFP8Quantize": 1, "MXFP8Gemm": 1}


class TestIf:
    def test_outer_weights_stay_outside_and_are_packed_once(self):
        branches = [graph([node("MatMul", "x w", t, f"mm_{t}")], t) for t in "ab"]
        rewritten, report = rewrite(if_model(*branches, {"w": weight(64, 96)}))
        assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
        assert [kinds(g) for g in inner(rewritten)] == [QUANTIZED, QUANTIZED]
        assert [s.decision.site.subgraph for s in report.sites] == ["choose/else_branch", "choose/then_branch"]
        x = normal(3, 64)
        for yes in (True, False):
            actual = run(rewritten, {"x": x, "yes": np.array(yes)})[0]
            expect(x, weight(64, 96).T).then(np.negative).check(actual)

    def test_inner_weights_stay_inside(self):
        then = graph([node("MatMul", "x w1", "a", "one")], "a", {"w1": weight(64, 96)})
        other = graph([node("MatMul", "x w2", "b", "two")], "b", {"w2": weight(64, 96, seed=1)})
        rewritten, _ = rewrite(if_model(then, other))
        assert [[t.name for t in g.initializer] for g in inner(rewritten)] == [
            ["w2_mxfp8", "w2_mxfp8_scales"],
            ["w1_mxfp8", "w1_mxfp8_scales"],
        ]
        x = normal(3, 64)
        for yes, seed in ((True, 0), (False, 1)):
            actual = run(rewritten, {"x": x, "yes": np.array(yes)})[0]
            expect(x, weight(64, 96, seed=seed).T).then(np.negative).check(actual)

    def test_branches_that_call_different_weights_by_one_name_keep_them_apart(self):
        then = graph([node("MatMul", "x w", "a", "mm")], "a", {"w": weight(64, 96)})
        other = graph([node("MatMul", "x w", "a", "mm")], "a", {"w": weight(64, 96, seed=1)})
        rewritten, report = rewrite(if_model(then, other))
        assert [s.decision.site.name for s in report.sites] == ["mm", "mm#2"]
        assert [s.decision.site.shared_with for s in report.sites] == [0, 0]
        x = normal(3, 64)
        for yes, seed in ((True, 0), (False, 1)):
            actual = run(rewritten, {"x": x, "yes": np.array(yes)})[0]
            expect(x, weight(64, 96, seed=seed).T).then(np.negative).check(actual)

    def test_a_weight_that_only_the_other_branch_still_uses_stays_there(self):
        then = graph([node("MatMul", "x w", "a", "packed")], "a", {"w": weight(64, 96)})
        other = graph([node("MatMul", "x w", "a", "kept")], "a", {"w": weight(64, 96, seed=1)})
        rewritten, _ = rewrite(if_model(then, other), Recipe(name="mxfp8", exclude=("kept",)))
        x = normal(3, 64)
        y = run(rewritten, {"x": x, "yes": np.array(False)})[0]
        np.testing.assert_allclose(y, -x.astype(float) @ weight(64, 96, seed=1), rtol=1e-4, atol=1e-4)

    def test_edits_on_both_sides_of_the_border_all_arrive(self):
        nodes = [
            node("MatMul", "x w", "a", "outer"),
            node("Relu", "a", "b"),
            either(
                graph([node("MatMul", "b v", "c", "deep")], "c"), graph([node("MatMul", "b v", "d", "deep2")], "d"), "e"
            ),
            node("MatMul", "e w", "f", "after"),
            node("Neg", "f", "y"),
        ]
        weights = {"w": weight(64, 96), "v": weight(96, 64, seed=1)}
        rewritten, report = rewrite(model(nodes, {**X, "yes": (np.bool_, [])}, Y, weights))
        assert len(report.rewritten) == 4
        assert kinds(rewritten) == {"MXFP8Quantize": 2, "MXFP8Gemm": 2, "Relu": 1, "If": 1, "Neg": 1}
        assert [kinds(g) for g in inner(rewritten)] == [QUANTIZED, QUANTIZED]

    def test_an_add_inside_a_branch_is_no_bias_of_a_matmul_outside(self):
        then = graph([node("Add", "h0 b", "t", "add")], "t")
        other = graph([node("Identity", "zero", "e", "pass")], "e")
        nodes = [node("MatMul", "x w", "h0", "mm"), either(then, other), node("Neg", "h", "y")]
        weights = {"w": weight(64, 96), "b": weight(96, seed=1), "zero": np.zeros((3, 96), F32)}
        rewritten, report = rewrite(model(nodes, {**X, "yes": (np.bool_, [])}, Y, weights))
        assert not report.sites[0].decision.site.has_bias
        assert [kinds(g) for g in inner(rewritten)] == [{"Identity": 1}, {"Add": 1}]
        x = normal(3, 64)
        y = expect(x, weight(64, 96).T)
        Expected(-(y.y + weights["b"]), y.bound).check(run(rewritten, {"x": x, "yes": np.array(True)})[0], roundings=1)

    def test_nested_branches_see_the_weights_of_both_levels(self):
        deep = [graph([node("MatMul", f"x {w}", t, f"mm_{t}")], t) for w, t in (("w0", "a"), ("w1", "b"))]
        middle = graph([either(*deep, "c", "inner"), node("Abs", "c", "d")], "d", {"w1": weight(64, 96, seed=1)})
        other = graph([node("MatMul", "x w0", "e", "mm_e")], "e")
        rewritten, report = rewrite(if_model(middle, other, {"w0": weight(64, 96)}))
        assert [s.decision.site.subgraph for s in report.sites] == [
            "choose/else_branch",
            "choose/then_branch/inner/else_branch",
            "choose/then_branch/inner/then_branch",
        ]
        assert initializers(rewritten) == ["w0_mxfp8", "w0_mxfp8_scales"]
        assert [t.name for t in inner(rewritten)[1].initializer] == ["w1_mxfp8", "w1_mxfp8_scales"]
        x = normal(3, 64)
        expect(x, weight(64, 96).T).then(np.abs).then(np.negative).check(
            run(rewritten, {"x": x, "yes": np.array(True)})[0]
        )
        expect(x, weight(64, 96).T).then(np.negative).check(run(rewritten, {"x": x, "yes": np.array(False)})[0])

    def test_bias_and_views_inside_a_branch(self):
        nodes = [
            node("Transpose", "w", "wt", "view"),
            node("MatMul", "x wt", "a", "mm"),
            node("Add", "a b", "s", "add"),
        ]
        then = graph(nodes, "s", {"w": weight(96, 64)})
        other = graph([node("Identity", "zero", "z", "pass")], "z")
        rewritten, _ = rewrite(if_model(then, other, {"b": weight(96, seed=1), "zero": np.zeros((3, 96), F32)}))
        assert [kinds(g) for g in inner(rewritten)] == [{"Identity": 1}, QUANTIZED]
        x = normal(3, 64)
        y = expect(x, weight(96, 64), weight(96, seed=1)).then(np.negative)
        y.check(run(rewritten, {"x": x, "yes": np.array(True)})[0])

    def test_a_subgraph_rule_matches_the_path(self):
        branches = [graph([node("MatMul", "x w", t, f"mm_{t}")], t) for t in "ab"]
        rules = [{"subgraph": "else_branch", "quantize": False}]
        proto = if_model(*branches, {"w": weight(64, 96)})
        rewritten, report = rewrite(proto, Recipe.model_validate({"name": "mxfp8", "rules": rules}))
        assert [kinds(g) for g in inner(rewritten)] == [{"MatMul": 1}, QUANTIZED]
        assert reasons(report)["mm_b"] == "kept by rules.0: subgraph='else_branch' -> keep"


def loop_model(body: Sequence[onnx.NodeProto], weights: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """y = -(state after 3 rounds of state -> next), state [m, 64]."""
    inputs = [value("i", np.int64, []), value("go", np.bool_, []), value("state", F32, ["m", 64])]
    go = node("Identity", "go", "on", "go_on")
    loop = helper.make_node(
        "Loop", ["rounds", "yes", "x"], ["h"], "loop", body=graph([*body, go], "on next", None, inputs)
    )
    weights = {**weights, "rounds": np.array(3), "yes": np.array(True)}
    return model([loop, node("Neg", "h", "y")], X, {"y": (F32, ["m", 64])}, weights)


class TestLoopAndScan:
    def test_a_loop_body(self):
        w = weight(64, 64)
        rewritten, report = rewrite(loop_model([node("MatMul", "state w", "next", "mm")], {"w": w}))
        assert kinds(inner(rewritten)[0]) == {**QUANTIZED, "Identity": 1}
        assert [s.decision.site.subgraph for s in report.sites] == ["loop/body"]
        state = normal(3, 64)
        actual = run(rewritten, {"x": state})[0]
        # Requantizing each round's float32 state: predict with the same float32 states, kept apart from rounding ties.
        for _ in range(3):
            state = (quantized(state) @ quantized(np.ascontiguousarray(w.T)).T).astype(F32)
        np.testing.assert_allclose(actual, -state, rtol=0, atol=0.05 * np.abs(state).max())

    def test_a_state_that_feeds_the_next_round_is_no_output_projection(self):
        proto = loop_model([node("MatMul", "state w", "next", "mm")], {"w": weight(64, 64)})
        proto.graph.node[0].output[0] = "y"
        del proto.graph.node[1]
        onnx.checker.check_model(proto)
        assert reasons(rewrite(proto)[1]) == {"mm": "linear, by recipe 'mxfp8'"}

    def test_an_outer_activation_is_quantized_inside(self):
        body = [node("MatMul", "x w", "p", "mm"), node("Add", "state p", "next", "sum")]
        rewritten, _ = rewrite(loop_model(body, {"w": weight(64, 64)}))
        x = normal(3, 64)
        one = expect(x, weight(64, 64).T)
        total = Expected(-(x + 3 * one.y), 3 * one.bound)
        total.check(run(rewritten, {"x": x})[0], roundings=4)

    def test_a_scan_body(self):
        rewritten, report = rewrite(scan_model())
        assert [s.decision.site.subgraph for s in report.sites] == ["scan/body"]
        x = normal(5, 64)
        total, rows = run(rewritten, {"x": x})
        each = expect(x, weight(64, 64).T)
        each.then(np.negative).check(rows)
        Expected(-each.y.sum(0), each.bound.sum(0)).check(total, roundings=5)

    @pytest.mark.parametrize(("output", "shape"), [("next", [1, 64]), ("out", ["a", "b", "c"]), ("out", [])])
    def test_a_scan_body_that_declares_a_wrong_rank(self, output, shape):
        """ONNX Runtime runs it after some of its optimizations, and not without them."""
        proto = scan_model()
        declared = {each.name: each for each in proto.graph.node[0].attribute[0].g.output}[output]
        declared.CopyFrom(value(output, F32, shape))
        what = f"its body declares rank {len(shape)} for output '{output}', which has rank 1"
        with pytest.raises(ContractError, match=re.escape(f"model: node 'scan' (Scan): {what}; expected ")):
            rewrite(proto)


def scan_model() -> onnx.ModelProto:
    """Returns a model whose rows are multiplied by a Scan, which gives them and their sum."""
    inputs = [value("sum", F32, [64]), value("row", F32, [64])]
    nodes = [
        node("MatMul", "row w", "p", "mm"),
        node("Add", "sum p", "next", "add"),
        node("Neg", "p", "out", "neg"),
    ]
    body = graph(nodes, "next out", {"w": weight(64, 64)}, inputs)
    scan = helper.make_node("Scan", ["zero", "x"], ["total", "rows"], "scan", num_scan_inputs=1, body=body)
    return model(
        [scan, node("Neg", "total", "y")],
        {"x": (F32, [5, 64])},
        {"y": (F32, [64]), "rows": (F32, [5, 64])},
        {"zero": np.zeros(64, F32)},
    )


def function_model(functions: Sequence[onnx.FunctionProto], nodes: Sequence[onnx.NodeProto], weights: Any, **kw: Any):
    proto = helper.make_model(
        helper.make_graph(
            list(nodes),
            "main",
            [value("x", F32, ["m", 64])],
            [value("y", F32, ["m", kw.pop("n", 96)])],
            [numpy_helper.from_array(array, name) for name, array in weights.items()],
        ),
        functions=list(functions),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("local", 1)],
        ir_version=10,
    )
    onnx.checker.check_model(proto)
    return proto


def function(
    name: str, inputs: str, nodes: Sequence[onnx.NodeProto], output: str, opset: int = 21
) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, inputs.split(), output.split(), list(nodes), imports)


def call(name: str, inputs: str, output: str) -> onnx.NodeProto:
    return node(name, inputs, output, f"call_{output}", domain="local")


LINEAR = function("Linear", "a b", [node("MatMul", "a b", "r", "inner")], "r")


class TestFunctions:
    def test_a_function_that_holds_a_matmul_is_inlined_where_it_is_called(self):
        nodes = [call("Linear", "x w", "h"), node("Neg", "h", "y")]
        rewritten, report = rewrite(function_model([LINEAR], nodes, {"w": weight(64, 96)}))
        assert report.notes == ("inlined local functions: Linear",)
        assert kinds(rewritten) == {**QUANTIZED, "Neg": 1}
        assert {f.name for f in rewritten.functions} == {"MXFP8Quantize", "MXFP8Gemm"}
        x = normal(3, 64)
        expect(x, weight(64, 96).T).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_each_call_has_its_own_weight(self):
        nodes = [call("Linear", "x w", "a"), node("Relu", "a", "b"), call("Linear", "b v", "h"), node("Neg", "h", "y")]
        weights = {"w": weight(64, 96), "v": weight(96, 64, seed=1)}
        rewritten, report = rewrite(function_model([LINEAR], nodes, weights, n=64))
        assert len(reasons(report)) == 2
        assert {s.decision.site.weight for s in report.sites} == {"w", "v"}
        assert kinds(rewritten) == {"MXFP8Quantize": 2, "MXFP8Gemm": 2, "Relu": 1, "Neg": 1}

    def test_a_function_that_calls_one_that_holds_a_matmul(self):
        outer = function("Block", "a b", [call("Linear", "a b", "t"), node("Abs", "t", "r")], "r")
        nodes = [call("Block", "x w", "h"), node("Neg", "h", "y")]
        rewritten, report = rewrite(function_model([LINEAR, outer], nodes, {"w": weight(64, 96)}))
        assert report.notes == ("inlined local functions: Linear, Block",)
        x = normal(3, 64)
        expect(x, weight(64, 96).T).then(np.abs).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_a_matmul_inside_an_if_inside_a_function(self):
        branches = [graph([node("MatMul", "a b", t, f"mm_{t}")], t) for t in "st"]
        body = [helper.make_node("If", ["c"], ["r"], "if", then_branch=branches[0], else_branch=branches[1])]
        choose = function("Choose", "a b c", body, "r")
        nodes = [call("Choose", "x w yes", "h"), node("Neg", "h", "y")]
        proto = function_model([choose], nodes, {"w": weight(64, 96), "yes": np.array(True)})
        rewritten, _ = rewrite(proto)
        x = normal(3, 64)
        expect(x, weight(64, 96).T).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_a_call_inside_a_branch(self):
        branches = [graph([call("Linear", f"x {w}", t)], t) for w, t in (("w", "s"), ("v", "t"))]
        nodes = [
            helper.make_node("If", ["yes"], ["h"], "if", then_branch=branches[0], else_branch=branches[1]),
            node("Neg", "h", "y"),
        ]
        weights = {"w": weight(64, 96), "v": weight(64, 96, seed=1), "yes": np.array(False)}
        rewritten, _ = rewrite(function_model([LINEAR], nodes, weights))
        assert [kinds(g) for g in inner(rewritten)] == [QUANTIZED, QUANTIZED]
        x = normal(3, 64)
        expect(x, weight(64, 96, seed=1).T).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_a_weight_inside_the_function(self):
        constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weight(64, 96)))
        fixed = function("Fixed", "a", [constant, node("MatMul", "a w", "r", "inner")], "r")
        rewritten, _ = rewrite(function_model([fixed], [call("Fixed", "x", "h"), node("Neg", "h", "y")], {}))
        assert kinds(rewritten) == {**QUANTIZED, "Neg": 1}
        x = normal(3, 64)
        expect(x, weight(64, 96).T).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_functions_without_a_matmul_stay(self):
        other = function("Twice", "a", [node("Add", "a a", "r", "add")], "r")
        nodes = [call("Linear", "x w", "h"), call("Twice", "h", "y")]
        proto = function_model([LINEAR, other], nodes, {"w": weight(64, 96)})
        rewritten, _ = rewrite(proto)
        assert rewritten.functions[0] == other
        assert kinds(rewritten) == {**QUANTIZED, "Twice": 1}
        x = normal(3, 64)
        y = expect(x, weight(64, 96).T)
        Expected(2 * y.y, 2 * y.bound).check(run(rewritten, {"x": x})[0])

    def test_functions_of_another_opset_whose_ops_are_the_same_in_both(self):
        old = function("Linear", "a b", [node("MatMul", "a b", "r", "inner")], "r", opset=17)
        other = function("Twice", "a", [node("Add", "a a", "r", "add")], "r", opset=18)
        nodes = [call("Linear", "x w", "h"), call("Twice", "h", "y")]
        rewritten, _ = rewrite(function_model([old, other], nodes, {"w": weight(64, 96)}))
        assert kinds(rewritten) == {**QUANTIZED, "Twice": 1}
        assert rewritten.functions[0] == other
        x = normal(3, 64)
        y = expect(x, weight(64, 96).T)
        Expected(2 * y.y, 2 * y.bound).check(run(rewritten, {"x": x})[0])

    def test_functions_of_another_opset_whose_ops_differ_are_an_error(self):
        body = [node("ReduceSum", "a", "s", axes=[0]), node("Add", "a s", "t"), node("MatMul", "t b", "r")]
        proto = function_model([LINEAR], [call("Linear", "x w", "h"), node("Neg", "h", "y")], {"w": weight(64, 96)})
        proto.functions[0].CopyFrom(function("Linear", "a b", body, "r", opset=11))
        with pytest.raises(ContractError) as caught:
            mxfp8_graph.rewrite(proto)
        assert str(caught.value) == (
            "model: local function 'Linear' is of opset 11, in which Add is another than in the model's opset 21; "
            "expected one opset for both; export the model again"
        )

    def test_a_function_nobody_calls_gives_no_site(self):
        nodes = [node("Neg", "x", "y")]
        with pytest.raises(NothingEligibleError, match="no MatMul or Gemm in the model"):
            mxfp8_graph.rewrite(function_model([LINEAR], nodes, {}, n=64))
