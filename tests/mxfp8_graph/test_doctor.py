"""doctor: what it checks, and what it says when something is missing or does not work."""

import platform
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

import mxfp8_graph
from mxfp8_graph import doctor
from mxfp8_graph.doctor import Check, diagnose, healthy
from mxfp8_ops import contract, cpu, numpy_nodes, ort
from mxfp8_ops.cuda import system as cuda_system
from mxfp8_ops.errors import BackendError


def find(name: str) -> Check:
    return next(check for check in diagnose() if check.name == name)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_system, "DRIVER", "libnothing.so.1")


H200 = cuda_system.Gpu("NVIDIA H200", (9, 0), 132, 150_754_820_096)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[cuda_system.Gpu]:
    """The GPUs of this machine: a list to fill."""
    found: list[cuda_system.Gpu] = []
    monkeypatch.setattr(cuda_system, "gpus", lambda: found)
    return found


@pytest.mark.usefixtures("no_driver")
def test_the_checks_and_their_order() -> None:
    assert [check.name for check in diagnose()] == [
        "python",
        "mxfp8-graph",
        "numpy",
        "ml_dtypes",
        "onnx",
        "onnx-graphsurgeon",
        "onnxruntime",
        "torch",
        "native library",
        "kernels",
        "recipe",
        "session",
        "cuda",
    ]


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


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise BackendError("mxfp8_ops", "no library", expected="one", advice="install the project with pip")

    monkeypatch.setattr(cpu, "library_path", missing)
    assert find("native library") == Check(
        name="native library",
        state="failed",
        detail="mxfp8_ops: no library; expected one",
        advice="install the project with pip",
    )
    assert find("session").state == "failed"


def test_kernels_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numpy_nodes.gemm
    monkeypatch.setattr(numpy_nodes, "gemm", lambda *args: right(*args) + 1)
    check = find("session")
    assert check.state == "failed"
    assert check.detail.startswith("cpu: a 2 x 3 x 40 gemm gives [")
    assert check.advice == "report this, with the output of doctor"


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver() -> None:
    check = find("cuda")
    assert check.state == "missing"
    assert check.detail.startswith("no CUDA driver (libnothing.so.1: cannot open")
    assert check.detail.endswith("; needed for CUDA kernels only")
    assert check.advice == "install NVIDIA's driver, if this machine has a GPU"
    assert healthy(diagnose())


def test_a_driver_without_a_gpu(gpus: list[cuda_system.Gpu]) -> None:
    assert (find("cuda").state, find("cuda").detail) == ("missing", "no GPU; needed for CUDA kernels only")


def test_each_gpu_says_whether_it_multiplies_mxfp8_itself(gpus: list[cuda_system.Gpu]) -> None:
    gpus += [H200, cuda_system.Gpu("NVIDIA B200", (10, 0), 148, 192_000_000_000)]
    first = "NVIDIA H200 has compute capability 9.0, and tensor cores multiply MXFP8 from 10.0 (Blackwell) on"
    second = "NVIDIA B200 has compute capability 10.0, whose tensor cores multiply MXFP8"
    assert (find("gpu 0").detail, find("gpu 1").detail) == (first, second)


def test_a_session_on_the_gpu(gpus: list[cuda_system.Gpu], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.append(H200)
    devices, session = [], ort.session

    def on_the_processor(model: bytes, *, device: str) -> Any:
        devices.append(device)
        return session(model)

    monkeypatch.setattr(ort, "session", on_the_processor)
    detail = "ONNX Runtime runs the kernels on 'cuda-copies', with the results of the reference"
    assert find("gpu session") == Check("gpu session", "ok", detail)
    assert devices == ["cpu", "cuda-copies"]


def test_a_session_on_the_gpu_that_does_not_run(gpus: list[cuda_system.Gpu], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.append(H200)

    def fails(model: bytes, *, device: str) -> Any:
        if device == "cpu":
            return session(model)
        advice = "pip install cupy-cuda13x"
        raise BackendError("cuda", "CuPy cannot be imported", expected="CuPy 14 or later", advice=advice)

    session = ort.session
    monkeypatch.setattr(ort, "session", fails)
    assert find("gpu session") == Check(
        name="gpu session",
        state="broken",
        detail="cuda: CuPy cannot be imported; expected CuPy 14 or later",
        advice="pip install cupy-cuda13x",
    )
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
