"""The command `mxfp8-graph`, also as `python -m mxfp8_graph`: it forks once, and the child does the work.

A damaged model may crash onnx's C++, and the system kills a process that takes all memory. The parent, which holds
nothing, then says so in one line. It imports nothing of ours before the fork: threads do not survive one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import Final

_STOPS: Final = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def main() -> None:
    """Runs the command line, in a child process where the system can fork."""
    before = {each: signal.getsignal(each) for each in _STOPS}
    child = 0
    if hasattr(os, "fork"):
        # Blocked until both have their handlers: a signal in between would end one of them with a stack trace.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        child = os.fork()

    def forward(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signum)

    for each, handler in before.items():
        if handler is not signal.SIG_IGN:  # as `nohup` and shells in the background have it
            signal.signal(each, forward if child else _stop)
    if hasattr(os, "fork"):
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if child:
        sys.exit(_wait(child))
    if sys.platform == "linux":
        import ctypes

        # SIGKILL cannot be forwarded: the kernel sends SIGTERM to the child when the parent ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        from mxfp8_graph.cli import main as run
    except KeyboardInterrupt as stop:
        sys.exit(128 + stop.args[0])
    run()


def _stop(signum: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt for SIGTERM too, so that temporary files are removed."""
    # Once: a terminal sends Ctrl-C to both processes, and the parent forwards it.
    for each in _STOPS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(signum)


def _wait(child: int) -> int:
    """Returns the exit code of the child; 2, with a message, if a signal ended it."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        return code
    if code == -signal.SIGKILL:
        what, expected = "killed (SIGKILL), as systems do when memory runs out", "enough memory for the model"
        advice = "free memory, or use a machine with more"
    else:
        what, expected = f"onnx or another native library crashed ({signal.strsignal(-code)})", "a sound model"
        advice = (
            "check the model with onnx.checker; if it is sound, report this with the output of `mxfp8-graph doctor`"
        )
    print(f"error: mxfp8-graph: {what}; expected {expected}; {advice}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
