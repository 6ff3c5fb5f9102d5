"""Rewrites damaged ONNX models by the command, in forked processes, and checks how each ends: `make fuzz`.

A file must end with exit code 0, 2, 3 or, fewer than one in 200 of them, 70, and leave a whole output or none. No stack
trace may reach the shell. Exit code 1 if a file breaks a promise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import onnx

from mxfp8_graph import __main__, cli  # noqa: F401 - the command has loaded its modules before it is forked

from .onnx_models import DATA, DATA_BYTES, RECIPE, mutate, seeds

ROOT: Final = Path(__file__).parents[2]
CORPUS: Final = sorted((ROOT / "tests" / "fuzz" / "corpus").iterdir())
"""Files that once ended wrongly, and one for each message that they or others are refused with."""
SLOW: Final = -1
"""The code of a file that takes too long, which breaks no promise."""


class Result(NamedTuple):
    """How a file ended: the exit code that the command would have, and the text of what breaks a promise, if any."""

    code: int
    fault: str = ""


def inputs(count: int, seed: int) -> list[bytes]:
    """Returns the files of the corpus, twelve good models, and `count` damaged ones."""
    good = seeds()
    rngs = (random.Random(f"{seed}/{number}") for number in range(count))
    return [*(path.read_bytes() for path in CORPUS), *good, *(mutate(rng.choice(good), rng) for rng in rngs)]


def attempt(data: bytes, folder: Path, *, seconds: float = 120) -> Result:
    """Returns how the command ends on a file, within so many seconds; `folder` is empty."""
    files = {folder / "model.onnx": data, folder / DATA: DATA_BYTES}
    for path, content in files.items():
        path.write_bytes(content)
    output = folder / "output" / "model.onnx"
    output.parent.mkdir()
    process = multiprocessing.get_context("fork").Process(target=_rewrite, args=(folder / "model.onnx", output))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Result(SLOW)
    code, printed = process.exitcode, output.with_suffix(".txt").read_text(errors="replace").strip()
    output.with_suffix(".txt").unlink()
    fault = "" if code in {0, 2, 3, 70} and "Traceback" not in printed and printed else f"ends with {code}: {printed}"
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


def _rewrite(path: Path, output: Path) -> None:
    """Runs the command in this process, which prints to a file beside `output`."""
    sys.stdout = sys.stderr = output.with_suffix(".txt").open("a", buffering=1)
    for descriptor in (1, 2):  # of C++
        os.dup2(sys.stdout.fileno(), descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, resource.RLIM_INFINITY))  # an allocation fails, not the machine
    (recipe := path.with_name("recipe.yaml")).write_text(RECIPE.model_dump_json())
    sys.argv = ["mxfp8-graph", "rewrite", str(path), "--output", str(output), "--recipe", str(recipe)]
    __main__.main()


def fuzz(files: Sequence[bytes]) -> Iterator[Result]:
    for data in files:
        with tempfile.TemporaryDirectory() as folder:
            yield attempt(data, Path(folder))


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
    results = list(fuzz(files))
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
