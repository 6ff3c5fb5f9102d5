"""Runs the tests of the marker `gpu` so that one call yields as much as it can: make gpu-test, make gpu-sanitize.

An illegal access ends a CUDA context, and with it every later test of the process; a deadlock ends nothing at all. So
the tests run in a process that is started anew, with what has not run yet, when the device is lost, the process dies or
a test takes too long. Processes that tests have started end with them: the program under a sanitizer would keep the
device busy. Each result is in the log as soon as it is known.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

LOG = "MXFP8_GPU_TEST_LOG"
"""Environment variable: the log, for the process that runs the tests."""
LOST = 86
"""Its exit code when it cannot go on."""
HERE = Path(__file__).parent


# --- the plugin: in the process that runs the tests -------------------------------------------------------------------


def lost() -> bool:
    """Returns whether nothing more can run on the device in this process."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def write(*words: Any) -> None:
    with Path(os.environ[LOG]).open("a", encoding="utf-8") as file:
        file.write(" ".join(map(str, words)) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what has been started before."""
    started = {words[2] for words in results(Path(os.environ[LOG])) if words[0] == "start"}
    items[:] = [item for item in items if item.nodeid not in started]


def pytest_runtest_logstart(nodeid: str) -> None:
    write("start", "0", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    write(report.outcome, f"{report.duration:.1f}", report.nodeid)
    if report.skipped and isinstance(report.longrepr, tuple):
        write("   ", report.longrepr[2])
    if report.failed:
        write("    " + report.longreprtext.replace("\n", "\n    "))
        if lost():
            write("    The device is lost: the next tests run in a new process.")
            pytest.exit("the device is lost", returncode=LOST)


# --- processes that end with those that they start -------------------------------------------------------------------


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


# --- the script ------------------------------------------------------------------------------------------------------


def results(log: Path) -> list[list[str]]:
    """Returns [outcome, seconds, test] of each line that has them."""
    lines = log.read_text(encoding="utf-8").splitlines()
    found = [line.split(" ", 2) for line in lines if line and not line.startswith(" ")]
    return [words for words in found if len(words) == 3]


def run_once(tests: list[str], log: Path, deadline: float, most: float) -> int | None:
    """Runs what has not run yet; returns the exit code of pytest, or None if it had to be killed.

    A test has `most` seconds. Starting Python, torch and pytest is not part of a test: only `deadline` ends that.
    """
    environment = {**os.environ, LOG: str(log)}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "run_on_gpu", "-p", "no:cacheprovider", "-q", "-m", "gpu", *tests]
    size, since, started = log.stat().st_size, time.monotonic(), False
    with process_group(command, env=environment) as process:
        while process.poll() is None:
            time.sleep(0.1)
            now = time.monotonic()
            if log.stat().st_size != size:
                size, since, started = log.stat().st_size, now, True
            if now > deadline or (started and now - since > most):
                return None
        return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=470, help="for all tests together")
    parser.add_argument("--most", type=float, default=150, help="seconds for one test")
    parser.add_argument("-k", help="only tests that pytest selects by this expression")
    parser.add_argument("--dry-run", action="store_true", help="only say which tests there are; needs no GPU")
    arguments = parser.parse_args()
    end_groups_on_sigterm()
    tests = [*arguments.files, *(["-k", arguments.k] if arguments.k else [])]
    if arguments.dry_run:
        return pytest.main(["--collect-only", "-p", "no:cacheprovider", "-q", "-m", "gpu", *tests])
    log, deadline = arguments.log, time.monotonic() + arguments.seconds
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    finished = False
    while time.monotonic() < deadline and not finished:
        before = len(results(log))
        code = run_once(tests, log, deadline, arguments.most)
        found = results(log)
        if found and found[-1][0] == "start":
            why = "took too long" if code is None else f"ended the process with exit code {code}"
            with log.open("a", encoding="utf-8") as file:
                file.write(f"failed {arguments.most:.0f} {found[-1][2]}\n    It {why}.\n")
        # 0, 1: ran to the end; 5: nothing was left. Anything else with nothing new would be so again.
        finished = code in (0, 1, 5) or len(results(log)) == before
    outcomes = collections.Counter(words[0] for words in results(log) if words[0] != "start")
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) or "nothing ran"
    if not finished:
        summary += f"; stopped after {arguments.seconds:.0f} s"
    with log.open("a", encoding="utf-8") as file:
        file.write(f"    {summary}\n")
    failed = [words[2] for words in results(log) if words[0] == "failed"]
    print(f"{log}: {summary}", *failed, sep="\n  failed: ")
    return int(bool(failed) or not finished or not outcomes["passed"])


if __name__ == "__main__":
    sys.exit(main())
