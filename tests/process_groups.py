"""Processes that end together with everything they started: on a GPU, a leftover process slows the next one down."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def process_group(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Starts a command as the leader of a process group; at the end of the `with`, nothing of the group is left.

    Args:
        command: program and arguments.
        options: those of `subprocess.Popen`.
    """
    # A group suffices, and who ends the session then still ends the group. Before Python 3.11 it takes a session.
    own: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
    with subprocess.Popen(command, **own, **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):  # it may be gone, with all that it started
                os.killpg(process.pid, signal.SIGKILL)


def end_groups_on_sigterm() -> None:
    """Makes SIGTERM an exception, so that the groups of this process end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
