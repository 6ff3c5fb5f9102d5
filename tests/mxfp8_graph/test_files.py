"""Written files are whole, never a model beside another's data, and leave no temporary files."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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


def refused(call: Callable[[], None]) -> str:
    with pytest.raises(ContractError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("old", [{}, {"o": b"old"}, OLD], ids=["none", "one file", "a pair"])
@pytest.mark.parametrize("new", [{"o": b"new"}, NEW], ids=["one file", "a pair"])
def test_the_new_files_take_the_place_of_the_old_ones(tmp_path, old, new):
    put(tmp_path, old)
    write(tmp_path, new, overwrite=bool(old))
    assert contents(tmp_path) == new
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(new)


@pytest.mark.parametrize("old", [{}, OLD], ids=["none", "a pair"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_while_it_is_written_leaves_the_old_files_alone(tmp_path, old, error):
    put(tmp_path, old)

    def broken() -> None:
        with output(tmp_path / "o", overwrite=True, replaces=[tmp_path / "o.data"] if old else []) as folder:
            put(folder, NEW)
            raise error

    with pytest.raises(error):
        broken()
    assert contents(tmp_path) == old
    assert len(list(tmp_path.iterdir())) == len(old)


def test_an_os_error_is_one_of_the_output(tmp_path):
    def full() -> None:
        with output(tmp_path / "o", overwrite=False):
            raise OSError(28, "No space left on device")

    assert refused(full) == (
        f"{tmp_path / 'o'}: cannot be written: No space left on device; expected a writable folder with enough space; "
        "free some space or pass another path"
    )
    assert list(tmp_path.iterdir()) == []


def steps(kill: Callable[[int], None]) -> None:
    """Lets `kill` be called with 0, 1, ... before each file is opened, renamed or removed, in this process."""
    count = iter(range(sys.maxsize))

    def hook(event: str, _: tuple[object, ...]) -> None:
        if event in {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}:
            kill(next(count))

    sys.addaudithook(hook)


@pytest.fixture(params=["pair over pair", "pair over one", "one over pair", "pair", "one"])
def case(request: pytest.FixtureRequest) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files before and after."""
    new, _, old = request.param.partition(" over ")
    sets = {"": ({}, {}), "pair": (OLD, NEW), "one": ({"o": b"old"}, {"o": b"new"})}
    return sets[old][0], sets[new][1]


def test_a_process_that_ends_at_any_step_leaves_no_model_beside_others_data(tmp_path, case):
    old, new = case
    for step in range(100):
        folder = tmp_path / str(step)
        folder.mkdir()
        put(folder, old)
        pid = os.fork()
        if pid == 0:
            steps(lambda now, step=step: os._exit(9) if now == step else None)
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
        with monkeypatch.context() as context:
            for name in ("replace", "unlink"):
                context.setattr(
                    Path, name, failing(getattr(Path, name), lambda count=count, step=step: next(count) == step, error)
                )
            try:
                write(folder, new, overwrite=bool(old))
            except (ContractError, KeyboardInterrupt):
                found = contents(folder)
                assert found.items() <= old.items()
                assert "o" not in found or found == old
                assert len(list(folder.iterdir())) == len(found)
                continue
        assert contents(folder) == new
        return
    raise AssertionError("a writer without end")


def failing(step: Callable[..., object], now: Callable[[], bool], error: type[BaseException]) -> Callable[..., object]:
    """Returns `step`, which raises `error` instead if it is called `now`."""

    def stepped(*arguments: object, **options: object) -> object:
        if now():
            raise error
        return step(*arguments, **options)

    return stepped


def test_a_file_that_comes_meanwhile_is_kept(tmp_path):
    for name in ("o", "o.data"):

        def late(name: str = name) -> None:
            with output(tmp_path / "o", overwrite=False) as folder:
                put(folder, NEW)
                put(tmp_path, {name: b"precious"})

        found = refused(late)
        assert found == f"{tmp_path / name}: exists already; expected a new file; pass overwrite=True or another path"
        assert contents(tmp_path) == {name: b"precious"}
        (tmp_path / name).unlink()


def test_data_that_the_old_model_does_not_name_stay(tmp_path):
    put(tmp_path, OLD)

    def over() -> None:
        with output(tmp_path / "o", overwrite=True) as folder:
            put(folder, NEW)

    expected = (
        f"{tmp_path / 'o.data'}: exists already, and {tmp_path / 'o'} does not name it: it may be another model's; "
        "expected no file there; move it away or pass another path"
    )
    assert refused(over) == expected
    beside = [tmp_path / "o.data"]
    assert refused(lambda: check_output(tmp_path / "o", overwrite=True, beside=beside)) == expected
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
        found = refused(lambda path=path: check_output(path, overwrite=True, inputs=[Path("same"), tmp_path / "data"]))
        assert found == f"{path}: is an input; expected another file; pass another path"
    found = refused(
        lambda: check_output(Path("new"), overwrite=True, inputs=[Path("data")], replaces=[tmp_path / "data"])
    )
    assert found.startswith(f"{tmp_path / 'data'}: is an input")


def test_a_link_is_replaced_and_its_target_kept(tmp_path):
    put(tmp_path, {"precious": b"precious"})
    (tmp_path / "o").symlink_to("precious")
    assert "exists already" in refused(lambda: check_output(tmp_path / "o", overwrite=False))
    write(tmp_path, {"o": b"new"}, overwrite=True)
    assert not (tmp_path / "o").is_symlink()
    assert contents(tmp_path) == {"o": b"new", "precious": b"precious"}


def test_a_link_to_nowhere_is_something(tmp_path):
    (tmp_path / "o").symlink_to("nowhere")
    assert "exists already" in refused(lambda: check_output(tmp_path / "o", overwrite=False))


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_what_is_no_file_is_never_replaced(tmp_path, kind):
    path = tmp_path / "o"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    what = "a directory" if kind == "folder" else "not a regular file"
    for overwrite in (False, True):
        found = refused(lambda overwrite=overwrite: check_output(path, overwrite=overwrite))
        assert found == f"{path}: {what}; expected a file name; pass another path"
    found = refused(lambda: check_output(tmp_path / "new", overwrite=True, beside=[path]))
    assert found == f"{path}: {what}; expected a file name; pass another path"


def test_what_cannot_be_written_is_known_before_the_work(tmp_path):
    assert refused(lambda: check_output(tmp_path / "none" / "o", overwrite=False)) == (
        f"{tmp_path / 'none' / 'o'}: folder {tmp_path / 'none'} does not exist; expected a file in an existing folder; "
        "create the folder"
    )
    (tmp_path / "file").touch()
    assert "Not a directory" in refused(lambda: check_output(tmp_path / "file" / "o", overwrite=False))
    assert "File name too long" in refused(lambda: check_output(tmp_path / ("a" * 300), overwrite=False))
    check_output(tmp_path / ("a" * 255), overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_read_only_folder(tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o").chmod(0o555)
    tmp_path.chmod(0o755)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        found = refused(lambda: check_output(tmp_path / "o" / "o", overwrite=False))
    finally:
        if root:
            os.seteuid(0)
    assert "cannot be written: Permission denied" in found


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_permissions_are_those_of_any_new_file(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write(tmp_path, NEW, overwrite=False)
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in NEW} == {mode}
