"""Runs the wheel for aarch64 in an emulator: kernels against the reference, bit for bit, and a session of ONNX Runtime.

Everything runs in qemu's emulation of processors with and without the newer instructions: tests/native/gemms.cpp, an
aarch64 Python from Debian's packages and aarch64 wheels from the package index. It shows what the code computes, not
how fast. With --tests, the tests of mxfp8_ops run there too. Needs Debian 12 with these once, as root:

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
SETS = {"max": "portable", "neoverse-n1": "portable", "cortex-a72": "portable"}
"""The instruction sets that the library has to find on each of the emulator's processors, best first."""
PYTHON = "3.11"
PACKAGES = (
    "libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5",
    "libsqlite3-0", "libuuid1", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", f"python{PYTHON}-minimal",
)  # fmt: skip
ONNXRUNTIME = "onnxruntime==1.26.0"
"""Importing 1.29 and later ends qemu 7.2 with a segmentation fault, without our library too."""
TESTS = ("pytest>=8.4", "hypothesis>=6.100")
NOT_HERE = ("*cuda*", "*gpu*", "*device*", "*torch*", "*sass*")
"""Tests of what the emulated system lacks."""
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
    """Returns what a command printed; ends the program if it fails."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(f"failed ({done.returncode}): {' '.join(map(str, command))}")
    return done.stdout


def compile_gemms(library: Path, program: Path) -> None:
    """Compiles the grid of gemms with the compiler of the wheel, for the wheel's library."""
    headers, source = ROOT / "custom_ops/mxfp8_ops/src", ROOT / "tests/native/gemms.cpp"
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu.2.17", "-std=c++17", "-O2"]
    run(*zig, f"-I{headers}", source, library, "-o", program)


def write_launcher(python: Path, emulator: list[object], path: Path) -> Path:
    """Returns a script that is a Python for tests that start one: the system of this machine runs it, not aarch64's."""
    path.write_text(f'#!/bin/sh\nexec {" ".join(map(str, emulator))} {python} "$@"\n')
    path.chmod(0o755)
    return path


def main() -> None:
    """Unpacks what is needed into a folder, and runs the gemms and `wheel_trial.py` on each processor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "aarch64", help="kept for the next time")
    parser.add_argument(
        "--tests", action="store_true", help="run the tests of mxfp8_ops on the processor `max` instead"
    )
    arguments = parser.parse_args()
    for program in (EMULATOR, "apt-get", "dpkg"):
        if shutil.which(program) is None:
            sys.exit(f"{program}: not found; see the first lines of {Path(__file__).name}")
    folder = arguments.folder.resolve()
    root = unpack_system(folder)
    site = unpack_wheels(folder, arguments.wheel.resolve(), *(TESTS if arguments.tests else ()))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(site)}
    python = root / f"usr/bin/python{PYTHON}"
    if arguments.tests:
        launcher = write_launcher(python, [EMULATOR, "-L", root], folder / "python")
        start = f"import sys, pytest; sys.executable = {str(launcher)!r}; sys.exit(pytest.main(sys.argv[1:]))"
        choice = [
            "-m",
            "not (slow or gpu or tools or samples or processes)",
            *(f"--ignore-glob={name}" for name in NOT_HERE),
        ]
        environment |= {"MXFP8_TEST_ISAS": "all"}
        run(launcher, "-P", "-c", start, *choice, "tests/mxfp8_ops", env=environment, cwd=ROOT)
        return
    compile_gemms(site / "mxfp8_ops/libmxfp8_ops.so", folder / "gemms")
    for processor, sets in SETS.items():
        emulator = [EMULATOR, "-cpu", processor, "-L", root]
        print(f"== {processor}", flush=True)
        trial = folder / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        trial.mkdir()
        gemms = run(*emulator, folder / "gemms", env={"LD_LIBRARY_PATH": str(site / "mxfp8_ops")})
        if (there := ",".join(re.findall(r"^(\w+): \d+ gemms", gemms, re.MULTILINE))) != sets:
            sys.exit(f"{processor}: instruction sets {there}; expected {sets}; look at isa.cpp")
        run(*emulator, python, Path(__file__).with_name("wheel_trial.py"), trial, env=environment, cwd=trial)


if __name__ == "__main__":
    main()
