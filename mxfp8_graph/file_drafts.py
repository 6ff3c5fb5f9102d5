"""Files are written beside their place and put there whole: at every moment, a result is the old one or the new one.

While it is written, a file has a name that cannot be guessed, and a lock (flock) that dies with its process:

    .NAME.TOKEN.mxfp8-new     takes the place of NAME
    .NAME.TOKEN.mxfp8-data    the same, for the external data of a model with the same token
    .NAME.TOKEN.mxfp8-bridge  the model that names the external data as it is called before it is in place
    .NAME.TOKEN.mxfp8-link    another name of the external data, on its way to NAME

`file_leftovers.py` finishes or removes what a killed process leaves of these.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from pathlib import Path
from typing import BinaryIO, Final, Literal

from mxfp8_graph.file_locks import locked, uninterrupted
from mxfp8_graph.file_reading import NO_NAME, require_regular

_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
"""What a file system without hard links says."""

_WORTH_IT: Final = 1 << 20
"""Bytes from which on the disk is asked to begin."""

Role = Literal["new", "data", "bridge", "link"]


class Drafts:
    """Files that are written together. A context manager: drafts that are not put in place are gone at its end."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(8)
        self._files: dict[Path, BinaryIO] = {}
        """By temporary path; there may be nothing there, but never anything else."""

    def __enter__(self) -> Drafts:
        """Returns the drafts."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes and removes what is left."""
        with uninterrupted():
            for temporary, file in self._files.items():
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # what is buffered for a full disk fails once more
                    file.close()

    def open(self, path: Path, role: Role = "new") -> BinaryIO:
        """Returns a new file, open for writing, that is to take the place of `path`.

        OSError if there can be none, or `path` is a device, a FIFO or a folder, or a link to one: these stay.
        """
        _check_place(path)
        temporary = path.with_name(f".{path.name}.{self._token}.mxfp8-{role}")
        with locked(path.parent), uninterrupted():
            file = self._files[temporary] = temporary.open("xb")
            with contextlib.suppress(OSError):  # a file system without locks: leftovers stay there
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file

    def put(self, file: BinaryIO, path: Path, *, overwrite: bool) -> None:
        """Puts a draft in place. FileExistsError if there is something and `overwrite` is false; OSError as usual."""
        _close([file])
        with locked(path.parent), uninterrupted():
            if overwrite:
                Path(file.name).replace(path)
            else:
                _link_new(Path(file.name), path)
        _sync_folder(path.parent)

    def put_new_pair(self, data: BinaryIO, data_path: Path, model: BinaryIO, path: Path) -> None:
        """Puts external data and its model where there is nothing; FileExistsError if there is."""
        _close([data, model])
        with locked(path.parent), uninterrupted():
            _link_new(Path(data.name), data_path)
            try:
                _link_new(Path(model.name), path)
            except OSError:
                data_path.unlink()
                raise
        _sync_folder(path.parent)

    def replace_pair(self, data: BinaryIO, data_path: Path, models: tuple[BinaryIO, BinaryIO], path: Path) -> None:
        """Puts external data and its model in place of whatever is there.

        Args:
            data: the external data.
            data_path: where it goes.
            models: the model with the external data named as the draft is, then with it named as `data_path`.
            path: where the model goes.
        """
        bridge, model = (Path(file.name) for file in models)
        _close([data, *models])
        with locked(path.parent), uninterrupted():
            bridge.replace(path)
            # From here on the model needs the draft of its data: if a step fails, the next run takes the rest.
            with self._files.pop(Path(data.name)), self._files.pop(model):
                finish_pair(Path(data.name), data_path, model, path)
        _sync_folder(path.parent)


def _check_place(path: Path) -> None:
    """Raises OSError if nothing can have the name `path`, or what has it is no regular file, nor a link to one."""
    try:
        require_regular(path.stat(), path)
    except FileNotFoundError:
        pass
    except ValueError:
        raise OSError(errno.EINVAL, NO_NAME, str(path)) from None


def write_early(file: BinaryIO, data: bytes | memoryview) -> None:
    """Writes to a draft and lets the disk begin with it: there is less to wait for when the draft is put in place."""
    file.write(data)
    if len(data) >= _WORTH_IT and hasattr(os, "posix_fadvise"):
        file.flush()
        os.posix_fadvise(file.fileno(), file.tell() - len(data), len(data), os.POSIX_FADV_DONTNEED)


def finish_pair(data: Path, data_path: Path, model: Path, path: Path) -> None:
    """Does the last steps of `replace_pair`: `path` is the model that names `data`."""
    link = data.with_name(data.name.removesuffix("data") + "link")
    try:
        os.link(data, link)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        link = data  # without hard links the model lacks its data for the moment between two renames
    link.replace(data_path)
    model.replace(path)
    for leftover in (link, data):
        leftover.unlink(missing_ok=True)


def _link_new(temporary: Path, path: Path) -> None:
    """Gives a draft its final name, too, if there is nothing of that name."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno in _NO_LINKS:
            path.touch(exist_ok=False)
            temporary.replace(path)
        else:
            raise OSError(error.errno, error.strerror, str(path)) from None


def _close(files: list[BinaryIO]) -> None:
    """Brings what was written to the disk. The files stay open, for their locks."""
    for file in files:
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can; the result is in place all the same
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
