"""Whatever the weights are, a checkpoint gives back what the model had, bit by bit, and writes the same file again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import properties
from builders import model, node
from hypothesis import given, settings
from hypothesis import strategies as st

import mxfp8_graph
from mxfp8_graph.policy.recipe import Recipe

NAMES = st.lists(
    st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8), min_size=1, max_size=3, unique=True
)
SHAPES = st.sampled_from([(32, 32), (33, 40), (70, 64), (2, 64, 40), (31, 96), (64, 1)])
RECIPES = st.builds(
    Recipe,
    min_dim=st.just(1),
    activations=st.sampled_from(["e4m3", "unchanged"]),
    weight_format=st.sampled_from(["e4m3", "e5m2"]),
    scale_rounding=st.sampled_from(["ceil", "floor", "even"]),
)


@st.composite
def models(draw: Any) -> onnx.ModelProto:
    """Draws a model of weights with any names and shapes, each multiplied with an input of its own."""
    nodes, inputs, outputs, weights = [], {}, {}, {}
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    for index, name in enumerate(draw(NAMES)):
        shape = draw(SHAPES)
        data = draw(properties.values(shape, dtype, finite=True, calm=True))
        inputs[f"x{index}"] = (dtype, [*shape[:-2], "m", shape[-2]])
        outputs[f"y{index}"] = (dtype, [*shape[:-2], "m", shape[-1]])
        product = onnx.helper.make_node("MatMul", [f"x{index}", f"{name}.weight"], [f"h{index}"], name=f"matmul{index}")
        nodes += [product, node("Relu", f"h{index}", f"y{index}")]
        weights[f"{name}.weight"] = data
    return model(nodes, inputs, outputs, weights)


@settings(max_examples=50)
@given(models(), RECIPES, st.sampled_from(["compressed-tensors", "scale-inv"]))
def test_a_checkpoint_gives_back_what_the_model_had(
    tmp_path: Path, graph: onnx.ModelProto, recipe: Recipe, convention: str
) -> None:
    rewritten, _ = mxfp8_graph.rewrite(graph, recipe)
    path = tmp_path / "a.safetensors"
    mxfp8_graph.export_safetensors(rewritten, path, convention=convention, overwrite=True)
    written = path.read_bytes()
    before, after = mxfp8_graph.unpack(rewritten), mxfp8_graph.import_safetensors(path)
    assert after.keys() == before.keys() == {tensor.name for tensor in graph.graph.initializer}
    for name, weight in before.items():
        found = after[name]
        assert (found.shape, found.element_format) == (weight.shape, weight.element_format)
        assert found.elements.tobytes() == weight.elements.tobytes()
        assert found.scales.tobytes() == weight.scales.tobytes()
        assert found.dequantize().tobytes() == weight.dequantize().tobytes()
    mxfp8_graph.export_safetensors(rewritten, path, convention=convention, overwrite=True)
    assert path.read_bytes() == written
