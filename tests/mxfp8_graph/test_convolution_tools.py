"""The tools on a network of convolutions: verify, compare, analyze and tune."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from models import text_model, weight

import mxfp8_graph
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.running import node_check
from mxfp8_graph.running.node_check import check_nodes
from mxfp8_ops import numpy_nodes

SAMPLES = [{"x": np.random.default_rng(seed).standard_normal((2, 40, 7, 6), np.float32)} for seed in range(2)]


def network() -> onnx.ModelProto:
    """Returns a residual block and a transposed convolution, with what is folded and fused."""
    text = (
        "one:Conv x w b>h|pads=[1,1,1,1]; Mul h s>i; Add i x>j; LeakyRelu j>k|alpha=0.1; "
        "two:ConvTranspose k t>l|strides=[2,2] pads=[1,1,1,1]; Neg l>y"
    )
    stored = {"w": weight(40, 40, 3, 3), "b": weight(40), "t": weight(40, 24, 4, 4), "s": np.float32(0.5)}
    return text_model(text, (2, 40, 7, 6), [None] * 4, **stored)


@pytest.fixture
def rewritten() -> onnx.ModelProto:
    return mxfp8_graph.rewrite(network(), "mxint8")[0]


def test_kernels_are_within_the_bound_of_the_bodies(rewritten: onnx.ModelProto) -> None:
    checks = check_nodes(load(rewritten), SAMPLES[0])
    assert [(each.name, each.has_bound) for each in checks] == [("one", True), ("two", True)]
    assert all(each.excess < 1 for each in checks), checks


def test_a_kernel_with_another_window_fails(rewritten: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    add = node_check._add_twin

    def with_dilations(model: Any, node: onnx.NodeProto, prefix: str) -> onnx.NodeProto:
        twin = add(model, node, prefix)
        for each in node.attribute if node.name == "one" else ():  # not of the body, which has them written into it
            each.ints[:] = {"dilations": [1, 2], "pads": [1, 2, 1, 2]}.get(each.name, each.ints)
        return twin

    monkeypatch.setattr(node_check, "_add_twin", with_dilations)
    assert [each.passed for each in check_nodes(load(rewritten), SAMPLES[0])] == [False, True]


def test_the_emulated_format_is_the_real_recipe() -> None:
    comparison = mxfp8_graph.compare(network(), ("mxint8", "mxint8-block32", "mxfp8-block32"), inputs=SAMPLES, repeat=1)
    _, real, emulated, e4m3 = comparison.rows
    assert real.sites == emulated.sites == 2
    np.testing.assert_allclose(real.scores[0].values, emulated.scores[0].values, rtol=1e-3)
    np.testing.assert_allclose(real.weight_sqnr or 0, emulated.weight_sqnr or 1, rtol=1e-6)
    assert e4m3.scores[0].mean > 2 * real.scores[0].mean


def test_inputs_are_blocks_of_channels() -> None:
    x = SAMPLES[0]["x"].copy()
    x[:, :32] *= 1000  # in blocks along another axis the other channels would be lost
    analysis = mxfp8_graph.analyze(network(), "mxint8", inputs=[{"x": x}])
    site = next(site for site in analysis.sites if site.site.decision.site.name == "one")
    codes = numpy_nodes.quantize(x, axis=1, element_format="int8", scale_rounding="floor")
    noise = x - numpy_nodes.dequantize(*codes, axis=1, element_format="int8")
    assert site.input is not None
    assert site.input.sqnr_db == pytest.approx(-20 * np.log10(np.linalg.norm(noise) / np.linalg.norm(x)), abs=1e-3)


def test_tune_tries_every_format_on_the_same_convolutions() -> None:
    plan = mxfp8_graph.tune(network(), ("relative_l2<=0.5",), recipe="mxint8", inputs=SAMPLES)
    assert {"e4m3", "int8", "weight-only"} <= {step.plan.treatment for step in plan.steps}
    assert plan.chosen.recipe.convolutions is True
