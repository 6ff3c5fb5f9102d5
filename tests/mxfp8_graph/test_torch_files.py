"""Programs in .pt2 files: equal in a fresh process, never half a file; no pickle in them runs code."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import refused, run
from full_disk import files_of_at_most
from grids import looped

torch = pytest.importorskip("torch")

import forked  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import DYNAMIC, SAMPLES, Apply, export, records, values, write  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.torch_pass import load, record, save  # noqa: E402
from mxfp8_ops import contract  # noqa: E402
from mxfp8_ops.errors import ContractError, RecipeError  # noqa: E402

X = values(5, 64, seed=2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(torch.relu(self.up(x))))


@pytest.fixture(scope="module")
def rewritten() -> ExportedProgram:
    torch.manual_seed(0)
    return mxfp8_graph.rewrite(export(Model(), X, dynamic={"x": {0: DYNAMIC}}))[0]


def test_a_fresh_process_gives_the_same_bits(tmp_path: Path) -> None:
    """Also where the outputs are of a class that transformers must register first."""
    transformers = pytest.importorskip("transformers")
    settings = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
    model = transformers.BertModel(transformers.BertConfig(**settings, vocab_size=32))
    ids = torch.arange(6).reshape(2, 3)
    program, _ = mxfp8_graph.rewrite(export(model, input_ids=ids))
    mxfp8_graph.save(program, tmp_path / "bert.pt2")
    torch.save(ids, tmp_path / "x")
    (tmp_path / "script.py").write_text("""
import mxfp8_graph
program = mxfp8_graph.load("bert.pt2")
import torch
torch.save(list(program.module()(input_ids=torch.load("x")).values()), "y")
""")
    exit_code, printed = forked.run(["python", "script.py"], tmp_path)
    assert exit_code == 0, printed
    expected = program.module()(input_ids=ids).values()
    assert all(torch.equal(a, b) for a, b in zip(torch.load(tmp_path / "y"), expected, strict=True))


def test_the_file_says_what_made_it(rewritten: ExportedProgram, tmp_path: Path) -> None:
    path = mxfp8_graph.save(rewritten, tmp_path / "model.pt2")
    with zipfile.ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(record.EXTRA_FILE)]
        entries = json.loads(archive.read(name))
    assert json.loads(entries["mxfp8_graph.recipe"])["name"] == "mxfp8"
    assert entries["mxfp8_graph.version"] == mxfp8_graph.__version__
    assert entries["mxfp8_graph.contract_version"] == str(contract.VERSION)
    loaded = mxfp8_graph.load(path)
    assert mxfp8_graph.rewrite(loaded)[1].already_rewritten
    with pytest.raises(RecipeError, match="for 'linear': packed with scale_rounding ceil, asked for floor"):
        mxfp8_graph.rewrite(loaded, "ocp")


def test_the_command_line_names_its_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mxfp8_graph.save(export(Model(), X), "m.pt2")
    Path("m.mxfp8.pt2").touch()
    exists = "m.mxfp8.pt2: exists already; expected a new file; pass"
    assert refused("rewrite", "m.pt2") == f"error: {exists} --overwrite or another path"
    with pytest.raises(ContractError, match=f"^{exists} overwrite=True or another path$"):
        mxfp8_graph.rewrite("m.pt2")
    assert refused("rewrite", "m.pt2", "-o", "m.pt2") == (
        "error: m.pt2: is an input; expected another file; pass another path"
    )


def test_a_file_is_rewritten_beside_it_and_stays_as_it_was(tmp_path: Path) -> None:
    source = mxfp8_graph.save(export(Model(), X), tmp_path / "model.pt2")
    before = source.read_bytes()
    output, report = mxfp8_graph.rewrite(source)
    assert output == tmp_path / "model.mxfp8.pt2"
    assert (report.source, report.output) == (str(source), str(output))
    assert report.bytes_before == len(before)
    assert report.bytes_after == output.stat().st_size < len(before)
    assert source.read_bytes() == before
    again, report = mxfp8_graph.rewrite(output, output=tmp_path / "again.pt2")
    assert report.already_rewritten
    assert mxfp8_graph.rewrite(again)[1].already_rewritten, "the output is a copy"
    assert mxfp8_graph.rewrite(source, overwrite=True)[0] == output
    with pytest.raises(ContractError, match="is an input"):
        mxfp8_graph.rewrite(source, output=source, overwrite=True)
    program = mxfp8_graph.load(source)
    assert mxfp8_graph.rewrite(program, output=tmp_path / "other.pt2")[0] == tmp_path / "other.pt2"


def test_a_dry_run_writes_nothing_and_refuses_the_same_outputs(tmp_path: Path) -> None:
    source = mxfp8_graph.save(export(Model(), X), tmp_path / "model.pt2")
    assert mxfp8_graph.rewrite(source, output=source.with_name("dry.pt2"), dry_run=True)[0] is None
    source.with_name("old.pt2").write_text("old")
    assert mxfp8_graph.rewrite(source, output=source.with_name("old.pt2"), dry_run=True)[0] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt2", "old.pt2"]
    assert source.with_name("old.pt2").read_text() == "old"
    for wrong, reason in ((tmp_path / "none" / "dry.pt2", "does not exist"), (source, "is an input")):
        with pytest.raises(ContractError, match=reason):
            mxfp8_graph.rewrite(source, output=wrong, dry_run=True)


@looped(
    "content, message",
    [
        (None, "No such file or directory; expected a readable .pt2 file"),
        (lambda whole: b"", "cannot read the program"),
        (lambda whole: whole[: len(whole) // 2], "cannot read the program"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named(
    content: Any, message: str, rewritten: ExportedProgram, tmp_path: Path
) -> None:
    path = tmp_path / "bad.pt2"
    if content:
        path.write_bytes(content(mxfp8_graph.save(rewritten, tmp_path / "whole.pt2", overwrite=True).read_bytes()))
    with pytest.raises(ContractError, match=message) as caught:
        mxfp8_graph.load(path)
    assert str(path) in str(caught.value)


def test_places_that_cannot_be_read_or_written(tmp_path: Path, rewritten: ExportedProgram) -> None:
    with pytest.raises(ContractError, match="a directory"):
        mxfp8_graph.load(tmp_path)
    (tmp_path / "folder.pt2").mkdir()
    path = mxfp8_graph.save(rewritten, tmp_path / "model.pt2")
    for place, message in {
        "folder.pt2": "a directory",
        "model.zip": r"suffix '.zip'; expected .pt2",
        "nowhere/model.pt2": "does not exist",
        "model.pt2": "exists already",
    }.items():
        with pytest.raises(ContractError, match=message):
            mxfp8_graph.save(rewritten, tmp_path / place)
    assert mxfp8_graph.save(rewritten, path, overwrite=True) == path


@looped("room", [0, 10_000])
def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path: Path, rewritten: ExportedProgram, room: int) -> None:
    """torch's own writer ends the process when it cannot write."""
    path = mxfp8_graph.save(rewritten, tmp_path / "model.pt2", overwrite=True)
    before = path.read_bytes()
    with files_of_at_most(room), pytest.raises(ContractError) as caught:
        mxfp8_graph.save(rewritten, path, overwrite=True)
    assert str(caught.value) == (
        f"{path}: cannot be written: File too large; expected a writable folder with enough space; free some space or "
        "pass another path"
    )
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]


def test_a_write_before_the_end_is_an_error(
    tmp_path: Path, rewritten: ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_header(_: Any, file: Any, **__: Any) -> None:
        file.write(b"size")
        file.seek(0)  # as torch does at the end
        assert (file.tell(), file.write(b"4")) == (0, 1)

    monkeypatch.setattr(torch.export, "save", with_header)
    with pytest.raises(ContractError, match=r"writes byte 0 of a .pt2 file after byte 4; .*; install another release"):
        mxfp8_graph.save(rewritten, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_newer_contract(tmp_path: Path, rewritten: ExportedProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mxfp8_graph.save(rewritten, tmp_path / "model.pt2")
    monkeypatch.setattr(contract, "VERSION", 0)
    with pytest.raises(ContractError, match=r"node contract 1, made by mxfp8-graph .*; expected at most 0; upgrade"):
        mxfp8_graph.load(path)


def test_unknown_containers_are_named(
    tmp_path: Path, rewritten: ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unregistered(archive: Any) -> Any:
        raise AssertionError("somewhere.Pair is not registered in pytree\nmore")

    monkeypatch.setattr(save, "container_modules", lambda program: ["somewhere", "torch.utils"])
    path = mxfp8_graph.save(rewritten, tmp_path / "pair.pt2")
    monkeypatch.setattr(load, "load_pt2", unregistered)
    with pytest.raises(ContractError, match=r"Pair is not registered in pytree; .*; import somewhere first$"):
        mxfp8_graph.load(path)


def test_containers_of_a_program() -> None:
    class Pair(NamedTuple):
        a: Tensor
        b: dict[str, Tensor]

    module = Apply(lambda m, x: Pair(x + 1, {"c": x + 2}), {})
    assert save.container_modules(export(module, X)) == [__name__]
    assert save.container_modules(export(Model(), X)) == []


# --- Crafted files -----------------------------------------------------------------------------------------------

PROGRAM = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
ENTRIES = "extra/mxfp8_graph.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = export(nn.Sequential(nn.Linear(64, 96), nn.ReLU()), values(5, 64), dynamic=({0: DYNAMIC},))
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    torch.export.save(program, path)
    return path


class Touch:
    """Pickles to a call that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def touching(path: Path) -> bytes:
    """Returns a pickle, as torch.save writes them, that makes a file."""
    torch.save((Touch(path),), buffer := io.BytesIO())
    return buffer.getvalue()


def changed(content: dict[str, bytes], name: str, edit: Callable[[Any], Any]) -> dict[str, bytes]:
    """Returns the content after `edit` changed one of its JSON records in place."""
    edit(parsed := json.loads(content[name]))
    return {**content, name: json.dumps(parsed).encode()}


def constants_of(name: str, data: Callable[[Path], bytes]) -> Callable[[dict[str, bytes], Path], dict[str, bytes]]:
    meta = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
    config = json.dumps({"config": {"c": meta}}).encode()
    return lambda content, proof: {CONSTANTS: config, f"data/constants/{name}": data(proof)}


def weights_as_pickle(content: dict[str, bytes], proof: Path) -> dict[str, bytes]:
    pickled = {"use_pickle": True, "path_name": "bad"}
    content = changed(content, WEIGHTS, lambda parsed: parsed["config"]["0.bias"].update(pickled))
    return {**content, "data/weights/bad": touching(proof)}


IN_PICKLES: dict[str, Callable[[dict[str, bytes], Path], dict[str, bytes]]] = {
    "samples": lambda content, proof: {SAMPLES: touching(proof)},
    "plain samples": lambda content, proof: {SAMPLES: pickle.dumps(Touch(proof))},
    "weights": weights_as_pickle,
    "old weights": lambda content, proof: {"data/weights/model.pt": touching(proof)},
    "old constants": lambda content, proof: {"data/constants/model.pt": touching(proof)},
    "constants": constants_of("tensor_0", touching),
    "custom objects": constants_of("custom_obj_0", lambda proof: pickle.dumps(Touch(proof))),
    "opaque objects": constants_of("opaque_obj_0", lambda proof: pickle.dumps(Touch(proof))),
}


@looped("place", IN_PICKLES)
def test_a_pickle_runs_no_code_and_the_environment_stays(place: str, source: Path, tmp_path: Path) -> None:
    proof, content, environment = tmp_path / "proof", records(source), dict(os.environ)
    path = write(tmp_path / "bad.pt2", content | IN_PICKLES[place](content, proof))
    with pytest.raises(ContractError, match=r"bad\.pt2: .*(pickle|object).*; expected "):
        mxfp8_graph.load(path)
    assert dict(os.environ) == environment
    assert not proof.exists()


def test_an_environment_that_allows_pickles_is_overruled_and_stays(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    mxfp8_graph.load(source)
    content = records(source)
    with pytest.raises(ContractError):
        mxfp8_graph.load(write(tmp_path / "bad.pt2", content | weights_as_pickle(content, tmp_path / "proof")))
    assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "0"
    assert not (tmp_path / "proof").exists()


def test_every_reader_refuses_pickles(source: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    path = str(write(tmp_path / "bad.pt2", records(source) | {SAMPLES: touching(proof)}))
    for read in (mxfp8_graph.unpack, lambda path: mxfp8_graph.to_onnx(path, tmp_path / "m.onnx")):
        with pytest.raises(ContractError, match=r"bad\.pt2: .*expected tensors"):
            read(path)
    for command in (("rewrite", path, "--dry-run"), ("run", path), ("verify", path, path)):
        result = run(*command)
        assert result.exit_code == 2, result.output
    assert not proof.exists()


def test_a_compiled_library_is_refused(source: Path, tmp_path: Path) -> None:
    libraries = {"data/aotinductor/model/x.so": b"\x7fELF", "data/aotinductor/model/x_metadata.json": b"{}"}
    with pytest.raises(ContractError, match=r"x\.so is a compiled library; expected a program of ops and tensors"):
        mxfp8_graph.load(write(tmp_path / "compiled.pt2", records(source) | libraries))


@looped(
    "name, data",
    [
        *((PROGRAM, data) for data in (b"[]", b"\xff", b"{}")),
        *((WEIGHTS, data) for data in (b'{"config": []}', b"")),
        *((ENTRIES, data) for data in (b"[]", b'{"mxfp8_graph.contract_version": "x"}')),
        (ENTRIES, b'{"mxfp8_graph.modules": [1]}'),
        ("archive_version", b"9"),
        (SAMPLES, b"PK\x03\x04"),
        ("data/weights/weight_0", b"123"),
    ],
)
def test_a_damaged_archive_is_refused_in_one_line(name: str, data: bytes, source: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.pt2", records(source) | {name: data})
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_tensor_of_another_shape_than_the_graph_says_is_refused(source: Path, tmp_path: Path) -> None:
    def edit(config: Any) -> None:
        layout = config["config"]["0.weight"]["tensor_meta"]
        layout["sizes"], layout["strides"] = [{"as_int": 64}, {"as_int": 96}], [{"as_int": 96}, {"as_int": 1}]

    path = write(tmp_path / "bad.pt2", changed(records(source), WEIGHTS, edit))
    with pytest.raises(ContractError, match=r"'0.weight' is torch.float32 \[64, 96\]; expected torch.float32 \[96, 64"):
        mxfp8_graph.load(path)


def test_modules_that_a_file_names_are_not_imported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "payload.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = {"mxfp8_graph.modules": ["payload", "torch.payload", "transformers.payload", "transformers..payload"]}
    mxfp8_graph.load(write(tmp_path / "model.pt2", records(source) | {ENTRIES: json.dumps(entries).encode()}))
    assert not (tmp_path / "proof").exists()
