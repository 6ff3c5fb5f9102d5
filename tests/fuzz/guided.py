"""Lets libFuzzer, through atheris, choose what to change: inputs that reach new code are changed further."""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from .trial import Job, Trial, left
from .verdicts import FINDING

_OPTIONS: Final = (
    "-mutate_depth=1",  # the target's own changes, as many as `Trial.changed` makes
    "-cross_over=0",
    "-entropic=0",  # which prefers what is broken in rare ways
    f"-max_len={1 << 16}",
    # Limits and signals are the supervisor's: it asks for a traceback, and takes a death for a finding.
    "-timeout=1000000",
    "-rss_limit_mb=0",
    "-malloc_limit_mb=0",
    "-detect_leaks=0",
    *(f"-handle_{name}=0" for name in ("segv", "bus", "abrt", "ill", "fpe", "int", "term", "usr1", "usr2")),
    "-verbosity=0",
)


def instrumented() -> AbstractContextManager[Any]:
    """Returns a context: modules of mxfp8_graph that are imported in it say which code is reached."""
    import atheris

    return atheris.instrument_imports(include=["mxfp8_graph"])  # type: ignore[no-any-return]


def run(trial: Trial, job: Job, start: list[bytes]) -> None:
    """Tries what there is to start from, then what libFuzzer chooses. Does not return."""
    import atheris

    folder = Path(job.folder) / "libfuzzer"
    folder.mkdir(exist_ok=True)
    for data in start[job.skip :]:
        if trial(data).outcome != FINDING:  # one that ends the process would do so again and again
            (folder / hashlib.sha256(data).hexdigest()).write_bytes(data)
    remaining = itertools.count(left(job, start), -1)

    def one(data: bytes) -> None:
        if next(remaining) <= 0 or time.time() > job.until:
            trial.end()
        trial(data)

    def change(data: bytes, longest: int, seed: int) -> bytes:
        return trial.changed(data, random.Random(seed))[:longest]

    own = [f"-seed={random.Random(job.seed).randrange(1, 1 << 31)}", f"-artifact_prefix={job.folder}/", str(folder)]
    atheris.Setup([sys.argv[0], *_OPTIONS, *own], one, custom_mutator=change)
    atheris.Fuzz()
