"""Matmuls inside If, Loop and Scan, and inside model-local functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from grids import looped
from models import calling, choose, local_function, model, node, steps, subgraph, text_model, value, weight
from onnx import numpy_helper
from oracle import GEMM, Expected, computes, expect, initializers, kinds, normal, quantized, reasons, rewrite, run

import mxfp8_graph
from mxfp8_graph import NothingEligibleError, Recipe
from mxfp8_ops.errors import ContractError

pytestmark = pytest.mark.usefixtures("runtime")

F32 = np.float32
W, V, SQUARE, ZERO = weight(64, 96), weight(64, 96, seed=1), weight(64, 64), np.zeros((3, 96), F32)
X = normal(3, 64)


def if_model(then: Any, other: Any, before: str = "", **stored: np.ndarray) -> onnx.ModelProto:
    """y = -(then if yes else other)."""
    nodes = [*(steps(before) if before else ()), choose(then, other), node("Neg", "h", "y")]
    return text_model(nodes, inputs={"yes": (np.bool_, [])}, **stored)


def inner(proto: onnx.ModelProto) -> list[onnx.GraphProto]:
    """Returns the subgraphs of the first control-flow node, sorted by name: then_branch comes after else_branch."""
    holder = next(n for n in proto.graph.node if any(a.HasField("g") for a in n.attribute))
    return [a.g for a in sorted(holder.attribute, key=lambda a: a.name) if a.HasField("g")]


def paths(report: Any) -> list[str]:
    return [site.decision.site.subgraph for site in report.sites]


def check(rewritten: onnx.ModelProto, *, yes: np.ndarray, no: np.ndarray) -> None:
    """Fails unless the branches give minus x times these weights [K, N]."""
    for flag, w in ((True, yes), (False, no)):
        expect(X, w.T).then(np.negative).check(run(rewritten, {"x": X, "yes": np.array(flag)})[0])


# --- If ---


def test_a_weight_outside_of_branches_is_packed_there_once() -> None:
    rewritten, report = rewrite(if_model("mm_a:MatMul x w>a", "mm_b:MatMul x w>b"))
    assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
    assert [kinds(g) for g in inner(rewritten)] == [GEMM, GEMM]
    assert paths(report) == ["choose/else_branch", "choose/then_branch"]
    check(rewritten, yes=W, no=W)


def test_a_rule_of_a_subgraph_matches_its_path() -> None:
    recipe = Recipe(name="mxfp8", rules=({"subgraph": "else_branch", "quantize": False},))
    rewritten, report = rewrite(if_model("mm_a:MatMul x w>a", "mm_b:MatMul x w>b"), recipe)
    assert [kinds(g) for g in inner(rewritten)] == [{"MatMul": 1}, GEMM]
    assert reasons(report)["mm_b"] == "kept by rules.0: subgraph='else_branch' -> keep"


@pytest.mark.parametrize("opset", [21, 13])
def test_weights_inside_branches_stay_there_and_apart_if_they_have_one_name(opset: int) -> None:
    proto = if_model(*(subgraph("mm:MatMul x w>a", w=w) for w in (W, V)))
    proto.opset_import[0].version = opset
    rewritten, report = rewrite(proto)
    assert [len(g.initializer) for g in (rewritten.graph, *inner(rewritten))] == [0, 2, 2]
    sites = [site.decision.site for site in report.sites]
    assert [(site.name, site.shared_with) for site in sites] == [("mm", 0), ("mm#2", 0)]
    check(rewritten, yes=W, no=V)


@looped("where", ["graph", "branch"])
def test_nodes_of_one_graph_get_names_of_their_own(where: str) -> None:
    """ONNX Runtime refuses two nodes of one name in one graph, and takes them in two."""
    proto = if_model("mm:MatMul x w>a", "mm:MatMul x w>b")
    graph = proto.graph if where == "graph" else inner(proto)[0]
    graph.node.append(node("Neg", graph.node[0].output[0], "unused", graph.node[0].name))
    rewritten, report = rewrite(proto)
    name = graph.node[0].name
    assert report.notes == (f"renamed nodes, for several of one graph had the name {name}",)
    assert [site.decision.site.name for site in report.sites] == ["mm", "mm#2"]
    check(rewritten, yes=W, no=W)


def test_a_weight_that_only_the_other_branch_still_reads_stays_there() -> None:
    then, other = subgraph("packed:MatMul x w>a", w=W), subgraph("kept:MatMul x w>a", w=V)
    rewritten, _ = rewrite(if_model(then, other), Recipe(name="mxfp8", exclude=("kept",)))
    y = run(rewritten, {"x": X, "yes": np.array(False)})[0]
    np.testing.assert_allclose(y, -X.astype(float) @ V, rtol=1e-4, atol=1e-4)


def test_matmuls_on_both_sides_of_the_border_of_a_branch_are_rewritten() -> None:
    deep = choose("deep:MatMul b v>c", "deep2:MatMul b v>d", "e")
    nodes = [*steps("outer:MatMul x w>a; Relu a>b"), deep, *steps("after:MatMul e w>f; Neg f>y")]
    rewritten, report = rewrite(text_model(nodes, inputs={"yes": (np.bool_, [])}, v=weight(96, 64, seed=1)))
    assert len(report.rewritten) == 4
    assert kinds(rewritten) == {"MXFP8Quantize": 2, "MXFP8Gemm": 2, "Relu": 1, "If": 1, "Neg": 1}
    assert [kinds(g) for g in inner(rewritten)] == [GEMM, GEMM]


def test_nested_branches_read_the_weights_of_both_levels() -> None:
    deep = choose("mm_a:MatMul x w>a", "mm_b:MatMul x v>b", "c", "inner")
    rewritten, report = rewrite(if_model(subgraph([deep, *steps("Identity c>d")], v=V), "mm_e:MatMul x w>e"))
    then = "choose/then_branch/inner"
    assert paths(report) == ["choose/else_branch", f"{then}/else_branch", f"{then}/then_branch"]
    assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
    assert [t.name for t in inner(rewritten)[1].initializer] == ["v_mxfp8", "v_mxfp8_scales"]
    check(rewritten, yes=W, no=W)


def test_a_bias_is_absorbed_inside_a_branch_and_not_across_its_border() -> None:
    then, b = subgraph("Transpose w>wt; mm:MatMul x wt>a; Add a b>s", w=weight(96, 64)), weight(96, seed=1)
    y, feeds = expect(X, weight(96, 64), b).then(np.negative), {"x": X, "yes": np.array(True)}
    rewritten, _ = computes(if_model(then, "Identity zero>z", b=b, zero=ZERO), y, **feeds)
    assert [kinds(g) for g in inner(rewritten)] == [{"Identity": 1}, GEMM]
    proto = if_model("Add h0 b>t", "Identity zero>z", "mm:MatMul x w>h0", b=b, zero=ZERO)
    y = expect(X, W.T)
    _, report = computes(proto, Expected(-(y.y + b), y.bound), roundings=1, **feeds)
    assert not report.sites[0].decision.site.has_bias


# --- Loop and Scan ---


def loop_model(body: str) -> onnx.ModelProto:
    """y = -(state after 3 rounds of state -> next), state [m, 64]."""
    inputs = [value("i", np.int64, []), value("go", np.bool_, []), value("state", F32, ["m", 64])]
    loop = node("Loop", "rounds yes x", "h", "loop", body=subgraph(f"{body}; Identity go>on", "on next", inputs))
    stored = {"w": SQUARE, "rounds": np.array(3), "yes": np.array(True)}
    return text_model([loop, node("Neg", "h", "y")], y=("m", 64), **stored)


def test_a_matmul_in_a_loop_is_rewritten() -> None:
    rewritten, report = rewrite(loop_model("mm:MatMul state w>next"))
    assert kinds(inner(rewritten)[0]) == {**GEMM, "Identity": 1}
    assert paths(report) == ["loop/body"]
    state = X
    for _ in range(3):
        state = (quantized(state) @ quantized(np.ascontiguousarray(SQUARE.T)).T).astype(F32)
    # A state between two elements may be rounded to the other one, and so differ by more than the bound of a gemm.
    np.testing.assert_allclose(run(rewritten, {"x": X})[0], -state, rtol=0, atol=0.05 * np.abs(state).max())


def test_a_state_that_feeds_the_next_round_is_no_output_projection() -> None:
    proto = loop_model("mm:MatMul state w>next")
    proto.graph.node[0].output[0] = "y"
    del proto.graph.node[1]
    assert reasons(rewrite(proto)[1]) == {"mm": "linear, by recipe 'mxfp8'"}


def test_an_activation_outside_of_a_loop_is_quantized_inside() -> None:
    one = expect(X, SQUARE.T)
    total = Expected(-(X + 3 * one.y), 3 * one.bound)
    computes(loop_model("mm:MatMul x w>p; Add state p>next"), total, roundings=4, x=X)


def test_a_matmul_in_a_scan_is_rewritten() -> None:
    inputs = [value("sum", F32, [64]), value("row", F32, [64])]
    body = subgraph("mm:MatMul row w>p; Add sum p>next; Neg p>out", "next out", inputs, w=SQUARE)
    scan = node("Scan", "zero x", "total rows", "scan", num_scan_inputs=1, body=body)
    ends = {"y": (64,), "outputs": {"rows": (F32, [5, 64])}}
    proto = text_model([scan, node("Neg", "total", "y")], (5, 64), zero=np.zeros(64, F32), **ends)
    rewritten, report = rewrite(proto)
    assert paths(report) == ["scan/body"]
    x = normal(5, 64)
    total, rows = run(rewritten, {"x": x})
    each = expect(x, SQUARE.T)
    each.then(np.negative).check(rows)
    Expected(-each.y.sum(0), each.bound.sum(0)).check(total, roundings=5)


# --- Local functions ---

LINEAR = local_function("Linear", "a b", "inner:MatMul a b>r")
NEGATED = expect(X, W.T).then(np.negative)


def function_model(nodes: Any, *functions: onnx.FunctionProto, n: int = 96, **stored: np.ndarray) -> onnx.ModelProto:
    """Returns a model of x [m, 64] and y [m, n] whose nodes call these functions."""
    nodes = steps(nodes) if isinstance(nodes, str) else nodes
    ends = {"x": (F32, ["m", 64])}, {"y": (F32, ["m", n])}
    return calling(model(nodes, *ends, stored, checked=False), *functions)


def test_a_function_that_holds_a_matmul_is_inlined_where_it_is_called() -> None:
    proto = function_model("Linear x w>h; Neg h>y", LINEAR, w=W)
    rewritten, report = computes(proto, NEGATED, {**GEMM, "Neg": 1}, x=X)
    assert report.notes == ("inlined local functions: Linear",)
    assert {f.name for f in rewritten.functions} == {"MXFP8Quantize", "MXFP8Gemm"}


def test_each_call_has_its_own_weight_also_in_branches() -> None:
    nodes = "Linear x w>a; Relu a>b; Linear b v>h; Neg h>y"
    _, report = rewrite(function_model(nodes, LINEAR, n=64, w=W, v=weight(96, 64, seed=1)))
    assert [s.decision.site.weight for s in report.sites] == ["w", "v"]
    calls = [subgraph([node("Linear", f"x {w}", t, domain="local")]) for w, t in (("w", "s"), ("v", "t"))]
    proto = function_model([choose(*calls), node("Neg", "h", "y")], LINEAR, w=V, v=W, yes=np.array(False))
    rewritten, _ = computes(proto, NEGATED, x=X)
    assert [kinds(g) for g in inner(rewritten)] == [GEMM, GEMM]


def test_a_function_that_calls_one_that_holds_a_matmul_is_inlined() -> None:
    outer = local_function("Block", "a b", [node("Linear", "a b", "t", domain="local"), node("Abs", "t", "r")])
    proto = function_model("Block x w>h; Neg h>y", LINEAR, outer, w=W)
    _, report = computes(proto, expect(X, W.T).then(np.abs).then(np.negative), x=X)
    assert report.notes == ("inlined local functions: Linear, Block",)


def test_a_weight_or_a_branch_inside_a_function_is_inlined() -> None:
    constant = node("Constant", "", "w", value=numpy_helper.from_array(W))
    fixed = local_function("Fixed", "a", [constant, node("MatMul", "a w", "r", "inner")])
    computes(function_model("Fixed x>h; Neg h>y", fixed), NEGATED, {**GEMM, "Neg": 1}, x=X)
    body = [choose("mm_s:MatMul a b>s", "mm_t:MatMul a b>t", "r", yes="c")]
    proto = function_model("Choose x w c>h; Neg h>y", local_function("Choose", "a b c", body), w=W, c=np.array(True))
    computes(proto, NEGATED, x=X)


@pytest.mark.parametrize(("linear", "twice"), [(21, 21), (17, 18)])
def test_a_function_without_a_matmul_stays_if_its_ops_are_those_of_the_opset(linear: int, twice: int) -> None:
    functions = (
        local_function("Linear", "a b", "inner:MatMul a b>r", linear),
        local_function("Twice", "a", "Add a a>r", twice),
    )
    y = expect(X, W.T)
    proto = function_model("Linear x w>h; Twice h>y", *functions, w=W)
    rewritten, _ = computes(proto, Expected(2 * y.y, 2 * y.bound), {**GEMM, "Twice": 1}, x=X)
    assert rewritten.functions[0] == functions[1]


def test_a_function_whose_ops_differ_in_the_opset_of_the_model_is_refused() -> None:
    proto = function_model("Linear x w>h; Neg h>y", LINEAR, w=W)
    body = "ReduceSum a>s|axes=[0]; Add a s>t; MatMul t b>r"
    proto.functions[0].CopyFrom(local_function("Linear", "a b", body, opset=11))
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.rewrite(proto)
    assert str(caught.value) == (
        "model: local function 'Linear' is of opset 11, in which Add is another than in the model's opset 21; "
        "expected one opset for both; export the model again"
    )


def test_a_function_without_a_call_gives_no_site() -> None:
    with pytest.raises(NothingEligibleError, match="no MatMul or Gemm in the model"):
        mxfp8_graph.rewrite(function_model("Neg x>y", LINEAR, n=64))
