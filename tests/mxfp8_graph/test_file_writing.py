"""Written files are whole, replace nothing by mistake, and leave no temporary files."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import builders
import pytest

import mxfp8_graph
from mxfp8_graph.files import clean_up, uninterrupted, write_text
from mxfp8_ops.errors import ContractError, Mxfp8Error

TOKEN = "0123456789abcdef"


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def message(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(Mxfp8Error) as caught:
        call(*arguments, **options)
    return str(caught.value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return builders.save(builders.chain_model(), tmp_path / "m.onnx")


class TestInNobodysWay:
    def test_a_link_planted_where_drafts_used_to_be_is_not_followed(self, tmp_path, model):
        precious = tmp_path / "precious"
        precious.write_text("precious")
        for name in (f".o.onnx.{os.getpid()}.tmp", f".o.onnx.data.{os.getpid()}.tmp"):
            (tmp_path / name).symlink_to(precious)
        mxfp8_graph.rewrite(model, output=tmp_path / "o.onnx", external_data="always")
        assert precious.read_text() == "precious"

    def test_no_name_is_used_twice(self, tmp_path, model):
        seen = []
        for _ in range(2):
            mxfp8_graph.rewrite(
                model, output=tmp_path / "o.onnx", external_data="always", overwrite=True,
                progress=lambda *_: seen.append(set(files(tmp_path))),
            )  # fmt: skip
        drafts = [{name for name in names if "mxfp8-" in name} for names in (seen[0], seen[-1])]
        assert all(drafts)
        assert drafts[0].isdisjoint(drafts[1])

    @pytest.mark.parametrize("external", ["always", "never"])
    @pytest.mark.parametrize("appears", ["o.onnx", "o.onnx.data"])
    def test_a_file_that_appears_meanwhile_is_kept(self, tmp_path, model, external, appears):
        if external == "never" and appears == "o.onnx.data":
            pytest.skip("is not written")

        def progress(*_: Any) -> None:
            (tmp_path / appears).write_text("precious")

        found = message(
            mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx", external_data=external, progress=progress
        )
        assert found == (
            f"{tmp_path / appears}: exists already; expected a new file; pass overwrite=True or another output"
        )
        assert (tmp_path / appears).read_text() == "precious"
        assert files(tmp_path) == sorted(["m.onnx", appears])

    def test_threads_write_one_output(self, tmp_path, model):
        errors = []

        def write() -> None:
            try:
                mxfp8_graph.rewrite(model, output=tmp_path / "o.onnx", external_data="always", overwrite=True)
            except ValueError as error:
                errors.append(error)

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert files(tmp_path) == ["m.onnx", "o.onnx", "o.onnx.data"]

    def test_a_link_at_the_output_is_replaced_and_its_target_kept(self, tmp_path, model):
        precious, out = tmp_path / "precious", tmp_path / "o.onnx"
        precious.write_text("precious")
        out.symlink_to(precious)
        assert "exists already" in message(mxfp8_graph.rewrite, model, output=out)
        mxfp8_graph.rewrite(model, output=out, overwrite=True)
        assert not out.is_symlink()
        assert precious.read_text() == "precious"

    def test_a_link_to_nowhere_at_the_output_is_something(self, tmp_path, model):
        (tmp_path / "o.onnx").symlink_to("nowhere")
        assert "exists already" in message(mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx")
        assert files(tmp_path) == ["m.onnx", "o.onnx"]

    @pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
    def test_permissions_are_those_of_any_new_file(self, tmp_path, model, mask, mode):
        before = os.umask(mask)
        try:
            mxfp8_graph.rewrite(model, output=tmp_path / "o.onnx", external_data="always")
        finally:
            os.umask(before)
        found = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("o.onnx", "o.onnx.data")]
        assert found == [mode, mode]


class TestTheInputIsKept:
    def test_an_output_that_is_a_hard_link_of_the_input(self, tmp_path, model):
        os.link(model, tmp_path / "o.onnx")
        found = message(mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx", overwrite=True)
        assert found.startswith(f"{tmp_path / 'o.onnx'}: is the input or its external data; ")

    def test_a_checkpoint_over_its_model(self, tmp_path):
        path, _ = mxfp8_graph.rewrite(builders.matmul_model(), output=tmp_path / "m.onnx", external_data="always")
        before = [(tmp_path / name).read_bytes() for name in files(tmp_path)]
        for name in ("m.onnx", "m.onnx.data"):
            found = message(mxfp8_graph.export_safetensors, path, tmp_path / name, overwrite=True)
            assert found == (
                f"{tmp_path / name}: is the model or its external data; expected another file; pass another path"
            )
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
        assert found == "error: m.json: is the model; expected another file; correct the report's path"
        builders.save(builders.matmul_model(), tmp_path / "m.onnx")
        found = refused("rewrite", "m.onnx", "-o", "o.json", "--report", "./o.json")
        assert found == "error: o.json: is the model; expected another file; correct the report's path"


class TestLeftovers:
    def test_drafts_of_a_dead_process_go_with_the_next_run(self, tmp_path, model):
        for name in (f".o.onnx.{TOKEN}.mxfp8-new", f".other.pt2.{TOKEN[::-1]}.mxfp8-new"):
            (tmp_path / name).write_text("half a file")
        mxfp8_graph.rewrite(model, output=tmp_path / "o.onnx")
        assert files(tmp_path) == ["m.onnx", "o.onnx"]

    @pytest.mark.parametrize(
        "name", [".o.onnx.tmp", f".o.onnx.{TOKEN}.mxfp8-other", f"o.onnx.{TOKEN}.mxfp8-new", ".o.onnx.0123.mxfp8-new"]
    )
    def test_files_of_other_names_stay(self, tmp_path, model, name):
        (tmp_path / name).write_text("precious")
        mxfp8_graph.rewrite(model, output=tmp_path / "o.onnx")
        assert (tmp_path / name).read_text() == "precious"

    def test_files_of_other_users_and_links_stay(self, tmp_path, model):
        mine, theirs, link = (tmp_path / f".{name}.{TOKEN}.mxfp8-new" for name in ("mine", "theirs", "link"))
        theirs.write_text("precious")
        link.symlink_to(model)
        if os.geteuid() == 0:
            os.chown(theirs, 12345, 12345)
            mxfp8_graph.rewrite(model, output=tmp_path / "o.onnx")
            assert theirs.exists()
        mxfp8_graph.rewrite(model, output=tmp_path / "o.onnx", overwrite=True)
        assert link.is_symlink()
        assert not mine.exists()

    def test_drafts_of_a_living_process_stay(self, tmp_path, model):
        def progress(name: str, done: int, total: int) -> None:
            if done < total:
                mxfp8_graph.rewrite(model, output=tmp_path / "other.onnx", overwrite=True)

        out, _ = mxfp8_graph.rewrite(model, output=tmp_path / "o.onnx", external_data="always", progress=progress)
        assert files(tmp_path) == ["m.onnx", "o.onnx", "o.onnx.data", "other.onnx"]
        assert list(mxfp8_graph.unpack(out)) == list(mxfp8_graph.unpack(tmp_path / "other.onnx"))

    def test_a_pair_that_was_half_in_place_is_finished_by_the_next_run_in_the_folder(self, tmp_path, model):
        """As a kill leaves it between the renames: the model names its data's draft."""
        (tmp_path / "new").mkdir()
        mxfp8_graph.rewrite(model, output=tmp_path / "new" / "o.onnx", external_data="always")
        new = (tmp_path / "new" / "o.onnx").read_bytes(), (tmp_path / "new" / "o.onnx.data").read_bytes()
        draft = f".o.onnx.data.{TOKEN}.mxfp8-data"
        (tmp_path / draft).write_bytes(new[1])
        (tmp_path / f".o.onnx.{TOKEN}.mxfp8-new").write_bytes(new[0])
        (tmp_path / "o.onnx").write_bytes(new[0].replace(b"o.onnx.data", draft.encode()))
        (tmp_path / "o.onnx.data").write_bytes(b"the old model's")
        write_text(tmp_path / "report.json", "{}")
        assert files(tmp_path) == ["m.onnx", "new", "o.onnx", "o.onnx.data", "report.json"]
        assert ((tmp_path / "o.onnx").read_bytes(), (tmp_path / "o.onnx.data").read_bytes()) == new

    def test_data_stay_if_there_is_no_draft_of_their_model(self, tmp_path):
        before = {
            "m.onnx": f"names .m.onnx.data.{TOKEN}.mxfp8-data",
            "m.onnx.data": "precious",
            f".m.onnx.data.{TOKEN}.mxfp8-data": "the model in place needs it",
        }
        for name, text in before.items():
            (tmp_path / name).write_text(text)
        write_text(tmp_path / "report.json", "{}")
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {**before, "report.json": "{}"}

    def test_without_hard_links_a_kill_before_the_last_rename_loses_nothing(self, tmp_path):
        (tmp_path / "m.onnx").write_text(f"names .m.onnx.data.{TOKEN}.mxfp8-data")
        (tmp_path / "m.onnx.data").write_text("the new data")
        (tmp_path / f".m.onnx.{TOKEN}.mxfp8-new").write_text("names m.onnx.data")
        (tmp_path / f".m.onnx.{TOKEN}.mxfp8-bridge").write_text("not the result")
        write_text(tmp_path / "report.json", "{}")
        found = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert found == {"m.onnx": "names m.onnx.data", "m.onnx.data": "the new data", "report.json": "{}"}


def test_without_hard_links_results_are_the_same(tmp_path, model, monkeypatch):
    def none(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    for overwrite in (False, True):
        mxfp8_graph.rewrite(model, output=tmp_path / "o.onnx", external_data="always", overwrite=overwrite)
        assert files(tmp_path) == ["m.onnx", "o.onnx", "o.onnx.data"]
        assert len(mxfp8_graph.unpack(tmp_path / "o.onnx")) == 2
    assert "exists already" in message(mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx")


def test_a_step_that_fails_between_the_renames_leaves_a_whole_result(tmp_path, model, monkeypatch):
    out = tmp_path / "o.onnx"
    mxfp8_graph.rewrite(model, "mxfp8-weight-only", output=out, external_data="always")
    rename, left = Path.replace, [1]

    def full(self: Path, target: Path) -> Path:
        if not left:
            raise OSError(28, "No space left on device")
        left.pop()
        return rename(self, target)

    with monkeypatch.context() as context:
        context.setattr(Path, "replace", full)
        found = message(mxfp8_graph.rewrite, model, output=out, external_data="always", overwrite=True)
    assert "cannot be written: No space left on device" in found
    write_text(tmp_path / "report.json", "{}")
    assert files(tmp_path) == ["m.onnx", "o.onnx", "o.onnx.data", "report.json"]
    assert {weight.weight_only for weight in mxfp8_graph.unpack(out).values()} == {False}


def test_a_process_that_holds_the_lock_for_long_is_an_error(tmp_path, model, monkeypatch):
    monkeypatch.setattr("mxfp8_graph.files._PATIENCE", 0.05)
    with (tmp_path / ".mxfp8-graph.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = message(mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx")
    what = "cannot be written: another process holds the lock of the folder; "
    assert found.startswith(f"{tmp_path / 'o.onnx'}: {what}")
    clean_up(tmp_path)  # as after a kill: the file is there, without its lock
    assert files(tmp_path) == ["m.onnx"]


@pytest.mark.parametrize("kind", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_a_lock_of_another_program_on_the_folder_is_in_nobodys_way(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("mxfp8_graph.files._PATIENCE", 0.05)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, kind)
        write_text(tmp_path / "report.json", "{}")
    finally:
        os.close(folder)
    assert files(tmp_path) == ["report.json"]


@pytest.fixture
def user() -> Iterator[int]:
    """Makes the test's process one of a user other than root, whose id is returned."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield os.geteuid()
    os.seteuid(before)


def test_a_folder_that_can_be_written_but_not_read(user):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o300)
        write_text(folder / "report.json", "{}")
        folder.chmod(0o700)
        assert files(folder) == ["report.json"]


def test_a_lock_that_may_not_be_opened_is_left_out(tmp_path, monkeypatch):
    """Of another user, in a folder for all."""
    lock, opened = tmp_path / ".mxfp8-graph.lock", os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if path == lock:
            raise PermissionError(13, os.strerror(13))
        return opened(path, *arguments, **options)

    lock.touch()
    monkeypatch.setattr(os, "open", refuse)
    write_text(tmp_path / "report.json", "{}")
    assert files(tmp_path) == [".mxfp8-graph.lock", "report.json"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_what_belongs_together(number):
    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, handler)
    done = []
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012
            signal.raise_signal(number)
            done.append("all of it")
        assert done == ["all of it"]
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


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


class TestWhatIsNoRegularFile:
    """Whatever writes a file does so with the same drafts."""

    @pytest.fixture
    def report(self, model):
        return mxfp8_graph.rewrite(model, dry_run=True)[1]

    def test_a_fifo_is_not_replaced_by_a_model(self, tmp_path, model):
        os.mkfifo(tmp_path / "o.onnx")
        found = message(mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx", overwrite=True)
        assert "cannot be written: a FIFO, not a regular file" in found
        assert stat.S_ISFIFO((tmp_path / "o.onnx").stat().st_mode)
        assert files(tmp_path) == ["m.onnx", "o.onnx"]

    def test_a_dry_run_says_so(self, tmp_path, model):
        os.mkfifo(tmp_path / "o.onnx")
        assert "a FIFO" in message(mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx", overwrite=True, dry_run=True)

    def test_a_fifo_is_not_replaced_by_a_report(self, tmp_path, report):
        os.mkfifo(tmp_path / "r.json")
        assert "a FIFO, not a regular file" in message(report.write, tmp_path / "r.json")
        assert stat.S_ISFIFO((tmp_path / "r.json").stat().st_mode)

    def test_a_link_to_a_device_is_not_replaced(self, tmp_path, model):
        (tmp_path / "o.onnx").symlink_to("/dev/null")
        assert "a device" in message(mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx", overwrite=True)
        assert (tmp_path / "o.onnx").is_symlink()

    def test_a_folder_in_place_of_external_data_is_not_touched(self, tmp_path, model):
        (tmp_path / "o.onnx.data").mkdir()
        found = message(mxfp8_graph.rewrite, model, output=tmp_path / "o.onnx", external_data="always", overwrite=True)
        assert found.startswith(f"{tmp_path / 'o.onnx.data'}: a directory")
        assert files(tmp_path) == ["m.onnx", "o.onnx.data"]

    @pytest.mark.parametrize("name", ["a" * 300, "a\0b", "none\0/b"])
    def test_a_name_that_no_file_can_have(self, tmp_path, model, report, name):
        for call in (
            lambda: mxfp8_graph.rewrite(model, output=tmp_path / name),
            lambda: mxfp8_graph.rewrite(tmp_path / name),
            lambda: report.write(tmp_path / f"{name}.json"),
            lambda: mxfp8_graph.unpack(tmp_path / name),
        ):
            message(call)
        assert files(tmp_path) == ["m.onnx"]

    def test_the_folder_itself_is_no_model(self):
        assert ".: a directory; expected an ONNX file" in message(mxfp8_graph.rewrite, ".")
