"""Commands on bad input: one line of error with the options of the command line, exit code 2 or 3, no file written."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import models as b
import numpy as np
import onnx
import pytest
import torch
from commands import poison, refused, run, save

from mxfp8_graph import rewriting

pytestmark = pytest.mark.usefixtures("own_folder")


def part_of_a_model(share: float) -> Callable[[Path], object]:
    content = b.chain_model().SerializeToString()
    return lambda path: path.write_bytes(content[: int(len(content) * share)])


def a_safetensors_file(path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def a_program(path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),)), "m.pt2")
    Path("m.pt2").rename(path)


def a_hugging_face_folder(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


def of_a_later_opset(path: Path) -> None:
    model = b.chain_model()
    model.opset_import[0].version = 99
    save(model, str(path))


INCOMPLETE = "not a complete ONNX file (protobuf cannot be decoded); expected an ONNX model; check that the file is one"
STATE_DICT = "a file of torch.save: weights or a module, without a graph; expected an ONNX model; load it in PyTorch"
DIRECTORY = "a directory; expected an ONNX file; name the .onnx file inside it"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda path: None, "No such file or directory; expected a readable ONNX file", id="missing"),
        pytest.param(Path.mkdir, DIRECTORY, id="a folder"),
        pytest.param(Path.touch, "the file is empty; expected an ONNX model; export it again", id="empty"),
        pytest.param(lambda path: path.write_text("hello"), INCOMPLETE, id="text"),
        pytest.param(lambda path: path.write_text('{"graph": {}}'), INCOMPLETE, id="JSON"),
        pytest.param(lambda path: path.write_bytes(bytes(1000)), INCOMPLETE, id="zeros"),
        *(pytest.param(part_of_a_model(s), INCOMPLETE, id=f"{s} of a model") for s in (0.01, 0.5, 0.9999)),
        pytest.param(a_safetensors_file, "a safetensors checkpoint: weights without a graph;", id="safetensors"),
        pytest.param(lambda path: torch.save({"w": torch.zeros(3)}, path), STATE_DICT, id="torch.save"),
        pytest.param(
            lambda path: torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False),
            STATE_DICT,
            id="older torch.save",
        ),
        pytest.param(a_program, "a program of torch.export.save; expected an ONNX model; rename it", id="program"),
        pytest.param(
            a_hugging_face_folder,
            f"{DIRECTORY}; for a folder with MXFP8 weights: mxfp8-graph from-hf FOLDER",
            id="a folder of Hugging Face",
        ),
        pytest.param(lambda path: path.write_bytes(b"\x12\x04test"), "not an ONNX model (no IR", id="protobuf"),
        pytest.param(of_a_later_opset, f"opset 99; expected 1 to {onnx.defs.onnx_opset_version()}, which", id="opset"),
    ],
)
def test_a_file_that_is_no_onnx_model(make: Callable[[Path], object], message: str) -> None:
    make(Path("m.onnx"))
    assert refused("rewrite", "m.onnx").startswith(f"error: m.onnx: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("rewrite m.onnx/m.onnx -o o.onnx", "m.onnx/m.onnx: Not a directory; expected a readable ONNX file; check the"),
        ("rewrite m.onnx -o m.onnx --overwrite", "m.onnx: is an input; expected another file"),
        ("rewrite m.json --report m.json", "m.json: is an input; expected another file"),
        ("rewrite m.onnx --report ./m.onnx.json -o m.onnx.json", "m.onnx.json: is an input; expected another file"),
        ("rewrite m.whl -o o.onnx", "m.whl: a Python wheel; expected an ONNX model; unzip it and name the .onnx file"),
        ("rewrite m.onnx", "m.mxfp8.onnx: exists already; expected a new file; pass --overwrite or another path"),
        ("rewrite m.onnx -o none/o.onnx", "none/o.onnx: folder none does not exist; expected a file in an existing"),
        ("rewrite m.onnx -o .", ".: a directory; expected a file name; pass another path"),
        ("rewrite m.onnx -o o.onnx --report none/r.json", "none/r.json: folder none does not exist; expected a file"),
        ("rewrite m.onnx -o o.onnx --external-data never", "o.onnx: the model does not fit into one protobuf file (2"),
        ("rewrite m.onnx -o o.onnx --recipe mxfp4", "recipe: 'mxfp4'; expected one of mxfp8, mxfp8-bf16, "),
        ("rewrite m.onnx -o o.onnx --recipe r.yaml", "r.yaml: exclude.0: '[' is not a regular expression ("),
        ("rewrite m.onnx -o o.onnx --exclude head", "recipe 'mxfp8 excluding head': exclude.0: 'head' matches none"),
        ("rewrite m.onnx -o o.onnx --exclude [", "Recipe: exclude.0: '[' is not a regular expression ("),
        ("rewrite m.mxfp8.onnx --recipe ocp", "m.mxfp8.onnx: Recipe mismatch for 'x_mxfp8_quantize': packed with"),
        ("verify m.onnx m.mxfp8.onnx --inputs none.npz", "none.npz: No such file or directory; expected a readable"),
        ("verify m.onnx m.mxfp8.onnx --dim bath=2", "m.onnx: size bath = 2; expected 0 or more, for one of batch (or"),
        ("verify m.onnx m.mxfp8.onnx --dim batch=2 --inputs d.npz", "m.onnx: sizes batch with given inputs; expected"),
        ("verify m.onnx m.mxfp8.onnx --dim batch=1125899906842624", "m.onnx: input x float32 [batch, 64] would be ("),
        ("verify m.onnx m.mxfp8.onnx --report v.txt", "v.txt: report with suffix '.txt'; expected .json or .html"),
        ("run m.onnx --inputs data.jsonl", "m.onnx: no input called 'input_ids' for texts; expected a model of tokens"),
        (
            "run fixed.onnx --dim b=3",
            "fixed.onnx: size b = 3; expected none: all sizes are fixed; correct or drop --dim",
        ),
    ],
    ids=lambda value: value if " -" in value else "",
)
def test_arguments_that_do_not_fit(arguments: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rewriting.rewrite(save(b.chain_model()))
    save(b.model([b.node("Relu", "x", "y")], *[{name: (np.float32, [2])} for name in "xy"]), "fixed.onnx")
    save(b.chain_model(), "m.json")
    Path("r.yaml").write_text("exclude: ['[']\n")
    with zipfile.ZipFile("m.whl", "w") as archive:
        archive.writestr("m/__init__.py", "")
    Path("data.jsonl").write_text('{"text": "a sentence"}\n')
    monkeypatch.setattr("mxfp8_graph.onnx_pass.save.INLINE_LIMIT", 5_000)
    assert refused(*arguments.split()).startswith(f"error: {message}")


def test_a_weight_that_is_not_finite_needs_an_option() -> None:
    message = refused("rewrite", save(poison(b.chain_model(), np.inf)))
    assert message.startswith("error: weight 'layers.0.weight': inf at index [3, 5]; expected finite values; ")
    assert "pass --allow-nonfinite" in message
    assert run("rewrite", "m.onnx", "--allow-nonfinite").exit_code == 0


def test_a_model_without_matmuls_ends_with_3() -> None:
    model = b.model([b.node("Relu", "x", "y")], *[{name: (np.float32, [2])} for name in "xy"])
    advice = "; expected at least one; nothing to rewrite"
    assert refused("rewrite", save(model), code=3) == f"error: m.onnx: no MatMul or Gemm in the model{advice}"
    table = b.model(b.steps("Add x w>y"), *[{name: (np.float32, [2])} for name in "xy"], {"w": np.ones(2, np.float32)})
    assert refused("rewrite", save(table), code=3).endswith("nothing to rewrite; its weights: Add 8 bytes")
    texts = onnx.helper.make_tensor("texts", onnx.TensorProto.STRING, [1], [b"a"])  # no size is known
    table.graph.initializer.append(texts)
    table.graph.node.append(b.node("Identity", "texts", "same"))
    assert refused("rewrite", save(table), code=3).endswith("nothing to rewrite; its weights: Add 8 bytes")
    linear = onnx.helper.make_node("LinearRegressor", ["x"], ["z"], domain="ai.onnx.ml", coefficients=[1.0, 1.0])
    model.graph.node.append(linear)
    model.opset_import.add(domain="ai.onnx.ml", version=1)
    note = f"1 LinearRegressor: not rewritten, the weights are attributes and no tensors){advice}"
    assert refused("rewrite", save(model), code=3).endswith(note)


@pytest.mark.parametrize("flags", [[], ["--dry-run"]], ids=str)
def test_a_model_in_which_nothing_is_eligible_ends_with_3_and_the_reasons(flags: list[str]) -> None:
    source = save(b.chain_model((64, 100), head=True))
    message, header, row, *rest = refused("rewrite", source, *flags, code=3).splitlines()
    assert message == (
        "error: m.onnx: none of its 1 matmul is eligible; expected at least one; see the reasons and adapt the recipe"
    )
    assert header.split() == ["site", "op", "M", "x", "N", "x", "K", "decision", "before", "rule", "reason"]
    reason = " ".join([row[row.index("output") :], *(line.strip() for line in rest)])
    assert reason == "output projection: its result is a graph output; set output_projections: true to quantize it"
