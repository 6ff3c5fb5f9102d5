"""doctor: its checks, and what it says where something is missing or broken."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from commands import process

import mxfp8_graph
from mxfp8_graph import doctor
from mxfp8_graph.doctor import Check, diagnose, healthy
from mxfp8_ops import contract, cpu, numpy_nodes, ort
from mxfp8_ops.cuda import system as cuda_system
from mxfp8_ops.errors import BackendError


def find(name: str) -> Check:
    return next(check for check in diagnose() if check.name == name)


H200 = cuda_system.Gpu("NVIDIA H200", (9, 0), 132, 150_754_820_096)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[cuda_system.Gpu]:
    """The GPUs of this machine: a list to fill."""
    found: list[cuda_system.Gpu] = []
    monkeypatch.setattr(cuda_system, "gpus", lambda: found)
    return found


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("python", platform.python_version()),
        ("python", platform.machine()),
        ("mxfp8-graph", mxfp8_graph.__version__),
        ("mxfp8-graph", f"nodes of 'mxfp8' version {contract.VERSION}"),
        ("onnxruntime", onnxruntime.__version__),
        ("native library", str(cpu.library_path())),
        ("kernels", f"{cpu.isa()}; "),
        ("kernels", ", ".join(cpu.available_isas())),
    ],
)
def test_a_check_says(name: str, detail: str) -> None:
    assert detail in find(name).detail


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "torch" else "1.0")
    optional = "not installed; needed for PyTorch models only"
    assert find("torch") == Check("torch", "missing", optional, "pip install torch")
    assert healthy(diagnose())
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "onnx" else "1.0")
    assert find("onnx") == Check("onnx", "failed", "not installed; needed always", "pip install onnx")
    assert not healthy(diagnose())


def test_another_distribution_of_a_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "onnxruntime-gpu":
            return "1.30.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert find("onnxruntime").detail == "1.30.0 (onnxruntime-gpu)"


def test_two_distributions_of_a_package_are_mended() -> None:
    check = doctor._package("onnxruntime", {"onnxruntime-gpu": "1.31.1", "onnxruntime": "1.32.0"}, "needed to run")
    providers = ", ".join(onnxruntime.get_available_providers())
    detail = f"onnxruntime-gpu 1.31.1 and onnxruntime 1.32.0 write the same files; providers: {providers}"
    advice = "pip uninstall -y onnxruntime-gpu onnxruntime && pip install --no-deps onnxruntime-gpu==1.31.1"
    assert check == Check("onnxruntime", "broken", detail, advice)


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise BackendError("mxfp8_ops", "no library", expected="one", advice="install the project with pip")

    monkeypatch.setattr(cpu, "library_path", missing)
    detail = "mxfp8_ops: no library; expected one"
    assert find("native library") == Check("native library", "failed", detail, "install the project with pip")
    assert find("session").state == "failed"


def test_kernels_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numpy_nodes.gemm
    monkeypatch.setattr(numpy_nodes, "gemm", lambda *args: right(*args) + 1)
    check = find("session")
    assert check.state == "failed"
    assert check.detail.startswith("cpu: a 2 x 3 x 40 gemm gives [")
    assert check.advice == "report this, with the output of doctor"


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_system, "DRIVER", "libnothing.so.1")
    checks = diagnose()
    names = ["python", "mxfp8-graph", "numpy", "ml_dtypes", "onnx", "onnx-graphsurgeon", "onnxruntime", "torch"]
    assert [check.name for check in checks] == [*names, "native library", "kernels", "recipe", "session", "cuda"]
    assert checks[-1].state == "missing"
    assert checks[-1].detail.startswith("no CUDA driver (libnothing.so.1: cannot open")
    assert checks[-1].advice == "install NVIDIA's driver, if this machine has a GPU"
    assert healthy(checks)


def test_a_driver_without_a_gpu(gpus: list[cuda_system.Gpu]) -> None:
    assert (find("cuda").state, find("cuda").detail) == ("missing", "no GPU; needed for CUDA kernels only")


def test_each_gpu_says_whether_it_multiplies_mxfp8_itself(gpus: list[cuda_system.Gpu]) -> None:
    gpus += [H200, cuda_system.Gpu("NVIDIA B200", (10, 0), 148, 192_000_000_000)]
    first = "NVIDIA H200 has compute capability 9.0, and tensor cores multiply MXFP8 from 10.0 (Blackwell) on"
    second = "NVIDIA B200 has compute capability 10.0, whose tensor cores multiply MXFP8"
    assert (find("gpu 0").detail, find("gpu 1").detail) == (first, second)


@pytest.mark.parametrize("works", [True, False])
def test_a_session_on_the_gpu(gpus: list[cuda_system.Gpu], works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.append(H200)
    devices, session, advice = [], ort.session, "pip install cupy-cuda13x"

    def on_the_processor(model: bytes, *, device: str) -> Any:
        devices.append(device)
        if device != "cpu" and not works:
            raise BackendError("cuda", "CuPy cannot be imported", expected="CuPy 14 or later", advice=advice)
        return session(model)

    monkeypatch.setattr(ort, "session", on_the_processor)
    check = find("gpu session")
    assert devices == ["cpu", "cuda-copies"]
    if works:
        detail = "ONNX Runtime runs the kernels on 'cuda-copies', with the results of the reference"
        assert check == Check("gpu session", "ok", detail)
    else:
        detail = "cuda: CuPy cannot be imported; expected CuPy 14 or later"
        assert check == Check("gpu session", "broken", detail, advice)
        assert healthy(diagnose())


def test_the_driver_is_asked_for_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver in Python: what ctypes would call, on ctypes' own arguments."""

    def store(value: Any) -> Any:
        def function(out: Any, *arguments: Any) -> int:
            out._obj.value = value(*arguments) if callable(value) else value
            return 0

        return function

    def name(buffer: Any, size: int, device: Any) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    driver = SimpleNamespace(
        cuDriverGetVersion=store(13020),
        cuInit=lambda flags: 0,
        cuDeviceGetCount=store(1),
        cuDeviceGet=store(0),
        cuDeviceGetName=name,
        cuDeviceTotalMem_v2=store(150_754_820_096),
        cuDeviceGetAttribute=store(lambda which, device: {75: 9, 76: 0, 16: 132}[which]),
    )
    monkeypatch.setattr(cuda_system, "_driver", lambda: driver)
    assert cuda_system.driver_version() == (13, 2)
    assert cuda_system.gpus() == [H200]
    driver.cuInit = lambda flags: 100
    assert cuda_system.gpus() == []
    driver.cuInit = lambda flags: 999
    with pytest.raises(BackendError, match="returns error 999; expected success; run nvidia-smi"):
        cuda_system.gpus()


# --- Broken installations, in processes of their own -----------------------------------------------------------------


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules come before all others; the one of torch, whose import is slow, is broken."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: \\x1b[31m')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return tmp_path


def lines(done: subprocess.CompletedProcess[str]) -> Mapping[str, str]:
    """Returns the line of each check; fails for a defect or a control character."""
    assert done.returncode in {0, 2}, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    assert all(c.isprintable() or c == "\n" for c in done.stdout)  # on stderr, ONNX Runtime writes too
    rows = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    return {line[:18].strip(): line[18:].strip() for line in rows}


@pytest.mark.parametrize(("name", "raised"), [("onnx_graphsurgeon", "AttributeError"), ("onnxruntime", "OSError")])
def test_a_needed_package_that_cannot_be_imported(first: Path, name: str, raised: str) -> None:
    (first / f"{name}.py").write_text(f"raise {raised}('half of it is missing')")
    done = process("doctor")
    detail = lines(done)[name.replace("_", "-")]
    assert detail.startswith("failed")
    assert detail.endswith(", but it cannot be imported: half of it is missing")
    assert done.returncode == 2


def test_a_package_without_which_nothing_starts(first: Path) -> None:
    (first / "numpy.py").write_text("raise ImportError('no numpy here')")
    done = process("doctor")
    expected = "error: no numpy here; expected the packages that mxfp8-graph needs; reinstall it with pip\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


@pytest.mark.skipif(sys.platform != "linux", reason="names and formats of libraries")
@pytest.mark.parametrize(
    ("make", "detail"),
    [
        pytest.param(lambda path: path.write_text("hello " * 1000), "cannot be loaded", id="text"),
        pytest.param(lambda path: path.write_bytes(cpu.library_path().read_bytes()[:4000]), "crashed", id="cut"),
        pytest.param(
            lambda path: path.symlink_to(np.linalg._umath_linalg.__file__), "has no mxfp8_last_error", id="another"
        ),
        pytest.param(Path.mkdir, None, id="a folder"),
    ],
)
def test_a_broken_library_before_the_right_one(first: Path, make: Callable[[Path], object], detail: str | None) -> None:
    real = cpu.library_path().parent
    (first / "mxfp8_ops").mkdir()
    make(first / "mxfp8_ops" / "libmxfp8_ops.so")
    code = (
        "import pathlib, sys, mxfp8_ops; from mxfp8_ops import native; "
        f"mxfp8_ops.__path__[:] = [{str(first / 'mxfp8_ops')!r}, {str(real)!r}, *mxfp8_ops.__path__]; "
        "sys.argv = ['mxfp8-graph', 'doctor']; from mxfp8_graph.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if detail == "crashed":
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith("error: mxfp8-graph: onnx or another native library crashed (")
    elif detail is None:  # what is no file is passed over
        assert lines(done)["kernels"].startswith("ok")
        assert lines(done)["torch"].endswith(r", but it cannot be imported: libtorch.so: \x1b[31m")
        assert done.returncode == 0
    else:
        assert detail in lines(done)["kernels"]
        assert lines(done)["session"].startswith("failed")
        assert done.returncode == 2


def test_an_unknown_instruction_set(first: Path) -> None:
    done = process("doctor", env={**os.environ, "MXFP8_ISA": "\x1b[31m"})
    assert lines(done)["kernels"].startswith("failed")
    assert done.returncode == 2
