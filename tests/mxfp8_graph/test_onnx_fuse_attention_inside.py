"""Attention inside If branches and Loop bodies is one node too and gives the same, or is left alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from attention_models import HEADS, HIDDEN, SIZE, attention, decoder, feeds, split, standard
from builders import node, value
from grids import looped, pairwise
from onnx import helper, numpy_helper
from oracle import rewrite, run

from mxfp8_graph import Recipe
from mxfp8_graph.onnx_pass.protos import iter_graphs

F32 = np.float32
EXACT = Recipe(activations="unchanged", min_dim=0)
ROUNDS = 3

pytestmark = pytest.mark.usefixtures("runtime")


def body(nodes: Sequence[onnx.NodeProto], outputs: str, inputs: Any = (), stored: Any = ()) -> onnx.GraphProto:
    results = [helper.make_empty_tensor_value_info(name) for name in outputs.split()]
    return helper.make_graph(list(nodes), "body", list(inputs), results, list(stored))


def in_branch(proto: onnx.ModelProto, *, outside: int = 0, stored_inside: bool = False) -> onnx.ModelProto:
    """Returns the model with its nodes, but for the first ones, in a branch that an input chooses; the other is -q."""
    nodes, graph = list(proto.graph.node), proto.graph
    stored = list(graph.initializer) if stored_inside else []
    outputs = [output.name for output in graph.output]
    named = [node("Identity", name, f"{name}_then") for name in outputs]
    other = [node("Neg", "q", "other")] + [node("Identity", "other", f"other{i}") for i in range(1, len(outputs))]
    then = body([*nodes[outside:], *named], " ".join(f"{name}_then" for name in outputs), stored=stored)
    less = body(other, " ".join(["other", *(f"other{i}" for i in range(1, len(outputs)))]))
    del graph.node[:]
    if stored_inside:
        del graph.initializer[:]
    choose = helper.make_node("If", ["yes"], outputs, "choose", then_branch=then, else_branch=less)
    graph.node.extend([*nodes[:outside], choose])
    graph.input.append(value("yes", np.bool_, []))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def in_loop(proto: onnx.ModelProto, states: Mapping[str, tuple[str, list[Any]]]) -> onnx.ModelProto:
    """Returns the model with its nodes in a Loop: each state, of a shape, is an input and then what a round makes."""
    nodes, graph = list(proto.graph.node), proto.graph
    inputs = [value("round", np.int64, []), value("go", np.bool_, [])]
    inputs += [value(f"{name}_now", F32, shape) for name, (_, shape) in states.items()]
    for each in nodes:
        each.input[:] = [f"{name}_now" if name in states else name for name in each.input]
    made = " ".join(result for result, _ in states.values())
    del graph.node[:]
    loop_body = body([*nodes, node("Identity", "go", "on")], f"on {made}", inputs)
    outputs = [f"{result}_last" for result, _ in states.values()]
    loop = helper.make_node("Loop", ["rounds", "start", *states], outputs, "loop", body=loop_body)
    graph.node.append(loop)
    graph.initializer.extend([numpy_helper.from_array(np.array(ROUNDS), "rounds")])
    graph.initializer.extend([numpy_helper.from_array(np.array(True), "start")])
    results = [value(name, F32, shape) for name, (_, shape) in zip(outputs, states.values(), strict=True)]
    del graph.output[:]
    graph.output.extend(results)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def check(proto: onnx.ModelProto, fused: int, given: Mapping[str, np.ndarray], error: float = 1e-5) -> onnx.ModelProto:
    """Fails unless so many attentions are fused, all inside, the report has each, and results are those of unfused.

    Where none is, the report says of its products why they are kept.
    """
    unfused = rewrite(proto, EXACT)[0]
    result, report = rewrite(proto, EXACT, fuse=True)
    main, *inner = ([n.op_type for n in graph.node].count("MXFP8Attention") for graph in iter_graphs(result.graph))
    assert (main, sum(inner)) == (0, fused)
    assert [fusion.kind for fusion in report.fusions].count("attention") == fused
    kept = {site.decision.site.role: site.decision.kind for site in report.kept}
    assert fused or kept["attention_scores"] == "role"
    for before, after in zip(run(unfused, given), run(result, given), strict=True):
        assert before.shape == after.shape
        difference = np.linalg.norm(after - before) / np.linalg.norm(before)
        assert difference < error, f"off by {difference}"
    return result


@looped("yes, stored_inside, opset", pairwise(yes=[True, False], stored_inside=[True, False], opset=[21, 23]))
def test_in_a_branch_it_is_one_node(yes: bool, stored_inside: bool, opset: int) -> None:
    proto = attention() if opset == 21 else standard("q k v bool_mask")
    given = feeds(proto)
    proto = in_branch(proto, stored_inside=stored_inside)
    check(proto, 1, {**given, "yes": np.array(yes)})


def test_heads_that_are_split_outside_are_read_as_they_were_before() -> None:
    """Q, K and V are split outside, and K is transposed for the product inside, or outside too."""
    turned = node("Transpose", "k2", "k3", perm=[0, 1, 3, 2])
    proto = attention(k=split("k"), v=[*split("v"), turned], scores=[node("MatMul", "q2 k3", "scores")])
    for whole in (proto, attention()):
        given = {**feeds(whole), "yes": np.array(True)}
        result = check(in_branch(whole, outside=6), 1, given)
        assert [each.op_type for each in result.graph.node] == ["If"]


@looped("outside", [7, 9, 10, 11])
def test_what_begins_outside_and_ends_inside_is_left_alone(outside: int) -> None:
    """The border is behind the scores, the masked ones, the softmax or the values."""
    proto = attention()
    given = {**feeds(proto), "yes": np.array(True)}
    check(in_branch(proto, outside=outside), 0, given)


def test_weights_that_a_branch_returns_are_kept() -> None:
    proto = attention(outputs={"weights": (F32, ["batch", HEADS, "rows", "keys"])})
    given = {**feeds(proto), "yes": np.array(True)}
    check(in_branch(proto), 0, given)


@looped("heads", [HEADS, HEADS // 2])
def test_branches_that_call_their_values_by_the_same_names(heads: int) -> None:
    """Also where a name stands for values of two shapes."""
    proto = attention()
    given = feeds(proto)
    fewer = numpy_helper.from_array(np.array([0, 0, heads, HIDDEN // heads]), "other_split")
    then, other = body(proto.graph.node, "y"), body(proto.graph.node, "y", stored=[fewer])
    for each in other.node:
        each.input[:] = ["other_split" if name == "split" else name for name in each.input]
    choose = helper.make_node("If", ["yes"], ["chosen"], "choose", then_branch=then, else_branch=other)
    del proto.graph.node[:]
    proto.graph.node.extend([choose, node("Identity", "chosen", "result")])
    proto.graph.output[0].name = "result"
    proto.graph.input.append(value("yes", np.bool_, []))
    for yes in (True, False):
        check(proto, 2, {**given, "yes": np.array(yes)})


@looped("opset", [21, 23])
def test_in_a_loop_it_is_one_node(opset: int) -> None:
    """Each round's result is the next one's queries."""
    proto = attention() if opset == 21 else standard("q k v bool_mask")
    given = feeds(proto)
    check(in_loop(proto, {"q": ("y", ["batch", "rows", HIDDEN])}), 1, given)


def test_a_cache_that_grows_in_a_loop() -> None:
    """Lengths change from round to round, so it is unknown whether keys and values are as many: their Concats stay."""
    proto = decoder(mask=(), softmax=[node("Softmax", "scaled", "weights", axis=-1)])
    given = feeds(proto)
    shape = [2, 2, None, SIZE]
    states = {"past_k": ("kc", shape), "past_v": ("vc", shape), "q": ("y", [2, 5, HIDDEN])}
    result = check(in_loop(proto, states), 1, given)
    (_, inside) = iter_graphs(result.graph)
    assert [each.op_type for each in inside.node].count("Concat") == 2


def test_in_a_loop_in_a_branch() -> None:
    proto = attention()
    given = {**feeds(proto), "yes": np.array(True)}
    proto = in_loop(proto, {"q": ("y", ["batch", "rows", HIDDEN])})
    check(in_branch(proto), 1, given)
