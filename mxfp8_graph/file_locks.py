"""One run at a time puts files in place in a folder, and a signal does not stop it halfway."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

LOCK: Final = ".mxfp8-graph.lock"
"""File in a folder, and locked, while results are put in place there or leftovers are looked at."""

_PATIENCE: Final = 30.0
"""Seconds to wait for the lock. A process holds it for a few renames only."""

_NO_LOCKS: Final = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EBADF})
"""What a file system without locks says."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other runs from putting files in place in a folder. Where locks do not work, nothing is kept apart.

    Raises:
        OSError: the folder cannot be written to, or another process holds the lock for long.
    """
    lock, held = folder / LOCK, None
    deadline = time.monotonic() + _PATIENCE
    try:
        while held is None:
            with uninterrupted():
                held = _try_lock(lock)
            if held is None:
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, f"another process holds {LOCK} there", str(lock))
                time.sleep(0.005)
        yield
    finally:
        if held is not None:
            with uninterrupted():
                lock.unlink(missing_ok=True)
                os.close(held)


def _try_lock(lock: Path) -> int | None:
    """Returns the descriptor of the locked file, or None if another process has it or has just removed it."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), lock.lstat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return descriptor
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[Any]]:
    """Holds back what SIGINT and SIGTERM raise, until its end: steps that belong together are done together.

    Yields the list of the signals that came so far.
    """
    held: list[Any] = []
    if threading.current_thread() is not threading.main_thread():
        yield held  # signals do not raise here
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    raising = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in raising:
        signal.signal(number, lambda *call: held.append(call))
    try:
        yield held
    finally:
        for number, handler in raising.items():
            signal.signal(number, handler)
        if held:
            raising[signal.Signals(held[0][0])](*held[0])
