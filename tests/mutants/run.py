"""Counts the mutants that `make test` and `make test-emulation` kill: `make mutants`, an hour or two on two cores.

First it runs these tests once and notes which tests run which lines. Then it changes the product in one place at a time
and runs the tests that reach this place: quick tests first, until one fails. A change of C++ is compiled into a library
of its own, and the tests of custom_ops run against it. Finished mutants are in build/mutants/results.json, so that a
stopped run goes on; remove the folder to begin again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from mutants.points import Mutant, mutants, mutated_cpp, sample

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mutants"
TIER = "not slow and not gpu and not tools and not samples and not processes"
"""Which tests `make test` and `make test-emulation` run: only emulated threads notice a change of the CUDA code."""

AREAS = {
    "policy": (18, "mxfp8_graph/policy/*.py"),
    "ONNX pass": (22, "mxfp8_graph/onnx_pass/**/*.py"),
    "torch pass": (20, "mxfp8_graph/torch_pass/*.py"),
    "running": (15, "mxfp8_graph/running/*.py"),
    "weights, packed": (15, "mxfp8_graph/weights.py", "mxfp8_graph/packed/*.py"),
    "numerics": (
        20,
        *(f"custom_ops/mxfp8_ops/{name}.py" for name in ("numerics", "formats", "onnx_functions", "function_body")),
        "custom_ops/mxfp8_ops/nodes/*.py",
    ),
    "argument checks": (12, "custom_ops/mxfp8_ops/checks.py", "custom_ops/mxfp8_ops/cpu/*.py"),
    "torch ops": (10, "custom_ops/mxfp8_ops/torch_ops/*.py"),
    "C++ kernels": (10, "custom_ops/mxfp8_ops/src/cpu/kernels/**/*.cpp"),
    "C++ ABI, ONNX Runtime": (8, "custom_ops/mxfp8_ops/src/cpu/*.cpp", "custom_ops/mxfp8_ops/src/ort/*.cpp"),
}
"""Per area how many mutants are tried, and the files that they are drawn from."""

CPP_TESTS = "tests/mxfp8_ops/test_*.py"
OF_WHOLE_FILES = ("test_every_kernel_ran",)
"""Tests that pass only after the others of their file, and would kill any mutant."""
FIRST_TESTS = 25
"""So many tests run before all others that reach a mutant: most mutants are killed by these, in seconds."""
MOST_SECONDS = 60.0
"""Tests of so many seconds run for one mutant, the quickest that reach it. The whole suite reaches some places, and a
mutant that survives all of it would take minutes; so a survivor is one of these tests.
"""

MOST_CPP_SECONDS = 180.0
"""The same for a change of C++, of which is not known which tests reach it."""


@dataclass(frozen=True)
class Result:
    """What happened to one mutant: killed by a test, survived, or no mutant at all as it does not compile."""

    name: str
    area: str
    outcome: str
    test: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", default=TIER, help="pytest's -m expression of the tests that should kill")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--names", type=Path, help="a file with one mutant's name a line, instead of the sample")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    FOLDER.mkdir(parents=True, exist_ok=True)
    chosen = named(options.names) if options.names else sampled(options.seed)
    runner = Runner(options.tests)
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(runner.try_mutant, chosen))
    print(table([runner.results[mutant.name] for mutant, _ in chosen]))


def sampled(seed: int) -> list[tuple[Mutant, str]]:
    """Returns the sample, each with its area."""
    chosen = []
    for area, (count, *patterns) in AREAS.items():
        paths = sorted({str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)})
        # Package files hold imports only, and few machines have AMX.
        paths = [path for path in paths if not path.endswith(("__init__.py", "gemm_amx.cpp"))]
        candidates = [mutant for path in paths for mutant in mutants(ROOT, path)]
        chosen += [(mutant, area) for mutant in sample(candidates, count, seed)]
    return chosen


def named(file: Path) -> list[tuple[Mutant, str]]:
    """Returns the mutants that a file names as `area<tab>name`."""
    rows = [line.split("\t") for line in file.read_text().splitlines()]
    known = {m.name: m for path in {name.partition("::")[0] for _, name in rows} for m in mutants(ROOT, path)}
    return [(known[name], area) for area, name in rows]


class Runner:
    """Runs tests against mutants and keeps the results."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.file = FOLDER / "results.json"
        stored = json.loads(self.file.read_text()) if self.file.exists() else []
        self.results = {row["name"]: Result(**row) for row in stored}
        self.reached, self.seconds, self.failed = self.measured()
        self.writing, self.building = threading.Lock(), threading.Lock()

    def measured(self) -> tuple[dict[str, dict[int, list[str]]], dict[str, float], list[str]]:
        """Returns the tests that run each line of each file, the seconds of each test, and the tests that fail without
        a mutant, which kill none; runs them once if it must.
        """
        folder = FOLDER / "coverage"
        if not folder.exists():
            partial = FOLDER / "coverage.part"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            arguments = ["-m", self.tier, "-n", "2", "--dist", "loadfile", "-p", "mutants.contexts"]
            self.pytest(arguments, MUTANTS_COVERAGE=str(partial))
            partial.rename(folder)
        lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        seconds: dict[str, float] = defaultdict(float)
        failed: list[str] = []
        for part in map(json.loads, (path.read_text() for path in folder.glob("*.json"))):
            for file, tests in part["lines"].items():
                for line, names in tests.items():
                    lines[file][int(line)] += names
            for test, time_taken in part["seconds"].items():
                seconds[test] += time_taken
            failed += part["failed"]
        if failed:
            print("These tests fail without a mutant and are left out:", *failed, sep="\n", flush=True)
        return lines, seconds, failed

    def try_mutant(self, chosen: tuple[Mutant, str]) -> None:
        """Runs the tests that reach a mutant, unless a run before has done so."""
        mutant, area = chosen
        if mutant.name in self.results:
            return
        start = time.monotonic()
        if mutant.path.endswith(".py"):
            outcome, test = self.run_tests(self.tests_of(mutant), MUTANT=mutant.name)
        else:
            with self.building:  # one build folder
                library = build(mutant)
                outcome, test = ("does not compile", "") if library is None else self.run_cpp_tests(library)
        result = Result(mutant.name, area, outcome, test, round(time.monotonic() - start, 1))
        with self.writing:
            self.results[mutant.name] = result
            self.file.write_text(json.dumps([asdict(row) for row in self.results.values()], indent=1))
        print(f"{result.outcome:8} {result.seconds:6.1f} s  {mutant.name} (line {mutant.lines[0]})  {test}", flush=True)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Returns the tests that reach a mutant's statement, the quickest first."""
        reached = self.reached.get(mutant.path, {})
        first, last = mutant.lines
        tests = {test for line in range(first, last + 1) for test in reached.get(line, [])}
        files = {test for test in tests if "::" not in test}
        return self.affordable({test for test in tests if test.partition("::")[0] not in files} | files)

    def affordable(self, tests: Iterable[str], most: float = MOST_SECONDS) -> list[str]:
        """Returns the quickest of the tests, up to so many seconds in all."""
        alone = (test for test in tests if not test.endswith(OF_WHOLE_FILES))
        ordered = sorted(alone, key=lambda test: (self.cost(test), test))
        sums = itertools.accumulate(map(self.cost, ordered))
        return [test for test, seconds in zip(ordered, sums, strict=True) if seconds <= most] or ordered[:1]

    def cost(self, test: str) -> float:
        """Returns the seconds of a test, or of all tests of a file."""
        if "::" in test:
            return self.seconds[test]
        return sum(seconds for name, seconds in self.seconds.items() if name.startswith(f"{test}::"))

    def run_cpp_tests(self, library: Path) -> tuple[str, str]:
        files = {str(path.relative_to(ROOT)) for path in ROOT.glob(CPP_TESTS)}
        tests = self.affordable((test for test in self.seconds if test.partition("::")[0] in files), MOST_CPP_SECONDS)
        return self.run_tests(tests, MUTANT_LIBRARY=str(library))

    def run_tests(self, tests: list[str], **environment: str) -> tuple[str, str]:
        """Runs tests until one fails; returns the outcome and the test that failed."""
        left_out = [f"--deselect={test}" for test in self.failed]
        for some in (tests[:FIRST_TESTS], tests[FIRST_TESTS:]):
            if not some:
                continue
            arguments = FOLDER / f"arguments-{threading.get_ident()}"
            arguments.write_text("\n".join(some))
            limit = 300 + 10 * sum(map(self.cost, some))
            code, printed = self.pytest(["-m", self.tier, "-x", *left_out, f"@{arguments}"], limit=limit, **environment)
            if code not in (0, 5):  # 5: all were deselected
                failed = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
                return "killed", failed[0].split()[1] if failed else f"exit code {code}"
        return "survived" if tests else "no test", ""

    def pytest(self, arguments: list[str], limit: float | None = None, **environment: str) -> tuple[int, str]:
        """Runs pytest in a process of its own; returns its exit code and what it printed. Exit code -1: too slow."""
        paths = [str(ROOT / "tests"), str(ROOT / "tests" / "mutants" / "site"), os.environ.get("PYTHONPATH", "")]
        log = FOLDER / f"log-{threading.get_ident()}"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=no", *arguments]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = -1
            if code == -1:
                os.killpg(process.pid, 9)
                process.wait()
        return code, log.read_text(errors="replace")


def build(mutant: Mutant) -> Path | None:
    """Builds the library with a change of C++; returns its folder, or None if it does not compile."""
    tree, output = FOLDER / "custom_ops", FOLDER / "library"
    if not tree.exists():
        shutil.copytree(ROOT / "custom_ops", tree)
        folders = ["-B", str(FOLDER / "cmake"), f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}"]
        subprocess.run(["cmake", "-S", str(tree), *folders], check=True, stdout=subprocess.DEVNULL)
    original = ROOT / mutant.path
    changed = FOLDER / mutant.path
    changed.write_text(mutated_cpp(original.read_text(), mutant.name))
    command = ["cmake", "--build", str(FOLDER / "cmake"), "--parallel", "2", "--target", "mxfp8_ops"]
    try:
        code = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode
    finally:
        changed.write_text(original.read_text())  # the next build compiles it again, unchanged
    return output if code == 0 else None


def table(results: list[Result]) -> str:
    """Returns the results by area and the survivors, in Markdown."""
    lines = ["| area | mutants | killed |", "|---|---|---|"]
    valid = [result for result in results if result.outcome != "does not compile"]
    for area in [*AREAS, "all"]:
        rows = [result for result in valid if area in (result.area, "all")]
        lines.append(f"| {area} | {len(rows)} | {sum(row.outcome == 'killed' for row in rows)} |")
    lines += ["", *(f"- {row.outcome}: `{row.name}`" for row in valid if row.outcome != "killed")]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
