"""Temporary folders that do not stay: what a killed run leaves, the next one removes. They may hold gigabytes.

A folder `mxfp8-graph.WHAT.RANDOM` where the system has temporary files, with a lock (flock) that dies with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OURS: Final = re.compile(r"mxfp8-graph\.[a-z]+\.\w+")


@contextlib.contextmanager
def scratch(what: str) -> Iterator[Path]:
    """Yields a new folder that is gone at the end, having removed those of dead processes.

    Args:
        what: a word for what it is, which its name has.

    Raises:
        OSError: there can be none.
    """
    around = Path(tempfile.gettempdir())
    _clean_up(around)
    # It has a name of ours only once it has its lock: without one, it would be a dead process's.
    folder = Path(tempfile.mkdtemp(prefix="mxfp8-graph-", dir=around))
    lock = None
    try:
        lock = lock_folder(folder)
        final = folder.with_name(f"mxfp8-graph.{what}.{folder.name.rpartition('-')[2]}")
        folder.rename(final)
        folder = final
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def lock_folder(folder: Path) -> int | None:
    """Returns a descriptor that holds the lock of a folder until it is closed; None where there are no locks.

    Raises:
        BlockingIOError: another process holds it.
        OSError: there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            raise BlockingIOError(error.errno, error.strerror, str(folder)) from None
        return None
    return descriptor


def _clean_up(around: Path) -> None:
    """Removes the folders of ours, by name and owner, whose lock no process holds."""
    with contextlib.suppress(OSError):
        for folder in [path for path in around.iterdir() if _OURS.fullmatch(path.name)]:
            with contextlib.suppress(OSError):
                found = folder.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and _is_dead(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_dead(folder: Path) -> bool:
    lock = lock_folder(folder)
    if lock is None:
        return False  # a process may hold it
    os.close(lock)
    return True
