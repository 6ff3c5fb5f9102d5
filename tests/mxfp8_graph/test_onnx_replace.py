"""Edges of replacing: odd graphs, what is removed and what is not, and graphs that are large."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnx
from builders import chain_model, matmul_model, matmul_stack, model, node, weight
from grids import looped
from onnx import helper
from oracle import check_well_formed, computes, expect, initializers, kinds, normal, relu, rewrite, run

import mxfp8_graph
from mxfp8_graph import Recipe, Rule

F32 = np.float32


X, Y = {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 96])}


def test_a_weight_that_is_a_graph_output_too_stays():
    nodes = [node("MatMul", "x w", "h"), node("Neg", "h", "y")]
    rewritten, _ = rewrite(model(nodes, X, {**Y, "w": (F32, [64, 96])}, {"w": weight(64, 96)}))
    assert initializers(rewritten) == ["w", "w_mxfp8", "w_mxfp8_scales"]
    np.testing.assert_array_equal(run(rewritten, {"x": normal(3, 64)})[1], weight(64, 96))


def test_a_weight_that_a_branch_reads_stays():
    branch = helper.make_graph([node("Abs", "w", "t")], "b", [], [helper.make_empty_tensor_value_info("t")])
    choose = helper.make_node("If", ["yes"], ["z"], "if", then_branch=branch, else_branch=branch)
    nodes = [node("MatMul", "x w", "h"), node("Neg", "h", "y"), choose]
    weights = {"w": weight(64, 96), "yes": np.array(True)}
    rewritten, _ = mxfp8_graph.rewrite(model(nodes, X, {**Y, "z": (F32, [64, 96])}, weights))
    assert "w" in initializers(rewritten)
    np.testing.assert_array_equal(run(rewritten, {"x": normal(3, 64)})[1], np.abs(weight(64, 96)))


def test_a_product_that_is_a_graph_output_keeps_its_name():
    heads = Recipe(name="r", output_projections=True)
    rewritten, _ = rewrite(model([node("MatMul", "x w", "y", "head")], X, Y, {"w": weight(64, 96)}), heads)
    assert rewritten.graph.node[-1].output == ["y"]
    swapped = model(
        [node("MatMul", "w x", "y")], {"x": (F32, [64, "m"])}, {"y": (F32, [96, "m"])}, {"w": weight(96, 64)}
    )
    x = normal(64, 3)
    rewritten, _ = computes(swapped, expect(x.T, weight(96, 64)).then(np.transpose), recipe=heads, x=x)
    assert [(n.op_type, *n.output) for n in rewritten.graph.node][-1] == ("Transpose", "y")


def test_one_bias_of_two_matmuls_is_kept_once():
    nodes = []
    for i in "ab":
        nodes += [node("MatMul", f"x w{i}", f"h{i}"), node("Add", f"h{i} bias", f"s{i}"), node("Neg", f"s{i}", f"y{i}")]
    weights = {"wa": weight(64, 96), "wb": weight(64, 96, seed=1), "bias": weight(96, seed=2)}
    rewritten, _ = rewrite(model(nodes, X, {"ya": Y["y"], "yb": Y["y"]}, weights))
    assert initializers(rewritten).count("bias") == 1
    assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 2, "Neg": 2}
    x = normal(3, 64)
    for name, y in zip("ab", run(rewritten, {"x": x}), strict=True):
        expect(x, weights[f"w{name}"].T, weights["bias"]).then(np.negative).check(y)


def test_one_weight_with_and_without_quantized_activations_is_packed_once():
    nodes = [node("MatMul", "x w", "a", "one"), node("Neg", "a", "ya")]
    nodes += [node("MatMul", "x w", "b", "two"), node("Neg", "b", "yb")]
    proto = model(nodes, X, {"ya": Y["y"], "yb": Y["y"]}, {"w": weight(64, 96)})
    recipe = Recipe(name="r", rules=(Rule(name="two", activations="unchanged"),))
    rewritten, _ = mxfp8_graph.rewrite(proto, recipe)
    assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
    assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "MXFP8WeightGemm": 1, "Neg": 2}


def test_only_the_functions_that_are_used_are_attached():
    names = {
        recipe: sorted(f.name for f in rewrite(matmul_model(), recipe)[0].functions)
        for recipe in ("mxfp8", "mxfp8-weight-only")
    }
    assert names == {"mxfp8": ["MXFP8Gemm", "MXFP8Quantize"], "mxfp8-weight-only": ["MXFP8WeightGemm"]}


def test_the_default_domain_by_its_long_name():
    proto = matmul_model(64, 96)
    proto.opset_import[0].domain = "ai.onnx"
    proto.graph.node[0].domain = "ai.onnx"  # what onnx's checker does not know, but ONNX Runtime does
    rewritten, _ = mxfp8_graph.rewrite(proto)
    check_well_formed(rewritten)
    x = normal(2, 5, 64)
    expect(x, weight(64, 96).T).then(relu).check(run(rewritten, {"x": x})[0])


def test_a_matmul_of_another_domain_is_no_site():
    proto = chain_model((64, 64, 64))
    proto.graph.node[0].domain = "org.custom"
    proto.opset_import.append(helper.make_opsetid("org.custom", 1))
    _, report = mxfp8_graph.rewrite(proto)
    assert [s.decision.site.name for s in report.sites] == ["layers.1.linear"]


@looped("opset, ir", [(21, 10), (21, 13), (26, 13)])
def test_the_limits_of_onnx_runtime(opset, ir):
    proto = chain_model(opset=opset)
    proto.ir_version = ir
    rewritten, _ = mxfp8_graph.rewrite(proto)
    assert rewritten.ir_version == ir
    assert run(rewritten, {"x": normal(3, 64)})[0].shape == (3, 64)


def test_a_long_chain_of_passive_ops_is_no_deeper_than_pythons_stack():
    nodes = [node("MatMul", "x w", "h0", "linear"), *(node("Mul", f"h{i} c", f"h{i + 1}") for i in range(1500))]
    weights = {"w": weight(64, 96), "c": np.array(1, F32)}
    proto = model(nodes, {"x": (F32, ["m", 64])}, {"h1500": (F32, ["m", 96])}, weights)
    _, report = mxfp8_graph.rewrite(proto, Recipe(name="r", rules=(Rule(op="MatMul"),)), dry_run=True)
    assert report.sites[0].decision.site.role == "output_projection"


def steps(proto: onnx.ModelProto) -> int:
    """Returns how many lines and calls of Python a rewrite takes, which is the same on every machine, idle or busy."""
    count, before = 0, sys.gettrace()

    def trace(*_: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    sys.settrace(trace)
    try:
        mxfp8_graph.rewrite(proto)
    finally:
        sys.settrace(before)
    return count


def test_a_chain_of_more_matmuls_than_pythons_stack_is_deep():
    _, report = mxfp8_graph.rewrite(matmul_stack(1100), dry_run=True)
    assert len(report.rewritten) == 1100


def test_twice_the_matmuls_take_twice_the_steps():
    steps(matmul_stack(1))  # imports
    assert steps(matmul_stack(400)) <= 2.1 * steps(matmul_stack(200))
