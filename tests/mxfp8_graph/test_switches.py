"""Models with a switch per site: all off they are the original, all on they are what a rewrite without fusion makes."""

from __future__ import annotations

import models as b
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


def matmul_in_a_branch() -> onnx.ModelProto:
    """y = -(x @ w if yes else x @ v): sites in subgraphs, with weights of the main graph."""
    branches = {
        f"{branch}_branch": helper.make_graph(
            b.steps(f"mm_{w}:MatMul x {w}>{w}_out"), "body", [], [helper.make_empty_tensor_value_info(f"{w}_out")]
        )
        for branch, w in (("then", "w"), ("else", "v"))
    }
    shapes = {"x": (np.float32, ["m", 64]), "yes": (np.bool_, [])}, {"y": (np.float32, ["m", 96])}
    nodes = [b.node("If", "yes", "h", **branches), b.node("Neg", "h", "y")]
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
    before = model.SerializeToString()
    rewritten, report = mxfp8_graph.rewrite(model, EVERYTHING)
    with open_switchable(model, EVERYTHING) as switched:
        feeds = make_samples(switched.signature, {}).feeds[0]
        assert len(switched.switched) == len(report.rewritten) > 0
        # In the original, ONNX Runtime fuses what a branch keeps apart: the last bits may differ.
        for on, wanted, rtol in ((False, model, 1e-5), (True, rewritten, 0)):
            expected = open_runnable(wanted)[1].run(feeds)
            found = switched.run(feeds, [on] * len(switched.switched))
            assert list(found) == list(expected)
            for output, values in expected.items():
                np.testing.assert_allclose(found[output], values, rtol, rtol, err_msg=f"{output}, {on=}")
    assert model.SerializeToString() == before


def test_one_on_is_the_model_with_only_that_one_rewritten() -> None:
    model = b.chain_model((64, 96, 64, 32))
    with open_switchable(model, Recipe(fuse=False)) as switched:
        feeds = make_samples(switched.signature, {}).feeds[0]
        for index, site in enumerate(switched.switched):
            recipe = Recipe(include=(f"^{site.decision.site.name}$",), fuse=False)
            expected = open_runnable(mxfp8_graph.rewrite(model, recipe)[0])[1].run(feeds)
            found = switched.run(feeds, [index == other for other in range(len(switched.switched))])
            np.testing.assert_array_equal(found["y"], expected["y"], err_msg=site.decision.site.name)


def test_the_input_of_a_site_is_observed_once_with_k_last_unless_it_is_in_a_subgraph() -> None:
    with open_switchable(b.attention_model(), Recipe()) as switched:
        q, k, v, o = switched.observed
        assert q == k == v != o
        feeds = make_samples(switched.signature, {}).feeds[0]
        for found in switched.observe(feeds, [q, o, v])[::2]:
            np.testing.assert_array_equal(found, feeds["x"])
    with open_switchable(b.matmul_model(left=True), EVERYTHING) as switched:
        feeds = make_samples(switched.signature, {}).feeds[0]
        (x,) = switched.observe(feeds, switched.observed)
        np.testing.assert_array_equal(x, feeds["x"].swapaxes(-1, -2))
    with open_switchable(matmul_in_a_branch(), EVERYTHING) as switched:
        assert switched.observed == (None, None)
