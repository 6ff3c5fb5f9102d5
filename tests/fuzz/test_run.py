"""Rewrites damaged ONNX models by the command, in forked processes, and checks how each ends.

A file must end with exit code 0, 2, 3 or, fewer than one in 200 of them, 70, and leave a whole output or none. No stack
trace may reach the shell. `make fuzz` tries FUZZ_COUNT files of FUZZ_SEED; build/fuzz has those that end otherwise.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

import onnx
import pytest
from fuzz.onnx_models import DATA, DATA_BYTES, RECIPE, mutate, seeds

from mxfp8_graph import __main__, cli  # noqa: F401 - the command has loaded its modules before it is forked

ROOT: Final = Path(__file__).parents[2]
CORPUS: Final = sorted((ROOT / "tests" / "fuzz" / "corpus").iterdir())
"""Files that once ended wrongly, and one for each message that they or others are refused with."""
KEPT: Final = ROOT / "build" / "fuzz"
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
    """Returns how the command ends on a file, within so many seconds, in a new folder."""
    folder.mkdir()
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


@pytest.mark.tools
def test_damaged_models_end_as_promised(tmp_path: Path) -> None:
    files, faults = inputs(int(os.environ.get("FUZZ_COUNT", "200")), int(os.environ.get("FUZZ_SEED", "1"))), []
    codes: Counter[int] = Counter()
    for number, data in enumerate(files):
        code, fault = attempt(data, tmp_path / str(number))
        shutil.rmtree(tmp_path / str(number))
        codes[code] += 1
        if fault or code == 70:
            KEPT.mkdir(parents=True, exist_ok=True)
            (KEPT / f"{number}.onnx").write_bytes(data)
        faults += [f"{KEPT / f'{number}.onnx'}: exit code {code} {fault}"] * bool(fault)
    print(", ".join(f"{count} with {code}" for code, count in sorted(codes.items())))
    assert faults == []
    assert codes[70] < len(files) / 200
