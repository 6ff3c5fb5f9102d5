"""Opens the files that a user or a model names: regular files, which must not change while they are read.

Opening or reading a FIFO, a device or a socket could block, never end, or have an effect. The files that a model names
(its external data, the shards of a checkpoint's index) lie in its folder, by the rules of onnx (`checker.cc`,
resolve_external_data_location): below the folder, no symbolic link, no second hard link. A model from a stranger can
name any file, and through a link it could read one that is not its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import BinaryIO, Final

from mxfp8_ops.errors import ContractError

_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}

NO_NAME: Final = "not a name that a file can have"
"""What is said of a NUL, and of what the encoding of the file system lacks."""


class Pins:
    """The files one result is made of, each as it was when it was first opened."""

    def __init__(self) -> None:
        self._states: dict[Path, tuple[int, ...]] = {}

    def open(self, path: Path) -> BinaryIO:
        """Returns an open file, the same one as before if it was opened before.

        Raises:
            OSError: as `open_regular`.
            ContractError: the file changed since it was first opened.
        """
        file = open_regular(path)
        found = _state(os.fstat(file.fileno()))
        if self._states.setdefault(path, found) != found:
            file.close()
            raise _changed(path)
        return file

    @property
    def files(self) -> frozenset[Path]:
        """What was opened."""
        return frozenset(self._states)

    def check_open(self, file: BinaryIO) -> None:
        """Raises ContractError if a file that `open` returned is no longer what it was."""
        if _state(os.fstat(file.fileno())) != self._states[Path(file.name)]:
            raise _changed(Path(file.name))

    def check(self, *paths: Path) -> None:
        """Raises ContractError if a file that was opened, by default any, is no longer what it was, or not there."""
        for path in paths or self._states:
            try:
                same = _state(path.stat()) == self._states[path]
            except OSError:
                same = False
            if not same:
                raise _changed(path)


class ModelFolder:
    """The folder that a model, or the index of a checkpoint, lies in."""

    def __init__(self, model: Path) -> None:
        self.path = model.parent
        self._model = model
        self.files = Pins()
        """The model and the external files, as they were when they were first opened."""
        # In the cache of the Hugging Face hub, model and data are links into one other folder: that counts as inside.
        self._linked = Path(os.path.realpath(model)).parent if model.is_symlink() else None
        self._allowed: dict[str, Path] = {}

    def open(self, name: str, where: str) -> BinaryIO:
        """Opens the file that a model calls `name`; `where` is the part of the model that names it, for errors.

        Raises:
            OSError: there is no such file, or it cannot be read, or is not a regular file.
            ContractError: the model must not name this file, or it changed since it was first opened.
        """
        return self.files.open(self.locate(name, where))

    def open_model(self) -> BinaryIO:
        """Opens the model's own file; errors as `open`."""
        return self.files.open(self._model)

    def check(self, file: BinaryIO) -> None:
        """Raises ContractError if a file that `open` returned, or the model that refers to it, changed."""
        self.files.check_open(file)
        self.files.check(self._model)

    def locate(self, name: str, where: str) -> Path:
        """Returns the path, without links, of the file that a model calls `name`; errors as `open`."""
        if name not in self._allowed:
            self._allowed[name] = self._allow(name, where)
        path = self._allowed[name]
        # Asked on each access, not once: a link can be added between two reads.
        if (links := path.stat().st_nlink) > 1 and path.is_file():
            what = f"external file {name!r} has {links} hard links"
            raise ContractError(where, what, expected="a file with one name, as onnx does", advice="put a copy there")
        return path

    def _allow(self, name: str, where: str) -> Path:
        plain = PurePath(name)
        nameless = not name or any(c == "\0" or "\ud800" <= c <= "\udfff" for c in name)  # JSON has half surrogates
        # Decided by the name first: realpath of such a name would ask the system about files that are none of the
        # model's.
        outside = nameless or plain.is_absolute() or ".." in plain.parts
        expected = Path(os.path.realpath(self.path)) / plain
        real_path = expected if outside else Path(os.path.realpath(expected))
        cached = self._linked is not None and real_path.is_relative_to(self._linked)
        if outside or not (cached or real_path.is_relative_to(os.path.realpath(self.path))):
            advice = "move the data next to the model"
            raise ContractError(where, f"external file {name!r}", expected=f"a file inside {self.path}", advice=advice)
        if real_path != expected and not cached:
            what = f"external file {name!r} is a symbolic link"
            raise ContractError(where, what, expected="a file, as onnx does", advice="put the file itself there")
        return real_path


def _state(status: os.stat_result) -> tuple[int, ...]:
    """Returns what tells a file from another one, or from itself after a change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder; of a name that is too long, `Path.is_dir` would raise."""
    return os.path.isdir(path)  # noqa: PTH112


def is_any_of(path: Path, files: Iterable[Path]) -> bool:
    """Whether `path` is one of `files`, under whatever name: a result must not replace what it is made from."""
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # what is not there has no other names
            if path.absolute() == file.absolute() or path.samefile(file):
                return True
    return False


def open_regular(path: str | Path) -> BinaryIO:
    """Returns a regular file, open for reading; symbolic links are followed. Never waits for a FIFO's other end.

    Raises:
        OSError: the file cannot be opened, or is something else than a regular file; `strerror` says what.
    """
    try:
        require_regular(Path(path).stat(), path)
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 - Path.open takes no opener
    except ValueError:  # a NUL, or what the file system's encoding lacks
        raise OSError(errno.EINVAL, NO_NAME, str(path)) from None
    try:
        require_regular(os.fstat(file.fileno()), path)  # it may have been exchanged since
    except OSError:
        file.close()
        raise
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def require_regular(found: os.stat_result, path: str | Path) -> None:
    """Raises OSError if `found`, of `path`, is not of a regular file."""
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no file")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))


def _changed(path: Path) -> ContractError:
    expected, advice = "the same file from beginning to end", "run again once nothing writes to it"
    return ContractError(path, "changed while it was read", expected=expected, advice=advice)
