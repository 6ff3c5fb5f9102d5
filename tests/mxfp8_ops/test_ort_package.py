"""The package onnxruntime: what it says where it is missing, incomplete or without CUDA, and what it preloads."""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mxfp8_ops import cpu
from mxfp8_ops.errors import BackendError
from mxfp8_ops.ort import package

BOTH = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}
MENDED = r"pip uninstall -y onnxruntime-gpu onnxruntime && pip install --no-deps onnxruntime-gpu==1\.31\.1"


@pytest.fixture
def distributions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed distributions of onnxruntime: a dictionary to fill."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    return versions


def of(*providers: str, **names: Any) -> Any:
    module = ModuleType("onnxruntime")
    vars(module).update(__version__="1.31.1", get_available_providers=lambda: providers, **names)
    return module


@pytest.mark.parametrize("module", [None, ModuleType("onnxruntime")], ids=["not importable", "files are deleted"])
@pytest.mark.parametrize(
    ("versions", "command"),
    [
        ({}, r"pip install 'mxfp8-graph\[cpu\]' \(for a GPU \[cuda13\] or \[cuda12\]\)"),
        ({"onnxruntime-gpu": "1.31.1"}, r"pip install --force-reinstall --no-deps onnxruntime-gpu==1\.31\.1"),
    ],
)
def test_a_package_that_is_missing_or_has_lost_files(
    distributions: dict[str, str], versions: dict[str, str], command: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributions |= versions
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    what = "cannot be imported" if module is None else "has no InferenceSession"
    with pytest.raises(BackendError, match=f"^onnxruntime: {what}.*; {command}$"):
        package.onnxruntime()


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"onnxruntime": "1.32.0"}, r"pip uninstall -y onnxruntime && pip install 'mxfp8-graph\[cuda13\]'"),
        (BOTH, rf"onnxruntime-gpu 1\.31\.1 and onnxruntime 1\.32\.0 write the same files; .*; {MENDED}"),
    ],
)
def test_an_onnxruntime_without_cuda(distributions: dict[str, str], versions: dict[str, str], message: str) -> None:
    distributions |= versions
    with pytest.raises(BackendError, match=message):
        package.check_cuda(of("CPUExecutionProvider"))


def test_libraries_are_preloaded_once_and_silently(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[None] = []
    ort = of(package.CUDA_PROVIDER, preload_dlls=lambda: calls.append(print("Failed to load libcublas.so.13")))
    package.check_cuda(ort)
    package.check_cuda(ort)
    assert (calls, capsys.readouterr().out) == ([None], "")
    package.check_cuda(of(package.CUDA_PROVIDER))  # before 1.21 there is no such function


@pytest.mark.skipif(sys.platform != "linux", reason="names of libraries")
def test_the_libraries_of_a_provider_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia/cu99/lib").mkdir(parents=True)
    shutil.copy(cpu.library_path(), tmp_path / "nvidia/cu99/lib/libcublas.so.99")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    said = package.libraries(SimpleNamespace(__file__=str(tmp_path / "onnxruntime/__init__.py"), cuda_version="99.1"))
    needed, missing = said.split("; not loaded: ")
    assert f"libcudnn.so.9, looked for in {tmp_path}/nvidia/*/lib, LD_LIBRARY_PATH='/somewhere' and the sys" in needed
    assert "libcublas.so.99" not in missing
    assert "libcudart.so.99 (libcudart.so.99: cannot open" in missing
