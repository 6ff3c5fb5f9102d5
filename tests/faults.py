"""Kills writers at random moments and at every step they take, fills their disk, lets them meet: is a file ever lost?

    python tests/faults.py [--kills 300] [--seed 0]

Prints how often which state was found, and exits with 1 if one of them was wrong. A state is right if the input is what
it was, the output is the old one (or none) or the new one, and nothing else is left: at once where a writer could clean
up, after the next run where it could not. Workers are forked from one process that has imported everything.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import builders
import onnx

import mxfp8_graph
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops.errors import Mxfp8Error

STEPS = frozenset({"open", "os.link", "os.rename", "os.remove", "os.truncate", "fcntl.flock"})
"""Audit events of what a writer does to files."""

REFUSED = 2
INTERRUPTED = 130


@dataclass
class Case:
    """A way to write a result."""

    name: str
    write: Callable[[Path, bool], Any]
    """(folder to write to, overwrite)."""
    old: Callable[[Path], Any] | None
    """Writes an older result that is replaced, or None if there is none."""
    before: dict[str, bytes] = field(default_factory=dict)
    """The files of the older result."""
    after: dict[str, bytes] = field(default_factory=dict)
    """The files of the new result."""

    @property
    def overwrite(self) -> bool:
        return self.old is not None

    def run(self, folder: Path) -> None:
        self.write(folder, self.overwrite)


def cases(folder: Path, *, torch: bool = True) -> list[Case]:
    """Returns every kind of result, written where there is none and over an older one; `folder` gets the input.

    Args:
        folder: gets the input.
        torch: whether .pt2 files are among them. They need torch.
    """
    sizes = (512, 1024, 512)
    model = builders.save(builders.chain_model(sizes), folder / "m.onnx", external=True)
    packed, _ = mxfp8_graph.rewrite(builders.chain_model(sizes))
    other = Recipe(name="other", activations="unchanged")

    def rewritten(external: str) -> Callable[[Path, bool], Any]:
        return lambda to, overwrite: mxfp8_graph.rewrite(
            model, output=to / "o.onnx", external_data=external, overwrite=overwrite
        )

    def older(external: str) -> Callable[[Path], Any]:
        return lambda to: mxfp8_graph.rewrite(model, other, output=to / "o.onnx", external_data=external)

    def exported(to: Path, overwrite: bool) -> Path:
        return mxfp8_graph.export_safetensors(packed, to / "o.safetensors", overwrite=overwrite)

    found = [
        Case("one file", rewritten("never"), None),
        Case("model and data", rewritten("always"), None),
        Case("one file over one", rewritten("never"), older("never")),
        Case("one file over a pair", rewritten("never"), older("always")),
        Case("a pair over one file", rewritten("always"), older("never")),
        Case("a pair over a pair", rewritten("always"), older("always")),
        Case("safetensors", exported, None),
        Case("safetensors over one", exported, lambda to: (to / "o.safetensors").write_bytes(b"old" * 100_000)),
    ]
    if torch:
        found += _torch_cases()
    for number, case in enumerate(found):
        with scratch(folder / str(number)) as place:
            if case.old is not None:
                case.old(place)
                case.before = contents(place)
            case.run(place)
            case.after = contents(place)
    return found


def _torch_cases() -> list[Case]:
    import torch

    layers = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
    program = torch.export.export(layers, (torch.zeros(1, 512),))

    def save(to: Path, overwrite: bool) -> Path:
        return mxfp8_graph.save(program, to / "o.pt2", overwrite=overwrite)

    return [
        Case("pt2", save, None),
        Case("pt2 over one", save, lambda to: (to / "o.pt2").write_bytes(b"old" * 100_000)),
    ]


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns every file of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def start(work: Callable[[], Any], at_step: Callable[[int], None] | None = None) -> int:
    """Returns the id of a forked process that does `work` as the command line would; `at_step` is called with 0, 1, ...

    before each thing it does to a file. The process ends with 0, REFUSED or INTERRUPTED.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until the handlers are those of the command line
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _terminate)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        if at_step is not None:
            _count_steps(at_step)
        work()
        code = 0
    except Mxfp8Error:
        code = REFUSED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def _terminate(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(signum)


def _count_steps(at_step: Callable[[int], None]) -> None:
    steps, writer = iter(range(sys.maxsize)), os.getpid()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if os.getpid() != writer:  # a child that makes one call into onnx, see mxfp8_graph/onnx_model/child.py
            return
        if event in STEPS and not (event == "open" and str(arguments[0]).startswith(("/usr", "/proc", "/sys"))):
            at_step(next(steps))

    sys.addaudithook(hook)


def wait(pid: int) -> int:
    """Returns how a process ended: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def state(case: Case, folder: Path) -> str:
    """Returns which result is there: "old", "new", "new, not all in place", or what is wrong."""
    found = contents(folder)
    names = case.before.keys() | case.after.keys()
    results = {name: content for name, content in found.items() if name in names}
    if results == case.after:
        return "new"
    if results == case.before:
        return "old"
    model = results.get("o.onnx")
    if model == case.after.get("o.onnx") and "o.onnx.data" not in case.after:
        return "new"  # in one file; the old data is not removed yet
    if model is not None and _tensors(model, found) == _tensors(case.after["o.onnx"], case.after):
        return "new, not all in place"
    return f"wrong: {sorted(found)}"


def _tensors(model: bytes, files: dict[str, bytes]) -> dict[str, bytes]:
    """Returns what a model and the files beside it hold."""
    held = {}
    for tensor in onnx.ModelProto.FromString(model).graph.initializer:
        at = {entry.key: entry.value for entry in tensor.external_data}
        begin = int(at.get("offset", 0))
        content = files[at["location"]][begin : begin + int(at["length"])] if at else tensor.raw_data
        held[tensor.name] = content
    return held


class Trials:
    """Counts what was found, and remembers what was wrong."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    @contextlib.contextmanager
    def place(self, case: Case) -> Iterator[Path]:
        """Yields a folder with the older result, and checks that the input is as before."""
        before = inputs(self._folder)
        with scratch(self._folder / "out") as place:
            for name, content in case.before.items():
                (place / name).write_bytes(content)
            yield place
        self.check(case.name, inputs(self._folder) == before, "the input changed")

    def kill(self, case: Case, number: signal.Signals, kill: Callable[[Path], int]) -> int:
        """Lets `kill` start a writer and end it, checks what that left, and returns how the writer ended."""
        label = f"{case.name}, {number.name}"
        with self.place(case) as place:
            ended = kill(place)
            left = state(case, place)
            self.check(label, not left.startswith("wrong"), left)
            if number != signal.SIGKILL and ended != 0:
                extra = contents(place).keys() - case.before.keys() - case.after.keys()
                self.check(label, not extra and ended == INTERRUPTED, f"ended with {ended} and left {sorted(extra)}")
            done = not case.overwrite and left.startswith("new")
            again = wait(start(lambda: case.run(place)))
            self.check(label, again == (REFUSED if done else 0), f"the next run ended with {again}")
            self.check(label, contents(place) == case.after, f"the next run left {sorted(contents(place))}")
        self.counts[f"{number.name}: {'done before' if ended == 0 else left}"] += 1
        return ended

    def check(self, label: str, ok: bool, what: str) -> None:
        """Remembers `what` unless `ok`."""
        if not ok:
            self.wrong.append(f"{label}: {what}")


def inputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def random_kills(trials: Trials, found: list[Case], count: int, seed: int) -> None:
    """Kills `count` writers at moments spread evenly over the time they take."""
    rng = random.Random(seed)
    seconds = [_seconds(trials, case) for case in found]
    for turn in range(count):
        case = found[turn % len(found)]
        number = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        moment = rng.uniform(0.0, 1.1 * seconds[turn % len(found)])

        def kill(place: Path, case: Case = case, number: int = number, moment: float = moment) -> int:
            pid = start(lambda: case.run(place))
            time.sleep(moment)
            os.kill(pid, number)
            return wait(pid)

        trials.kill(case, number, kill)


def _seconds(trials: Trials, case: Case) -> float:
    with trials.place(case) as place:
        begin = time.perf_counter()
        wait(start(lambda: case.run(place)))
        return time.perf_counter() - begin


def kills_at_every_step(trials: Trials, case: Case, number: signal.Signals) -> int:
    """Kills a writer before the first thing it does to a file, then before the second, ...; returns how many."""
    for step in range(1000):

        def at_step(now: int, step: int = step) -> None:
            if now == step:
                os.kill(os.getpid(), number)

        if trials.kill(case, number, lambda place: wait(start(lambda: case.run(place), at_step))) == 0:
            return step
    raise AssertionError("a writer without end")


def full_disks(trials: Trials, found: list[Case], count: int, seed: int) -> None:
    """Lets no file grow beyond a random size."""
    rng = random.Random(seed)
    for turn in range(count):
        case = found[turn % len(found)]
        room = rng.randrange(max(map(len, case.after.values())))

        def work(place: Path, case: Case = case, room: int = room) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            case.run(place)

        _refused(trials, case, "full disk", work)


def read_only_folders(trials: Trials, found: list[Case]) -> None:
    """Writes as a user without permission."""
    for case in found:

        def work(place: Path, case: Case = case) -> None:
            place.chmod(0o555)
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            case.run(place)

        _refused(trials, case, "read-only folder", work)


def _refused(trials: Trials, case: Case, label: str, work: Callable[[Path], None]) -> None:
    with trials.place(case) as place:
        ended = wait(start(lambda: work(place)))
        place.chmod(0o755)
        left = contents(place)
        ok = ended == REFUSED and left == case.before
        trials.check(f"{case.name}, {label}", ok, f"ended with {ended} and left {sorted(left)}")
    trials.counts[f"{label}: refused, the old result kept"] += ok


def writers_that_meet(trials: Trials, found: list[Case], rounds: int) -> None:
    """Lets four write the same result: over an older one all may, where there is none exactly one does."""
    for turn in range(rounds):
        case = found[turn % len(found)]
        with trials.place(case) as place:
            pids = [start(lambda case=case, place=place: case.run(place)) for _ in range(4)]  # type: ignore[misc]
            ended = sorted(map(wait, pids))
            ok = ended == ([0] * 4 if case.overwrite else [0] + [REFUSED] * 3) and contents(place) == case.after
            trials.check(f"{case.name}, four writers", ok, f"ended with {ended} and left {sorted(contents(place))}")
        trials.counts["four writers: one whole result"] += ok


def main() -> None:
    """Runs all of it and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        found = cases(folder)
        trials = Trials(folder)
        random_kills(trials, found, options.kills, options.seed)
        steps = sum(
            kills_at_every_step(trials, case, number)
            for case in found
            for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
        )
        full_disks(trials, found, 50, options.seed)
        read_only_folders(trials, found)
        writers_that_meet(trials, found, 50)
    print(
        f"{options.kills} kills at random moments (seed {options.seed}), {steps} at every step of {len(found)} writers"
    )
    for label, count in sorted(trials.counts.items()):
        print(f"{count:6}  {label}")
    print(f"{len(trials.wrong):6}  wrong", *trials.wrong, sep="\n        ")
    sys.exit(bool(trials.wrong))


if __name__ == "__main__":
    main()
