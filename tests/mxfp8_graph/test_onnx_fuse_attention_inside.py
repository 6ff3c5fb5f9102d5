"""Attention inside If branches and Loop bodies is one node too and gives the same, or is left alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from attention_models import EXACT, HEADS, HIDDEN, SIZE, attention, check_near, decoder, feeds, split, standard
from grids import looped, pairwise
from models import choose, node, steps, subgraph, value
from onnx import numpy_helper
from oracle import rewrite, run

from mxfp8_graph.onnx_pass.protos import iter_graphs

F32 = np.float32
ROUNDS = 3

pytestmark = pytest.mark.usefixtures("runtime")


def in_branch(proto: onnx.ModelProto, *, outside: int = 0, stored_inside: bool = False) -> onnx.ModelProto:
    """Returns the model with its nodes, but for the first ones, in a branch that an input chooses; the other is -q."""
    nodes, graph = list(proto.graph.node), proto.graph
    outputs = [output.name for output in graph.output]
    named = [node("Identity", name, f"{name}_then") for name in outputs]
    then = subgraph([*nodes[outside:], *named], " ".join(f"{name}_then" for name in outputs))
    more = [f"other{i}" for i in range(1, len(outputs))]
    other = subgraph(
        [node("Neg", "q", "other"), *(node("Identity", "other", name) for name in more)], " ".join(["other", *more])
    )
    if stored_inside:
        then.initializer.extend(graph.initializer)
        del graph.initializer[:]
    del graph.node[:]
    graph.node.extend([*nodes[:outside], choose(then, other, " ".join(outputs))])
    graph.input.append(value("yes", np.bool_, []))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def in_loop(proto: onnx.ModelProto, states: Mapping[str, tuple[str, list[Any]]]) -> onnx.ModelProto:
    """Returns the model with its nodes in a Loop; a state, of a shape, is an input and then the result of a round."""
    nodes, graph = list(proto.graph.node), proto.graph
    inputs = [value("round", np.int64, []), value("go", np.bool_, [])]
    inputs += [value(f"{name}_now", F32, shape) for name, (_, shape) in states.items()]
    for each in nodes:
        each.input[:] = [f"{name}_now" if name in states else name for name in each.input]
    results = " ".join(result for result, _ in states.values())
    body = subgraph([*nodes, node("Identity", "go", "on")], f"on {results}", inputs)
    outputs = [f"{result}_last" for result, _ in states.values()]
    del graph.node[:], graph.output[:]
    graph.node.append(node("Loop", f"rounds start {' '.join(states)}", " ".join(outputs), "loop", body=body))
    stored = {"rounds": np.array(ROUNDS), "start": np.array(True)}
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in stored.items())
    graph.output.extend(value(name, F32, shape) for name, (_, shape) in zip(outputs, states.values(), strict=True))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def check(proto: onnx.ModelProto, fused: int, inputs: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Fails unless so many attentions are fused, all inside, the report has each, and results are as without fusion.

    Where no attention is fused, the report has the reason that keeps its products.
    """
    unfused, (result, report) = rewrite(proto, EXACT)[0], rewrite(proto, EXACT, fuse=True)
    main, *inner = ([n.op_type for n in graph.node].count("MXFP8Attention") for graph in iter_graphs(result.graph))
    assert (main, sum(inner)) == (0, fused)
    assert [fusion.kind for fusion in report.fusions].count("attention") == fused
    kept = {site.decision.site.role: site.decision.kind for site in report.kept}
    assert fused or kept["attention_scores"] == "role"
    check_near(run(unfused, inputs), run(result, inputs))
    return result


@looped("yes, stored_inside, opset", pairwise(yes=[True, False], stored_inside=[True, False], opset=[21, 23]))
def test_in_a_branch_it_is_one_node(yes: bool, stored_inside: bool, opset: int) -> None:
    proto = attention() if opset == 21 else standard("q k v bool_mask")
    inputs = feeds(proto)
    proto = in_branch(proto, stored_inside=stored_inside)
    check(proto, 1, {**inputs, "yes": np.array(yes)})


def test_heads_that_are_split_outside_are_read_as_they_were_before() -> None:
    """Q, K and V are split outside, and K is transposed for the product inside, or outside too."""
    v = [*split("v"), *steps("Transpose k2>k3|perm=[0,1,3,2]")]
    proto = attention(k=split("k"), v=v, scores="MatMul q2 k3>scores")
    for whole in (proto, attention()):
        inputs = {**feeds(whole), "yes": np.array(True)}
        result = check(in_branch(whole, outside=6), 1, inputs)
        assert [each.op_type for each in result.graph.node] == ["If"]


@looped("outside", [7, 9, 10, 11])
def test_attention_that_begins_outside_and_ends_inside_is_left_alone(outside: int) -> None:
    """The border is behind the scores, the masked ones, the softmax or the values."""
    proto = attention()
    inputs = {**feeds(proto), "yes": np.array(True)}
    check(in_branch(proto, outside=outside), 0, inputs)


def test_weights_that_a_branch_returns_are_kept() -> None:
    proto = attention(outputs={"weights": ["batch", HEADS, "rows", "keys"]})
    inputs = {**feeds(proto), "yes": np.array(True)}
    check(in_branch(proto), 0, inputs)


@looped("heads", [HEADS, HEADS // 2])
def test_branches_whose_values_have_the_same_names_are_fused_apart(heads: int) -> None:
    """With fewer heads, a name is of values of two shapes."""
    proto = attention()
    inputs = feeds(proto)
    fewer = np.array([0, 0, heads, HIDDEN // heads])
    then, other = subgraph(proto.graph.node, "y"), subgraph(proto.graph.node, "y", other_split=fewer)
    for each in other.node:
        each.input[:] = ["other_split" if name == "split" else name for name in each.input]
    del proto.graph.node[:]
    proto.graph.node.extend([choose(then, other, "chosen"), node("Identity", "chosen", "result")])
    proto.graph.output[0].name = "result"
    proto.graph.input.append(value("yes", np.bool_, []))
    for yes in (True, False):
        check(proto, 2, {**inputs, "yes": np.array(yes)})


@looped("opset", [21, 23])
def test_in_a_loop_it_is_one_node(opset: int) -> None:
    """Each round's result is the next one's queries."""
    proto = attention() if opset == 21 else standard("q k v bool_mask")
    inputs = feeds(proto)
    check(in_loop(proto, {"q": ("y", ["batch", "rows", HIDDEN])}), 1, inputs)


def test_a_cache_that_grows_in_a_loop_keeps_its_concats() -> None:
    """Lengths change from round to round, so it is unknown whether keys and values have the same."""
    proto = decoder(mask="", softmax="Softmax scaled>weights|axis=-1")
    inputs = feeds(proto)
    shape = [2, 2, None, SIZE]
    states = {"past_k": ("kc", shape), "past_v": ("vc", shape), "q": ("y", [2, 5, HIDDEN])}
    result = check(in_loop(proto, states), 1, inputs)
    (_, inside) = iter_graphs(result.graph)
    assert [each.op_type for each in inside.node].count("Concat") == 2


def test_in_a_loop_in_a_branch_it_is_one_node() -> None:
    proto = attention()
    inputs = {**feeds(proto), "yes": np.array(True)}
    check(in_branch(in_loop(proto, {"q": ("y", ["batch", "rows", HIDDEN])})), 1, inputs)
