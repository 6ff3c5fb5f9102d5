"""One input at a time: says which, tries it, and remembers those worth keeping. Also the task of a worker."""

from __future__ import annotations

import mmap
import os
import random
import resource
import shutil
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from .verdicts import ACCEPTED, FINDING, REFUSED, Verdict, judge

LONGEST = 4 << 20
"""Bytes of the longest input that is tried."""

KEPT_PER_PLACE = 8
"""How many inputs are kept that are refused in one place, with different messages."""

ACCEPTED_KEPT = 100
"""How many accepted inputs, the latest ones, are changed further."""

BOX = "box"
"""Name of the file that says which input is being tried: see `Box`."""

DONE = "done"
"""The line that a worker writes when there is nothing left to try."""

SPENT = 3
"""Exit code of a worker whose memory limit no longer means anything: its peak stays what it is."""


@dataclass(frozen=True)
class Job:
    """The task of a worker."""

    target: str
    seed: str
    pool: list[str]
    """Folders of inputs to start from, beside the target's seeds."""
    folder: str = ""
    """Folder to work in, which the supervisor makes."""
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
        self.box = Box(Path(job.folder) / BOX)
        self.folder = Path(job.folder) / "files"
        self.folder.mkdir(exist_ok=True)
        self.accepted: list[bytes] = target.seeds()
        self.long = 4 * max(map(len, self.accepted))
        self.smallest: dict[str, int] = {}
        self.refused_at: Counter[str] = Counter()

    def __call__(self, data: bytes) -> Verdict:
        """Tries one input; the verdict has it if it is worth keeping."""
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
        if self._is_new(verdict, len(data)):
            verdict = replace(verdict, data=data.hex())
        self.report(verdict.to_line())
        if verdict.outcome == ACCEPTED and len(data) < self.long and data not in self.accepted:
            self.accepted = [data, *self.accepted[: ACCEPTED_KEPT - 1]]
        if held > self.job.megabytes:
            self.end(SPENT)
        with os.scandir(self.folder) as entries:
            dirty = any(entries)
        if dirty:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)
        return verdict

    def changed(self, data: bytes, chosen: random.Random) -> bytes:
        """Returns `data`, or as often an accepted input, changed once or several times.

        Most changes break an input, and what is broken in several ways is refused for the first of them.
        """
        if chosen.random() < 0.5:
            data = chosen.choice(self.accepted)
        while True:
            data = self.target.mutate(data, chosen)[:LONGEST]
            if chosen.random() < 0.6:
                return data

    def _is_new(self, verdict: Verdict, size: int) -> bool:
        """Whether an input is the first of its kind, or much smaller than those before it."""
        key = verdict.kind if verdict.outcome == FINDING else f"{verdict.kind} {verdict.text}"
        known = self.smallest.get(key)
        if verdict.outcome == ACCEPTED or (known is not None and size >= 0.8 * known):
            return False
        if verdict.outcome == REFUSED and known is None:
            if size > self.long or self.refused_at[verdict.kind] == KEPT_PER_PLACE:
                return False
            self.refused_at[verdict.kind] += 1
        self.smallest[key] = size
        return True

    def end(self, code: int = 0) -> None:
        """Ends the process."""
        if code == 0:
            self.report(DONE)
        os._exit(code)  # libFuzzer would not let go otherwise


def left(job: Job, start: list[bytes]) -> int:
    """Returns how many changed inputs are left to try."""
    return sys.maxsize if job.count is None else job.count - max(0, job.skip - len(start))


def _peak_megabytes() -> int:
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return max(_own_peak(), children) // (1024 * 1024 if sys.platform == "darwin" else 1024)


def _own_peak() -> int:
    """Returns what `ru_maxrss` means; on Linux that of a started program begins with the peak of whoever started it."""
    if (status := Path("/proc/self/status")).exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
