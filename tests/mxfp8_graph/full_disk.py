"""Simulates faults outside of a program: disks that fill up, files that change."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Makes every write fail that would make a file larger than `size` bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
