"""Writes one file whole or not at all: see `file_drafts.py` for how."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mxfp8_graph.file_drafts import Drafts
from mxfp8_graph.file_leftovers import clean_up
from mxfp8_ops.errors import Mxfp8Error


def is_taken(path: Path) -> bool:
    """Whether there is something at `path`, once the leftovers of dead processes are gone."""
    clean_up(path.parent)
    return os.path.lexists(path)


@contextlib.contextmanager
def replacing(path: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Yields a file to write to, which takes the place of `path` at the end.

    After an error `path` is what it was, and nothing else is left.

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
