"""What operating systems differ in: the library's file, the process that works, signals, files in use, the processor.

CUDA apart (`cuda/`), which is used on Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

LIBRARY: Final = {"darwin": "libmxfp8_ops.dylib", "win32": "mxfp8_ops.dll"}.get(sys.platform, "libmxfp8_ops.so")
"""File name of the native library."""

_STOPS: Final = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_IN_USE: Final = (5, 32, 1224)
"""ERROR_ACCESS_DENIED, ERROR_SHARING_VIOLATION and ERROR_USER_MAPPED_FILE of winerror.h."""


def fork_worker() -> int | None:
    """Returns None in the process that is to work, a child except on Windows; its exit code in the parent, at its end.

    The code is minus the number of the signal if one ended the child. SIGINT and SIGTERM raise KeyboardInterrupt, once
    and with their number, in the process that works; the parent forwards them.
    """
    before = {each: signal.getsignal(each) for each in _STOPS}
    child = 0
    if sys.platform != "win32":
        # Blocked until both have their handlers: a signal in between would end one of them with a stack trace.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        child = os.fork()

    def forward(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signum)

    for each, handler in before.items():
        if handler is not signal.SIG_IGN:  # as `nohup` and shells in the background have it
            signal.signal(each, forward if child else _stop)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if sys.platform == "linux":
        import ctypes

        # SIGKILL cannot be forwarded: the kernel sends SIGTERM to the child when the parent ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return None


def _stop(signum: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt for SIGTERM too, so that temporary files are removed."""
    # Once: a terminal sends Ctrl-C to both processes, and the parent forwards it.
    for each in _STOPS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(signum)


def in_use(error: OSError) -> bool:
    """Returns whether Windows refuses to replace or remove a file because a program has it open or mapped."""
    return getattr(error, "winerror", None) in _IN_USE


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a folder that goes afterwards, at the end of the process where Windows keeps files that are mapped."""
    folder = Path(tempfile.mkdtemp(prefix="mxfp8-graph-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=sys.platform == "win32")
        if folder.exists():
            atexit.register(shutil.rmtree, folder, ignore_errors=True)


def processor() -> str:
    """Returns the name of the processor, or of its architecture if the system does not name it."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M):
            return match[1]
    return platform.processor() or platform.machine()
