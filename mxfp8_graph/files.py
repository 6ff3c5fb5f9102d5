"""Writes files whole or not at all: into a temporary folder beside the output, from which they are renamed into place.

When an output is replaced, the old model is removed first and the new model is renamed last. If the process ends in
between, there is no model, rather than a model beside another model's data.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from mxfp8_ops.errors import ContractError, Option

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EROFS})
OF_CALLBACK: Final = "of_callback"
"""Attribute of an OSError that a user's callback raised; `output` leaves such an error as it is."""


@contextlib.contextmanager
def output(
    path: Path,
    *,
    overwrite: bool,
    inputs: Iterable[Path] = (),
    beside: Collection[Path] = (),
    replaces: Collection[Path] = (),
) -> Iterator[Path]:
    """Yields a temporary folder for a file called `path.name`, and for others beside it, under their final names.

    At the end the old `path` and `replaces` are removed, then the new files are renamed into place, `path` last. After
    an error before that, `path` is unchanged; after an error in these steps, it is absent. An empty folder replaces
    nothing.

    Args:
        path: the output.
        overwrite: whether an old output may be replaced.
        inputs: files that must not be replaced, under any name.
        beside: further files that the caller will write beside `path`.
        replaces: files beside `path` that belong to the old output, and to no other model.

    Raises:
        ContractError: see `check_output`; or a step, or the caller, raised an OSError; see also `OF_CALLBACK`.
    """
    check = partial(check_output, path, overwrite=overwrite, inputs=list(inputs), replaces=replaces)
    check(beside=beside)
    with _refused(path), _temporary_folder(path) as name:
        folder = Path(name)
        with _read_errors(path, folder):
            yield folder
        written = sorted(path.with_name(file.name) for file in folder.iterdir() if file.name != path.name)
        if written or (folder / path.name).exists():
            check(beside=written)  # again, because others may have written files since
            _replace_old(folder, path, written, [path, *replaces] if overwrite else [])


def check_output(
    path: Path,
    *,
    overwrite: bool,
    inputs: Collection[Path] = (),
    beside: Collection[Path] = (),
    replaces: Collection[Path] = (),
) -> None:
    """Checks that `output` can write `path` and the files `beside` it. Call it before long work.

    Raises:
        ContractError: the folder is not writable; or a file is an input, is not a regular file, or must not be
            replaced.
    """
    for file in dict.fromkeys((path, *replaces, *beside)):
        if is_any_of(file, inputs):
            raise ContractError(file, "is an input", expected="another file", advice="pass another path")
        # A folder, a device or a FIFO must not be removed.
        if os.path.exists(file) and not os.path.isfile(file):
            what = "a directory" if file.is_dir() else "not a regular file"
            raise ContractError(file, what, expected="a file name", advice="pass another path")
        if os.path.lexists(file) and not overwrite:
            advice = ("pass ", Option("overwrite", True), " or another path")
            raise ContractError(file, "exists already", expected="a new file", advice=advice)
        if os.path.lexists(file) and file != path and file not in replaces:
            what = f"exists already, and {path} does not name it: it may be another model's"
            raise ContractError(file, what, expected="no file there", advice="move it away or pass another path")
    with _refused(path), _temporary_folder(path) as folder:
        Path(folder, path.name).touch()  # the system may refuse the name, because of its length for example


def is_any_of(path: Path, files: Iterable[Path]) -> bool:
    """Whether `path` is one of `files`, under any name: a result must not replace its own source."""
    for file in files:
        with contextlib.suppress(OSError):  # a file that does not exist has no other name
            if path.absolute() == file.absolute() or path.samefile(file):
                return True
    return False


def data_path_of(path: Path) -> Path:
    """Returns the path of the external data of a model that is written to `path`."""
    return path.parent / f"{path.name}.data"


def _temporary_folder(path: Path) -> tempfile.TemporaryDirectory[str]:
    # Without the name of the output, which could make the folder's name too long.
    return tempfile.TemporaryDirectory(prefix=".mxfp8-graph-", dir=path.parent, ignore_cleanup_errors=True)


@contextlib.contextmanager
def _read_errors(path: Path, folder: Path) -> Iterator[None]:
    """Turns an OSError about another file than those in `folder` into a ContractError: the disk of `path` has room."""
    try:
        yield
    except OSError as error:
        file = error.filename
        # A failed write names no file, or the one that is copied.
        is_write = error.errno in _NO_ROOM or (file is not None and str(file).startswith(str(folder)))
        if is_write or hasattr(error, OF_CALLBACK):
            raise
        if file is not None:
            raise ContractError.unreadable(file, error, "a readable file") from None
        what = f"not written, because of {error.strerror or error}"
        expected, advice = "a source and an output that the system can read and write", "check their disks"
        raise ContractError(path, what, expected=expected, advice=advice) from None


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Turns an OSError into a ContractError about writing `path`."""
    try:
        yield
    except OSError as error:
        if hasattr(error, OF_CALLBACK):
            raise
        raise ContractError.unwritable(path, error, "free some space or pass another path") from None


def _replace_old(folder: Path, path: Path, beside: Iterable[Path], old: Iterable[Path]) -> None:
    try:
        for file in old:  # `path` first: no model may stand beside another's data
            file.unlink(missing_ok=True)
        # The model last: without its data it is not complete.
        for file in (*beside, path):
            (folder / file.name).replace(file)
    except BaseException:
        if (folder / path.name).exists():  # else all files are in place
            for file in beside:
                if not (folder / file.name).exists():
                    file.unlink(missing_ok=True)
        raise
