"""from_hf: three layers of an encoder, the third of them repeated, are what an export of all layers gives."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxscript")

from mxfp8_graph.tools.from_hf import architecture, graph  # noqa: E402
from mxfp8_graph.tools.from_hf.limits import Limits  # noqa: E402
from mxfp8_graph.tools.from_hf.repeat import EXPORTED, repeat  # noqa: E402

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 50}
SIZES = {"dim": 64, "n_heads": 2, "hidden_dim": 96, "vocab_size": 50}
ENCODERS = {
    "BertModel": transformers.BertConfig(**SMALL, num_hidden_layers=5),
    "MPNetModel": transformers.MPNetConfig(**SMALL, num_hidden_layers=5),
    "DistilBertModel": transformers.DistilBertConfig(**SIZES, n_layers=5),
}

EMPTY: Any = SimpleNamespace(weights={}, others={}, byte_size=0)
"""A checkpoint of nothing: models as small as these are within its limits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


def encoder_graph(name: str, layers: int, folder: Path) -> tuple[onnx.ModelProto, str]:
    """Returns the graph of an encoder's first layers, and where its layers are."""
    content, place = exported(name, layers, folder)
    return onnx.ModelProto.FromString(content), place


@functools.cache
def exported(name: str, layers: int, folder: Path) -> tuple[bytes, str]:
    ENCODERS[name].save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "architectures": [name]}))
    config = architecture.load_config(folder)
    model = architecture.build(config, folder, "float32", Limits(EMPTY, folder), "cpu")
    place, found = architecture.repeated(model)
    with architecture.shortened(found, layers):
        return graph.export(architecture.call_of(model, config), 21, name).SerializeToString(), place


def nodes_of(proto: onnx.ModelProto, path: str) -> list[Any]:
    """Returns the nodes of a graph, with what made a value, or its bytes, in the place of the value's name."""
    names = {tensor.name: numpy_helper.to_array(tensor).tolist() for tensor in proto.graph.initializer}
    found = []
    for index, node in enumerate(proto.graph.node):
        settings = sorted(attribute.SerializeToString() for attribute in node.attribute)
        found.append((node.op_type, graph.layer_of(node, path), settings, [names.get(n, n) for n in node.input]))
        names |= {name: (index, place) for place, name in enumerate(node.output)}
    return [*found, [(value.name, names[value.name]) for value in proto.graph.output]]


@pytest.mark.parametrize(
    "name", ["BertModel", *(pytest.param(name, marks=pytest.mark.slow) for name in ("MPNetModel", "DistilBertModel"))]
)
def test_a_repeated_encoder_is_what_an_export_of_all_layers_gives(name: str, folder: Path) -> None:
    (proto, path), (expected, _) = (encoder_graph(name, layers, folder) for layers in (EXPORTED, 5))
    assert repeat(proto.graph, path, 5)
    onnx.checker.check_model(proto, full_check=True)
    assert nodes_of(proto, path) == nodes_of(expected, path)
    assert {v.name for v in proto.graph.input} == {v.name for v in expected.graph.input}


def test_a_graph_whose_layers_differ_is_left_as_it_is(folder: Path) -> None:
    """The caller exports every layer then."""
    proto, path = encoder_graph("BertModel", EXPORTED, folder)
    other = next(node for node in proto.graph.node if graph.layer_of(node, path) == 2 and node.op_type == "Softmax")
    other.attribute[0].i = 1
    before = proto.SerializeToString()
    assert not repeat(proto.graph, path, 5)
    assert proto.SerializeToString() == before
