"""Runs the wheel for aarch64 in an emulator: kernels against the reference, bit for bit, and a session of ONNX Runtime.

Everything runs in qemu's emulation of processors with and without the newer instructions: tests/native/gemms.cpp, an
aarch64 Python from Debian's packages and aarch64 wheels from the package index. It shows what the code computes, not
how fast. With --tests, the tests of mxfp8_ops run there instead. Needs Debian 12 with these once, as root:

    dpkg --add-architecture arm64 && apt-get update && apt-get install qemu-user-static
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMULATOR = "qemu-aarch64-static"
SETS = {"max": "neon_mm,neon_dot,portable", "neoverse-n1": "neon_dot,portable", "cortex-a72": "portable"}
"""The instruction sets that the library has to find on each of the emulator's processors, best first."""
PYTHON = "3.11"
PACKAGES = (
    "libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5",
    "libsqlite3-0", "libuuid1", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", f"python{PYTHON}-minimal",
)  # fmt: skip
ONNXRUNTIME = "onnxruntime==1.26.0"
"""Importing 1.28 and later ends qemu 7.2 with a segmentation fault, without our library too."""
TESTS = ("pytest>=8.4", "hypothesis>=6.100")
NOT_HERE = ("*cuda*", "*gpu*", "*device*", "*torch*", "*sass*", "*ort_sessions*", "*threads*")
"""Tests of what the emulated system lacks: torch, a GPU, a process whose memory is its program's, and processors for
many threads: those of ONNX Runtime wait busily, and a test with eight sessions does not end in minutes."""
DIFFERENT = (
    "nodes_that_differ_each_give",  # ONNX Runtime 1.26 cannot load some of these models, on x86-64 either
    "nodes_inside_if_and_loop",
    "where_subnormals_are_flushed",  # ONNX Runtime did not flush them here
    "the_file_is_what_the_reference_gives",  # NumPy's NaN of a product has another sign
)
"""Tests that fail there for another reason than our code."""
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")


def unpack_system(folder: Path) -> Path:
    """Returns the root of an aarch64 system that has a Python and nothing else."""
    root, packages = folder / "root", folder / "packages"
    if not root.exists():
        packages.mkdir(parents=True, exist_ok=True)
        run("apt-get", "download", "--quiet", *(f"{name}:arm64" for name in PACKAGES), cwd=packages)
        for package in sorted(packages.glob("*.deb")):
            run("dpkg", "-x", package, root)
    return root


def unpack_wheels(folder: Path, *wanted: object) -> Path:
    """Returns a folder with wheels and what they need, as if installed."""
    wheels, site = folder / "wheels", folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    choice = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    run(sys.executable, "-m", "pip", "download", "--quiet", *choice, "--dest", wheels, ONNXRUNTIME, *wanted)
    for each in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(each) as archive:
            archive.extractall(site)
    return site


def run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Runs a command and returns what it printed, which is shown too; ends the program if it fails."""
    words = list(map(str, command))
    with subprocess.Popen(words, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        sys.exit(f"failed ({process.returncode}): {' '.join(words)}")
    return "".join(lines)


def compile_gemms(library: Path, program: Path) -> None:
    """Compiles the grid of gemms with the compiler of the wheel, for the wheel's library."""
    headers, source = ROOT / "custom_ops/mxfp8_ops/src", ROOT / "tests/native/gemms.cpp"
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu.2.17", "-std=c++17", "-O2"]
    run(*zig, f"-I{headers}", source, library, "-o", program)


def run_tests(python: Path, root: Path, folder: Path, environment: dict[str, str]) -> None:
    """Runs the tests of mxfp8_ops that need neither torch nor a GPU, with every instruction set."""
    # Tests that start a Python start this script: this machine runs it, but no program for aarch64. Without SME: with
    # it, ONNX Runtime's own MatMul gave the largest float32 where function bodies have infinity.
    launcher = folder / "python"
    launcher.write_text(f'#!/bin/sh\nexec {EMULATOR} -cpu max,sme=off -L {root} {python} "$@"\n')
    launcher.chmod(0o755)
    start = f"import sys, pytest; sys.executable = {str(launcher)!r}; sys.exit(pytest.main(sys.argv[1:]))"
    choice = [*(f"--ignore-glob={each}" for each in NOT_HERE), "-k", f"not ({' or '.join(DIFFERENT)})"]
    choice += ["-m", "not (slow or gpu or tools or samples or processes)"]
    environment = environment | {"MXFP8_TEST_ISAS": "all"}
    run(launcher, "-P", "-c", start, "-p", "no:cacheprovider", *choice, "tests/mxfp8_ops", env=environment, cwd=ROOT)


def try_on(processor: str, python: Path, root: Path, folder: Path, environment: dict[str, str]) -> None:
    """Runs the gemms and `wheel_trial.py` on a processor of the emulator; ends the program if it lacks kernels."""
    emulator = [EMULATOR, "-cpu", processor, "-L", root]
    print(f"== {processor}", flush=True)
    gemms = run(*emulator, folder / "gemms", env={"LD_LIBRARY_PATH": f"{folder}/site/mxfp8_ops"})
    sets = ",".join(re.findall(r"^(\w+): \d+ gemms", gemms, re.MULTILINE))
    if sets != SETS[processor]:
        sys.exit(f"{processor}: instruction sets {sets}; expected {SETS[processor]}; correct isa.cpp, or SETS here")
    trial = folder / "trial"
    shutil.rmtree(trial, ignore_errors=True)
    trial.mkdir()
    run(*emulator, python, Path(__file__).with_name("wheel_trial.py"), trial, env=environment, cwd=trial)


def main() -> None:
    """Unpacks what is needed into a folder, and runs it there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "aarch64", help="kept for the next time")
    parser.add_argument("--tests", action="store_true", help="run the tests of mxfp8_ops instead")
    arguments = parser.parse_args()
    for program in (EMULATOR, "apt-get", "dpkg"):
        if shutil.which(program) is None:
            sys.exit(f"{program}: not found; see the first lines of {Path(__file__).name}")
    folder = arguments.folder.resolve()
    root = unpack_system(folder)
    site = unpack_wheels(folder, arguments.wheel.resolve(), *(TESTS if arguments.tests else ()))
    packages = root / "usr/lib/python3/dist-packages"
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "wheels.pth").write_text(f"{site}\n")  # tests set PYTHONPATH
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    python = root / f"usr/bin/python{PYTHON}"
    if arguments.tests:
        run_tests(python, root, folder, environment)
        return
    compile_gemms(site / "mxfp8_ops/libmxfp8_ops.so", folder / "gemms")
    for processor in SETS:
        try_on(processor, python, root, folder, environment)


if __name__ == "__main__":
    main()
