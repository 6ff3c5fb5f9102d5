"""Models with a switch per site: all off they are the original, all on they are what a rewrite without fusion makes."""

from __future__ import annotations

from typing import Any

import builders as b
import numpy as np
import onnx
from grids import looped
from onnx import helper

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.running.runner import open_runnable
from mxfp8_graph.running.samples import make_samples
from mxfp8_graph.tools.switches import open_switchable

EVERYTHING = Recipe(
    attention_scores=True, attention_values=True, output_projections=True, embeddings=True, min_dim=1, fuse=False
)


def switchable(model: Any, recipe: Recipe = EVERYTHING) -> Any:
    return open_switchable(model, recipe)


def matmul_in_a_branch() -> onnx.ModelProto:
    """y = -(x @ w if yes else x @ v): sites in subgraphs, with weights of the main graph."""
    value = helper.make_empty_tensor_value_info
    branches = [
        helper.make_graph([b.node("MatMul", f"x {w}", f"{w}_out", f"mm_{w}")], "body", [], [value(f"{w}_out")])
        for w in "wv"
    ]
    nodes = [
        helper.make_node("If", ["yes"], ["h"], "choose", then_branch=branches[0], else_branch=branches[1]),
        b.node("Neg", "h", "y"),
    ]
    shapes = {"x": (np.float32, ["m", 64]), "yes": (np.bool_, [])}, {"y": (np.float32, ["m", 96])}
    return b.model(nodes, *shapes, {"w": b.weight(64, 96), "v": b.weight(64, 96, seed=1)})


MODELS = {
    "bias": lambda: b.matmul_model(bias=True),
    "float16": lambda: b.matmul_model(dtype=np.float16, bias=True),
    "weight first": lambda: b.matmul_model(left=True),
    "gemm with alpha and beta": lambda: b.gemm_model(alpha=0.5, beta=2.0, transB=1),
    "attention": b.attention_model,
    "embeddings and a head": b.language_model,
    "layers": lambda: b.chain_model((64, 96, 64, 40), head=True),
    "older opset": lambda: b.chain_model((64, 96, 64), opset=13),
    "subgraphs": matmul_in_a_branch,
}


@looped("name", MODELS)
def test_all_off_is_the_original_and_all_on_the_rewritten_model(name: str) -> None:
    model = MODELS[name]()
    rewritten, report = mxfp8_graph.rewrite(model, EVERYTHING)
    with switchable(model) as switched:
        feeds = make_samples(switched.signature, {}).feeds[0]
        assert len(switched.switched) == len(report.rewritten) > 0
        # In the original, ONNX Runtime fuses what a branch keeps apart: the last bits may differ.
        for on, wanted, rtol in ((False, model, 1e-5), (True, rewritten, 0)):
            expected = open_runnable(wanted)[1].run(feeds)
            found = switched.run(feeds, [on] * len(switched.switched))
            assert list(found) == list(expected)
            for output, values in expected.items():
                np.testing.assert_allclose(found[output], values, rtol, rtol, err_msg=f"{output}, {on=}")


def test_one_on_is_the_model_with_only_that_one_rewritten() -> None:
    model = b.chain_model((64, 96, 64, 32), opset=21)
    with switchable(model, Recipe(fuse=False)) as switched:
        feeds = make_samples(switched.signature, {}).feeds[0]
        for index, site in enumerate(switched.switched):
            recipe = Recipe(include=(f"^{site.decision.site.name}$",), fuse=False)
            expected = open_runnable(mxfp8_graph.rewrite(model, recipe)[0])[1].run(feeds)
            found = switched.run(feeds, [index == other for other in range(len(switched.switched))])
            np.testing.assert_array_equal(found["y"], expected["y"], err_msg=site.decision.site.name)


def test_what_goes_into_a_site_comes_with_k_last() -> None:
    with switchable(b.matmul_model(left=True)) as switched:
        feeds = make_samples(switched.signature, {}).feeds[0]
        (x,) = switched.observe(feeds, switched.observed)
        np.testing.assert_array_equal(x, feeds["x"].swapaxes(-1, -2))


def test_sites_that_share_an_activation_share_what_is_observed() -> None:
    with switchable(b.attention_model(), Recipe()) as switched:
        q, k, v, o = switched.observed
        assert q == k == v != o
        feeds = make_samples(switched.signature, {}).feeds[0]
        first, _, again = switched.observe(feeds, [q, o, v])
        np.testing.assert_array_equal(first, again)
        np.testing.assert_array_equal(first, feeds["x"])


def test_inputs_of_sites_in_subgraphs_are_not_observed_and_the_model_stays_as_it_was() -> None:
    model = matmul_in_a_branch()
    before = model.SerializeToString()
    with switchable(model) as switched:
        assert switched.observed == (None, None)
    assert model.SerializeToString() == before
