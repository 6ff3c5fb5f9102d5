"""Written files are whole, never a model beside another's data, and replace no input; no temporary file stays."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import models as b
import pytest

import mxfp8_graph
from mxfp8_graph.files import check_output, data_path_of, output
from mxfp8_ops.errors import ContractError

OLD = {"o": b"old, names o.data", "o.data": b"old data"}
NEW = {"o": b"new, names o.data", "o.data": b"new data"}


def put(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder, also those in temporary folders, by their path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(folder: Path, new: dict[str, bytes], *, overwrite: bool) -> None:
    path = folder / "o"
    replaces = [data_path_of(path)] if overwrite and data_path_of(path).exists() else []
    with output(path, overwrite=overwrite, replaces=replaces) as temporary:
        put(temporary, new)


def refused(call: Callable[..., object], *arguments: object, **options: object) -> str:
    with pytest.raises(ContractError) as caught:
        call(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize("old", [{}, OLD], ids=["none", "a pair"])
@pytest.mark.parametrize(
    ("error", "expected"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), ContractError)],
    ids=["an interrupt", "a full disk"],
)
def test_an_error_while_it_is_written_leaves_the_old_files_alone(tmp_path, old, error, expected):
    put(tmp_path, old)

    def broken() -> None:
        with output(tmp_path / "o", overwrite=True, replaces=[tmp_path / "o.data"] if old else []) as folder:
            put(folder, NEW)
            raise error

    with pytest.raises(expected) as caught:
        broken()
    assert contents(tmp_path) == old
    assert len(list(tmp_path.iterdir())) == len(old)
    if expected is ContractError:
        assert str(caught.value).startswith(f"{tmp_path / 'o'}: cannot be written: No space left on device; expected")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "source"),
            "source: No such file or directory; expected a re",
        ),
        (OSError(5, "Input/output error"), "{out}: not written, because of Input/output error; expected a source and "),
    ],
)
def test_an_error_of_the_source_is_not_one_of_the_output(tmp_path, error, expected):
    def broken() -> None:
        with output(tmp_path / "o", overwrite=True):
            raise error

    assert refused(broken).startswith(expected.format(out=tmp_path / "o"))


@pytest.fixture(params=["pair over pair", "pair over one", "one over pair", "pair", "one"])
def case(request: pytest.FixtureRequest) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files before and after."""
    new, _, old = request.param.partition(" over ")
    sets = {"": ({}, {}), "pair": (OLD, NEW), "one": ({"o": b"old"}, {"o": b"new"})}
    return sets[old][0], sets[new][1]


def end_at(step: int) -> None:
    """Ends this process before it opens, renames or removes a file for the `step`th time."""
    count = iter(range(sys.maxsize))
    events = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
    sys.addaudithook(lambda event, _: os._exit(9) if event in events and next(count) == step else None)


def test_a_process_that_ends_at_any_step_leaves_no_model_beside_others_data(tmp_path, case):
    old, new = case
    for step in range(100):
        folder = tmp_path / str(step)
        folder.mkdir()
        put(folder, old)
        pid = os.fork()
        if pid == 0:
            end_at(step)
            write(folder, new, overwrite=bool(old))
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        left = {name: content for name, content in contents(folder).items() if "/" not in name}
        assert left.keys() <= old.keys() | new.keys()
        # A model is there with all of its data, and no model beside another's.
        assert "o" not in left or left in (old, new), left
        if ended == 0:
            assert left == new
            assert step > 5
            return
    raise AssertionError("a writer without end")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_at_any_step_leaves_no_new_file_but_all_of_them(tmp_path, case, error, monkeypatch):
    old, new = case
    for step in range(100):
        folder = tmp_path / str(step)
        folder.mkdir()
        put(folder, old)
        count = iter(range(100))

        def failing(name: str, step: int = step, count: Iterator[int] = count) -> Callable[..., object]:
            real = getattr(Path, name)

            def stepped(*arguments: object, **options: object) -> object:
                if next(count) == step:
                    raise error
                return real(*arguments, **options)

            return stepped

        with monkeypatch.context() as context:
            for name in ("replace", "unlink"):
                context.setattr(Path, name, failing(name))
            try:
                write(folder, new, overwrite=bool(old))
            except (ContractError, KeyboardInterrupt):
                left = contents(folder)
                assert left.items() <= old.items()
                assert "o" not in left or left == old
                assert len(list(folder.iterdir())) == len(left)
                continue
        assert contents(folder) == new
        assert len(list(folder.iterdir())) == len(new)
        return
    raise AssertionError("a writer without end")


@pytest.mark.parametrize("name", ["o", "o.data"])
def test_a_file_that_comes_meanwhile_is_kept(tmp_path, name):
    def late() -> None:
        with output(tmp_path / "o", overwrite=False) as folder:
            put(folder, NEW)
            put(tmp_path, {name: b"precious"})

    expected = f"{tmp_path / name}: exists already; expected a new file; pass overwrite=True or another path"
    assert refused(late) == expected
    assert contents(tmp_path) == {name: b"precious"}


def test_data_that_the_old_model_does_not_name_stay(tmp_path):
    put(tmp_path, OLD)
    expected = (
        f"{tmp_path / 'o.data'}: exists already, and {tmp_path / 'o'} does not name it: it may be another model's"
    )

    def over() -> None:
        with output(tmp_path / "o", overwrite=True) as folder:
            put(folder, NEW)

    assert refused(over).startswith(expected)
    assert refused(check_output, tmp_path / "o", overwrite=True, beside=[tmp_path / "o.data"]).startswith(expected)
    assert contents(tmp_path) == OLD


def test_a_folder_left_empty_replaces_nothing(tmp_path):
    put(tmp_path, OLD)
    with output(tmp_path / "o", overwrite=True, replaces=[tmp_path / "o.data"]):
        pass
    assert contents(tmp_path) == OLD


@pytest.mark.parametrize("name", ["same", "link", "hard link", "data"])
def test_an_input_is_never_replaced(tmp_path, name, monkeypatch):
    put(tmp_path, {"same": b"input", "data": b"data"})
    (tmp_path / "link").symlink_to("same")
    os.link(tmp_path / "same", tmp_path / "hard link")
    monkeypatch.chdir(tmp_path)
    for path in (Path(name), tmp_path / name):
        message = refused(check_output, path, overwrite=True, inputs=[Path("same"), tmp_path / "data"])
        assert message == f"{path}: is an input; expected another file; pass another path"
    data = tmp_path / "data"
    message = refused(check_output, Path("new"), overwrite=True, inputs=[Path("data")], replaces=[data])
    assert message.startswith(f"{data}: is an input")


def test_a_link_is_replaced_and_its_target_kept(tmp_path):
    put(tmp_path, {"precious": b"precious"})
    for target in ("nowhere", "precious"):
        (tmp_path / "o").unlink(missing_ok=True)
        (tmp_path / "o").symlink_to(target)
        assert "exists already" in refused(check_output, tmp_path / "o", overwrite=False)
    write(tmp_path, {"o": b"new"}, overwrite=True)
    assert not (tmp_path / "o").is_symlink()
    assert contents(tmp_path) == {"o": b"new", "precious": b"precious"}


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Path.mkdir, "a directory"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/null"), "not a regular file"),
    ],
    ids=["folder", "fifo", "device"],
)
def test_an_irregular_file_is_never_replaced(tmp_path, make, what):
    path = tmp_path / "o"
    make(path)
    for output_path, options in (
        (path, {"overwrite": False}),
        (path, {"overwrite": True}),
        (tmp_path / "new", {"overwrite": True, "beside": [path]}),
    ):
        message = refused(check_output, output_path, **options)
        assert message == f"{path}: {what}; expected a file name; pass another path"


def test_a_path_that_cannot_be_written_is_an_error_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    for path, message in (
        (tmp_path / "none" / "o", f"folder {tmp_path / 'none'} does not exist; expected a file in an existing folder"),
        (tmp_path / "file" / "o", "cannot be written: Not a directory"),
        (tmp_path / ("a" * 300), "cannot be written: File name too long"),
    ):
        assert refused(check_output, path, overwrite=False).startswith(f"{path}: {message}")
    check_output(tmp_path / ("a" * 255), overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_permissions_are_those_of_any_new_file(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write(tmp_path, NEW, overwrite=False)
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in NEW} == {mode}


# --- The functions that write pass their inputs, and the files that they replace -------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return b.save(b.chain_model(), tmp_path / "m.onnx")


@pytest.mark.parametrize("external", ["always", "never"])
def test_external_data_go_with_the_model_that_names_them(tmp_path, model, external):
    out, data = tmp_path / "o.onnx", tmp_path / "o.onnx.data"
    mxfp8_graph.rewrite(model, "ocp", output=out, external_data="always")
    out.rename(tmp_path / "other.onnx")  # it still names o.onnx.data
    before = data.read_bytes()
    if external == "always":
        message = refused(mxfp8_graph.rewrite, model, output=out, overwrite=True, external_data="always")
        assert message.startswith(f"{data}: exists already, and {out} does not name it: it may be another model's")
        (tmp_path / "other.onnx").rename(out)
        mxfp8_graph.rewrite(model, output=out, overwrite=True, external_data="always")
        assert data.read_bytes() != before
    else:
        for _ in range(2):
            mxfp8_graph.rewrite(model, output=out, overwrite=True, external_data="never")
        assert data.read_bytes() == before


def linked(path: Path) -> None:
    os.link(path, path.with_suffix(".link"))


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize("damage", [lambda data: os.truncate(data, 9), linked, dangling, Path.unlink])
def test_damaged_data_of_the_old_output_are_replaced(tmp_path, model, damage):
    out, data = tmp_path / "o.onnx", tmp_path / "o.onnx.data"
    mxfp8_graph.rewrite(model, output=out, external_data="always")
    before = contents(tmp_path)
    damage(data)
    mxfp8_graph.rewrite(model, output=out, overwrite=True, external_data="always")
    assert not data.is_symlink()
    assert contents(tmp_path) | before == contents(tmp_path)


def test_an_old_output_that_cannot_be_read_is_the_reason(tmp_path, model):
    out = tmp_path / "o.onnx"
    put(tmp_path, {"o.onnx": b"not a model", "o.onnx.data": b"data"})
    message = refused(mxfp8_graph.rewrite, model, output=out, overwrite=True, external_data="always")
    what = f"exists already, and {out}, whose data it may be, cannot be read: not a complete ONNX file"
    assert message == f"{out}.data: {what}; expected no file there; move it away or pass another path"
    mxfp8_graph.rewrite(model, output=out, overwrite=True)  # without data it leaves that file alone
    assert contents(tmp_path)["o.onnx.data"] == b"data"


def test_the_data_of_the_old_output_are_kept_if_the_input_has_them(tmp_path):
    out = b.save(b.chain_model(), tmp_path / "o.onnx", external=True)
    (tmp_path / "copy.onnx").write_bytes(out.read_bytes())
    message = refused(mxfp8_graph.rewrite, tmp_path / "copy.onnx", output=out, overwrite=True, external_data="never")
    assert message == f"{out}.data: is an input; expected another file; pass another path"


def test_a_checkpoint_replaces_no_file_of_its_model(tmp_path):
    path, _ = mxfp8_graph.rewrite(b.matmul_model(), output=tmp_path / "m.onnx", external_data="always")
    before = contents(tmp_path)
    for name in ("m.onnx", "m.onnx.data"):
        message = refused(mxfp8_graph.export_safetensors, path, tmp_path / name, overwrite=True)
        assert message == f"{tmp_path / name}: is an input; expected another file; pass another path"
    assert contents(tmp_path) == before


def test_an_onnx_file_does_not_replace_its_program(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "p.pt2"
    path.touch()
    message = refused(mxfp8_graph.to_onnx, path, path, overwrite=True)
    assert message == f"{path}: is the program; expected another file; pass another path"


def test_a_name_that_is_too_long_is_an_error_of_readers_too(tmp_path):
    path = tmp_path / ("a" * 300)
    assert "File name too long" in refused(mxfp8_graph.rewrite, path)
    assert "File name too long" in refused(mxfp8_graph.unpack, path)
