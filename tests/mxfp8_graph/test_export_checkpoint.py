"""export_checkpoint: folders that vLLM, SGLang and transformers load, by the rules of their sources.

transformers itself loads the folders here; vLLM and SGLang need a GPU, so their rules are written out below.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import safetensors.torch  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import Recipe  # noqa: E402
from mxfp8_graph.tools import checkpoint  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 50, "num_hidden_layers": 2}
IDS = torch.arange(8)[None]
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""`packed_modules_mapping` of vllm/model_executor/models/llama.py and of SGLang's llama.py."""
LAYERS = [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.qkv_proj", "self_attn.o_proj")]
LAYERS += [f"model.layers.{i}.mlp.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")]
"""The linear layers of a Llama of two layers in vLLM and SGLang."""


def parts_of(layer: str) -> list[str]:
    module, _, last = layer.rpartition(".")
    return [f"{module}.{part}" for part in FUSED[last]] if last in FUSED else [layer]


def vllm_scheme(config: dict[str, Any], layer: str) -> str | None:
    """Returns the scheme that vLLM gives a linear layer; None for high precision.

    vllm/model_executor/layers/quantization/compressed_tensors: `should_ignore_layer` of utils.py (a fused layer is
    ignored by its name, or if all its parts are; parts that differ are an error), `find_matched_target` (its name, or
    all its parts, among the targets), `_is_mxfp8` of compressed_tensors.py (the fields below; those of activations do
    not matter, so weight-only groups are W8A8).
    """
    ignored = {part in config["ignore"] for part in parts_of(layer)}
    if layer in config["ignore"] or ignored == {True}:
        return None
    if len(ignored) > 1:
        raise ValueError(f"parts of {layer} have different schemes")
    for group in config["config_groups"].values():
        if layer in group["targets"] or set(parts_of(layer)) <= set(group["targets"]):
            fields = {"strategy": "group", "symmetric": True, "group_size": 32, "type": "float", "num_bits": 8}
            assert group["weights"].items() >= {**fields, "scale_dtype": "torch.uint8"}.items()
            return "W8A8 MXFP8"
    return None


def sglang_scheme(config: dict[str, Any], layer: str) -> str | None:
    """Returns the scheme that SGLang gives a linear layer; None for high precision.

    python/sglang/srt/layers/quantization/fp8.py `Fp8Config.from_config` ("mxfp8" in quant_method, dynamic activations,
    [1, 32]; ignored_layers or modules_to_not_convert, each with and without "model."), utils.py `is_layer_skipped`
    (a fused layer by its parts, which must agree).
    """
    assert config["quant_method"] == "mxfp8"
    assert (config["activation_scheme"], config["weight_block_size"]) == ("dynamic", [1, 32])
    assert config["scale_fmt"] == "ue8m0"
    bases = {name.removeprefix("model.") for name in config["modules_to_not_convert"]}
    skipped = {part.removeprefix("model.") in bases for part in parts_of(layer)}
    if len(skipped) > 1:
        raise ValueError(f"parts of {layer} have different schemes")
    return None if skipped == {True} else "W8A8 MXFP8"


def check_tensors(tensors: dict[str, Any], layer: str, suffix: str, scheme: str | None) -> None:
    """Fails unless the file has the tensors that a layer of this scheme loads.

    compressed_tensors_w8a8_mxfp8.py `create_weights`; fp8.py `Fp8LinearMethod.create_weights`: float8_e4m3fn [N, K],
    uint8 [N, K / 32].
    """
    for part in parts_of(layer):
        weight, scales = tensors[f"{part}.weight"], tensors.get(f"{part}.weight{suffix}")
        if scheme is None:
            assert (weight.dtype.is_floating_point, weight.dtype.itemsize > 1, scales) == (True, True, None), part
        else:
            assert (weight.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.uint8), part
            assert list(scales.shape) == [weight.shape[0], weight.shape[1] / 32], part


RULES = {"compressed-tensors": ("_scale", vllm_scheme), "scale-inv": ("_scale_inv", sglang_scheme)}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 64, "use_cache": False, **options}
    )
    return transformers.LlamaForCausalLM(config).eval()


def rewritten(model: Any, recipe: Any = "mxfp8") -> Any:
    program = torch.export.export(model, (), {"input_ids": IDS}, strict=False)
    return mxfp8_graph.rewrite(program, recipe)[0]


def export(model: Any, to: Path, config: Path, **settings: Any) -> tuple[Any, dict[str, Any], list[str]]:
    """Returns (the tensors, the quantization_config, the notes) of an exported folder."""
    folder, notes = mxfp8_graph.export_checkpoint(model, to, config=config, **settings)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return safetensors.torch.load_file(folder / "model.safetensors"), config, notes


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a hub has it, with a tokenizer and with files that must not go along."""
    folder = tmp_path_factory.mktemp("a") / "llama"
    llama().save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes.bin").write_bytes(b"x")
    return folder


@pytest.fixture(scope="module")
def packed() -> Any:
    return rewritten(llama())


@pytest.mark.parametrize("convention", RULES)
def test_servers_load_every_linear_layer_as_mxfp8_and_the_rest_as_it_is(convention, packed, original, tmp_path):
    suffix, rule = RULES[convention]
    tensors, config, _ = export(packed, tmp_path / "a", original, convention=convention)
    for layer in LAYERS:
        assert rule(config, layer) == "W8A8 MXFP8", layer
        check_tensors(tensors, layer, suffix, "W8A8 MXFP8")
    assert rule(config, "lm_head") is None
    assert {name for name in tensors if not name.endswith(suffix)} == set(llama().state_dict())


@pytest.mark.parametrize("convention", RULES)
def test_a_fused_layer_that_is_kept_as_a_whole_is_one_of_high_precision(convention, original, tmp_path):
    kept = ["model.layers.1.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"]
    recipe = Recipe().excluding([r"layers\.1\.self_attn\.[qkv]_proj", r"layers\.0\.mlp\.(gate|up)_proj"])
    suffix, rule = RULES[convention]
    tensors, config, _ = export(rewritten(llama(), recipe), tmp_path / "a", original, convention=convention)
    for layer in LAYERS:
        expected = None if layer in kept else "W8A8 MXFP8"
        assert rule(config, layer) == expected, layer
        check_tensors(tensors, layer, suffix, expected)
    # A server that does not know the parts looks for the name of the fused layer.
    listed = config.get("ignore") or config["modules_to_not_convert"]
    assert set(kept) <= set(listed)


def test_a_fused_layer_that_is_packed_in_part_is_refused_by_its_name(original, tmp_path):
    program = rewritten(llama(), Recipe().excluding([r"layers\.1\.self_attn\.k_proj"]))
    said = r"'model\.layers\.1\.self_attn\.qkv_proj' is one layer of servers, of which .*k_proj.weight are not packed"
    with pytest.raises(ContractError, match=f"^program: {said}; .*all of a fused one$"):
        export(program, tmp_path / "a", original)
    assert not list(tmp_path.iterdir())


def test_transformers_and_from_hf_load_the_values_of_the_packed_weights(packed, original, tmp_path):
    folder, _ = mxfp8_graph.export_checkpoint(packed, tmp_path / "a", config=original, convention="scale-inv")
    # Without a GPU transformers dequantizes, into the dtype of config.json: float32.
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    state, weights = llama().state_dict(), mxfp8_graph.unpack(packed)
    assert len(weights) == 14
    for name, value in loaded.state_dict().items():
        expected = weights[name].dequantize() if name in weights else state[name].numpy()
        np.testing.assert_array_equal(value.numpy(), expected, err_msg=name)
    model, report = mxfp8_graph.from_hf(folder, tmp_path / "b.onnx")
    assert len(report.rewritten) == 14
    first = safetensors.torch.load_file(folder / "model.safetensors")
    second, _, _ = export(model, tmp_path / "again", folder, convention="scale-inv")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


def test_config_and_tokenizer_go_along_and_nothing_else(packed, original, tmp_path):
    folder, notes = mxfp8_graph.export_checkpoint(packed, tmp_path / "a", config=original)
    names = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (folder / "tokenizer.json").read_bytes() == (original / "tokenizer.json").read_bytes()
    before, after = (json.loads((path / "config.json").read_text()) for path in (original, folder))
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["quantization_config"]) == after.pop("quantization_config")
    assert (after, notes) == (before, [])


def test_a_checkpoint_over_the_limit_is_several_files_with_an_index(packed, original, tmp_path, monkeypatch):
    expected, _, _ = export(packed, tmp_path / "whole", original)
    monkeypatch.setattr(checkpoint, "_LARGEST_FILE", 40_000)
    folder, _ = mxfp8_graph.export_checkpoint(packed, tmp_path / "parts", config=original)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 1
    tensors = {}
    for file in files:
        part = safetensors.torch.load_file(folder / file)
        assert sum(t.nbytes for t in part.values()) <= 40_000
        assert {name for name, place in index["weight_map"].items() if place == file} == part.keys()
        tensors |= part
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(t.view(torch.uint8), expected[name].view(torch.uint8)) for name, t in tensors.items())
    transformers.AutoConfig.from_pretrained(folder)
    assert mxfp8_graph.import_safetensors(folder).keys() == mxfp8_graph.unpack(packed).keys()


def test_a_tied_output_projection_is_written_once_and_listed_as_not_converted(tmp_path):
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "original")
    tensors, config, _ = export(rewritten(model), tmp_path / "a", tmp_path / "original", convention="scale-inv")
    assert "lm_head.weight" not in tensors
    assert config["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")


def test_names_may_begin_with_the_name_of_a_module_around_the_model(original, tmp_path):
    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = llama()

        def forward(self, input_ids: Any) -> Any:
            return self.wrapped(input_ids=input_ids).logits

    tensors, _, _ = export(rewritten(Logits()), tmp_path / "a", original)
    assert "model.layers.0.self_attn.q_proj.weight_scale" in tensors


def test_weight_only_weights_have_a_note_that_servers_quantize_activations(original, tmp_path):
    _, config, notes = export(rewritten(llama(), "mxfp8-weight-only"), tmp_path / "a", original)
    assert [note.partition(": ")[0] for note in notes] == [
        "14 weights do not quantize their activations; servers do (W8A8)"
    ]
    assert vllm_scheme(config, LAYERS[0]) == "W8A8 MXFP8"


def mixtral() -> Any:
    sizes = {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 1, "num_local_experts": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, use_cache=False)).eval()


HEAD = Recipe(output_projections=True)


@pytest.mark.parametrize(
    ("build", "recipe", "what"),
    [
        (lambda: llama(intermediate_size=80), Recipe(), r"'model.layers.0.mlp.down_proj.weight' has K = 80"),
        (llama, Recipe(weight_format="e5m2"), r"'model.layers.0.self_attn.q_proj.weight' has e5m2 elements, not e4m3"),
        (llama, HEAD, r"'lm_head.weight' is packed, but servers read it in high precision"),
        (lambda: llama(tie_word_embeddings=True), HEAD, r"'model.embed_tokens.weight' is packed, but servers read it"),
        (mixtral, Recipe(), r"'model.layers.0.mlp.experts.gate_up_proj' stacks experts, which servers"),
    ],
    ids=["partial blocks", "e5m2", "an output projection", "a tied embedding", "experts"],
)
def test_weights_that_servers_cannot_read_are_refused(build, recipe, what, tmp_path):
    model = build()
    model.save_pretrained(tmp_path / "original")
    with pytest.raises(ContractError, match=f"^program: .*{what}"):
        export(rewritten(model, recipe), tmp_path / "a", tmp_path / "original")


def test_a_config_of_another_model_is_refused_with_the_tensors_that_do_not_fit(packed, tmp_path):
    llama(num_hidden_layers=3, vocab_size=60).save_pretrained(tmp_path / "original")
    with pytest.raises(ContractError) as error:
        export(packed, tmp_path / "a", tmp_path / "original")
    assert "'model.embed_tokens.weight' is [50, 64], not [60, 64]" in str(error.value)
    assert "no 'model.layers.2.self_attn.q_proj.weight' [64, 64]" in str(error.value)


def test_a_model_that_is_not_packed_and_a_folder_that_exists_are_refused(packed, original, tmp_path):
    plain = torch.export.export(llama(), (), {"input_ids": IDS}, strict=False)
    for model, to, settings, said in (
        (plain, tmp_path / "a", {}, "no packed weights"),
        (packed, original, {}, "exists already"),
        (packed, tmp_path / "a", {"convention": "gguf"}, "'gguf'"),
    ):
        with pytest.raises(ContractError, match=said):
            export(model, to, original, **settings)


def test_the_command_writes_the_folder_and_prints_it(packed, original, tmp_path):
    mxfp8_graph.save(packed, tmp_path / "m.pt2")
    arguments = (str(tmp_path / "m.pt2"), "-o", str(tmp_path / "a"), "--config", str(original))
    done = commands.run("export-checkpoint", *arguments)
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'a'}\n"), done.output
    assert mxfp8_graph.import_safetensors(tmp_path / "a").keys() == mxfp8_graph.unpack(packed).keys()
