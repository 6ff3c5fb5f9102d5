"""Tries one input after the other until there are no more, or one of them ends the process.

Its last argument is a `Job` as JSON. It writes a `Verdict` per input to stdout, a line each; what the code under test
prints goes to stderr.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

from . import guided
from .trial import LONGEST, Job, Trial, left
from .verdicts import watch_errors


def main() -> None:
    """Does the job that the last argument describes."""
    os.setsid()  # so that our children can be ended with us
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    job = Job(**json.loads(sys.argv[-1]))
    watch_errors()
    with guided.instrumented() if job.engine == "atheris" else nullcontext():
        target = importlib.import_module(f"{__package__}.{job.target}")
    start = [data for data in _start(target, job) if len(data) <= LONGEST]
    trial = Trial(target, job, lambda line: stdout.write(f"{line}\n"))
    _limit_memory(job.megabytes)
    if job.engine == "atheris" and job.files is None:
        guided.run(trial, job, start)
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
    for _ in range(left(job, start)):
        yield
        data = trial.changed(chosen.choice(pool), chosen)
        if trial(data).data is not None:
            pool.append(data)


def _limit_memory(megabytes: int) -> None:
    """Makes an allocation far beyond the limit fail, so that it does not take the machine down; the rest is watched."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        size = pages * resource.getpagesize() + 2 * (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    main()
