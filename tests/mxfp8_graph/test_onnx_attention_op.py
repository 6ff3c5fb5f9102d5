"""ONNX's Attention is taken apart where a recipe quantizes its products, and only there."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from attention_models import PAST, feeds, standard
from grids import looped
from oracle import kinds, rewrite, run

import mxfp8_graph
from mxfp8_graph import Recipe

pytestmark = pytest.mark.usefixtures("runtime")

PRODUCTS = Recipe(activations="e4m3", fp8_dpa=True, min_dim=0)
ERROR = 0.1
"""Of Q, K, V and weights, each off by 2.6 percent, and of the linear behind them."""

OPS: dict[str, onnx.ModelProto] = {
    "plain": standard(),
    "in heads": standard(heads=True),
    "a condition": standard("q k v bool_mask"),
    "causal": standard(is_causal=1, scale=0.3),
    "past and present": standard(
        "q k v all_mask past_key past_value", "a pk pv", shapes={"all_mask": (np.float32, ["batch", 1, "rows", "all"])}
    ),
    "opset 24": standard("q k v mask", opset=24),
}


def gemms(model: onnx.ModelProto) -> int:
    return kinds(model).get("MXFP8Gemm", 0)


@looped("name", OPS)
def test_its_products_are_quantized(name: str) -> None:
    proto = OPS[name]
    result, report = rewrite(proto, PRODUCTS, fuse=True)
    assert gemms(result) == 3
    assert not kinds(result).keys() & {"Attention", "MXFP8Attention", "MatMul"}
    roles = [site.decision.site.role for site in report.rewritten]
    assert roles == ["attention_scores", "attention_values", "linear"]
    assert "took apart 1 Attention" in report.notes[0]
    given = feeds(proto, rows=3, keys=6)
    given |= {"all_mask": np.zeros((2, 1, 3, 6 + PAST), np.float32)} if "all_mask" in given else {}
    (before, *presents), (after, *others) = run(proto, given), run(result, given)
    assert 1e-3 < np.linalg.norm(after - before) / np.linalg.norm(before) < ERROR
    for present, other in zip(presents, others, strict=True):
        np.testing.assert_array_equal(present, other)


def test_one_product_alone() -> None:
    result, report = mxfp8_graph.rewrite(standard(), Recipe(attention_values=True, min_dim=0))
    assert (gemms(result), kinds(result)["MatMul"], kinds(result)["Softmax"]) == (2, 1, 1)
    assert [site.decision.site.role for site in report.kept] == ["attention_scores"]


def test_what_it_becomes_says_where_it_comes_from() -> None:
    proto = standard(heads=True)
    op = next(each for each in proto.graph.node if each.op_type == "Attention")
    op.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layers.0.attention', 'sdpa']")
    _, report = mxfp8_graph.rewrite(proto, PRODUCTS)
    products = [site.decision.site for site in report.sites if site.decision.site.role != "linear"]
    assert all(site.name.startswith("attention_") for site in products)
    assert {site.module for site in products} == {"layers.0.attention"}


def test_other_nodes_stay_the_messages_that_they_were() -> None:
    proto = standard(heads=True)
    result, _ = mxfp8_graph.rewrite(proto, Recipe(fp8_dpa=True, fuse=False, rules=[]))
    after = [each.SerializeToString() for each in result.graph.node]
    kept = [each for each in proto.graph.node if each.op_type not in {"Attention", "MatMul"}]
    assert all(each.SerializeToString() in after for each in kept)


def test_it_stays_whole_for_other_recipes() -> None:
    result, report = mxfp8_graph.rewrite(standard(), Recipe(fuse=False))
    assert kinds(result)["Attention"] == 1
    assert report.notes == ()


def test_what_onnx_cannot_take_apart_stays_with_a_note() -> None:
    """onnx asks for the dtype of a mask that is not there."""
    proto = standard("q k v - past_key past_value", "a pk pv")
    result, report = mxfp8_graph.rewrite(proto, Recipe(fp8_dpa=True, fuse=False))
    if "Attention" not in kinds(result):
        pytest.skip(f"onnx {onnx.__version__} can")
    assert "the products inside Attention are not quantized: model: onnx's inliner" in report.notes[0]
    assert gemms(result) == 1
