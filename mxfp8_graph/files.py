"""Writes files whole or not at all, a model together with its external data. Also temporary folders.

A file is written beside its target, brought to the disk and renamed:

    .NAME.TOKEN.mxfp8-new     replaces NAME
    .NAME.TOKEN.mxfp8-data    replaces NAME, the external data of a model
    .NAME.TOKEN.mxfp8-bridge  the model, with its data under the name above

No single step replaces two files, so the bridge goes first: at every moment the model in place names data that are
there. A process has a lock (flock) on each of its drafts, which dies with the process. The next process that writes to
the folder finishes the replacement of a pair, and removes all other drafts without a lock. Processes take turns at
these steps: each locks the file `.mxfp8-graph.lock` in the folder, and removes it afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from mxfp8_graph.file_reading import NO_NAME, is_any_of, open_regular, require_regular
from mxfp8_ops.errors import ContractError, Mxfp8Error, Option

_DRAFT: Final = re.compile(r"\.(?P<name>.+)\.(?P<token>[0-9a-f]{16})\.mxfp8-(?P<role>new|data|bridge)", re.DOTALL)
_SCRATCH: Final = re.compile(r"mxfp8-graph\.[a-z]+\.\w+")

_LOCK: Final = ".mxfp8-graph.lock"
"""Name of the file whose lock is the lock of its folder. Other programs lock folders, and read permission may lack."""

_PATIENCE: Final = 30.0
"""Seconds to wait for the lock of a folder. A process holds it for a few renames only."""

_NO_LOCK: Final = -1

_WORTH_IT: Final = 1 << 20
"""Bytes from which on the disk is asked to begin."""


class Drafts:
    """Files that are written together. A context manager: its end removes the drafts that are not in place."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(8)
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> Drafts:
        """Returns the drafts."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes and removes the drafts."""
        with uninterrupted():
            for temporary, file in self._files.items():
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # what is buffered for a full disk fails once more
                    file.close()

    def open(self, path: Path, role: Literal["new", "data", "bridge"] = "new") -> BinaryIO:
        """Returns a new file, open for writing, that is to replace `path`.

        OSError if it cannot be created, or `path` is a device, a FIFO or a folder, or a link to one: these stay.
        """
        try:
            require_regular(path.stat(), path)
        except FileNotFoundError:
            pass
        except ValueError:
            raise OSError(errno.EINVAL, NO_NAME, str(path)) from None
        temporary = _draft(path, self._token, role)
        with _locked(path.parent), uninterrupted():  # the folder's lock, until the draft has its own
            file = self._files[temporary] = temporary.open("xb")
            _lock(file.fileno())
        return file

    def put(self, file: BinaryIO, path: Path, *, overwrite: bool) -> None:
        """Puts a draft in place. FileExistsError if there is something and `overwrite` is false; OSError as usual."""
        _sync(file)
        with _locked(path.parent), uninterrupted():
            _place(Path(file.name), path, overwrite=overwrite)
        _sync_folder(path.parent)

    def put_pair(self, data: BinaryIO, bridge: BinaryIO, model: BinaryIO, path: Path, *, overwrite: bool) -> None:
        """Puts a model and its external data in place; errors as `put`.

        Args:
            data: the draft of `data_path_of(path)`.
            bridge: the draft of the model that names its data as the draft of the data is called.
            model: the draft of the model that names its data as they are called in the end.
            path: where the model goes.
            overwrite: whether an older model or data may be replaced.
        """
        _sync(data, bridge, model)
        with _locked(path.parent), uninterrupted():
            if not overwrite and os.path.lexists(data_path_of(path)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(data_path_of(path)))
            _place(Path(bridge.name), path, overwrite=overwrite)
            # From here on the model in place needs the draft of its data: an error leaves both to `clean_up`.
            with self._files.pop(Path(data.name)), self._files.pop(Path(model.name)):
                _finish_pair(Path(data.name), Path(model.name), path)
        _sync_folder(path.parent)


def data_path_of(path: Path) -> Path:
    """Returns where the external data of a model written to `path` lie."""
    return path.parent / f"{path.name}.data"


def clean_up(folder: Path) -> None:
    """Finishes or removes the drafts of dead processes in a folder, if it can be written to."""
    with contextlib.suppress(OSError, ValueError):  # the next step that writes there reports it
        drafts = [path for path in folder.iterdir() if _DRAFT.fullmatch(path.name)]
        if drafts or os.path.lexists(folder / _LOCK):  # which a killed process left too: `_locked` removes it
            with _locked(folder):
                for draft in sorted(drafts, key=lambda path: path.name.endswith("-new")):  # which a pair may need
                    with contextlib.suppress(OSError):
                        _clean_draft(draft)


def _clean_draft(draft: Path) -> None:
    name = _DRAFT.fullmatch(draft.name)
    assert name is not None
    if not _is_mine(draft, stat.S_IFREG):
        return
    with open_regular(draft) as file:
        if not _lock(file.fileno()):
            return
        role, token = name["role"], name["token"]
        path = draft.with_name(name["name"].removesuffix(".data") if role == "data" else name["name"])
        data, model = _draft(data_path_of(path), token, "data"), _draft(path, token, "new")
        if role == "data" and _names(path, draft.name):
            if draft != data or not _is_mine(model, stat.S_IFREG):  # an error if it is missing
                return  # the model in place needs this draft, and no other model is there to replace it
            _finish_pair(data, model, path)
        # Without hard links `_finish_pair` may end between its renames.
        elif role == "new" and data_path_of(path).is_file() and not os.path.lexists(data) and _names(path, data.name):
            model.replace(path)
        draft.unlink(missing_ok=True)


def _finish_pair(data: Path, model: Path, path: Path) -> None:
    """Does the last steps of `put_pair`: `path` is the bridge, which names `data`."""
    data_path_of(path).unlink(missing_ok=True)  # no model names it any more
    try:
        os.link(data, data_path_of(path))
    except OSError:
        data.replace(data_path_of(path))  # without hard links the model lacks its data between two renames
    model.replace(path)
    data.unlink(missing_ok=True)


def _names(model: Path, name: str) -> bool:
    """Returns whether a model says that its data lie in the file called `name`, which has a token and so is unique."""
    wanted, before = os.fsencode(name), b""
    with contextlib.suppress(OSError), open_regular(model) as file:
        while chunk := file.read(1 << 20):
            if wanted in before + chunk:
                return True
            before = chunk[-len(wanted) :]
    return False


def _draft(path: Path, token: str, role: str) -> Path:
    return path.with_name(f".{path.name}.{token}.mxfp8-{role}")


def _place(temporary: Path, path: Path, *, overwrite: bool) -> None:
    """Gives a draft its final name. FileExistsError, with that name, if it is taken and `overwrite` is false."""
    if not overwrite:
        try:
            os.link(temporary, path)  # a rename would replace what appeared meanwhile
            return
        except FileExistsError as error:
            raise FileExistsError(error.errno, error.strerror, str(path)) from None
        except OSError:  # a file system without hard links
            path.touch(exist_ok=False)
    temporary.replace(path)


def write_early(file: BinaryIO, data: bytes | memoryview) -> None:
    """Writes to a draft and lets the disk begin with it: there is less to wait for when the draft is put in place."""
    file.write(data)
    if len(data) >= _WORTH_IT and hasattr(os, "posix_fadvise"):
        file.flush()
        os.posix_fadvise(file.fileno(), file.tell() - len(data), len(data), os.POSIX_FADV_DONTNEED)


def _sync(*files: BinaryIO) -> None:
    """Brings what was written to the disk. The files stay open, for their locks."""
    for file in files:
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError), _opened(folder) as descriptor:  # not every file system can
        os.fsync(descriptor)


def is_taken(path: Path) -> bool:
    """Returns whether there is something at `path`, once the drafts of dead processes are gone."""
    clean_up(path.parent)
    return os.path.lexists(path)


@contextlib.contextmanager
def replacing(path: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Yields a file to write to, which replaces `path` at the end. After an error `path` is what it was.

    Raises:
        FileExistsError: there is something by then, and `overwrite` is false.
        OSError: it cannot be written; the caller's to explain.
    """
    clean_up(path.parent)
    with Drafts() as drafts:
        file = drafts.open(path)
        yield file
        drafts.put(file, path, overwrite=overwrite)


def write_text(path: Path, text: str, *, overwrite: bool = True) -> None:
    """Writes a text file whole or not at all.

    Raises:
        Mxfp8Error: the folder is not writable, the disk is full, or there is a file and `overwrite` is false.
    """
    try:
        with replacing(path, overwrite=overwrite) as file:
            file.write(text.encode("utf-8"))
    except OSError as error:
        what = error.strerror or str(error)
        raise Mxfp8Error(path, what, expected="a writable place", advice="choose another") from None


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields a folder to fill, which is renamed to `target` at the end, or removed after an error.

    Raises:
        FileExistsError: there is something by then.
        OSError: it cannot be written.
    """
    folder = _draft(target, secrets.token_hex(8), "folder")  # beside it: a rename stays within one file system
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    folder.mkdir()
    try:
        yield folder
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
                raise FileExistsError(error.errno, error.strerror, str(target)) from None
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def scratch(what: str) -> Iterator[Path]:
    """Yields a new temporary folder that is gone at the end. First removes those of dead processes: they may be large.

    Args:
        what: a word for the purpose, which the folder's name has: `mxfp8-graph.WHAT.RANDOM`.

    Raises:
        OSError: it cannot be created.
    """
    around = Path(tempfile.gettempdir())
    for left in around.glob("mxfp8-graph.*"):
        with contextlib.suppress(OSError):
            if _SCRATCH.fullmatch(left.name) and _is_mine(left, stat.S_IFDIR):
                with _opened(left) as descriptor:
                    if _lock(descriptor):
                        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="mxfp8-graph-", dir=around))
    try:
        with _opened(folder) as descriptor:
            _lock(descriptor)
            # Renamed once it has its lock: another process removes a folder of that name without one.
            final = folder.with_name(f"mxfp8-graph.{what}.{folder.name.rpartition('-')[2]}")
            folder.rename(final)
            folder = final
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_mine(path: Path, kind: int) -> bool:
    """Returns whether `path` itself is of that kind (`stat.S_IFREG`, ...) and belongs to this user."""
    status = path.lstat()
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.geteuid()


def open_locked(path: Path) -> BinaryIO:
    """Returns a regular file, open for reading and appending, with its lock until it is closed; created if missing.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: it cannot be opened, or is a link or something else than a regular file.
    """
    file = open(path, "a+b", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666))  # noqa: SIM115
    try:
        require_regular(os.fstat(file.fileno()), path)
        if _lock(file.fileno()) is False:
            raise BlockingIOError(errno.EAGAIN, "another process has its lock", str(path))
    except OSError:
        file.close()
        raise
    return file


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from putting files in place in a folder; does nothing where locks do not work.

    Raises:
        OSError: there is no such folder, or another process holds the lock for long.
    """
    lock, descriptor = folder / _LOCK, None
    deadline = time.monotonic() + _PATIENCE
    try:
        while descriptor is None:
            with uninterrupted():
                descriptor = _try_lock(lock)
            if descriptor is None:
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, "another process holds the lock of the folder", str(folder))
                time.sleep(0.005)
        yield
    finally:
        if descriptor is not None and descriptor != _NO_LOCK:
            with uninterrupted():
                with contextlib.suppress(OSError):  # another user's, in a folder with the sticky bit
                    lock.unlink()
                os.close(descriptor)


def _try_lock(lock: Path) -> int | None:
    """Returns the descriptor of a locked file, `_NO_LOCK` if it may not be opened, None if it is another process's."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except PermissionError:  # a file of another user, or a folder that the next step cannot write to either
        return _NO_LOCK
    with contextlib.suppress(FileNotFoundError):
        # The process that had the lock may have removed the file: another one may have a new file there.
        if _lock(descriptor) is not False and os.path.samestat(os.fstat(descriptor), lock.lstat()):
            return descriptor
    os.close(descriptor)
    return None


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yields the descriptor of a folder, whose end releases its lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Locks a file or folder until it is closed; false if another process has the lock, None if there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[Any]]:
    """Delays what SIGINT and SIGTERM raise until its end: steps that belong together are done together.

    Yields the list of the signals that came so far.
    """
    came: list[Any] = []
    if threading.current_thread() is not threading.main_thread():
        yield came  # signals do not raise here
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    raising = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in raising:
        signal.signal(number, lambda *call: came.append(call))
    try:
        yield came
    finally:
        for number, handler in raising.items():
            signal.signal(number, handler)
        if came:
            raising[signal.Signals(came[0][0])](*came[0])


@contextlib.contextmanager
def output(
    path: Path, *, overwrite: bool, inputs: Iterable[Path] = (), replaces: Collection[Path] = ()
) -> Iterator[Path]:
    """Yields a temporary folder for a file called `path.name`, and for others beside it, under their final names.

    At the end the old `path` and `replaces` are removed, then the new files are renamed into place, `path` last. After
    an error before that, `path` is what it was; after one within, it is absent. An empty folder replaces nothing.

    Args:
        path: the file to write.
        overwrite: whether an existing `path` may be replaced.
        inputs: files that must not be replaced, under whatever name.
        replaces: files beside `path` that belong to the old one, and to no other model.

    Raises:
        ContractError: as `check_output`; or the system refused a step, or one of the caller's with an OSError.
    """
    check = partial(check_output, path, overwrite=overwrite, inputs=list(inputs), replaces=replaces)
    check()
    with _refused(path), _temporary_folder(path) as name:
        folder = Path(name)
        yield folder
        beside = sorted(path.with_name(file.name) for file in folder.iterdir() if file.name != path.name)
        if beside or (folder / path.name).exists():
            check(beside=beside)  # once more: files may have come since
            _put(folder, path, beside, [path, *replaces] if overwrite else [])


def check_output(
    path: Path,
    *,
    overwrite: bool,
    inputs: Collection[Path] = (),
    beside: Collection[Path] = (),
    replaces: Collection[Path] = (),
) -> None:
    """Checks that `output` can write `path`, and the files `beside` it. To be called before long work.

    Raises:
        ContractError: the folder is missing or not writable; or a file is an input or no regular file, or exists and
            must not be replaced.
    """
    for file in dict.fromkeys((path, *replaces, *beside)):
        if is_any_of(file, inputs):
            raise ContractError(file, "is an input", expected="another file", advice="pass another path")
        # A device or a FIFO must not be removed, nor a folder.
        if os.path.exists(file) and not os.path.isfile(file):  # noqa: PTH110, PTH113 - false if the name is too long
            what = "a directory" if file.is_dir() else "not a regular file"
            raise ContractError(file, what, expected="a file name", advice="pass another path")
        if os.path.lexists(file) and not overwrite:
            advice = ("pass ", Option("overwrite", True), " or another path")
            raise ContractError(file, "exists already", expected="a new file", advice=advice)
        if os.path.lexists(file) and file != path and file not in replaces:
            what = f"exists already, and {path} does not name it: it may be another model's"
            raise ContractError(file, what, expected="no file there", advice="move it away or pass another path")
    with _refused(path), _temporary_folder(path) as folder:
        Path(folder, path.name).touch()  # the system may refuse the name alone


def _temporary_folder(path: Path) -> tempfile.TemporaryDirectory[str]:
    # Without the output's name in its own, which would be too long for some.
    return tempfile.TemporaryDirectory(prefix=".mxfp8-graph-", dir=path.parent, ignore_cleanup_errors=True)


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Reports an OSError as one of writing `path`."""
    try:
        yield
    except OSError as error:
        raise ContractError.unwritable(path, error, "free some space or pass another path") from None


def _put(folder: Path, path: Path, beside: Iterable[Path], old: Iterable[Path]) -> None:
    try:
        for file in old:  # `path` first: no model may stand beside another's data
            file.unlink(missing_ok=True)
        for file in (*beside, path):
            (folder / file.name).replace(file)
    except BaseException:
        if (folder / path.name).exists():  # else all files are in place
            for file in beside:
                if not (folder / file.name).exists():
                    file.unlink(missing_ok=True)
        raise
