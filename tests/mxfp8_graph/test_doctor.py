"""doctor: what it checks, and what it says when something is missing or does not work."""

import platform
from pathlib import Path

import onnxruntime
import pytest

import mxfp8_graph
from mxfp8_graph import doctor
from mxfp8_graph.doctor import Check, diagnose, healthy
from mxfp8_ops import cpu, numerics
from mxfp8_ops.errors import BackendError


def find(name: str) -> Check:
    return next(check for check in diagnose() if check.name == name)


def test_this_machine_is_healthy() -> None:
    checks = diagnose()
    assert [check for check in checks if check.state == "failed"] == []
    assert healthy(checks)


def test_the_checks_and_their_order() -> None:
    assert [check.name for check in diagnose()] == [
        "python",
        "platform",
        "mxfp8-graph",
        "node contract",
        "numpy",
        "ml_dtypes",
        "onnx",
        "onnx-graphsurgeon",
        "onnxruntime",
        "torch",
        "cupy",
        "native library",
        "kernels",
        "session",
    ]


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("python", platform.python_version()),
        ("platform", platform.machine()),
        ("mxfp8-graph", mxfp8_graph.__version__),
        ("onnxruntime", onnxruntime.__version__),
        ("native library", str(cpu.library_path())),
        ("kernels", f"{cpu.isa()} "),
        ("kernels", f"available: {', '.join(cpu.available_isas())}"),
    ],
)
def test_a_check_says(name: str, detail: str) -> None:
    assert detail in find(name).detail


def test_an_optional_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda names: None if "torch" in names else "1.0")
    assert find("torch") == Check(
        name="torch",
        state="missing",
        detail="not installed; needed for PyTorch models only",
        advice="pip install 'mxfp8-graph[torch]'",
    )
    assert healthy(diagnose())


def test_a_required_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda names: None if "onnx" in names else "1.0")
    assert find("onnx") == Check(name="onnx", state="failed", detail="not installed", advice="pip install onnx")
    assert not healthy(diagnose())


def test_another_distribution_of_a_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "onnxruntime-gpu":
            return "1.30.0"
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    assert find("onnxruntime").detail == "1.30.0 (onnxruntime-gpu)"


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise BackendError("mxfp8_ops: no library; expected one; install the project with pip")

    monkeypatch.setattr(cpu, "library_path", missing)
    assert find("native library") == Check(
        name="native library",
        state="failed",
        detail="mxfp8_ops: no library; expected one",
        advice="install the project with pip",
    )
    assert find("session").state == "failed"


def test_kernels_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numerics.gemm
    monkeypatch.setattr(numerics, "gemm", lambda *args: right(*args) + 1)
    check = find("session")
    assert check.state == "failed"
    assert check.detail.startswith("session: a 2 x 3 x 40 gemm gives [")
    assert check.advice == "report this, with the output of doctor"
