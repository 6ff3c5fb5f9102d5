"""`mxfp8-graph package`: the folders that hosts load. Running the hosts themselves: test_hosts_run.py, and samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import builders as b
import numpy as np
import onnx
import pytest
from commands import refused, run, save

import mxfp8_graph
from mxfp8_graph.tools.hosts import HOSTS
from mxfp8_graph.tools.hosts.layout import Layout, Request
from mxfp8_ops import cpu, ort

pytestmark = pytest.mark.usefixtures("own_folder")

LIBRARY = cpu.library_path().name
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 96,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
}


def rewritten(model: onnx.ModelProto | None = None, *, external: bool = False) -> str:
    source = save(model or b.matmul_model(), "source.onnx", external=external)
    mxfp8_graph.rewrite(source, output="m.onnx")
    return "m.onnx"


def decoder(names: str = "past_key_values.{}.{}", size: int | str = 16) -> onnx.ModelProto:
    """One linear, and a cache of two layers that is handed on."""
    shape = ["batch", 2, "past", size]
    past = [names.format(layer, kind) for layer in range(2) for kind in ("key", "value")]
    present = [name.replace("past_key_values", "present").replace("past", "present") for name in past]
    nodes = [b.node("MatMul", "x w", "h", "linear"), b.node("Relu", "h", "logits", "relu")]
    nodes += [b.node("Identity", name, out) for name, out in zip(past, present, strict=True)]
    cache = dict.fromkeys(past, (np.float32, shape))
    return b.model(
        nodes,
        {"x": (np.float32, ["batch", "seq", 64]), "attention_mask": (np.int64, ["batch", "total"]), **cache},
        {"logits": (np.float32, ["batch", "seq", 96]), **dict.fromkeys(present, (np.float32, shape))},
        {"w": b.weight(64, 96)},
    )


def described(**files: Any) -> Path:
    """Writes a folder with a tokenizer, weights and these .json files."""
    folder = Path("described")
    folder.mkdir()
    for name, content in {"tokenizer": {}, "model.safetensors.index": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def files_of(folder: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


# --- Triton ----------------------------------------------------------------------------------------------------------


def test_a_model_of_a_triton_repository() -> None:
    result = run("package", rewritten(), "--for", "triton", "-o", "repository/relu")
    assert (result.exit_code, result.stdout) == (0, f"{Path('repository/relu').resolve()}\n"), result.output
    assert files_of("repository") == {"relu/config.pbtxt", f"relu/{LIBRARY}", "relu/1/model.onnx"}
    library = Path("repository/relu", LIBRARY).resolve()
    assert library.read_bytes() == cpu.library_path().read_bytes()
    assert Path("repository/relu/config.pbtxt").read_text(encoding="utf-8") == (
        'name: "relu"\n'
        'backend: "onnxruntime"\n'
        "max_batch_size: 32\n"
        'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 64 ] }\n'
        'output { name: "y" data_type: TYPE_FP32 dims: [ -1, 96 ] }\n'
        "dynamic_batching { }\n"
        f'model_operations {{ op_library_filename: "{library}" }}\n'
    )


def test_triton_reads_the_configuration() -> None:
    pb = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="needs the extra hosts")
    from google.protobuf import text_format

    model = b.neg_model("Gemm", ["batch", 64], ["batch", 96], {"w": b.weight(64, 96)})
    for value, name in ((model.graph.input[0], 'ä"\n'), (model.graph.output[0], "y")):
        rename(model, value.name, name)
    mxfp8_graph.package(rewritten(model), "triton", "ä b", root="/models/ä b")
    found = text_format.Parse(Path("ä b/config.pbtxt").read_text(encoding="utf-8"), pb.ModelConfig())
    assert (found.name, found.backend, found.max_batch_size) == ("ä b", "onnxruntime", 32)
    assert [(i.name, i.data_type, list(i.dims)) for i in found.input] == [('ä"\n', pb.TYPE_FP32, [64])]
    assert [(o.name, o.data_type, list(o.dims)) for o in found.output] == [("y", pb.TYPE_FP32, [96])]
    assert list(found.model_operations.op_library_filename) == [f"/models/ä b/{LIBRARY}"]


def rename(model: onnx.ModelProto, old: str, new: str) -> None:
    for value in (*model.graph.input, *model.graph.output):
        value.name = new if value.name == old else value.name
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]


def test_triton_makes_no_batches_where_no_dimension_is_the_batch() -> None:
    model = b.neg_model("MatMul", [4, 64], [4, 96], {"w": b.weight(64, 96)})
    mxfp8_graph.package(rewritten(model), "triton", "t")
    text = Path("t/config.pbtxt").read_text(encoding="utf-8")
    assert "max_batch_size: 0\n" in text
    assert "dims: [ 4, 64 ]" in text
    assert "dynamic_batching" not in text


def test_external_data_goes_along_and_the_model_runs_there() -> None:
    source = rewritten(external=True)
    assert Path("m.onnx.data").exists()
    mxfp8_graph.package(source, "triton", "t")
    feeds = {"x": np.ones((1, 2, 64), np.float32)}
    before, after = (ort.session(path).run(None, feeds)[0] for path in (source, Path("t/1/model.onnx")))
    np.testing.assert_array_equal(before, after)


# --- onnxruntime-genai -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["past_key_values.{}.{}", "past_{1}_{0}"])
def test_a_genai_configuration_is_made_of_what_transformers_and_the_model_say(names: str) -> None:
    folder = mxfp8_graph.package(
        rewritten(decoder(names)), "genai", "g", config=described(config={**LLAMA, "head_dim": 16})
    )
    assert files_of("g") == {LIBRARY, "model.onnx", "genai_config.json", "config.json", "tokenizer.json"}
    config = json.loads((folder / "genai_config.json").read_text())
    past = names.format("%d", "{}")
    present = past.replace("past_key_values", "present").replace("past", "present")
    assert config["model"] == {
        "type": "llama",
        "context_length": 128,
        "vocab_size": 96,
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
        "pad_token_id": 1,
        "decoder": {
            "head_size": 16,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "inputs": {
                "attention_mask": "attention_mask",
                "past_key_names": past.format("key"),
                "past_value_names": past.format("value"),
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": present.format("key"),
                "present_value_names": present.format("value"),
            },
            "filename": "model.onnx",
            "session_options": {"custom_ops_library": LIBRARY},
        },
    }


def test_a_genai_configuration_that_is_there_is_kept() -> None:
    given = {"model": {"type": "phi3", "decoder": {"filename": "x.onnx", "session_options": {"log_id": "l"}}}}
    folder = mxfp8_graph.package(
        rewritten(), "genai", "g", config=described(genai_config={**given, "search": {"top_k": 7}}, config={})
    )
    assert json.loads((folder / "genai_config.json").read_text()) == {
        "model": {
            "type": "phi3",
            "decoder": {
                "filename": "model.onnx",
                "session_options": {"log_id": "l", "custom_ops_library": LIBRARY},
            },
        },
        "search": {"top_k": 7},
    }


# --- sentence-transformers and optimum -------------------------------------------------------------------------------


def modules(*paths: str) -> list[dict[str, str]]:
    return [{"path": path, "type": "sentence_transformers.models.Anything"} for path in ("", *paths)]


def test_a_sentence_transformers_folder() -> None:
    folder = described(config={}, modules=modules("2_Dense"))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense/model.safetensors").write_bytes(b"small")
    (folder / "onnx").mkdir()
    (folder / "onnx/model.onnx").write_bytes(b"the float32 model")
    mxfp8_graph.package(rewritten(), "sentence-transformers", "s", config=folder)
    assert files_of("s") == {
        "config.json",
        "modules.json",
        "tokenizer.json",
        "2_Dense/model.safetensors",
        "onnx/model.onnx",
    }
    assert Path("s/onnx/model.onnx").read_bytes() == Path("m.onnx").read_bytes()


def test_a_sentence_transformers_folder_of_an_early_version() -> None:
    """The transformer has a folder of its own, and the ONNX backend looks for its model there."""
    folder = described(modules=modules("1_Pooling"))
    (folder / "modules.json").write_text(json.dumps([{"path": "0_Transformer"}, {"path": "1_Pooling"}]))
    for name in ("0_Transformer/config.json", "0_Transformer/pytorch_model.bin", "1_Pooling/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    mxfp8_graph.package(rewritten(), "sentence-transformers", "s", config=folder)
    assert files_of("s") == {
        "modules.json",
        "tokenizer.json",
        "0_Transformer/config.json",
        "0_Transformer/onnx/model.onnx",
        "1_Pooling/config.json",
    }
    assert Path("s/0_Transformer/onnx/model.onnx").read_bytes() == Path("m.onnx").read_bytes()


@pytest.mark.parametrize("package", ["models", "base.modules.normalize", "sentence_transformer.modules"])
def test_the_folder_of_a_normalize_module_may_be_missing(package: str) -> None:
    """It has no files, and git, pip and the hub carry no empty folders; sentence-transformers loads it without."""
    normalize = {"path": "2_Normalize", "type": f"sentence_transformers.{package}.Normalize"}
    mxfp8_graph.package(
        rewritten(), "sentence-transformers", "s", config=described(config={}, modules=[*modules(), normalize])
    )
    assert files_of("s") == {"config.json", "modules.json", "tokenizer.json", "onnx/model.onnx"}
    assert json.loads(Path("s/modules.json").read_text())[1] == normalize


def test_an_optimum_folder() -> None:
    mxfp8_graph.package(rewritten(external=True), "optimum", "o", config=described(config={}))
    assert files_of("o") == {"config.json", "tokenizer.json", "model.onnx", "m.onnx.data"}


def test_a_description_in_the_cache_of_the_hugging_face_hub() -> None:
    """There every file is a link into one other folder."""
    folder = described(config={"model_type": "bert"})
    Path("blobs").mkdir()
    for path in list(folder.iterdir()):
        path.rename(Path("blobs", path.stem))
        path.symlink_to(Path("../blobs", path.stem))
    mxfp8_graph.package(rewritten(), "optimum", "o", config=folder)
    assert json.loads(Path("o/config.json").read_text()) == {"model_type": "bert"}
    assert not Path("o/config.json").is_symlink()


def test_the_help_names_every_host() -> None:
    words = " ".join(run("package", "--help").stdout.split())
    assert f"One of {', '.join(HOSTS)}." in words


def toy(request: Request) -> Layout:
    return Layout("m.onnx", request.library, {"toy.txt": request.name.encode()})


def test_a_new_host_is_a_row_and_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HOSTS, "toy", f"{__name__}:toy")
    path = rewritten()
    mxfp8_graph.package(path, "toy", "folder")
    assert files_of("folder") == {"m.onnx", LIBRARY, "toy.txt"}
    assert Path("folder/toy.txt").read_text() == str(path)


# --- What is refused -------------------------------------------------------------------------------------------------


def refusal(host: str, *arguments: str, model: str = "m.onnx") -> str:
    return refused("package", model, "--for", host, "-o", "out", *arguments).removeprefix("error: ")


def test_a_host_nobody_knows() -> None:
    rewritten()
    assert refusal("tritn") == (
        "host: 'tritn'; expected one of genai, optimum, sentence-transformers, triton; correct the name"
    )


def test_a_model_that_is_not_rewritten() -> None:
    assert refusal("triton", model=save(b.matmul_model())) == (
        "m.onnx: has no MXFP8 nodes; expected a rewritten model; rewrite it first"
    )


def test_a_program() -> None:
    Path("m.pt2").touch()
    assert refusal("triton", model="m.pt2").startswith("m.pt2: is not an ONNX file; expected one; write a program with")


def test_a_folder_that_exists() -> None:
    rewritten()
    Path("out").mkdir()
    Path("out/mine.txt").touch()
    message = f"{Path('out').resolve()}: exists already; expected a new folder; pass another --output, or remove it"
    assert refusal("triton") == message


def test_no_configuration() -> None:
    rewritten()
    assert refusal("optimum") == (
        "m.onnx: there is no description of the model; expected a folder with the model's config.json and tokenizer; "
        "pass --config FOLDER"
    )


@pytest.mark.parametrize(
    ("host", "files", "message"),
    [
        ("sentence-transformers", {}, "described: has no modules.json; expected a folder with a sentence-transformers"),
        ("sentence-transformers", {"modules": {}}, "described/modules.json: holds a dict; expected list; copy"),
        ("sentence-transformers", {"modules": [1]}, "described/modules.json: a module without a path; expected a list"),
        ("sentence-transformers", {"modules": []}, "described/modules.json: a module without a path; expected a list"),
        ("sentence-transformers", {"modules": modules("no")}, "described/no: No such file or directory; expected a"),
        ("genai", {}, "described: has no config.json; expected a folder with genai_config.json or config.json; pass"),
        ("genai", {"genai_config": {"model": {}}}, "described/genai_config.json: has no single decoder"),
        ("genai", {"genai_config": {"model": {"decoder": {}}}}, "described/genai_config.json: type is None; expected"),
        ("genai", {"config": {}}, "described/config.json: max_position_embeddings is None; expected a positive number"),
        ("genai", {"config": {**LLAMA, "model_type": None}}, "described/config.json: model_type is None; expected the"),
        ("genai", {"config": {**LLAMA, "num_hidden_layers": 3}}, "m.onnx: no inputs or outputs that name the keys of"),
        ("genai", {"config": LLAMA | {"head_dim": 32}}, "described/config.json: input 'past_key_values.0.key' of the"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_configuration_that_does_not_fit(host: str, files: dict[str, Any], message: str) -> None:
    rewritten(decoder())
    found = refusal(host, "--config", str(described(**files)))
    assert found.startswith(message), found


def test_a_configuration_that_is_no_json() -> None:
    rewritten(decoder())
    (described() / "config.json").write_text("{")
    assert refusal("genai", "--config", "described").startswith("described/config.json: not JSON: ")


def test_files_of_other_folders() -> None:
    rewritten()
    Path("secret.json").write_text("{}")
    (described(config={}) / "linked.json").symlink_to(Path("secret.json").resolve())
    assert "'linked.json'" in refusal("optimum", "--config", "described")
    Path("described/linked.json").unlink()


@pytest.mark.parametrize("path", ["../elsewhere", "../missing", "/etc", "link", "a\0b", "\ud800"], ids=ascii)
def test_a_module_outside_of_the_folder_is_refused_before_it_is_listed(path: str) -> None:
    rewritten()
    Path("elsewhere").mkdir()
    (described(config={}, modules=modules(path)) / "link").symlink_to(Path("elsewhere").resolve())
    assert f"external file {path!r}" in refusal("sentence-transformers", "--config", "described")


def test_external_data_with_the_name_of_another_file() -> None:
    save(b.matmul_model(), "config.onnx", external=True)
    mxfp8_graph.rewrite("config.onnx", output="m.onnx")
    model = onnx.load("m.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "config.json" if entry.key == "location" else entry.value
    onnx.save(model, "m.onnx")
    Path("m.onnx.data").rename("config.json")
    message = refusal("optimum", "--config", str(described(config={})))
    assert "two files called 'config.json'" in message


def test_external_data_that_is_missing_leaves_nothing() -> None:
    rewritten(external=True)
    Path("m.onnx.data").unlink()
    assert "m.onnx.data" in refusal("triton")


def test_a_place_that_cannot_be_written() -> None:
    rewritten()
    message = refused("package", "m.onnx", "--for", "triton", "-o", "m.onnx/out")
    assert message.endswith(
        "m.onnx/out: cannot be written: File exists; expected a writable folder with enough space; "
        "pass another --output"
    )


@pytest.mark.parametrize(("host", "root"), [("triton", "models"), ("optimum", "/models")])
def test_a_root_that_means_nothing(host: str, root: str) -> None:
    rewritten()
    assert refusal(host, "--root", root) == (
        f"root: '{root}' for {host}; expected an absolute path, for triton; correct it or leave it out"
    )


def test_a_description_for_triton() -> None:
    rewritten()
    assert refusal("triton", "--config", str(described())) == (
        "config: a description for triton; expected none, since the configuration follows from the model; leave it out"
    )


def test_a_dtype_that_triton_has_not() -> None:
    import ml_dtypes

    rewritten(b.matmul_model(dtype=ml_dtypes.bfloat16))
    assert refusal("triton") == (
        "m.onnx: 'x' has the dtype bfloat16; expected a shape, and a dtype that Triton has; "
        "export the model with another, or with shapes"
    )
