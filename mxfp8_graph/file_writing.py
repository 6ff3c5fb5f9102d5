"""Files are written beside their place and renamed: nobody ever sees half a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def temporary_beside(path: Path, suffix: str = "") -> Path:
    """Returns where to write what `path` is to hold; on the same file system, so that it can be renamed."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp{suffix}")


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
