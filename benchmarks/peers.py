"""Peers in processes of their own: their threads do not disturb ours, and their memory can be measured apart from ours.

    peer = Peer("openvino_peer.py", {"model": "model.onnx", "precision": "bf16", "threads": 2}, python=sys.executable)
    peer.feed(feeds)
    seconds = peer()  # the time of one inference, taken in the other process

The script gives `serve` its engine. This module needs NumPy alone: it runs in the environments of the peers too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Feeds = dict[str, np.ndarray]


class Engine(Protocol):
    """The object that a peer's script makes from its settings."""

    version: str

    def feed(self, feeds: Feeds) -> None:
        """Takes the inputs of the runs that follow; those that the model lacks are left out."""

    def run(self) -> None:
        """Runs the model once."""

    def output(self) -> np.ndarray:
        """Returns the first output of the last run."""


class Peer:
    """An engine in another process. Calling it runs the model once and returns the seconds that took.

    Args:
        script: a file beside this one that calls `serve`.
        settings: the argument of the engine that `serve` runs.
        python: an interpreter that has what the script imports.

    Raises:
        RuntimeError: the process ended; with its last line.
    """

    def __init__(self, script: str, settings: dict[str, Any], *, python: str = sys.executable) -> None:
        command = [python, str(Path(__file__).with_name(script)), json.dumps(settings)]
        self._folder = tempfile.TemporaryDirectory()
        with self._log.open("w") as log:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.version = self._answer()

    def feed(self, feeds: Feeds) -> None:
        """Sets the inputs of the runs that follow."""
        path = Path(self._folder.name) / "feeds.npz"
        np.savez(path, **feeds)  # type: ignore[arg-type]
        self._ask(f"feed {path}")

    def __call__(self) -> float:
        """Runs the model once and returns the seconds."""
        return float(self._ask("run"))

    def output(self) -> np.ndarray:
        """Returns the first output of a run."""
        path = Path(self._folder.name) / "output.npy"
        self._ask(f"output {path}")
        return np.asarray(np.load(path))

    def memory(self) -> int:
        """Returns the most bytes that the process held, less those before it opened the model."""
        return int(self._ask("memory"))

    def close(self) -> None:
        """Ends the process."""
        self._child.kill()
        self._child.wait()
        self._folder.cleanup()

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / "log"

    def _ask(self, line: str) -> str:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{line}\n")
        self._child.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._child.stdout is not None
        answer = self._child.stdout.readline().strip()
        if not answer:
            log = self._log.read_text().strip().splitlines()
            self.close()
            raise RuntimeError(log[-1] if log else "the process ended without output")
        return answer


def serve(engine_of: Callable[[dict[str, Any]], Engine]) -> None:
    """Makes the engine, then answers each line of `Peer`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout, which is for answers only
    before = _memory("VmRSS")
    engine = engine_of(json.loads(sys.argv[1]))
    print(engine.version, file=answers, flush=True)
    for line in map(str.strip, sys.stdin):
        command, _, path = line.partition(" ")
        answer: object = "done"
        if command == "feed":
            with np.load(path) as feeds:
                engine.feed(dict(feeds))
        elif command == "run":
            start = time.perf_counter()
            engine.run()
            answer = time.perf_counter() - start
        elif command == "output":
            engine.run()
            np.save(path, engine.output())
        else:
            answer = _memory("VmHWM") - before
        print(answer, file=answers, flush=True)


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{field}:"))
