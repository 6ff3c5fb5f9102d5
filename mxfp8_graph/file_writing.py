"""Files are written beside their place and renamed: nobody ever sees half a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mxfp8_ops.errors import Mxfp8Error


def temporary_beside(path: Path, suffix: str = "") -> Path:
    """Returns where to write what `path` is to hold; on the same file system, so that it can be renamed.

    `suffix` is for writers that insist on theirs; torch also names the folder in a .pt2 archive after the file.
    """
    return path.with_name(f".{path.stem if suffix else path.name}.{os.getpid()}.tmp{suffix}")


@contextlib.contextmanager
def replacing(path: Path, suffix: str = "") -> Iterator[Path]:
    """Yields a temporary file's path to write to; what is there afterwards takes the place of `path`.

    After an error `path` is what it was, and the temporary file is gone. An OSError is the caller's to explain.
    """
    temporary = temporary_beside(path, suffix)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all.

    Raises:
        Mxfp8Error: the folder is not writable, or the disk is full.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        what = error.strerror or str(error)
        raise Mxfp8Error(path, what, expected="a writable place", advice="choose another") from None
