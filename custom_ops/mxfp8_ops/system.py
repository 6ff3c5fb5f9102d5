"""The code that differs between operating systems: library files, forks, signals, files in use, processor names.

CUDA is used on Linux only, so its code is apart, in cuda/.
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
    """Forks, and returns None in the child; the parent waits for the child and returns its exit code.

    Windows has no fork: the process itself gets None. If a signal ended the child, the code is minus its number. SIGINT
    and SIGTERM raise KeyboardInterrupt(number) once in the process that gets None; the parent forwards them.
    """
    before = {each: signal.getsignal(each) for each in _STOPS}
    parent, child = os.getpid(), 0
    if sys.platform != "win32":
        # Signals are blocked until both processes have their handlers: one in between would end one with a stack trace.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        child = os.fork()

    def forward(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signum)

    for each, handler in before.items():
        if handler is not signal.SIG_IGN:  # `nohup` and background shells ignore a signal: so does the command
            signal.signal(each, forward if child else _stop)
    if sys.platform == "linux" and not child:
        import ctypes

        # SIGKILL cannot be forwarded: the kernel sends SIGTERM to the child when the parent ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), signal.SIGTERM)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if child:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # the result stands, and there is no child to forward to
            return code
    return None


def stop_by_default() -> None:
    """Ends `fork_worker`'s handling of signals in the child: the next SIGINT or SIGTERM ends the process."""
    for each in _STOPS:
        if signal.getsignal(each) is _stop:  # after a first signal both are ignored
            signal.signal(each, signal.SIG_DFL)


def used_up_processor_time() -> bool:
    """Returns whether the child of `fork_worker` reached the limit on processor time (`ulimit -t`)."""
    if sys.platform == "win32":
        return False
    import resource

    limit, usage = resource.getrlimit(resource.RLIMIT_CPU)[0], resource.getrusage(resource.RUSAGE_CHILDREN)
    # The kernel compares another count with the limit, by up to 6% larger in measurements.
    return limit != resource.RLIM_INFINITY and usage.ru_utime + usage.ru_stime >= 0.9 * limit


def _stop(signum: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt for SIGTERM too, so that temporary files are removed."""
    # Once: the child gets Ctrl-C twice, from the terminal and from the parent.
    for each in _STOPS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(signum)


def in_use(error: OSError) -> bool:
    """Returns whether the error is Windows' refusal to replace or remove a file that a program has open or mapped."""
    return getattr(error, "winerror", None) in _IN_USE


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a new folder and deletes it afterwards."""
    # Windows does not delete mapped files: there the rest goes when the process ends.
    folder = Path(tempfile.mkdtemp(prefix="mxfp8-graph-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=sys.platform == "win32")
        if folder.exists():
            atexit.register(shutil.rmtree, folder, ignore_errors=True)


def processor() -> str:
    """Returns the name of the processor; the name of its architecture if the system has none."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M):
            return match[1]
    return platform.processor() or platform.machine()
