"""Crafted .pt2 files: no pickle in them runs code, and each is refused with what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run
from grids import looped
from hostile_programs import CONSTANTS, PROGRAM, SAMPLES, WEIGHTS, edited, plainly_touching, records, touching, write

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_programs import DYNAMIC, export, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        return {"y": x + self.down(torch.relu(self.up(x))) * scale}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = export(Model(), values(5, 64), scale=torch.ones(1), dynamic={"x": {0: DYNAMIC}, "scale": None})
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    torch.export.save(program, path)
    return path


def weights_as_pickle(content: dict[str, bytes], proof: Path) -> None:
    config = json.loads(content[WEIGHTS])
    config["config"]["up.bias"] |= {"use_pickle": True, "path_name": "bad"}
    content |= {WEIGHTS: json.dumps(config).encode(), "data/weights/bad": touching(proof)}


def constants_of(name: str) -> Callable[[dict[str, bytes], Path], None]:
    def edit(content: dict[str, bytes], proof: Path) -> None:
        meta = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
        content[CONSTANTS] = json.dumps({"config": {"c": meta}}).encode()
        content[f"data/constants/{name}"] = (touching if name.startswith("tensor") else plainly_touching)(proof)

    return edit


IN_PICKLES: dict[str, Callable[[dict[str, bytes], Path], None]] = {
    "samples": lambda content, proof: content.update({SAMPLES: touching(proof)}),
    "plain samples": lambda content, proof: content.update({SAMPLES: plainly_touching(proof)}),
    "weights": weights_as_pickle,
    "old weights": lambda content, proof: content.update({"data/weights/model.pt": touching(proof)}),
    "old constants": lambda content, proof: content.update({"data/constants/model.pt": touching(proof)}),
    "constants": constants_of("tensor_0"),
    "custom objects": constants_of("custom_obj_0"),
    "opaque objects": constants_of("opaque_obj_0"),
}


@looped("place", IN_PICKLES)
def test_pickles_run_nothing(place: str, source: Path, tmp_path: Path) -> None:
    proof, content = tmp_path / "proof", records(source)
    IN_PICKLES[place](content, proof)
    path = write(tmp_path / "bad.pt2", content)
    with pytest.raises(ContractError, match=r"bad\.pt2: .*(pickle|object).*; expected "):
        mxfp8_graph.load(path)
    assert not proof.exists()


def test_every_reader_refuses_pickles(source: Path, tmp_path: Path) -> None:
    proof, content = tmp_path / "proof", records(source)
    IN_PICKLES["samples"](content, proof)
    path = str(write(tmp_path / "bad.pt2", content))
    for read in (mxfp8_graph.unpack, lambda path: mxfp8_graph.to_onnx(path, tmp_path / "m.onnx")):
        with pytest.raises(ContractError, match=r"bad\.pt2: .*expected tensors"):
            read(path)
    for command in (("rewrite", path, "--dry-run"), ("run", path), ("verify", path, path)):
        result = run(*command)
        assert result.exit_code == 2, result.output
    assert not proof.exists()


def test_compiled_libraries_are_refused(source: Path, tmp_path: Path) -> None:
    libraries = {"data/aotinductor/model/x.so": b"\x7fELF", "data/aotinductor/model/x_metadata.json": b"{}"}
    with pytest.raises(ContractError, match=r"x\.so is a compiled library; expected a program of ops and tensors"):
        mxfp8_graph.load(write(tmp_path / "compiled.pt2", records(source) | libraries))


@pytest.mark.parametrize("before", [None, "0"])
def test_the_environment_stays(
    before: str | None, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is not None:
        monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", before)
    environment, bad = dict(os.environ), records(source)
    IN_PICKLES["weights"](bad, tmp_path / "proof")
    mxfp8_graph.load(source)
    assert dict(os.environ) == environment
    with pytest.raises(ContractError):
        mxfp8_graph.load(write(tmp_path / "bad.pt2", bad))
    assert dict(os.environ) == environment
    assert not (tmp_path / "proof").exists()


@looped(
    "name, data",
    [
        *((PROGRAM, data) for data in (b"[" * 1_000_000, b"[]", b"\xff", b"{}")),
        *((WEIGHTS, data) for data in (b'{"config": []}', b"")),
        ("extra/mxfp8_graph.json", b"[]"),
        ("extra/mxfp8_graph.json", b'{"mxfp8_graph.modules": [1]}'),
        ("extra/mxfp8_graph.json", b'{"mxfp8_graph.contract_version": "x"}'),
        ("archive_version", b"9"),
        (SAMPLES, b"PK\x03\x04"),
        ("data/weights/weight_0", b"123"),
        ("data/weights/weight_0", b""),
    ],
)
def test_archives_that_are_not_programs(name: str, data: bytes, source: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.pt2", records(source) | {name: data})
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_tensors_that_are_not_what_the_graph_says(source: Path, tmp_path: Path) -> None:
    def edit(config: Any) -> None:
        layout = config["config"]["up.weight"]["tensor_meta"]
        layout["sizes"], layout["strides"] = [{"as_int": 64}, {"as_int": 96}], [{"as_int": 96}, {"as_int": 1}]

    path = edited(source, tmp_path / "bad.pt2", edit, WEIGHTS)
    with pytest.raises(
        ContractError, match=r"'up.weight' is torch.float32 \[64, 96\]; expected torch.float32 \[96, 64\]"
    ):
        mxfp8_graph.load(path)


def test_modules_that_a_file_names_are_not_imported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "payload.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = {"mxfp8_graph.modules": ["payload", "torch.payload", "transformers.payload", "transformers..payload"]}
    content = records(source) | {"extra/mxfp8_graph.json": json.dumps(entries).encode()}
    mxfp8_graph.load(write(tmp_path / "model.pt2", content))
    assert not (tmp_path / "proof").exists()
