"""Only regular files are read, and one that changes on the way is an error: a result is made of one state of its input.

Whatever opens a file that a user or a model names does it here. Opening or reading a FIFO, a device or a socket
could block, never end, or have an effect.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

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


class State(NamedTuple):
    """What tells a file from another one, or from itself after a change."""

    device: int
    inode: int
    size: int
    modified: int
    """In ns."""

    @classmethod
    def of(cls, found: os.stat_result) -> State:
        """Returns the state that a stat result shows."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class Pins:
    """The files one result is made of, each as it was when it was first opened."""

    def __init__(self) -> None:
        self._states: dict[Path, State] = {}

    def open(self, path: Path) -> BinaryIO:
        """Returns an open file, the same one as before if it was opened before.

        Raises:
            OSError: as `open_regular`.
            ContractError: the file changed since it was first opened.
        """
        file = open_regular(path)
        found = State.of(os.fstat(file.fileno()))
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
        if State.of(os.fstat(file.fileno())) != self._states[Path(file.name)]:
            raise _changed(Path(file.name))

    def check(self, *paths: Path) -> None:
        """Raises ContractError if a file that was opened, by default any, is no longer what it was, or not there."""
        for path in paths or self._states:
            try:
                found = State.of(path.stat())
            except OSError:
                raise _changed(path) from None
            if found != self._states[path]:
                raise _changed(path)


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
