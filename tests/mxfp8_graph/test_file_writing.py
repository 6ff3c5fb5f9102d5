"""What commands write replaces nothing by mistake, and leaves no temporary files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders
import pytest

import mxfp8_graph
from mxfp8_ops.errors import ContractError, Mxfp8Error


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def message(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(Mxfp8Error) as caught:
        call(*arguments, **options)
    return str(caught.value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return builders.save(builders.chain_model(), tmp_path / "m.onnx")


@pytest.mark.parametrize("external", ["always", "never"])
@pytest.mark.parametrize("appears", ["o.onnx", "o.onnx.data"])
def test_a_file_that_appears_meanwhile_is_kept(tmp_path, model, external, appears):
    if external == "never" and appears == "o.onnx.data":
        pytest.skip("is not written")

    def progress(*_: Any) -> None:
        (tmp_path / appears).write_text("precious")

    found = message(mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx", external_data=external, progress=progress)
    assert found == f"{tmp_path / appears}: exists already; expected a new file; pass overwrite=True or another path"
    assert (tmp_path / appears).read_text() == "precious"
    assert files(tmp_path) == sorted(["m.onnx", appears])


def test_a_pt2_file_that_appears_meanwhile_is_kept(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    save = torch.export.save

    def slow(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        (tmp_path / "p.pt2").write_text("precious")

    monkeypatch.setattr(torch.export, "save", slow)
    with pytest.raises(ContractError, match="exists already"):
        mxfp8_graph.save(program, tmp_path / "p.pt2")
    assert (tmp_path / "p.pt2").read_text() == "precious"
    assert files(tmp_path) == ["p.pt2"]


@pytest.mark.parametrize("external", ["always", "never"])
def test_external_data_go_with_the_model_that_names_them(tmp_path, model, external):
    out, data = tmp_path / "o.onnx", tmp_path / "o.onnx.data"
    mxfp8_graph.rewrite(model, "mxfp8-weight-only", output=out, external_data="always")
    out.rename(tmp_path / "other.onnx")  # it still names o.onnx.data
    before = data.read_bytes()
    rewrite = {"output": out, "overwrite": True, "external_data": external}
    if external == "always":
        assert message(mxfp8_graph.rewrite, model, **rewrite) == (
            f"{data}: exists already, and {out} does not name it: it may be another model's; expected no file there; "
            "move it away or pass another path"
        )
        (tmp_path / "other.onnx").rename(out)
        mxfp8_graph.rewrite(model, **rewrite)
        assert files(tmp_path) == ["m.onnx", "o.onnx", "o.onnx.data"]
        mxfp8_graph.rewrite(model, **{**rewrite, "external_data": "never"})
        assert files(tmp_path) == ["m.onnx", "o.onnx"]
    else:
        mxfp8_graph.rewrite(model, **rewrite)
        mxfp8_graph.rewrite(model, **rewrite)
        assert data.read_bytes() == before


def test_the_data_of_the_old_output_are_kept_if_the_input_has_them(tmp_path, model):
    out = tmp_path / "o.onnx"
    builders.save(builders.chain_model(), out, external=True)
    (tmp_path / "copy.onnx").write_bytes(out.read_bytes())
    found = message(mxfp8_graph.rewrite, tmp_path / "copy.onnx", output=out, overwrite=True, external_data="never")
    assert found == f"{tmp_path / 'o.onnx.data'}: is an input; expected another file; pass another path"


class TestTheInputIsKept:
    def test_an_output_that_is_a_hard_link_of_the_input(self, tmp_path, model):
        os.link(model, tmp_path / "o.onnx")
        found = message(mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx", overwrite=True)
        assert found.startswith(f"{tmp_path / 'o.onnx'}: is an input; ")

    def test_a_checkpoint_over_its_model(self, tmp_path):
        path, _ = mxfp8_graph.rewrite(builders.matmul_model(), output=tmp_path / "m.onnx", external_data="always")
        before = [(tmp_path / name).read_bytes() for name in files(tmp_path)]
        for name in ("m.onnx", "m.onnx.data"):
            found = message(mxfp8_graph.export_safetensors, path, tmp_path / name, overwrite=True)
            assert found == f"{tmp_path / name}: is an input; expected another file; pass another path"
        assert [(tmp_path / name).read_bytes() for name in files(tmp_path)] == before

    def test_an_onnx_file_over_its_program(self, tmp_path):
        torch = pytest.importorskip("torch")
        program = torch.export.export(
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), (torch.ones(2, 64),)
        )
        path = mxfp8_graph.save(mxfp8_graph.rewrite(program)[0], tmp_path / "p.pt2")
        found = message(mxfp8_graph.to_onnx, path, path, overwrite=True)
        assert found == f"{path}: is the program; expected another file; pass another path"

    def test_a_report_over_its_model(self, tmp_path, monkeypatch):
        from commands import refused

        monkeypatch.chdir(tmp_path)
        builders.save(builders.matmul_model(), tmp_path / "m.json")
        found = refused("rewrite", "m.json", "--report", "m.json")
        assert found == "error: m.json: is an input; expected another file; pass another path"
        builders.save(builders.matmul_model(), tmp_path / "m.onnx")
        found = refused("rewrite", "m.onnx", "-o", "o.json", "--report", "./o.json")
        assert found == "error: o.json: is an input; expected another file; pass another path"


class TestWhatIsNoRegularFile:
    @pytest.mark.parametrize("dry_run", [False, True])
    def test_a_fifo_is_not_replaced_by_a_model(self, tmp_path, model, dry_run):
        os.mkfifo(tmp_path / "o.onnx")
        found = message(mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx", overwrite=True, dry_run=dry_run)
        assert found.startswith(f"{tmp_path / 'o.onnx'}: not a regular file; ")
        assert (tmp_path / "o.onnx").is_fifo()
        assert files(tmp_path) == ["m.onnx", "o.onnx"]

    def test_a_fifo_is_not_replaced_by_a_report(self, tmp_path, model):
        os.mkfifo(tmp_path / "r.json")
        report = mxfp8_graph.rewrite(model, dry_run=True)[1]
        assert "not a regular file" in message(report.write, tmp_path / "r.json")
        assert (tmp_path / "r.json").is_fifo()

    def test_a_folder_in_place_of_external_data_is_not_touched(self, tmp_path, model):
        (tmp_path / "o.onnx.data").mkdir()
        found = message(mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx", external_data="always", overwrite=True)
        assert found.startswith(f"{tmp_path / 'o.onnx.data'}: a directory")
        assert files(tmp_path) == ["m.onnx", "o.onnx.data"]

    def test_a_name_that_is_too_long(self, tmp_path, model):
        report = mxfp8_graph.rewrite(model, dry_run=True)[1]
        path = tmp_path / ("a" * 300)
        for call in (
            lambda: mxfp8_graph.rewrite(model, output=path),
            lambda: mxfp8_graph.rewrite(path),
            lambda: report.write(f"{path}.json"),
            lambda: mxfp8_graph.unpack(path),
        ):
            assert "File name too long" in message(call)
        assert files(tmp_path) == ["m.onnx"]

    def test_the_folder_itself_is_no_model(self):
        assert ".: a directory; expected an ONNX file" in message(mxfp8_graph.rewrite, ".")
