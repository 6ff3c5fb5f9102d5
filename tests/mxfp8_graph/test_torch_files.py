"""Programs in .pt2 files: equal in a fresh process, never half a file, and errors that say what to do."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import forked
import pytest
from commands import refused
from full_disk import files_of_at_most
from grids import looped

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import DYNAMIC, Apply, export, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402
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


def in_fresh_process(code: str, folder: Path) -> str:
    """Runs code in a folder, in a process that has imported torch and nothing of ours."""
    (folder / "script.py").write_text(code)
    exit_code, printed = forked.run(["python", "script.py"], folder)
    assert exit_code == 0, printed
    return printed


def test_fresh_process_gives_the_same_bits(tmp_path: Path) -> None:
    """Also where the outputs are of a class that transformers must register first."""
    transformers = pytest.importorskip("transformers")
    settings = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
    model = transformers.BertModel(transformers.BertConfig(**settings, vocab_size=32))
    ids = torch.arange(6).reshape(2, 3)
    program, _ = mxfp8_graph.rewrite(export(model, input_ids=ids))
    mxfp8_graph.save(program, tmp_path / "bert.pt2")
    torch.save(ids, tmp_path / "x")
    code = """
import mxfp8_graph
program = mxfp8_graph.load("bert.pt2")
import torch
torch.save(list(program.module()(input_ids=torch.load("x")).values()), "y")
"""
    in_fresh_process(code, tmp_path)
    expected = program.module()(input_ids=ids).values()
    assert all(torch.equal(a, b) for a, b in zip(torch.load(tmp_path / "y"), expected, strict=True))
    assert [p.name for p in tmp_path.glob("*.pt2")] == ["bert.pt2"]


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


def test_rewriting_files(tmp_path: Path) -> None:
    source = mxfp8_graph.save(export(Model(), X), tmp_path / "model.pt2")
    before = source.read_bytes()
    output, report = mxfp8_graph.rewrite(source)
    assert output == tmp_path / "model.mxfp8.pt2"
    assert (report.source, report.output) == (str(source), str(output))
    assert report.bytes_before == len(before)
    assert report.bytes_after == output.stat().st_size < len(before)
    assert source.read_bytes() == before
    again, report = mxfp8_graph.rewrite(output, output=tmp_path / "again.pt2")
    assert again == tmp_path / "again.pt2"  # a copy
    assert report.already_rewritten
    assert mxfp8_graph.rewrite(again)[1].already_rewritten
    with pytest.raises(ContractError, match="exists already"):
        mxfp8_graph.rewrite(source)
    assert mxfp8_graph.rewrite(source, overwrite=True)[0] == output
    with pytest.raises(ContractError, match="is an input"):
        mxfp8_graph.rewrite(source, output=source, overwrite=True)
    assert mxfp8_graph.rewrite(source, output=tmp_path / "dry.pt2", dry_run=True)[0] is None
    assert not (tmp_path / "dry.pt2").exists()
    written = output.read_bytes()
    assert mxfp8_graph.rewrite(source, output=output, dry_run=True)[0] is None
    assert output.read_bytes() == written
    for wrong, reason in (
        (tmp_path / "none" / "dry.pt2", "does not exist"),
        (source, "is an input"),
    ):
        with pytest.raises(ContractError, match=reason):
            mxfp8_graph.rewrite(source, output=wrong, dry_run=True)
    program = mxfp8_graph.load(source)
    assert mxfp8_graph.rewrite(program, output=tmp_path / "other.pt2")[0] == tmp_path / "other.pt2"


@looped(
    "name, content, message",
    [
        ("missing.pt2", None, "No such file or directory; expected a readable .pt2 file"),
        ("empty.pt2", b"", "cannot read the program"),
        ("text.pt2", b"hello, I am a text file", "cannot read the program"),
        ("truncated.pt2", 0.5, "cannot read the program"),
        ("other.pt2", {"a/data.txt": b"x"}, "cannot read the program"),
    ],
)
def test_files_that_cannot_be_loaded(
    name: str, content: Any, message: str, rewritten: ExportedProgram, tmp_path: Path
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, float):
        whole = mxfp8_graph.save(rewritten, tmp_path / "whole.pt2").read_bytes()
        path.write_bytes(whole[: int(len(whole) * content)])
    elif content:
        with zipfile.ZipFile(path, "w") as archive:
            for inner, data in content.items():
                archive.writestr(inner, data)
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


@looped("room", [0, 1000, 10_000])
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


def test_recipes_with_rules_survive(tmp_path: Path) -> None:
    recipe = Recipe(name="mine", rules=({"name": "up", "activations": "unchanged"},))
    program, _ = mxfp8_graph.rewrite(export(Model(), X), recipe)
    loaded = mxfp8_graph.load(mxfp8_graph.save(program, tmp_path / "model.pt2"))
    assert mxfp8_graph.rewrite(loaded, recipe)[1].already_rewritten


def test_a_program_that_was_not_rewritten_is_read(tmp_path: Path) -> None:
    """Its einsum has an argument called path, as ops that read files have."""
    program = export(Apply(lambda m, x: torch.einsum("ab,cb->ac", x, m.w), {"w": values(96, 64, seed=3)}), X)
    assert any(node.target is torch.ops.aten.einsum.default for node in program.graph.nodes)
    torch.export.save(program, tmp_path / "einsum.pt2")
    assert torch.equal(mxfp8_graph.load(tmp_path / "einsum.pt2").module()(X), program.module()(X))
