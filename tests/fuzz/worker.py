"""Tries one input after the other until there are no more, or one of them ends the process.

Its last argument is a `Job` as JSON. It writes a `Verdict` per input to stdout, a line each; what the code under test
prints goes to stderr.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import itertools
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from .verdicts import FINDING, REFUSED, Verdict, judge, watch_errors

LONGEST = 4 << 20
"""Bytes of the longest input that is tried."""

KEPT_PER_PLACE = 8
"""How many inputs are kept that are refused in one place, with different messages."""

DONE = "done"
"""The line that a worker writes when there is nothing left to try."""

SPENT = 3
"""Exit code of a worker whose memory limit no longer means anything: its peak stays what it is."""


@dataclass(frozen=True)
class Job:
    """What a worker is to do."""

    target: str
    seed: str
    box: str
    """File for the input that is being tried: see `Box`."""
    pool: list[str]
    """Folders of inputs to start from, beside the target's seeds."""
    files: list[str] | None = None
    """The only inputs to try, unchanged."""
    count: int | None = None
    """How many changed inputs to try."""
    skip: int = 0
    """How many inputs were tried already."""
    until: float = float("inf")
    """When to stop, by `time.time`."""
    engine: str = "mutate"
    seconds: float = 20
    """How long an input may take."""
    megabytes: int = 2048
    """How much memory the process may hold."""


class Box:
    """A file in memory that says which input is being tried and since when: it is still there after a crash."""

    _HEAD = struct.Struct("dQ")

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            file.truncate(self._HEAD.size + LONGEST)
            self._map = mmap.mmap(file.fileno(), 0)

    def put(self, data: bytes) -> None:
        """Says that `data` is being tried from now on."""
        self._map[self._HEAD.size : self._HEAD.size + len(data)] = data
        self._HEAD.pack_into(self._map, 0, time.time(), len(data))

    def clear(self) -> None:
        """Says that nothing is being tried."""
        self._HEAD.pack_into(self._map, 0, 0.0, 0)

    @property
    def since(self) -> float:
        """When the input that is being tried was begun; 0 if there is none."""
        return float(self._HEAD.unpack_from(self._map)[0])

    @property
    def data(self) -> bytes:
        """The input that is being tried."""
        length = self._HEAD.unpack_from(self._map)[1]
        return self._map[self._HEAD.size : self._HEAD.size + length]


class Trial:
    """Tries inputs, and remembers what is worth keeping."""

    def __init__(self, target: ModuleType, job: Job, report: Callable[[str], object]) -> None:
        self.target, self.job, self.report = target, job, report
        self.box = Box(Path(job.box))
        self.folder = Path(tempfile.mkdtemp(prefix="mxfp8-fuzz-"))
        self.known: set[str] = set()
        self.refused_at: Counter[str] = Counter()
        self.smallest: dict[str, int] = {}

    def __call__(self, data: bytes) -> bool:
        """Tries one input; returns whether it is worth changing further."""
        self.box.put(data)
        verdict = judge(self.target.check, data, self.folder)
        took, held = time.time() - self.box.since, _peak_megabytes()
        self.box.clear()
        for what, much in (
            (f"over {self.job.seconds:g} s", took > self.job.seconds),
            (f"over {self.job.megabytes} MB", held > self.job.megabytes),
        ):
            if much:
                text = f"{took:.1f} s, {held} MB held at a time\n{verdict.text}"
                verdict = Verdict(FINDING, f"{what} by {verdict.kind}", text)
        kept = self._is_new(verdict, len(data))
        self.report(replace(verdict, data=data.hex() if kept else None).to_line())
        if held > self.job.megabytes:
            self.end(SPENT)
        with os.scandir(self.folder) as entries:
            dirty = any(entries)
        if dirty:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)
        return kept and verdict.outcome == REFUSED

    def _is_new(self, verdict: Verdict, size: int) -> bool:
        if verdict.outcome == FINDING:
            smaller = size < self.smallest.get(verdict.kind, sys.maxsize)
            self.smallest[verdict.kind] = min(size, self.smallest.get(verdict.kind, size))
            return smaller
        key = f"{verdict.kind} {verdict.text}"
        if key in self.known or self.refused_at[verdict.kind] == KEPT_PER_PLACE:
            return False
        self.known.add(key)
        self.refused_at[verdict.kind] += 1
        return True

    def end(self, code: int = 0) -> None:
        """Ends the process."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if code == 0:
            self.report(DONE)
        os._exit(code)  # libFuzzer would not let go otherwise


def main() -> None:
    """Does the job that the last argument describes."""
    os.setsid()  # so that our children can be ended with us
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    job = Job(**json.loads(sys.argv[-1]))
    watch_errors()
    with _instrumented(job.engine):
        target = importlib.import_module(f"{__package__}.{job.target}")
    start = [data for data in _start(target, job) if len(data) <= LONGEST]
    trial = Trial(target, job, lambda line: stdout.write(f"{line}\n"))
    _limit_memory(job.megabytes)
    if job.engine == "atheris" and job.files is None:
        _with_atheris(trial, job, start)
    for _ in itertools.takewhile(lambda _: time.time() < job.until, _tries(trial, job, start)):
        pass
    trial.end()


def _start(target: ModuleType, job: Job) -> Iterator[bytes]:
    if job.files is None:
        yield from target.seeds()
    folders = [path for folder in job.pool for path in sorted(Path(folder).glob("*"))]
    for path in map(Path, job.files) if job.files is not None else folders:
        yield path.read_bytes()


def _tries(trial: Trial, job: Job, start: list[bytes]) -> Iterator[None]:
    """Tries what there is to start from, then changed inputs; yields before each."""
    for data in start[job.skip :]:
        yield
        trial(data)
    if job.files is not None:
        return
    chosen, pool = random.Random(job.seed), list(start)
    for _ in range(_left(job, start)):
        yield
        data = changed(trial.target, chosen.choice(pool), chosen)
        if trial(data):
            pool.append(data)


def _left(job: Job, start: list[bytes]) -> int:
    """Returns how many changed inputs are left to try."""
    return sys.maxsize if job.count is None else job.count - max(0, job.skip - len(start))


def changed(target: ModuleType, data: bytes, chosen: random.Random) -> bytes:
    """Returns an input changed once or several times."""
    while True:
        data = target.mutate(data, chosen)[:LONGEST]
        if chosen.random() < 0.6:
            return data


def _with_atheris(trial: Trial, job: Job, start: list[bytes]) -> None:
    """Lets libFuzzer choose what to change, by the code that inputs reach. Does not return."""
    import atheris

    folder = Path(job.box).with_suffix(".libfuzzer")
    folder.mkdir(exist_ok=True)
    for data in start:
        (folder / hashlib.sha256(data).hexdigest()).write_bytes(data)
    left = itertools.count(_left(job, start) + len(start), -1)

    def one(data: bytes) -> None:
        if next(left) == 0 or time.time() > job.until:
            trial.end()
        trial(data)

    def change(data: bytes, longest: int, seed: int) -> bytes:
        return changed(trial.target, data or start[0], random.Random(seed))[:longest]

    # Signals are ours: the supervisor asks for a traceback, and takes a death for a finding.
    signals = [f"-handle_{name}=0" for name in ("segv", "bus", "abrt", "ill", "fpe", "int", "term", "usr1", "usr2")]
    seed = random.Random(job.seed).randrange(1, 1 << 31)
    limits = ["-rss_limit_mb=0", "-malloc_limit_mb=0", "-timeout=0", "-detect_leaks=0", f"-max_len={1 << 16}"]
    atheris.Setup(
        [sys.argv[0], f"-seed={seed}", "-verbosity=0", *limits, *signals, str(folder)], one, custom_mutator=change
    )
    atheris.Fuzz()


def _instrumented(engine: str) -> AbstractContextManager[Any]:
    if engine != "atheris":
        return nullcontext()
    import atheris

    return atheris.instrument_imports(include=["mxfp8_graph"])  # type: ignore[no-any-return]


def _limit_memory(megabytes: int) -> None:
    """Makes an allocation far beyond the limit fail, so that it does not take the machine down; the rest is watched."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        size = pages * resource.getpagesize() + 2 * (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _peak_megabytes() -> int:
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(own, children) // (1024 * 1024 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
