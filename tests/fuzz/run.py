"""Tries changed inputs on the targets, counts the outcomes, and saves the inputs that break something.

    python -m tests.fuzz.run --target recipes --seconds 60 --seed 1
    python -m tests.fuzz.run --target recipes --input FILE

Exit code 1 if there is a finding. Findings are saved in OUT/TARGET/findings: the smallest input that was met, and a
text that says what it does. Inputs that reach something new are kept in OUT/TARGET/corpus, and the next run starts from
them too; --keep adds them to the committed corpus as well, while there is room.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import CORPUS, ROOT, TARGETS, exists
from .supervisor import Limits, Supervisor
from .trial import Job
from .verdicts import ACCEPTED, FINDING, REFUSED, Verdict

LARGEST_CORPUS = 64 << 10
"""Bytes of the committed corpus of a target."""


@dataclass
class Result:
    """The outcomes of the inputs of one target."""

    target: str
    seconds: float = 0.0
    processor: float = 0.0
    """Seconds of processor time, those that targets take to start among them."""
    interrupted: bool = False
    counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {outcome: Counter() for outcome in (ACCEPTED, REFUSED, FINDING)}
    )
    """Inputs by outcome and kind."""
    findings: dict[str, Verdict] = field(default_factory=dict)
    """By kind: the one with the smallest input."""
    kept: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """Place and input, by place and message: those that were refused in a new place or with a new message."""

    @property
    def tried(self) -> int:
        """How many inputs were tried."""
        return sum(map(Counter.total, self.counts.values()))

    def add(self, verdict: Verdict) -> None:
        """Counts a verdict, and keeps its input if it is worth it."""
        self.counts[verdict.outcome][verdict.kind] += 1
        if verdict.outcome == FINDING:
            known = self.findings.get(verdict.kind)
            if verdict.data is not None and (known is None or len(verdict.data) < len(known.data or "")):
                self.findings[verdict.kind] = verdict
        elif verdict.data is not None and verdict.outcome == REFUSED:
            key, data = f"{verdict.kind} {verdict.text}", bytes.fromhex(verdict.data)
            if len(data) < len(self.kept.get(key, (verdict.kind, data + b" "))[1]):
                self.kept[key] = verdict.kind, data

    def interesting(self) -> list[bytes]:
        """Returns the kept inputs: first one of each place, then a second, ...; the small ones of each round first."""
        seen: Counter[str] = Counter()
        ranked = []
        for kind, data in sorted(self.kept.values(), key=lambda kept: len(kept[1])):
            seen[kind] += 1
            ranked.append((seen[kind], len(data), data))
        return [data for _, _, data in sorted(ranked)]

    def __str__(self) -> str:
        """Returns the counts as lines."""
        totals = ", ".join(f"{kinds.total()} {outcome}" for outcome, kinds in self.counts.items() if outcome != FINDING)
        rates = " and ".join(f"{self.tried / max(s, 0.01):.0f} a second" for s in (self.seconds, self.processor))
        lines = [
            f"{self.target}: {self.tried} inputs in {self.seconds:.0f} s ({rates} of processor time): {totals}, "
            f"{self.counts[FINDING].total()} findings of {len(self.findings)} kinds"
        ]
        for outcome in (REFUSED, FINDING):
            lines += [f"  {count:8} {kind}" for kind, count in self.counts[outcome].most_common()]
        return "\n".join(lines)


def fuzz(job: Job, *, jobs: int = 1, limits: Limits | None = None) -> Result:
    """Returns the verdicts on the inputs that `jobs` processes tried, each with a seed of its own."""
    begun, spent, result = time.time(), _processor_time(), Result(job.target)
    supervisors: list[Supervisor] = []
    try:
        for index in range(jobs):
            share = None if job.count is None else (job.count + jobs - 1 - index) // jobs
            own = replace(job, seed=f"{job.seed}/{job.target}/{index}", count=share)
            supervisors.append(Supervisor(own, limits or Limits()))
        while not all(one.finished for one in supervisors):
            for one in supervisors:
                for verdict in [] if one.finished else one.poll():
                    result.add(verdict)
            time.sleep(0.05)
    except KeyboardInterrupt:  # earlier findings count
        result.interrupted = True
    finally:
        for one in supervisors:
            one.end()
    result.seconds, result.processor = time.time() - begun, _processor_time() - spent
    return result


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def save_findings(result: Result, seed: str, out: Path) -> None:
    """Writes the findings of a run, and says how to see them again."""
    for kind, verdict in result.findings.items():
        path = out / "findings" / f"{re.sub('[^A-Za-z0-9.]+', '-', kind)[:150]}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = bytes.fromhex(verdict.data or "")
        if not path.exists() or path.stat().st_size > len(data):
            path.write_bytes(data)
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        again = f"python -m tests.fuzz.run --target {result.target} --input {shown}"
        head = f"{kind}\n{result.counts[FINDING][kind]} times with seed {seed}\nto see it again: {again}\n"
        path.with_suffix(".txt").write_text(f"{head}\n{verdict.text}", encoding="utf-8", errors="replace")
        print(f"{kind}: {again}")


def save_corpus(result: Result, corpus: Path, room: float) -> None:
    """Adds the inputs that reached something new to a folder, until it holds `room` bytes."""
    corpus.mkdir(parents=True, exist_ok=True)
    room -= sum(path.stat().st_size for path in corpus.iterdir())
    for data in result.interesting():
        if len(data) <= room:
            (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
            room -= len(data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    targets = options.target or list(TARGETS)
    if missing := [name for name in targets if not exists(name)]:
        print(f"no such target: {', '.join(f'tests/fuzz/{name}.py' for name in missing)}", file=sys.stderr)
    code = 1 if missing else 0
    limits = Limits(options.hang_seconds, options.megabytes)
    for target in (name for name in targets if name not in missing):
        out = options.out / target
        job = Job(
            target,
            str(options.seed),
            pool=[] if options.input else [str(CORPUS / target), str(out / "corpus")],
            files=[str(path.resolve()) for path in options.input] if options.input else None,
            count=options.count,
            until=time.time() + options.seconds if options.seconds else float("inf"),
            engine=options.engine,
        )
        result = fuzz(job, jobs=1 if options.input else options.jobs, limits=limits)
        print(result, flush=True)
        if options.input:
            print("\n".join(verdict.text for verdict in result.findings.values()))
        else:
            save_findings(result, job.seed, out)
            save_corpus(result, out / "corpus", float("inf"))
            if options.keep:
                save_corpus(result, CORPUS / target, LARGEST_CORPUS)
        code |= bool(result.findings)
        if result.interrupted:
            return code or 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--target", action="append", help=f"one of {', '.join(TARGETS)}; repeatable; default: all")
    parser.add_argument("--input", type=Path, nargs="+", help="try these inputs, and only these, unchanged")
    parser.add_argument("--seconds", type=float, help="how long to look, for each target")
    parser.add_argument("--count", type=int, help="how many changed inputs to try, for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument(
        "--engine", choices=["mutate", "atheris"], default="mutate", help="atheris: guided by the code that is reached"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz", help="folder for findings and inputs kept")
    parser.add_argument("--keep", action="store_true", help="add the inputs kept to tests/fuzz/corpus")
    parser.add_argument("--hang-seconds", type=float, default=Limits.seconds)
    parser.add_argument("--megabytes", type=int, default=Limits.megabytes)
    return parser


if __name__ == "__main__":
    sys.exit(main())
