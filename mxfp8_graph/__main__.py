"""The command `mxfp8-graph`, also as `python -m mxfp8_graph`: it forks once, and the child does the work.

A damaged model may crash onnx's C++, and the system kills a process that takes all memory. Then the parent, which uses
little memory, prints one line. Nothing that starts threads is imported before the fork, because threads do not survive
it. Windows has no fork: one process does the work there, and a crash ends the command without a message.
"""

from __future__ import annotations

import signal
import sys
from typing import Final

from mxfp8_ops import system

_CRASHES: Final = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP")
"""Signals that a fault in a program causes."""


def main() -> None:
    """Runs the command line, in a child process where the system can fork."""
    try:
        code = system.fork_worker()
        if code is None:  # the child
            try:
                from mxfp8_graph.cli import main as run

                run()
            finally:
                # Python's shutdown passes no exception on, so a signal during it must end the process.
                system.stop_by_default()
    except KeyboardInterrupt as stop:  # outside of a command, which has a handler of its own
        sys.exit(_stopped(stop.args[0] if stop.args else signal.SIGINT))
    # The parent ends with the child's exit code, which is negative after a signal.
    sys.exit(_ended_by(-code) if code is not None and code < 0 else code)


def _ended_by(signum: int) -> int:
    """Prints the likely cause of the signal that ended the child; returns the exit code."""
    name = next((each.name for each in signal.Signals if each == signum), "")  # a real-time signal has none
    # Linux sends SIGKILL at the hard limit, and `ulimit -t` sets both limits.
    if name == "SIGXCPU" or (name == "SIGKILL" and system.used_up_processor_time()):
        what = "reached its limit on processor time (ulimit -t)"
        expected, advice = "a model that takes less", "raise the limit if you trust the model"
    elif name == "SIGKILL":
        what, expected = "killed (SIGKILL), as systems do when memory runs out", "enough memory for the model"
        advice = "free memory, or use a machine with more"
    elif name in _CRASHES:
        what, expected = f"onnx or another native library crashed ({signal.strsignal(signum)})", "a sound model"
        advice = (
            "check the model with onnx.checker; if it is sound, report this with the output of `mxfp8-graph doctor`"
        )
    else:
        return _stopped(signum)
    print(f"error: mxfp8-graph: {what}; expected {expected}; {advice}", file=sys.stderr)
    return 2


def _stopped(signum: int) -> int:
    """Prints that a signal from outside ended the work; returns the exit code, as shells report it."""
    words = {int(signal.SIGINT): "interrupted", int(signal.SIGTERM): "terminated"}
    print(words.get(signum) or f"stopped by a signal: {signal.strsignal(signum) or signum}", file=sys.stderr)
    return 128 + signum


if __name__ == "__main__":
    main()
