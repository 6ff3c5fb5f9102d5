"""Calls a function in a child process: code that may abort, run away or eat memory then ends no other process.

The child is a fork, which costs milliseconds and not the imports of a new process. It makes the one call and never
returns to the code of its parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

MOST_MEMORY: Final = 1 << 30
"""How many bytes the call may need beyond those its process has."""

PATIENCE: Final = 20
"""Seconds to wait for each second of processor time that the call may take: other processes want processors too."""

_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM)

_CHUNK: Final = 1 << 20
_DONE, _RAISED = b"+", b"-"
"""The first byte of what a child writes: before its result, or before the class and message of an exception."""


@dataclass(frozen=True)
class Failure:
    """Why a call has no result."""

    kind: str
    """Class name of what it raised; "" if it crashed or was stopped."""
    message: str


def call(function: Callable[[], bytes], seconds: int) -> bytes | Failure:
    """Returns what `function` returns, called in a child process.

    Args:
        function: what to call; whatever else it does stays in the child.
        seconds: processor time it may take.

    Raises:
        OSError: the system gives us no further process.
    """
    reading, writing = os.pipe()
    try:
        child = _fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    if not child:
        _run(function, writing, seconds)
    os.close(writing)
    deadline = time.monotonic() + PATIENCE * seconds
    try:
        content = _read(reading, deadline)
        is_late = time.monotonic() >= deadline
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # after its last word it has nothing to do
        _, status = os.waitpid(child, 0)
    if content[:1] == _DONE:
        return content[1:]
    if content[:1] == _RAISED:
        return Failure(*content[1:].decode(errors="replace").split("\n", 1))
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if is_late or ended_by == signal.SIGXCPU:
        return Failure("", f"takes more than {seconds} s")
    return Failure(
        "", "is killed, as systems do when memory runs out" if ended_by == signal.SIGKILL else "crashes on it"
    )


def _fork() -> int:
    # What an interrupt raises while Python calls the handlers of a fork is lost, and may leave a lock held.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    child, collects = -1, gc.isenabled()
    gc.disable()  # in the child it would end sessions of the parent, whose threads the child does not have
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, none of which the child needs
            child = os.fork()
        return child
    finally:
        if child:  # the child waits until it has handlers of its own
            if collects:
                gc.enable()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(function: Callable[[], bytes], writing: int, seconds: int) -> NoReturn:
    """What the child does: nothing of its parent's, whatever happens."""
    try:
        _limit(seconds)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what C++ says before it aborts
        try:
            content = _DONE + function()
        except Exception as error:
            content = f"{_RAISED.decode()}{type(error).__name__}\n{error}".encode(errors="replace")
        with memoryview(content) as rest:
            written = 0
            while written < len(rest):
                written += os.write(writing, rest[written:])
    finally:
        os._exit(0)


def _limit(seconds: int) -> None:
    faulthandler.disable()  # a crash is reported once, by the parent
    for signum in _INTERRUPTS:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
    _lower(resource.RLIMIT_CORE, 0, 0)
    _lower(resource.RLIMIT_CPU, seconds, seconds + 1)
    own = Path("/proc/self/statm")
    if own.exists():
        held = int(own.read_text().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, held + MOST_MEMORY, held + MOST_MEMORY)


def _lower(limit: int, soft: int, hard: int) -> None:
    """Sets a limit of this process; where the system allows less, to that."""
    allowed = resource.getrlimit(limit)[1]
    most = hard if allowed == resource.RLIM_INFINITY else min(hard, allowed)
    resource.setrlimit(limit, (min(soft, most), most))


def _read(reading: int, deadline: float) -> bytes:
    """Returns what the child writes; what there is by then if it has not ended at the deadline."""
    chunks: list[bytes] = []
    ready = select.poll()  # select.select() takes no descriptor from 1,024 on
    ready.register(reading, select.POLLIN)
    while ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
        chunk = os.read(reading, _CHUNK)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
    return b""
