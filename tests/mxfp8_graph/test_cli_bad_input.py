"""`mxfp8-graph rewrite` on every kind of bad input: the message, the exit code, and no file left behind."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import builders as b
import numpy as np
import onnx
import pytest
import torch
from commands import poison, refused, run, save

pytestmark = pytest.mark.usefixtures("own_folder")


# --- rewrite: bad input ----------------------------------------------------------------------------------------------


def a_directory(path: Path) -> None:
    path.mkdir()


def truncated(path: Path) -> None:
    save(b.chain_model(), str(path))
    os.truncate(path, 3000)


def a_checkpoint(path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def a_state_dict(path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, path)


def an_older_state_dict(path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)


def a_program(path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),)), "m.pt2")
    Path("m.pt2").rename(path)


def a_hugging_face_folder(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


MODULE = (
    "a file of torch.save: weights or a module, without a graph; expected an ONNX model; load it in PyTorch, "
    "torch.export.export(module, inputs), and save that with mxfp8_graph.save as .pt2"
)


def of_a_later_opset(path: Path) -> None:
    model = b.chain_model()
    model.opset_import[0].version = 99
    save(model, str(path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "No such file or directory; expected a readable ONNX file; check the path"),
        (a_directory, "a directory; expected an ONNX file; name the .onnx file inside it"),
        (lambda path: path.touch(), "the file is empty; expected an ONNX model; export it again"),
        (
            lambda path: path.write_text("hello"),
            "not a complete ONNX file (protobuf cannot be decoded); expected an ONNX model; "
            "check that the file is one and was copied whole",
        ),
        (
            truncated,
            "not a complete ONNX file (protobuf cannot be decoded); expected an ONNX model; "
            "check that the file is one and was copied whole",
        ),
        (
            a_checkpoint,
            "a safetensors checkpoint: weights without a graph; expected an ONNX model; pass it as --weights; "
            "for a folder with MXFP8 weights: mxfp8-graph from-hf FOLDER",
        ),
        (a_state_dict, MODULE),
        (an_older_state_dict, MODULE),
        (a_program, "a program of torch.export.save; expected an ONNX model; rename it to end in .pt2"),
        (
            a_hugging_face_folder,
            "a directory; expected an ONNX file; name the .onnx file inside it; "
            "for a folder with MXFP8 weights: mxfp8-graph from-hf FOLDER",
        ),
        (
            lambda path: path.write_bytes(b"\x12\x04test"),
            "not an ONNX model (no IR version or no graph); expected an ONNX model; export the model again",
        ),
        (
            of_a_later_opset,
            f"opset 99; expected 1 to {onnx.defs.onnx_opset_version()}, which onnx {onnx.__version__} knows; "
            "upgrade onnx",
        ),
    ],
    ids=[
        "missing",
        "directory",
        "empty",
        "not-ONNX",
        "truncated",
        "safetensors",
        "torch.save",
        "older-torch.save",
        "program",
        "HF",
        "protobuf",
        "opset",
    ],
)
def test_a_model_that_cannot_be_read(make: Callable[[Path], object], message: str) -> None:
    make(Path("m.onnx"))
    assert refused("rewrite", "m.onnx") == f"error: m.onnx: {message}"


def test_external_data_that_is_missing() -> None:
    source = save(b.chain_model(), external=True)
    Path("m.onnx.data").unlink()
    message = refused("rewrite", source)
    assert message.startswith("error: m.onnx: tensor 'layers.0.weight': cannot read external file ")
    assert message.endswith("No such file or directory; expected the file next to the model; copy it there")


def test_external_data_that_is_short() -> None:
    source = save(b.chain_model(), external=True)
    os.truncate("m.onnx.data", 100)
    message = refused("rewrite", source)
    assert message.startswith("error: m.onnx: tensor 'layers.0.weight': needs bytes 0 to 32768 of ")
    assert message.endswith("which has 100; expected the whole file; copy the external data again")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite(value: float) -> None:
    source = save(poison(b.chain_model(), value))
    assert refused("rewrite", source) == (
        f"error: weight 'layers.0.weight': {value} at index [3, 5]; expected finite values; repair the checkpoint, "
        "or pass --allow-nonfinite to let its block become NaN"
    )


def test_another_recipe_on_a_rewritten_model() -> None:
    run("rewrite", save(b.chain_model()), "-o", "out.onnx", "--recipe", "ocp")
    assert refused("rewrite", "out.onnx", "--recipe", "MXFP8BlockScaling") == (
        "error: out.onnx: Recipe mismatch for 'x_mxfp8_quantize': packed with scale_rounding floor, asked for ceil; "
        "expected the original model, since packed weights cannot be packed again; rewrite that one"
    )


def test_a_recipe_of_transformer_engine_that_is_not_mxfp8() -> None:
    assert refused("rewrite", save(b.chain_model()), "--recipe", "Float8BlockScaling") == (
        "error: recipe: Float8BlockScaling is FP8 with a float32 scale per 128 values, or per 128 x 128 of a weight, "
        "not MXFP8; expected one of mxfp8, mxfp8-bf16, mxfp8-weight-only, ocp, mxint8, "
        "mxint8-bf16, mxint8-weight-only, all, auto, or a .yaml or .toml file; `mxfp8-graph compare` emulates it "
        "and shows the error it makes on your model"
    )


@pytest.mark.parametrize("flags", [[], ["--overwrite"]], ids=str)
def test_the_input_is_never_overwritten(flags: list[str]) -> None:
    source = save(b.chain_model())
    assert refused("rewrite", source, "-o", "m.onnx", *flags) == (
        "error: m.onnx: is an input; expected another file; pass another path"
    )


def test_an_output_that_exists() -> None:
    source = save(b.chain_model())
    Path("m.mxfp8.onnx").write_text("old")
    assert refused("rewrite", source) == (
        "error: m.mxfp8.onnx: exists already; expected a new file; pass --overwrite or another path"
    )
    assert Path("m.mxfp8.onnx").read_text() == "old"


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that even root cannot write to")
@pytest.mark.skipif(not Path("/sys/kernel").exists(), reason="needs /sys, which is read-only")
def test_a_read_only_folder() -> None:
    message = refused("rewrite", save(b.chain_model()), "-o", "/sys/out.onnx")
    assert message in {
        f"error: /sys/out.onnx: cannot be written: {reason}; expected a writable folder with enough space; "
        "free some space or pass another path"
        for reason in ("Permission denied", "Read-only file system", "Operation not permitted")
    }


def test_an_output_folder_that_does_not_exist() -> None:
    assert refused("rewrite", save(b.chain_model()), "-o", "none/out.onnx") == (
        "error: none/out.onnx: folder none does not exist; expected a file in an existing folder; create the folder"
    )


def test_a_model_too_large_for_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxfp8_graph.onnx_pass.save.INLINE_LIMIT", 5_000)
    assert refused("rewrite", save(b.chain_model()), "--external-data", "never") == (
        "error: m.mxfp8.onnx: the model does not fit into one protobuf file (2 GB); expected external data; "
        "pass --external-data always"
    )


def test_an_unknown_recipe() -> None:
    assert refused("rewrite", save(b.chain_model()), "--recipe", "mxfp4") == (
        "error: recipe: 'mxfp4'; expected one of mxfp8, mxfp8-bf16, mxfp8-weight-only, ocp, mxint8, "
        "mxint8-bf16, mxint8-weight-only, all, auto, or a .yaml or .toml file; correct the name"
    )


def test_a_bad_regular_expression_with_brackets() -> None:
    Path("r.yaml").write_text("exclude: ['[']\n")
    assert refused("rewrite", save(b.chain_model()), "--recipe", "r.yaml") == (
        "error: r.yaml: exclude.0: '[' is not a regular expression (unterminated character set at position 0); "
        "expected one; correct it"
    )


def test_a_rule_that_matches_nothing() -> None:
    Path("r.yaml").write_text("exclude: [lm_head]\n")
    assert refused("rewrite", save(b.chain_model()), "--recipe", "r.yaml") == (
        "error: recipe 'r': exclude.0: 'lm_head' matches none of the model's matmuls; expected at least one; "
        "correct or remove it. Matmuls: layers.0.linear, layers.1.linear"
    )


@pytest.mark.parametrize("output", [".", "..", "/"])
def test_an_output_that_is_a_folder(output: str) -> None:
    assert refused("rewrite", save(b.chain_model()), "-o", output) == (
        f"error: {output}: a directory; expected a file name; pass another path"
    )


def test_a_report_that_cannot_be_written_stops_before_the_work() -> None:
    assert refused("rewrite", save(b.chain_model()), "--report", "none/r.json") == (
        "error: none/r.json: folder none does not exist; expected a file in an existing folder; create the folder"
    )


# --- rewrite: nothing eligible ---------------------------------------------------------------------------------------


def test_a_model_without_matmuls() -> None:
    spec = {"x": (np.float32, [2])}, {"y": (np.float32, [2])}
    model = b.model([b.node("Relu", "x", "y")], *spec)
    advice = "; expected at least one; nothing to rewrite"
    assert refused("rewrite", save(model), code=3) == f"error: m.onnx: no MatMul or Gemm in the model{advice}"
    linear = onnx.helper.make_node("LinearRegressor", ["x"], ["z"], domain="ai.onnx.ml", coefficients=[1.0, 1.0])
    model.graph.node.append(linear)
    model.opset_import.add(domain="ai.onnx.ml", version=1)
    said = f"1 LinearRegressor: not rewritten, the weights are attributes and no tensors){advice}"
    assert refused("rewrite", save(model), code=3).endswith(said)


@pytest.mark.parametrize("flags", [[], ["--dry-run"]], ids=str)
def test_when_all_sites_are_skipped_the_reasons_are_listed(flags: list[str]) -> None:
    source = save(b.chain_model((64, 100), head=True))
    message, header, row, *rest = refused("rewrite", source, *flags, code=3).splitlines()
    assert message == (
        "error: m.onnx: none of its 1 matmul is eligible; expected at least one; see the reasons and adapt the recipe"
    )
    assert header.split() == ["site", "op", "M", "x", "N", "x", "K", "decision", "before", "rule", "reason"]
    reason = " ".join([row[row.index("output") :], *(line.strip() for line in rest)])
    assert reason == "output projection: its result is a graph output; set output_projections: true to quantize it"


def test_a_matmul_over_nothing() -> None:
    message = refused("rewrite", save(b.matmul_model(k=0)), code=3)
    assert "the weight is empty (shape [0, 96]);" in message


def test_a_python_wheel() -> None:
    with zipfile.ZipFile("m.whl", "w") as archive:
        archive.writestr("m/__init__.py", "")
    message = "a Python wheel; expected an ONNX model; unzip it and name the .onnx file in it"
    assert refused("rewrite", "m.whl", "-o", "m.onnx") == f"error: m.whl: {message}"


def test_samples_of_text() -> None:
    Path("data.jsonl").write_text('{"text": "a sentence"}\n')
    message = refused("run", save(b.chain_model()), "--inputs", "data.jsonl")
    assert message.startswith("error: m.onnx: no input called 'input_ids' for texts; expected a model of tokens")


def test_a_size_where_every_dimension_is_fixed() -> None:
    nodes = [b.node("MatMul", "x w", "y")]
    source = save(b.model(nodes, {"x": (np.float32, [2, 64])}, {"y": (np.float32, [2, 64])}, {"w": b.weight(64, 64)}))
    assert refused("run", source, "--dim", "b=3") == (
        "error: m.onnx: size b = 3; expected none: all sizes are fixed; correct or drop --dim"
    )
