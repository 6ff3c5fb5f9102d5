"""Every attention of what torch's exporters write becomes MXFP8Attention, and gives the same, step after step."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from oracle import kinds, run
from releases import release

import mxfp8_graph
from mxfp8_graph import Recipe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxscript")

EXACT = Recipe(activations="unchanged", min_dim=0)
LAYERS = 2
SMALL = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 96}
SHARP = {"initializer_range": 0.25}
"""Weights so large that attention looks at something in particular."""
DYNAMIC = torch.export.Dim.DYNAMIC


class ByPosition(torch.nn.Module):
    """Takes inputs by position and returns the first output: what the exporters like."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model.eval(), names

    def forward(self, *inputs: Any) -> Any:
        return self.model(**dict(zip(self.names, inputs, strict=True)))[0]


class Decoder(torch.nn.Module):
    """A Llama whose cache is inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(**SMALL, **SHARP, num_key_value_heads=2, vocab_size=99)
        self.model = transformers.LlamaForCausalLM(config).eval()

    def forward(self, ids: Any, *past: Any) -> tuple[Any, ...]:
        cache = transformers.DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        result = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        return (result.logits, *(t for layer in result.past_key_values.layers for t in (layer.keys, layer.values)))


def bert(implementation: str) -> tuple[Any, tuple[Any, ...], Any]:
    config = transformers.BertConfig(**SMALL, **SHARP, vocab_size=99, attn_implementation=implementation)
    ids = torch.randint(0, 99, (2, 8))
    names = ["input_ids", "attention_mask"]
    axes = ({0: "batch", 1: "tokens"},) * 2
    return ByPosition(transformers.BertModel(config), names), (ids, torch.ones_like(ids)), axes


def vit(implementation: str) -> tuple[Any, tuple[Any, ...], Any]:
    config = transformers.ViTConfig(**SMALL, **SHARP, image_size=32, patch_size=16, attn_implementation=implementation)
    return ByPosition(transformers.ViTModel(config), ["pixel_values"]), (torch.randn(2, 3, 32, 32),), ({0: "batch"},)


def gpt2(implementation: str) -> tuple[Any, tuple[Any, ...], Any]:
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=64, n_head=4, vocab_size=99, use_cache=False, attn_implementation=implementation, **SHARP
    )
    axes = ({0: "batch", 1: "tokens"},)
    return ByPosition(transformers.GPT2Model(config), ["input_ids"]), (torch.randint(0, 99, (2, 8)),), axes


def llama(implementation: str) -> tuple[Any, tuple[Any, ...], Any]:
    past = tuple(torch.randn(2, 2, 5, 16) for _ in range(2 * LAYERS))
    axes = ({0: "batch", 1: "tokens"}, ({0: "batch", 2: "past"},) * len(past))
    return Decoder(), (torch.randint(0, 99, (2, 3)), *past), (axes[0], *axes[1])


Build = Callable[[str], tuple[Any, tuple[Any, ...], Any]]
CASES: dict[str, tuple[Build, str, int, int]] = {
    "bert": (bert, "sdpa", 18, 1),
    "bert, opset 23": (bert, "sdpa", 23, 1),
    "bert, eager": (bert, "eager", 20, 0),
    "bert, the older exporter": (bert, "sdpa", -17, 1),
    "bert, eager, the older exporter": (bert, "eager", -14, 0),
    "vit": (vit, "sdpa", 18, 1),
    "vit, the older exporter": (vit, "sdpa", -17, int(release("torch") == (2, 10))),
    "gpt2": (gpt2, "sdpa", 18, 1),
    "llama": (llama, "sdpa", 18, 1),
    "llama, opset 23": (llama, "sdpa", 23, 1),
}
"""How to build a model, its attention, its opset, negative for torch's older exporter, and whether it guards NaN."""


def export(name: str, path: Path) -> onnx.ModelProto:
    build, implementation, opset, _ = CASES[name]
    torch.manual_seed(0)
    model, inputs, axes = build(implementation)
    names = [f"input{index}" for index in range(len(inputs))]
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            if opset > 0:
                dynamic = tuple(dict.fromkeys(each, DYNAMIC) for each in axes)
                shapes = (dynamic,)  # of the one parameter *inputs
                if build is llama:
                    shapes = (dynamic[0], dynamic[1:])
                torch.onnx.export(
                    model, inputs, path, dynamo=True, opset_version=opset, dynamic_shapes=shapes, verbose=False,
                    input_names=names, external_data=False,
                )  # fmt: skip
            else:
                torch.onnx.export(
                    model, inputs, path, dynamo=False, opset_version=-opset, input_names=names,
                    dynamic_axes=dict(zip(names, axes, strict=True)),
                )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load(path)


@pytest.fixture(scope="module", params=CASES)
def exported(request: Any, tmp_path_factory: Any) -> tuple[str, onnx.ModelProto]:
    return request.param, export(request.param, tmp_path_factory.mktemp("exported") / "model.onnx")


def feeds(proto: onnx.ModelProto, name: str, batch: int, tokens: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    if name.startswith("vit"):
        return {"input0": rng.standard_normal((batch, 3, 32, 32)).astype(np.float32)}
    given = {"input0": rng.integers(0, 99, (batch, tokens))}
    if name.startswith("bert"):
        given["input1"] = np.ones_like(given["input0"])
        given["input1"][0, 4:] = 0
    for value in list(proto.graph.input)[1:] if name.startswith("llama") else ():
        given[value.name] = np.zeros((batch, 2, 0, 16), np.float32)
    return given


def both(proto: onnx.ModelProto, recipe: Recipe) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Returns the model rewritten without fusion and with it."""
    return tuple(mxfp8_graph.rewrite(proto, chosen)[0] for chosen in (recipe.without_fusion(), recipe))


def test_every_attention_is_one_node(exported: tuple[str, onnx.ModelProto]) -> None:
    name, proto = exported
    _, _, _, guarded = CASES[name]
    result = mxfp8_graph.rewrite(proto, EXACT)[0]
    found = [node for node in result.graph.node if node.op_type == "MXFP8Attention"]
    assert len(found) == LAYERS
    assert not kinds(result).keys() & {"Softmax", "Attention", "IsNaN"}
    settings = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in found]
    assert {s["nan_guard"] for s in settings} == {guarded}
    assert {s["q_num_heads"] for s in settings} == {4}
    assert {s["kv_num_heads"] for s in settings} == {2 if name.startswith("llama") else 4}
    assert [s["scale"] for s in settings] == pytest.approx([0.25] * LAYERS, rel=1e-6)
    assert all(node.metadata_props for node in found) == (CASES[name][2] > 0)
    onnx.checker.check_model(result, full_check=True)


@pytest.mark.usefixtures("runtime")
def test_it_gives_the_same(exported: tuple[str, onnx.ModelProto]) -> None:
    name, proto = exported
    batch = 1 if name == "llama, opset 23" else 3  # ONNX Runtime's RotaryEmbedding wants angles of every batch
    for before, after in zip(*(run(model, feeds(proto, name, batch)) for model in both(proto, EXACT)), strict=True):
        assert before.shape == after.shape
        assert np.linalg.norm(after - before) < 1e-5 * np.linalg.norm(before)


@pytest.mark.usefixtures("runtime")
def test_rounded_to_bfloat16_it_points_the_same_way(exported: tuple[str, onnx.ModelProto]) -> None:
    """Rounded are Q, K, V and weights of each layer, and from then on what was rounded before differs a little."""
    name, proto = exported
    recipe = Recipe(activations="bfloat16", min_dim=0)
    unfused, fused = (run(model, feeds(proto, name, 1))[0].ravel() for model in both(proto, recipe))
    cosine = float(unfused @ fused / np.linalg.norm(unfused) / np.linalg.norm(fused))
    assert 0.9999 < cosine < 1 - 1e-8


@pytest.mark.usefixtures("runtime")
def test_a_cache_over_several_steps(exported: tuple[str, onnx.ModelProto]) -> None:
    name, proto = exported
    if not name.startswith("llama"):
        return
    models = both(proto, EXACT)
    given = [feeds(proto, name, 1, tokens=5) for _ in models]
    for step in range(4):
        results = [run(model, each) for model, each in zip(models, given, strict=True)]
        for before, after in zip(*results, strict=True):
            assert before.shape == after.shape
            assert np.linalg.norm(after - before) < 1e-5 * np.linalg.norm(before)
        assert results[0][1].shape[2] == 5 + step
        given = [{"input0": np.array([[7 * step]]), **{f"input{i}": past for i, past in enumerate(result[1:], 1)}}
                 for result in results]  # fmt: skip
