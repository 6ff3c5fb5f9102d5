"""Runs the tests against the lowest and the newest versions of what the project depends on, on every Python.

A row is a Python and a choice of versions: `3.10-lowest` takes the lowest that pyproject.toml declares of every direct
dependency, `3.13-newest` the newest that the package index has. Each row gets two fresh environments: one with the
extra `cpu` alone, where a model is rewritten, verified and run (`wheel_trial.py`), and one with the extras `torch` and
`test` too, where pytest runs. Arguments after `--` go to pytest in place of those of `make test`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from wheels import PYTHONS, ROOT, TRIAL, pythons, run

RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
ROWS = (f"{PYTHONS[0]}-lowest", *(f"{version}-newest" for version in PYTHONS))
"""Later Pythons have no wheels of the lowest versions."""
COUNTED = ("numpy", "ml_dtypes", "onnx", "onnxruntime", "onnxscript", "torch", "torchao", "transformers")
"""The packages whose versions the table gives."""
SUITE = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not slow and not gpu")
UV = Path(sys.executable).with_name("uv")


def environment() -> dict[str, str]:
    """Returns the variables of every command: no other sources than the wheel's, no Python that has to be fetched."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}


def build_wheel(folder: Path) -> Path:
    """Returns a wheel of this folder's files, for this machine."""
    shutil.rmtree(folder, ignore_errors=True)
    run(UV, "build", "--wheel", "--python", sys.executable, "--out-dir", folder, ROOT, env=environment())
    [wheel] = folder.glob("*.whl")
    return wheel


def install(python: str, folder: Path, wheel: Path, extras: list[str], arguments: argparse.Namespace) -> Path:
    """Returns the Python of a fresh environment with the wheel, in the versions that the row's folder is named for."""
    run(UV, "venv", "--clear", "--python", python, folder, env=environment())
    bare, more, without, chosen = (folder / name for name in ("bin/python", "more.txt", "without.txt", "chosen.txt"))
    more.write_text("\n".join(arguments.extra))
    # A marker that never holds takes a package out, also where another one requires it.
    without.write_text("".join(f"{name}; sys_platform == 'none'\n" for name in arguments.without))
    # uv finds direct dependencies in a project, not in a wheel.
    choice = [
        "--resolution",
        RESOLUTIONS[folder.parent.name.split("-")[1]],
        "--override",
        without,
        "--output-file",
        chosen,
    ]
    words = [word for extra in extras for word in ("--extra", extra)]
    run(UV, "pip", "compile", "--python", bare, *choice, *words, ROOT / "pyproject.toml", more, env=environment())
    run(UV, "pip", "install", "--python", bare, "--no-deps", "--requirements", chosen, env=environment())
    run(UV, "pip", "install", "--python", bare, "--no-deps", wheel, env=environment())
    return bare


def versions(python: Path) -> list[str]:
    """Returns the versions of Python and of the packages that count, "-" for one that is not there."""
    done = subprocess.run([UV, "pip", "freeze", "--python", python], capture_output=True, text=True, check=True)
    found = dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)
    code = "import platform; print(platform.python_version())"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return [done.stdout.strip(), *(found.get(name.replace("_", "-"), "-") for name in COUNTED)]


def run_suite(python: Path, folder: Path, words: list[str]) -> str:
    """Returns the counts of pytest; `tests.txt` in the folder has the failures."""
    report, log = folder / "tests.xml", folder / "tests.txt"
    report.unlink(missing_ok=True)
    command = [python.with_name("pytest"), f"--junitxml={report}", *words]
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=file, stderr=file, check=False)
    if not report.exists():
        return f"pytest ended with {done.returncode}: {log}"
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    tests, failures, errors, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
    failed = failures + errors
    return f"{tests - failed - skipped} passed, {failed} failed, {skipped} skipped" + (f": {log}" if failed else "")


def try_row(row: str, python: str, wheel: Path, arguments: argparse.Namespace) -> tuple[list[str], str, str]:
    """Returns versions, the outcome with the runtime dependencies alone, and the outcome of the tests."""
    folder = arguments.out / row
    folder.mkdir(parents=True, exist_ok=True)
    bare = install(python, folder / "runtime", wheel, ["cpu"], arguments)
    with tempfile.TemporaryDirectory() as empty:
        run(bare, TRIAL, empty, env=environment(), cwd=Path(empty))
    tested = install(python, folder / "suite", wheel, ["cpu", "torch", "test"], arguments)
    return versions(tested), "work", run_suite(tested, folder, arguments.pytest or list(SUITE))


def main() -> None:
    """Tries the rows and prints a table; ends with 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--python", nargs="+", default=[], help="interpreters to try; by default all that are found")
    parser.add_argument("--wheel", type=Path, help="the wheel to try; by default one is built here")
    parser.add_argument("--without", nargs="+", default=[], help="packages to leave out: torch's tests then skip")
    parser.add_argument("--extra", nargs="+", default=[], help="more requirements, as `onnx==1.20.1`")
    parser.add_argument("--out", type=Path, default=ROOT / "build/versions/rows", help="environments and logs")
    parser.add_argument("pytest", nargs="*", help="after `--`: arguments of pytest")
    arguments = parser.parse_args()
    wheel = arguments.wheel or build_wheel(arguments.out / "wheel")
    found = pythons(arguments.python)
    good = True
    header = ("versions", "Python", *COUNTED, "runtime dependencies alone", "tests")
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)
    for row in arguments.row:
        version, resolution = row.split("-")
        if version not in found:
            print(f"| {resolution} | {version} |{' - |' * (len(COUNTED) + 1)} not found here, not tried |", flush=True)
            continue
        try:
            numbers, runtime, outcome = try_row(row, found[version], wheel.resolve(), arguments)
        except SystemExit as end:
            numbers, runtime, outcome = [version, *"-" * len(COUNTED)], "-", str(end)
        good = good and " 0 failed" in outcome
        print(f"| {' | '.join((resolution, *numbers, runtime, outcome))} |", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
