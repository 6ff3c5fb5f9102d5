"""The command `mxfp8-graph`, also as `python -m mxfp8_graph`: it forks once, and the child does the work.

A damaged model may crash onnx's C++, and the system kills a process that takes all memory. Then the parent, which uses
little memory, prints one line. Nothing that starts threads is imported before the fork, because threads do not survive
it. Windows has no fork: one process does the work there, and a crash ends the command without a message.
"""

from __future__ import annotations

import signal
import sys

from mxfp8_ops import system


def main() -> None:
    """Runs the command line, in a child process where the system can fork."""
    code = system.fork_worker()
    # None in the child. The parent ends with the child's exit code, which is negative after a signal.
    if code is not None:
        sys.exit(code if code >= 0 else _killed(signal.Signals(-code)))
    try:
        from mxfp8_graph.cli import main as run
    except KeyboardInterrupt as stop:  # the import takes time, and the commands' handler is not there yet
        sys.exit(128 + stop.args[0])
    run()


def _killed(signum: signal.Signals) -> int:
    """Prints the likely cause of the signal that ended the child; returns the exit code."""
    if signum.name == "SIGKILL":
        what, expected = "killed (SIGKILL), as systems do when memory runs out", "enough memory for the model"
        advice = "free memory, or use a machine with more"
    else:
        what, expected = f"onnx or another native library crashed ({signal.strsignal(signum)})", "a sound model"
        advice = (
            "check the model with onnx.checker; if it is sound, report this with the output of `mxfp8-graph doctor`"
        )
    print(f"error: mxfp8-graph: {what}; expected {expected}; {advice}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
