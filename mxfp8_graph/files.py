"""Writes files whole or not at all: into a temporary folder beside the output, from which they are renamed into place.

Of a replaced output the old file goes first, and the new one comes last: if the process ends in between, there is no
output, but never a model beside another model's data.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path

from mxfp8_ops.errors import ContractError, Option


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
    an error before that, `path` is what it was; after one within, it is absent. An empty folder replaces nothing.

    `inputs` must not be replaced, under whatever name; `beside` are files that are known to come; `replaces` are files
    beside `path` that belong to the old one, and to no other model. Raises ContractError as `check_output`, or for an
    OSError of a step or of the caller's.
    """
    check = partial(check_output, path, overwrite=overwrite, inputs=list(inputs), replaces=replaces)
    check(beside=beside)
    with _refused(path), _temporary_folder(path) as name:
        folder = Path(name)
        yield folder
        written = sorted(path.with_name(file.name) for file in folder.iterdir() if file.name != path.name)
        if written or (folder / path.name).exists():
            check(beside=written)  # once more: files may have come since
            _put(folder, path, written, [path, *replaces] if overwrite else [])


def check_output(
    path: Path,
    *,
    overwrite: bool,
    inputs: Collection[Path] = (),
    beside: Collection[Path] = (),
    replaces: Collection[Path] = (),
) -> None:
    """Checks that `output` can write `path`, and the files `beside` it. To be called before long work.

    Raises ContractError if the folder is not writable, or a file is an input, irregular, or must not be replaced.
    """
    for file in dict.fromkeys((path, *replaces, *beside)):
        if is_any_of(file, inputs):
            raise ContractError(file, "is an input", expected="another file", advice="pass another path")
        # A device or a FIFO must not be removed, nor a folder.
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
        Path(folder, path.name).touch()  # the system may refuse the name alone


def is_any_of(path: Path, files: Iterable[Path]) -> bool:
    """Whether `path` is one of `files`, under whatever name: a result must not replace what it is made from."""
    for file in files:
        with contextlib.suppress(OSError):  # what is not there has no other names
            if path.absolute() == file.absolute() or path.samefile(file):
                return True
    return False


def data_path_of(path: Path) -> Path:
    """Returns where the external data of a model written to `path` lie."""
    return path.parent / f"{path.name}.data"


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
