"""Starts workers one after the other, watches them, and makes a verdict on the input that ended or stopped one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from . import ROOT
from .trial import BOX, DONE, SPENT, Box, Job
from .verdicts import FINDING, Verdict, place_in_dump

_MEMORY = Path("/dev/shm")  # every input is written to a file: a disk would take longer than what is tried


@dataclass(frozen=True)
class Limits:
    """The most that one input may take; more is a finding."""

    seconds: float = 20
    megabytes: int = 2048


class Supervisor:
    """One job, done by as many workers as it takes."""

    def __init__(self, job: Job, limits: Limits) -> None:
        self.limits, self.finished, self.tried = limits, False, 0
        self._tail = b""
        self._folder = Path(tempfile.mkdtemp(prefix="mxfp8-fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None))
        self._log = self._folder / "log.txt"
        (self._folder / BOX).touch()
        self._box = Box(self._folder / BOX)
        self._job = replace(job, folder=str(self._folder), **asdict(limits))
        self._worker = self._start()

    def poll(self) -> list[Verdict]:
        """Returns the verdicts since the last call; starts another worker if one has ended."""
        verdicts = self._read()
        code = self._worker.poll()
        if code is not None:
            verdicts += self._read() + self._after(code)
        elif (since := self._box.since) and time.time() - since > self.limits.seconds:
            verdicts += self._read() + self._stop(f"over {self.limits.seconds:g} s")
        elif _megabytes(self._worker.pid) > self.limits.megabytes:
            verdicts += self._read() + self._stop(f"over {self.limits.megabytes} MB")
        self.tried += len(verdicts)
        if self._worker.returncode is not None and not self.finished:
            self._worker = self._start()
        return verdicts

    def end(self) -> None:
        """Ends the worker and its children, and removes what they left."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._worker.pid, signal.SIGKILL)
        self._worker.kill()
        self._worker.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        done, self._tail = self.tried, b""
        self._box.clear()
        job = replace(self._job, skip=done, seed=f"{self._job.seed}/{done}" if done else self._job.seed)
        tests = ROOT / "tests"
        paths = [ROOT, tests, tests / "mxfp8_graph", tests / "mxfp8_ops", *filter(None, sys.path)]
        with self._log.open("wb") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.worker", json.dumps(asdict(job))],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert worker.stdout is not None
        os.set_blocking(worker.stdout.fileno(), False)
        return worker

    def _read(self) -> list[Verdict]:
        """Returns what the worker has said until now."""
        assert self._worker.stdout is not None
        while part := self._worker.stdout.read(1 << 20):
            self._tail += part
        *lines, self._tail = self._tail.split(b"\n")
        self.finished |= DONE.encode() in lines
        return [Verdict.from_line(line) for line in lines if line != DONE.encode()]

    def _after(self, code: int) -> list[Verdict]:
        """Returns the verdict on the input that ended the worker, if one did."""
        if self.finished:
            return []
        if self._box.since:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return [self._verdict(name)]
        if code != SPENT:
            raise RuntimeError(f"the target {self._job.target} does not run:\n{self._last_words()}")
        return []

    def _stop(self, why: str) -> list[Verdict]:
        """Ends a worker that an input holds up, and returns the verdict on that input."""
        since = self._box.since
        self._worker.send_signal(signal.SIGUSR1)  # it writes down where it is
        time.sleep(0.2)
        if self._box.since != since:
            return []  # it has got there after all, and has its own verdict
        verdict = self._verdict(why)
        self._kill()
        return [verdict]

    def _verdict(self, what: str) -> Verdict:
        words = self._last_words()
        return Verdict(FINDING, f"{what} at {place_in_dump(words)}", words, self._box.data.hex())

    def _last_words(self) -> str:
        return self._log.read_bytes()[-20_000:].decode(errors="replace")


def _megabytes(pid: int) -> int:
    """Returns what a process holds in memory now."""
    try:
        return int(psutil.Process(pid).memory_info().rss) >> 20
    except psutil.Error:
        return 0
