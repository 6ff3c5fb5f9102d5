"""from_hf(): Hugging Face folders with MXFP8 weights become ONNX models, byte for byte."""

from __future__ import annotations

import json
import socket
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


def arguments(dynamic: bool) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": dynamic}


class Folder(NamedTuple):
    path: Path
    weights: dict[str, ck.Codes]

    def tensors(self) -> dict[str, Any]:
        return load_file(self.path / "model.safetensors")

    def copy(self, path: Path, tensors: Any = None, metadata: Any = None, **config: Any) -> Path:
        """Writes a copy with other entries in its config, and perhaps other tensors; returns its path."""
        path.mkdir()
        save_file(tensors or self.tensors(), path / "model.safetensors", metadata={"format": "pt", **(metadata or {})})
        told = json.loads((self.path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**told, **config}))
        return path

    def computed_by_torch(self, **inputs: np.ndarray) -> Any:
        """Returns what transformers computes with dequantized weights in float32."""
        config = transformers.AutoConfig.from_pretrained(self.path)
        name = config.architectures[0]
        del config.quantization_config
        config.dtype = torch.float32
        model = getattr(transformers, name)(config).float().eval()
        state = {key: value.float() for key, value in self.tensors().items() if not key.endswith("_scale")}
        state |= {key: torch.from_numpy(np.array(ck.values(codes))) for key, codes in self.weights.items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
        with torch.no_grad():
            return model(**{key: torch.from_numpy(value) for key, value in inputs.items()})


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


def check_stored(made: Folder, path: Path) -> None:
    """Fails unless the ONNX file has each tensor of the checkpoint, byte for byte."""
    ck.check_bytes(mxfp8_graph.unpack(path), made.weights)
    tensors = {name: value.const_value for name, value in load(path).graph.initializers.items()}
    for name, tensor in made.tensors().items():
        if name.removesuffix("_scale") in made.weights:
            continue
        absorbed = name not in tensors and name.endswith(".bias")  # by a node that takes float32
        found, expected = (tensors[f"{name}_f32"], tensor.float()) if absorbed else (tensors[name], tensor)
        assert found is not None
        assert found.tobytes() == expected.view(torch.uint8).numpy().tobytes(), name


def check_close(actual: np.ndarray, expected: Any) -> None:
    """Fails unless float32 sums of 64 to 96 products in every layer explain the difference."""
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error < 100 * 96**0.5 * 2.0**-24, error


@pytest.fixture(autouse=True, scope="module")
def each_model_is_exported_once() -> Iterator[None]:
    """Keeps what torch makes of a model: seconds that the tests wait for once only."""
    export, graphs = architecture.export, {}

    def exported(call: Any, opset: int, where: str) -> ir.Model:
        model = call.module.model
        parameters = tuple((name, value.shape, value.dtype) for name, value in model.named_parameters())
        key = type(model).__name__, parameters, opset
        if key not in graphs:
            graphs[key] = ir.to_proto(export(call, opset, where)).SerializeToString()
        return ir.from_proto(onnx.ModelProto.FromString(graphs[key]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "export", exported)
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Two layers, stored in bfloat16."""
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=2, num_key_value_heads=1, max_position_embeddings=64)
    return folder(tmp_path_factory.mktemp("a") / "llama", config, "LlamaForCausalLM", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def decoder(llama: Folder) -> Path:
    return mxfp8_graph.from_hf(llama.path, recipe="mxfp8-weight-only")[0]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    config = transformers.BertConfig(**SMALL, num_hidden_layers=2, max_position_embeddings=32)
    made = tmp_path_factory.mktemp("a") / "bert"
    return folder(made, config, "BertModel", dtype=torch.float32, activations=False)


def test_every_byte_of_a_decoder_arrives_and_its_names_are_those_that_others_expect(
    llama: Folder, decoder: Path
) -> None:
    assert len(llama.weights) == 14
    check_stored(llama, decoder)
    graph = onnx.load(decoder, load_external_data=False).graph
    caches = [f".{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    inputs = ["input_ids", "attention_mask", *(f"past_key_values{c}" for c in caches)]
    assert [value.name for value in graph.input] == inputs
    assert [value.name for value in graph.output] == ["logits", *(f"present{c}" for c in caches)]
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input}
    assert shapes["input_ids"] == ["batch", "sequence"]
    assert shapes["attention_mask"] == ["batch", "total"]
    assert shapes["past_key_values.1.value"] == ["batch", 1, "past", 32]
    onnx.checker.check_model(decoder)


def step(session: Any, ids: np.ndarray, mask: np.ndarray, past: list[np.ndarray] | None = None) -> list[np.ndarray]:
    """Runs tokens behind a cache, by default an empty one."""
    names = [each.name for each in session.get_inputs() if each.name.startswith("past_key_values.")]
    past = past or [np.zeros((len(ids), 1, 0, 32), np.float32)] * len(names)
    feeds = {"input_ids": ids, "attention_mask": mask} | dict(zip(names, past, strict=True))
    return list(session.run(None, feeds))


def test_a_decoder_computes_what_torch_does_with_a_cache_and_padded_on_the_left(llama: Folder, decoder: Path) -> None:
    ids, session = np.random.default_rng(0).integers(0, 50, (2, 7)), ort.session(decoder)
    expected = llama.computed_by_torch(input_ids=ids).logits
    first = step(session, ids[:, :4], np.ones((2, 4), np.int64))
    check_close(first[0], expected[:, :4])
    check_close(step(session, ids[:, 4:], np.ones((2, 7), np.int64), first[1:])[0], expected[:, 4:])
    padded = np.concatenate([np.zeros((2, 3), np.int64), ids], axis=1)
    mask = np.array([[0] * 3 + [1] * 7] * 2)
    check_close(step(session, padded, mask)[0][:, 3:], expected)


def test_activations_are_quantized_as_the_checkpoint_says_and_nodes_fused(llama: Folder, tmp_path: Path) -> None:
    _, report = mxfp8_graph.from_hf(llama.path, tmp_path / "a.onnx")
    assert report.recipe["activations"] == "e4m3"
    kinds = Counter(fusion.kind for fusion in report.fusions)
    assert kinds == {"gemm + silu": 2, "gemm + silu + gate": 2, "attention": 2}


def test_every_byte_of_an_encoder_arrives_and_it_computes_what_torch_does(bert: Folder) -> None:
    path, report = mxfp8_graph.from_hf(bert.path)
    check_stored(bert, path)
    assert report.recipe["activations"] == "unchanged"  # as the checkpoint says
    assert report.bytes_before == sum(t.nbytes for t in bert.tensors().values())
    ids = np.random.default_rng(0).integers(0, 50, (3, 6))
    mask = np.array([[1] * 6, [1] * 4 + [0] * 2, [1] * 6])
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
    session, expected = ort.session(path), bert.computed_by_torch(**feeds)
    for output, values in zip(session.get_outputs(), session.run(None, feeds), strict=True):
        check_close(values, getattr(expected, output.name))
    assert [output.name for output in session.get_outputs()] == ["last_hidden_state", "pooler_output"]


VIT = {"model_type": "vit", "image_size": 32, "patch_size": 16, "num_hidden_layers": 1, "architectures": ["ViTModel"]}
MAPS = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
REMOTE = {"backbone": "microsoft/resnet-50", "use_pretrained_backbone": True, "use_timm_backbone": False}


@looped(
    "config, message",
    [
        ({"architectures": ["load_tool"]}, "expected a model class of transformers"),
        ({"model_type": "nonsense"}, "transformers .* cannot read it: .* never run; export it yourself"),
        ({"architectures": ["BertForNextSentencePrediction"], "num_attention_heads": 7}, "cannot be made of it"),
        (VIT, "ViTModel is called with .*; expected a decoder or an encoder of tokens"),
        ({"model_type": "evil", "auto_map": MAPS}, "never run"),
        ({"model_type": "detr", "architectures": ["DetrModel"], **REMOTE}, "offline"),
    ],
)
def test_a_config_that_cannot_be_exported_is_refused_without_its_code_and_the_network(
    config: dict[str, Any], message: str, bert: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *name, **_: asked.append(name) or [])
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    path = bert.copy(tmp_path / str(len(message)), **config)
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ContractError, match=message):
        mxfp8_graph.from_hf(path)
    assert (asked, (tmp_path / "ran").exists()) == ([], False)
    assert offline == huggingface_hub.constants.HF_HUB_OFFLINE


def test_tensors_that_are_missing_or_of_another_shape_are_listed(bert: Folder, tmp_path: Path) -> None:
    stored = bert.tensors()
    del stored["embeddings.LayerNorm.bias"]
    stored["embeddings.LayerNorm.weight"] = torch.ones(65)
    stored["pooler.dense.bias"] = torch.ones(64, dtype=torch.int64)
    path = bert.copy(tmp_path / "a", stored)
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.from_hf(path)
    assert "no 'embeddings.LayerNorm.bias' [64]" in str(caught.value)
    assert "'embeddings.LayerNorm.weight' is [65], not [64]" in str(caught.value)
    assert "'pooler.dense.bias' is I64, not one of F32, F16, BF16, F64" in str(caught.value)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]


def told(*activations: Any, method: str = "compressed-tensors") -> dict[str, Any]:
    """Returns a quantization_config with a group for each description of activations."""
    groups = [{"targets": ["Linear"], "input_activations": each} for each in activations]
    return {"quant_method": method, "config_groups": {f"group_{i}": group for i, group in enumerate(groups)}}


DYNAMIC = arguments(True)
OF_MODELOPT = {key: value for key, value in arguments(False).items() if key != "strategy"}


@looped(
    "config, message",
    [
        (told(None, DYNAMIC, DYNAMIC), "the activations of some layers alone are quantized"),
        (told(DYNAMIC, {**DYNAMIC, "group_size": 16}), "activations that are not in MXFP8: .*'group_size': 16"),
        (told(DYNAMIC, "yes"), "activations that are not in MXFP8: yes"),
        ({**told(OF_MODELOPT, method="modelopt"), "quant_algo": "MXFP8"}, ""),  # which says that they are not dynamic
    ],
)
def test_every_group_says_how_activations_are_quantized(
    config: Any, message: str, bert: Folder, tmp_path: Path
) -> None:
    path = bert.copy(tmp_path / str(len(message)), quantization_config=config)
    if not message:
        assert mxfp8_graph.from_hf(path)[1].recipe["activations"] == "e4m3"
        return
    with pytest.raises(ContractError, match=message):
        mxfp8_graph.from_hf(path)


@looped("dynamic, activations", [(True, "int8"), (False, "unchanged")])
def test_a_checkpoint_of_mxint8_is_taken_byte_for_byte(
    dynamic: bool, activations: str, bert: Folder, tmp_path: Path
) -> None:
    config = told({**DYNAMIC, "type": "int"} if dynamic else None)
    stored = bert.tensors()
    stored |= {name: stored[name].view(torch.int8) for name in bert.weights}
    rewritten, report = mxfp8_graph.from_hf(bert.copy(tmp_path / activations, stored, quantization_config=config))
    assert (report.recipe["activations"], report.recipe["weight_format"]) == (activations, "int8")
    ck.check_bytes(mxfp8_graph.unpack(rewritten), bert.weights)
    assert {w.element_format for w in mxfp8_graph.unpack(rewritten).values()} == {"int8"}


@looped("marked, activations", [(range(12), "unchanged"), ([], "e4m3"), ([3], None)])
def test_layers_of_comfyui_say_whether_activations_are_quantized(
    marked: Any, activations: str | None, bert: Folder, tmp_path: Path
) -> None:
    layers: dict[str, dict[str, Any]] = {name.removesuffix(".weight"): {"format": "mxfp8"} for name in bert.weights}
    stored = bert.tensors()
    for index, layer in enumerate(layers):
        layers[layer] |= {"full_precision_matrix_mult": True} if index in marked else {}
        stored[f"{layer}.weight_scale"] = torch.from_numpy(ck.tiles(bert.weights[f"{layer}.weight"][1]))
    metadata = {"_quantization_metadata": json.dumps({"layers": layers})}
    path = bert.copy(tmp_path / str(activations), stored, metadata, quantization_config={})
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
