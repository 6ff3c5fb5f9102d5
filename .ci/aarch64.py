"""Runs the wheel for aarch64 in an emulator: kernels against the reference, bit for bit, and a session of ONNX Runtime.

Everything runs in qemu's emulation of the processor: an aarch64 Python from Debian's packages and aarch64 wheels from
the package index. It shows what the code computes, not how fast. Needs Debian 12 with these once, as root:

    dpkg --add-architecture arm64 && apt-get update && apt-get install qemu-user-static
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMULATOR = "qemu-aarch64-static"
PYTHON = "3.11"
PACKAGES = (
    "libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5",
    "libsqlite3-0", "libuuid1", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", f"python{PYTHON}-minimal",
)  # fmt: skip
ONNXRUNTIME = "onnxruntime==1.26.0"
"""Importing 1.29 and later ends qemu 7.2 with a segmentation fault, without our library too."""
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


def unpack_wheels(wheel: Path, folder: Path) -> Path:
    """Returns a folder with the wheel and what it needs, as if installed."""
    wheels, site = folder / "wheels", folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    choice = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    run(sys.executable, "-m", "pip", "download", "--quiet", *choice, "--dest", wheels, ONNXRUNTIME, wheel)
    for each in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(each) as archive:
            archive.extractall(site)
    return site


def run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Runs a command; ends the program if it fails."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, check=False)
    if done.returncode:
        sys.exit(f"failed ({done.returncode}): {' '.join(map(str, command))}")


def main() -> None:
    """Unpacks what is needed into a folder and runs `wheel_trial.py` there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "aarch64", help="kept for the next time")
    arguments = parser.parse_args()
    for program in (EMULATOR, "apt-get", "dpkg"):
        if shutil.which(program) is None:
            sys.exit(f"{program}: not found; see the first lines of {Path(__file__).name}")
    folder = arguments.folder.resolve()
    root = unpack_system(folder)
    site = unpack_wheels(arguments.wheel.resolve(), folder)
    trial = folder / "trial"
    trial.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(trial), "PYTHONPATH": str(site)}
    python = root / f"usr/bin/python{PYTHON}"
    run(EMULATOR, "-L", root, python, Path(__file__).with_name("wheel_trial.py"), trial, env=environment, cwd=trial)


if __name__ == "__main__":
    main()
