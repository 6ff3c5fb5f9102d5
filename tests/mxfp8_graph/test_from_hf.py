"""from_hf(): Hugging Face folders with MXFP8 weights become ONNX models, byte for byte."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints as ck
import commands
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from grids import looped

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import huggingface_hub  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.onnx_pass.load import load  # noqa: E402
from mxfp8_graph.tools.from_hf import architecture  # noqa: E402
from mxfp8_ops import ort  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 50}
KEPT = ("embed", "norm", "Norm", "lm_head", "pooler")


EXPORT = architecture.export
GRAPHS: dict[Any, onnx.ModelProto] = {}


def arguments(dynamic: bool) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": dynamic}


class Folder(NamedTuple):
    path: Path
    weights: dict[str, ck.Codes]


def folder(path: Path, config: Any, name: str, *, dtype: Any, activations: bool = True, strip: str = "") -> Folder:
    """Writes a checkpoint as compressed-tensors has it, with random bytes."""
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    torch.manual_seed(0)
    weights: dict[str, ck.Codes] = {}
    stored: dict[str, Any] = {}
    for seed, (full, parameter) in enumerate(model.named_parameters()):
        key = full.removeprefix(strip)
        if parameter.dim() == 2 and not any(part in key for part in KEPT):
            weights[key] = ck.codes(*parameter.shape, seed=seed)
        else:
            stored[key] = (torch.randn(parameter.shape) * 0.1 + ("orm" in key and key.endswith("weight"))).to(dtype)
    for key, (elements, scales) in weights.items():
        stored[key] = torch.from_numpy(elements).view(torch.float8_e4m3fn)
        stored[f"{key}_scale"] = torch.from_numpy(scales)
    path.mkdir()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    group = {"targets": ["Linear"], "weights": arguments(False)}
    group["input_activations"] = arguments(True) if activations else None
    told = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": {"group_0": group}}
    (path / "config.json").write_text(
        json.dumps({**config.to_dict(), "architectures": [name], "quantization_config": told})
    )
    return Folder(path, weights)


def reference(made: Folder) -> Any:
    """Returns the model of a folder in torch, with dequantized weights in float32."""
    config = transformers.AutoConfig.from_pretrained(made.path)
    name = config.architectures[0]
    del config.quantization_config
    config.dtype = torch.float32
    model = getattr(transformers, name)(config).float().eval()
    stored = load_file(made.path / "model.safetensors")
    state = {
        key: value.float() for key, value in stored.items() if not key.endswith("_scale") and key not in made.weights
    }
    state |= {key: torch.from_numpy(np.array(ck.values(codes))) for key, codes in made.weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    return model


def check_stored(made: Folder, path: Path) -> None:
    """Fails unless the ONNX file has each tensor of the checkpoint, byte for byte."""
    ck.check_bytes(mxfp8_graph.unpack(path), made.weights)
    tensors = {name: value.const_value for name, value in load(path).graph.initializers.items()}
    for name, tensor in load_file(made.path / "model.safetensors").items():
        if name.removesuffix("_scale") in made.weights:
            continue
        absorbed = name not in tensors and name.endswith(".bias")  # by a node that takes float32
        found, expected = (tensors[f"{name}_f32"], tensor.float()) if absorbed else (tensors[name], tensor)
        assert found is not None
        assert found.tobytes() == expected.view(torch.uint8).numpy().tobytes(), name


def exported(call: Any, opset: int, where: str) -> ir.Model:
    """Returns what torch makes of a model: seconds that the tests need to wait for once only."""
    model = call.module.model
    parameters = tuple((name, value.shape, value.dtype) for name, value in model.named_parameters())
    key = type(model).__name__, parameters, opset
    if key not in GRAPHS:
        GRAPHS[key] = ir.to_proto(EXPORT(call, opset, where))
    return ir.from_proto(onnx.ModelProto.FromString(GRAPHS[key].SerializeToString()))


def close(actual: np.ndarray, expected: Any) -> None:
    """Fails unless float32 sums of 64 to 96 products in every layer explain the difference."""
    expected = expected.numpy()
    assert actual.shape == expected.shape
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error < 100 * 96**0.5 * 2.0**-24, error


@pytest.fixture(autouse=True, scope="module")
def each_model_is_exported_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "export", exported)
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Five layers, stored in bfloat16."""
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=5, num_key_value_heads=1, max_position_embeddings=64)
    return folder(tmp_path_factory.mktemp("a") / "llama", config, "LlamaForCausalLM", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def decoder(llama: Folder) -> Path:
    return mxfp8_graph.from_hf(llama.path, recipe="mxfp8-weight-only")[0]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Two layers, and names without the prefix that a model with a head has."""
    config = transformers.BertConfig(**SMALL, num_hidden_layers=2, max_position_embeddings=32)
    made = tmp_path_factory.mktemp("a") / "bert"
    return folder(made, config, "BertModel", dtype=torch.float32, activations=False)


@pytest.fixture(scope="module")
def encoder(bert: Folder) -> tuple[Path, mxfp8_graph.RewriteReport]:
    return mxfp8_graph.from_hf(bert.path)


# --- Decoders --------------------------------------------------------------------------------------------------------


def test_every_byte_of_a_decoder_arrives(llama: Folder, decoder: Path) -> None:
    assert len(llama.weights) == 35
    check_stored(llama, decoder)


def step(session: Any, ids: np.ndarray, mask: np.ndarray, past: list[np.ndarray] | None = None) -> list[np.ndarray]:
    """Runs tokens behind a cache, by default an empty one."""
    names = [given.name for given in session.get_inputs() if given.name.startswith("past_key_values.")]
    past = past or [np.zeros((len(ids), 1, 0, 32), np.float32)] * len(names)
    feeds = {"input_ids": ids, "attention_mask": mask} | dict(zip(names, past, strict=True))
    return list(session.run(None, feeds))


def test_a_decoder_computes_what_torch_does(llama: Folder, decoder: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (2, 7))
    session = ort.session(decoder)
    with torch.no_grad():
        expected = reference(llama)(torch.from_numpy(ids)).logits
    first = step(session, ids[:, :4], np.ones((2, 4), np.int64))
    close(first[0], expected[:, :4])
    close(step(session, ids[:, 4:], np.ones((2, 7), np.int64), first[1:])[0], expected[:, 4:])


def test_sequences_may_be_padded_on_the_left(decoder: Path) -> None:
    ids, session = np.random.default_rng(0).integers(0, 50, (1, 5)), ort.session(decoder)
    alone = step(session, ids, np.ones((1, 5), np.int64))[0]
    padded = np.concatenate([np.zeros((1, 3), np.int64), ids], axis=1)
    mask = np.array([[0, 0, 0, 1, 1, 1, 1, 1]])
    close(step(session, padded, mask)[0][:, 3:], torch.from_numpy(alone))


def test_inputs_and_outputs_have_the_names_that_others_expect(decoder: Path) -> None:
    graph = onnx.load(decoder, load_external_data=False).graph
    caches = [f".{layer}.{kind}" for layer in range(5) for kind in ("key", "value")]
    assert [value.name for value in graph.input] == [
        "input_ids",
        "attention_mask",
        *(f"past_key_values{c}" for c in caches),
    ]
    assert [value.name for value in graph.output] == ["logits", *(f"present{c}" for c in caches)]
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input}
    assert shapes["input_ids"] == ["batch", "sequence"]
    assert shapes["attention_mask"] == ["batch", "total"]
    assert shapes["past_key_values.4.value"] == ["batch", 1, "past", 32]
    onnx.checker.check_model(decoder)


def test_activations_are_quantized_as_the_checkpoint_says_and_nodes_fused(llama: Folder, tmp_path: Path) -> None:
    _, report = mxfp8_graph.from_hf(llama.path, tmp_path / "a.onnx")
    assert report.recipe["activations"] == "e4m3"
    kinds = Counter(fusion.kind for fusion in report.fusions)
    assert kinds == {"gemm + silu": 5, "gemm + silu + gate": 5, "attention": 5}


# --- Encoders --------------------------------------------------------------------------------------------------------


def test_every_byte_of_an_encoder_arrives(bert: Folder, encoder: tuple[Path, Any]) -> None:
    path, report = encoder
    check_stored(bert, path)
    assert report.recipe["activations"] == "unchanged"  # as the checkpoint says
    assert report.bytes_before == sum(t.nbytes for t in load_file(bert.path / "model.safetensors").values())


def test_an_encoder_computes_what_torch_does(bert: Folder, encoder: tuple[Path, Any]) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (3, 6))
    mask = np.array([[1] * 6, [1] * 4 + [0] * 2, [1] * 6])
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
    session = ort.session(encoder[0])
    assert [output.name for output in session.get_outputs()] == ["last_hidden_state", "pooler_output"]
    with torch.no_grad():
        expected = reference(bert)(**{name: torch.from_numpy(value) for name, value in feeds.items()})
    hidden, pooled = session.run(None, feeds)
    close(hidden, expected.last_hidden_state)
    close(pooled, expected.pooler_output)


# --- What does not fit -----------------------------------------------------------------------------------------------


def changed(made: Folder, path: Path, **config: Any) -> Path:
    """Returns a copy of a folder with another config."""
    path.mkdir()
    (path / "model.safetensors").write_bytes((made.path / "model.safetensors").read_bytes())
    told = json.loads((made.path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**told, **config}))
    return path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["load_tool"]}, "expected a model class of transformers"),
        ({"model_type": "nonsense"}, "transformers .* cannot read it: .* never run; export it yourself"),
        ({"architectures": ["BertForNextSentencePrediction"], "num_attention_heads": 7}, "cannot be made of it"),
    ],
)
def test_configs_that_cannot_be_exported(config: dict[str, Any], message: str, bert: Folder, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=message):
        mxfp8_graph.from_hf(changed(bert, tmp_path / "a", **config))


def test_other_kinds_of_models_are_refused(tmp_path: Path, bert: Folder) -> None:
    vit = transformers.ViTConfig(**SMALL, num_hidden_layers=1, image_size=32, patch_size=16).to_dict()
    with pytest.raises(ContractError, match=r"ViTModel is called with .*; expected a decoder or an encoder of tokens"):
        mxfp8_graph.from_hf(changed(bert, tmp_path / "a", **{**vit, "architectures": ["ViTModel"]}))


def test_code_of_the_folder_is_not_run(bert: Folder, tmp_path: Path) -> None:
    maps = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    path = changed(bert, tmp_path / "a", model_type="evil", auto_map=maps)
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ContractError, match="never run"):
        mxfp8_graph.from_hf(path)
    assert not (tmp_path / "ran").exists()


def test_tensors_that_are_missing_or_of_another_shape_are_listed(bert: Folder, tmp_path: Path) -> None:
    path = changed(bert, tmp_path / "a")
    stored = load_file(path / "model.safetensors")
    del stored["embeddings.LayerNorm.bias"]
    stored["embeddings.LayerNorm.weight"] = torch.ones(65)
    stored["pooler.dense.bias"] = torch.ones(64, dtype=torch.int64)
    save_file(stored, path / "model.safetensors")
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.from_hf(path)
    assert "no 'embeddings.LayerNorm.bias' [64]" in str(caught.value)
    assert "'embeddings.LayerNorm.weight' is [65], not [64]" in str(caught.value)
    assert "'pooler.dense.bias' is I64, not one of F32, F16, BF16, F64" in str(caught.value)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]


def test_repositories_that_a_config_names_are_not_asked_for(
    bert: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *name, **_: asked.append(name) or [])
    named = {"backbone": "microsoft/resnet-50", "use_pretrained_backbone": True, "use_timm_backbone": False}
    path = changed(bert, tmp_path / "a", model_type="detr", architectures=["DetrModel"], **named)
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    with pytest.raises(ContractError, match="offline"):
        mxfp8_graph.from_hf(path)
    assert asked == []
    assert offline == huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("place", "activations", "message"),
    [
        (0, None, "the activations of some layers alone are quantized"),
        (2, {**arguments(True), "group_size": 16}, "activations that are not in MXFP8: .*'group_size': 16"),
        (1, "yes", "activations that are not in MXFP8: yes"),
    ],
    ids=["none", "block size", "text"],
)
def test_every_group_says_how_activations_are_quantized(
    place: int, activations: Any, message: str, bert: Folder, tmp_path: Path
) -> None:
    groups = {f"group_{i}": {"targets": ["Linear"], "input_activations": arguments(True)} for i in range(3)}
    groups[f"group_{place}"]["input_activations"] = activations
    told = {"quant_method": "compressed-tensors", "config_groups": groups}
    with pytest.raises(ContractError, match=message):
        mxfp8_graph.from_hf(changed(bert, tmp_path / "a", quantization_config=told))


def test_modelopt_says_that_activations_are_not_dynamic(bert: Folder, tmp_path: Path) -> None:
    group = {"targets": ["Linear"], "input_activations": {k: v for k, v in arguments(False).items() if k != "strategy"}}
    told = {"quant_method": "modelopt", "quant_algo": "MXFP8", "config_groups": {"group_0": group}}
    _, report = mxfp8_graph.from_hf(changed(bert, tmp_path / "a", quantization_config=told))
    assert report.recipe["activations"] == "e4m3"


@looped("dynamic, activations", [(True, "int8"), (False, "unchanged")])
def test_a_checkpoint_of_mxint8_is_taken_byte_for_byte(
    dynamic: bool, activations: str, bert: Folder, tmp_path: Path
) -> None:
    arguments_of_int = {**arguments(True), "type": "int"}
    group = {"targets": ["Linear"], "input_activations": arguments_of_int if dynamic else None}
    told = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    path = changed(bert, tmp_path / activations, quantization_config=told)
    stored = load_file(path / "model.safetensors")
    stored |= {name: stored[name].view(torch.int8) for name in bert.weights}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    rewritten, report = mxfp8_graph.from_hf(path)
    assert (report.recipe["activations"], report.recipe["weight_format"]) == (activations, "int8")
    ck.check_bytes(mxfp8_graph.unpack(rewritten), bert.weights)
    assert {w.element_format for w in mxfp8_graph.unpack(rewritten).values()} == {"int8"}


@pytest.mark.parametrize(("marked", "activations"), [("all", "unchanged"), ("none", "e4m3"), ("some", None)])
def test_layers_of_comfyui_say_whether_activations_are_quantized(
    marked: str, activations: str | None, bert: Folder, tmp_path: Path
) -> None:
    path = changed(bert, tmp_path / "a", quantization_config={})
    layers = {name.removesuffix(".weight"): {"format": "mxfp8"} for name in bert.weights}
    stored = load_file(path / "model.safetensors")
    for index, (layer, told) in enumerate(layers.items()):
        if marked == "all" or (marked == "some" and index == 3):
            told["full_precision_matrix_mult"] = True
        stored[f"{layer}.weight_scale"] = torch.from_numpy(ck.tiles(bert.weights[f"{layer}.weight"][1]))
    told = {"_quantization_metadata": json.dumps({"layers": layers})}
    save_file(stored, path / "model.safetensors", told)
    if activations is None:
        with pytest.raises(ContractError, match="the activations of some layers alone are quantized"):
            mxfp8_graph.from_hf(path)
        return
    written, report = mxfp8_graph.from_hf(path)
    assert report.recipe["activations"] == activations
    ck.check_bytes(mxfp8_graph.unpack(written), bert.weights)


def test_what_is_excluded_has_no_other_values(bert: Folder, tmp_path: Path) -> None:
    recipe = mxfp8_graph.Recipe(exclude=["layer.1.output"])
    with pytest.raises(ContractError, match=r"excluded by 'layer\.1\.output'"):
        mxfp8_graph.from_hf(bert.path, tmp_path / "a.onnx", recipe=recipe)


def test_folders_and_dtypes_that_are_wrong(bert: Folder, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="not a folder; expected a local Hugging Face folder"):
        mxfp8_graph.from_hf(tmp_path / "none")
    with pytest.raises(ContractError, match="dtype: 'int8'; expected one of float32, float16, bfloat16"):
        mxfp8_graph.from_hf(bert.path, dtype="int8")  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ContractError, match="not a JSON object; expected the config of a model"):
        mxfp8_graph.from_hf(tmp_path)


def test_the_command_line(bert: Folder, tmp_path: Path) -> None:
    done = commands.run("from-hf", str(bert.path), "-o", str(tmp_path / "b.onnx"), "--external-data", "never")
    assert done.exit_code == 0, done.output
    assert "the checkpoint has it in MXFP8, as '" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["b.onnx"]
    check_stored(bert, tmp_path / "b.onnx")
    plain = commands.run("from-hf", str(bert.path), "-o", str(tmp_path / "c.onnx"), "--set", "fuse=false", "--json")
    assert json.loads(plain.stdout)["recipe"]["fuse"] is False
    again = commands.run("from-hf", str(bert.path), "-o", str(tmp_path / "b.onnx"))
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)


# --- Size ------------------------------------------------------------------------------------------------------------

LARGE = """
import resource, sys
import onnxscript, torch, transformers
from transformers import LlamaForCausalLM
import mxfp8_graph
mxfp8_graph.from_hf
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
bare = peak()
mxfp8_graph.from_hf(sys.argv[1])
print((peak() - bare) // 1024)
"""


@pytest.mark.slow
def test_a_billion_parameters_need_no_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "vocab_size": 32000}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=22, num_key_value_heads=4)
    made = folder(tmp_path / "llama", config, "LlamaForCausalLM", dtype=torch.bfloat16)
    done = subprocess.run([sys.executable, "-c", LARGE, str(made.path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000, f"{done.stdout} MB over the bare process"
    check_stored(made, made.path / "model.mxfp8.onnx")
