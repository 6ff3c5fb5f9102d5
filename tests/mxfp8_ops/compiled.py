"""What compilers make for the tests, kept in build/cuda-emulation for other processes and later runs."""

from __future__ import annotations

import hashlib
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from mxfp8_ops.cuda import build

try:
    import fcntl
except ImportError:  # Windows, where two processes may compile the same
    fcntl = None  # type: ignore[assignment]

FOLDER = Path(__file__).parents[2] / "build" / "cuda-emulation"


def library(name: str, source: str, options: Iterable[str], included: Sequence[Path] = ()) -> Path:
    """Returns the shared library that g++ makes of a source and of the files that it includes."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the emulation of CUDA needs g++ on Linux")
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, check=True).stdout
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", *options]
    folders = [f"-I{folder}" for folder in dict.fromkeys(path.parent for path in included)]

    def make(path: Path) -> None:
        text = path.with_suffix(".cpp")
        text.write_text(source)
        subprocess.run([*command, *folders, str(text), "-o", str(path)], check=True)

    parts = [version, repr(command).encode(), source.encode(), *(path.read_bytes() for path in included)]
    return _kept(f"{name}.so", parts, make)


def cubin(source: str, kernel: str, arch: str, extra: tuple[str, ...] = ()) -> build.Cubin:
    """Returns what `build.compile_kernel` returns."""

    def make(path: Path) -> None:
        path.write_bytes(pickle.dumps(build.compile_kernel(source, kernel, arch, extra)))

    parts = [build._key(source, kernel, arch).encode(), repr(extra).encode(), Path(build.__file__).read_bytes()]
    kept: build.Cubin = pickle.loads(_kept(f"{source}-{arch}.pickle", parts, make).read_bytes())
    return kept


def _kept(name: str, parts: Iterable[bytes], make: Callable[[Path], None]) -> Path:
    """Returns the file that is made of these parts: one process makes it, the others wait, and it appears whole."""
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]
    path = FOLDER / f"{digest}-{name}"
    if path.exists():
        return path
    FOLDER.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = Path(folder) / name
            make(made)
            made.replace(path)
    return path
