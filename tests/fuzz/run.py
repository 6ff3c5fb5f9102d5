"""Rewrites damaged ONNX models and checks how each ends: `make fuzz`.

A file must end with exit code 0, 2, 3 or, fewer than one in 200 of them, 70, and leave a whole output or none. A forked
worker calls the API for one file after the other. The command tries again what ended a worker, what the API ended with
70, and some others: no signal and no stack trace may reach the shell. Exit code 1 if a file breaks a promise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

import onnx

import mxfp8_graph
from mxfp8_ops.errors import Mxfp8Error

from .onnx_models import DATA, DATA_BYTES, RECIPE, mutate, seeds

ROOT: Final = Path(__file__).parents[2]
CORPUS: Final = sorted((ROOT / "tests" / "fuzz" / "corpus").iterdir())
"""Files that once ended wrongly, and one for each message that they or others are refused with."""
ENDED, SLOW = -1, -2
"""The codes of a file that ended its worker, and of one that takes too long, which breaks no promise."""


class Result(NamedTuple):
    """How a file ended: the exit code that the command would have, and the text of what breaks a promise, if any."""

    code: int
    fault: str = ""


def inputs(count: int, seed: int) -> list[bytes]:
    """Returns the files of the corpus, twelve good models, and `count` damaged ones."""
    good = seeds()
    rngs = (random.Random(f"{seed}/{number}") for number in range(count))
    return [*(path.read_bytes() for path in CORPUS), *good, *(mutate(rng.choice(good), rng) for rng in rngs)]


def attempt(data: bytes, folder: Path, *, command: bool = False) -> Result:
    """Returns how the rewrite of a file ends, called here or as a command; `folder` is empty."""
    files = {folder / "model.onnx": data, folder / DATA: DATA_BYTES}
    for path, content in files.items():
        path.write_bytes(content)
    output = folder / "output" / "model.onnx"
    output.parent.mkdir()
    code, fault = (_command if command else _call)(folder / "model.onnx", output)
    written = {path.name for path in output.parent.iterdir()}
    if any(path.read_bytes() != content for path, content in files.items()):
        fault += "the input changed"
    if written - ({output.name, f"{output.name}.data"} if code == 0 else set()):
        fault += f"left in the output's folder: {written}"
    if code == 0:
        try:
            onnx.load(output)
        except Exception as error:
            fault += f"the output cannot be read: {error}"
    return Result(code, fault)


def _call(path: Path, output: Path) -> Result:
    try:
        mxfp8_graph.rewrite(path, RECIPE, output=output)
    except mxfp8_graph.NothingEligibleError:
        return Result(3)
    except (Mxfp8Error, OSError):
        return Result(2)
    except Exception:
        return Result(70)
    return Result(0)


def _command(path: Path, output: Path) -> Result:
    (recipe := path.with_name("recipe.yaml")).write_text(RECIPE.model_dump_json())
    words = [sys.executable, "-m", "mxfp8_graph", "rewrite", path, "--output", output, "--recipe", recipe]
    run = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    said = run.stderr.strip()
    good = run.returncode in {0, 2, 3, 70} and "Traceback" not in said and (said or not run.returncode)
    return Result(run.returncode, "" if good else f"the command ends with {run.returncode}: {said}")


def _work(results: Connection, files: Sequence[bytes]) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, resource.RLIM_INFINITY))  # an allocation fails, not the machine
    for data in files:
        with tempfile.TemporaryDirectory() as folder:
            results.send(attempt(data, Path(folder)))


def fuzz(files: Sequence[bytes], *, seconds: float = 120, every: int = 500) -> list[Result]:
    """Returns how the files ended; one may take so many seconds, and the command tries one in `every` again."""
    fork = multiprocessing.get_context("fork")
    results: list[Result] = []
    while len(results) < len(files):
        reader, writer = fork.Pipe(duplex=False)
        worker = fork.Process(target=_work, args=(writer, files[len(results) :]))
        worker.start()
        writer.close()
        try:
            while len(results) < len(files) and reader.poll(seconds):
                results.append(reader.recv())
            ended = SLOW
        except EOFError:
            ended = ENDED
        worker.kill()
        worker.join()
        results += [Result(ended)] * (len(results) < len(files))
    for number, result in enumerate(results):
        if not result.fault and result.code != SLOW and (result.code in {ENDED, 70} or number % every == every - 1):
            with tempfile.TemporaryDirectory() as folder:
                results[number] = attempt(files[number], Path(folder), command=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "fuzz", help="folder for files that break a promise"
    )
    options = parser.parse_args(arguments)
    files = inputs(options.count, options.seed)
    results = fuzz(files)
    codes = Counter(result.code for result in results)
    print(", ".join(f"{count} with {code}" for code, count in sorted(codes.items())))
    for number, (code, fault) in enumerate(results):
        if fault or code == 70:
            path = options.out / f"{options.seed}-{number}.onnx"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[number])
            print(f"{path}: exit code {code} {fault}")
    return int(any(result.fault for result in results) or codes[70] >= len(files) / 200)


if __name__ == "__main__":
    sys.exit(main())
