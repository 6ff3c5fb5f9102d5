"""Processes with a process group of gloo among them, which run one function after another: a start takes seconds."""

from __future__ import annotations

import datetime
import functools
import importlib
import inspect
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forked import PROCESSES

PATIENCE = 120.0
"""Seconds for a function, which takes a few on an idle machine."""


class ProcessPool:
    """Runs functions of importable modules in all processes at once; a context manager, whose end ends them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns what each process returned; AssertionError with the tracebacks of those that failed."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [pipe.recv() if pipe.poll(PATIENCE) else (False, "no answer") for pipe in self._pipes]
        failed = [f"process {rank}: {said}" for rank, (passed, said) in enumerate(answers) if not passed]
        if failed:
            self.__exit__()  # the others may wait for the one that failed
            raise AssertionError("\n".join(failed))
        return [result for _, result in answers]

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.count):
            mine, theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_serve, args=(theirs, rank, self.count, port), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(mine)


def _serve(pipe: Connection, rank: int, count: int, port: int) -> None:
    """What a process of the pool runs."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=PATIENCE / 2)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timeout=wait, rank=rank, world_size=count)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def in_each_process(check: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of a function that each process of the fixture `pool` runs, with the parameters of the test.

    The processes import the test by its name, so only decorators that mark the test may stand above this one.
    """
    name = Path(inspect.getfile(check)).stem, check.__name__

    @functools.wraps(check)
    def test(pool: ProcessPool, **parameters: Any) -> None:
        pool(_run, *name, parameters)

    signature = inspect.signature(check)
    pool = inspect.Parameter("pool", inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), pool])  # type: ignore[attr-defined]
    return test


def _run(module: str, name: str, parameters: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**parameters)
