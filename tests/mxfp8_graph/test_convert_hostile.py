"""Damaged files of every dialect: each is converted, or refused with one of our errors that names the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attention_models
import dialect_models as d
import onnx
from grids import looped

import mxfp8_graph
from mxfp8_ops.errors import ContractError

LOSSES = ("activations", "rounding", "half")
DIALECTS = ("mxfp8", "trt", "qdq", "standard", "ort-cuda")


def written(to: str) -> onnx.ModelProto:
    """Returns attention as our own conversion takes it apart."""
    return mxfp8_graph.convert(mxfp8_graph.rewrite(attention_models.decoder())[0], to)[0]


SOURCES: dict[str, Callable[[], onnx.ModelProto]] = {
    "modelopt": d.modelopt,
    "TransformerEngine": d.transformer_engine,
    "static": d.static_activation,
    "qdq": d.qdq,
    "qdq in float16": lambda: d.qdq("float16"),
    "ort-cuda": d.ort_cuda,
    "quark": d.quark,
    "our standard ops": lambda: written("standard"),
    "our trt": lambda: written("trt"),
}


def fewer_inputs(rng: random.Random, graph: onnx.GraphProto) -> None:
    node = rng.choice([node for node in graph.node if node.input])
    node.input.pop()


def half_the_data(rng: random.Random, graph: onnx.GraphProto) -> None:
    tensor = rng.choice(graph.initializer)
    tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // 2]


def another_dtype(rng: random.Random, graph: onnx.GraphProto) -> None:
    rng.choice(graph.initializer).data_type = rng.choice([1, 2, 3, 7, 10, 16, 17, 19, 24, 99])


def another_size(rng: random.Random, graph: onnx.GraphProto) -> None:
    dims = rng.choice([tensor.dims for tensor in graph.initializer if tensor.dims])
    dims[rng.randrange(len(dims))] = rng.choice([0, 1, 31, -1, 2**40])


def another_rank(rng: random.Random, graph: onnx.GraphProto) -> None:
    rng.choice([tensor.dims for tensor in graph.initializer if tensor.dims]).pop()


def another_attribute(rng: random.Random, graph: onnx.GraphProto) -> None:
    attributes: list[Any] = [a for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.INT]
    if attributes:
        rng.choice(attributes).i = rng.choice([0, -1, 7, -9, 16, 2**40])


def another_source(rng: random.Random, graph: onnx.GraphProto) -> None:
    node = rng.choice([node for node in graph.node if node.input])
    node.input[rng.randrange(len(node.input))] = rng.choice(graph.node).output[0]


def another_mark(rng: random.Random, graph: onnx.GraphProto) -> None:
    entries = [entry for node in graph.node for entry in node.metadata_props]
    if entries:
        entry = rng.choice(entries)
        entry.value = entry.value.replace(rng.choice("0123456789:{,"), rng.choice(["9", "-1", "[", '"x"']))


DAMAGES = (fewer_inputs, half_the_data, another_dtype, another_size, another_rank, another_attribute, another_source)


@looped("source", SOURCES)
def test_a_damaged_file_is_converted_or_refused(source: str) -> None:
    whole = SOURCES[source]().SerializeToString()
    refused: list[ContractError] = []
    for seed in range(12):
        rng = random.Random(seed)
        model = onnx.ModelProto.FromString(whole)
        damages = rng.choices([*DAMAGES, another_mark], k=2)
        for damage in damages:
            damage(rng, model.graph)
        try:
            mxfp8_graph.convert(model, rng.choice(DIALECTS), allow=LOSSES)
        except ContractError as error:
            refused.append(error)
    assert refused
    for error in refused:
        assert str(error.where).startswith(("model", "node")), str(error)
