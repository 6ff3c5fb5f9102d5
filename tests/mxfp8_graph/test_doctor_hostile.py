"""doctor where things are broken: it says what, in printable text, and never ends in a defect or a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from commands import process

from mxfp8_ops import cpu

LIBRARY = "libmxfp8_ops.so"

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A folder whose modules and libraries are found before all others; torch, which is slow, is broken there."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: \\x1b[31m')")
    return tmp_path


def diagnosis(first: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Returns the process that ran doctor there."""
    path = os.pathsep.join([str(first), *sys.path])
    return process("doctor", env={**os.environ, "PYTHONPATH": path, **environment})


def lines(done: subprocess.CompletedProcess[str]) -> Mapping[str, str]:
    """Returns what was said of each thing, after the checks that there is no defect and no control character."""
    assert done.returncode in {0, 2}, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    assert all(c.isprintable() or c == "\n" for c in done.stdout)  # on stderr, ONNX Runtime speaks too
    rows = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    return {line[:18].strip(): line[18:].strip() for line in rows}


def test_an_optional_package_that_cannot_be_imported(first: Path) -> None:
    done = diagnosis(first)
    found = lines(done)["torch"]
    assert found.startswith("broken")
    assert found.endswith(r", but it cannot be imported: libtorch.so: \x1b[31m")
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("name", "raised"),
    [("onnx_graphsurgeon", "ImportError"), ("onnxruntime", "OSError"), ("onnx_graphsurgeon", "AttributeError")],
)
def test_a_needed_package_that_cannot_be_imported(first: Path, name: str, raised: str) -> None:
    (first / f"{name}.py").write_text(f"raise {raised}('half of it is missing')")
    done = diagnosis(first)
    found = lines(done)[name.replace("_", "-")]
    assert found.startswith("failed")
    assert found.endswith(", but it cannot be imported: half of it is missing")
    assert done.returncode == 2


@pytest.mark.parametrize("name", ["numpy", "onnx"])
def test_a_package_without_which_nothing_starts(first: Path, name: str) -> None:
    (first / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    done = diagnosis(first)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"error: no {name} here; expected the packages that mxfp8-graph needs; reinstall it with pip\n"
    )


def test_an_onnxruntime_that_is_empty(first: Path) -> None:
    (first / "onnxruntime.py").touch()
    assert lines(diagnosis(first))["session"].startswith("failed")


def empty(path: Path) -> None:
    path.touch()


def text(path: Path) -> None:
    path.write_text("hello " * 1000)


def half(path: Path) -> None:
    whole = cpu.library_path().read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def only_the_headers(path: Path) -> None:
    path.write_bytes(cpu.library_path().read_bytes()[:4000])


def another(path: Path) -> None:
    path.symlink_to(np.linalg._umath_linalg.__file__)


def folder(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.skipif(sys.platform != "linux", reason="names and formats of libraries")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (empty, "cannot be loaded"),
        (text, "cannot be loaded"),
        (half, "crashed"),
        (only_the_headers, "crashed"),
        (another, "has no mxfp8_last_error"),
        (folder, None),
        (dangling, None),
        (fifo, None),
    ],
)
def test_a_library_that_is_broken(first: Path, make: Callable[[Path], None], said: str | None) -> None:
    """Found before the right one; what is no file is passed over."""
    real = cpu.library_path().parent
    (first / "mxfp8_ops").mkdir()
    make(first / "mxfp8_ops" / LIBRARY)
    code = (
        "import pathlib, sys, mxfp8_ops; from mxfp8_ops import native; "
        f"mxfp8_ops.__path__[:] = [{str(first / 'mxfp8_ops')!r}, {str(real)!r}, *mxfp8_ops.__path__]; "
        "sys.argv = ['mxfp8-graph', 'doctor']; from mxfp8_graph.__main__ import main; main()"
    )
    path = os.pathsep.join([str(first), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if said == "crashed":
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith("error: mxfp8-graph: onnx or another native library crashed (")
        return
    found = lines(done)
    if said is None:
        assert done.returncode == 0
        assert found["kernels"].startswith("ok")
    else:
        assert done.returncode == 2
        assert said in found["kernels"]
        assert found["session"].startswith("failed")


@pytest.mark.parametrize("value", ["\x1b[31m", "AVX2"])
def test_an_instruction_set_that_is_not_there(first: Path, value: str) -> None:
    done = diagnosis(first, MXFP8_ISA=value)
    assert lines(done)["kernels"].startswith("failed")
    assert done.returncode == 2
