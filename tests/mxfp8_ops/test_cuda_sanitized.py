"""The CUDA kernels under sanitizers: on emulated threads, and on a GPU (make gpu-sanitize)."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_emulation import FLAGS, device, source_of

from mxfp8_ops import native
from mxfp8_ops.cuda import build, loader
from mxfp8_ops.cuda import device as cuda_device

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = (ROOT, ROOT / "custom_ops", HERE, HERE.parent, native.library_path().parents[1])
    path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    everything = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(command, env=everything, cwd=ROOT, capture_output=True, text=True, check=False)


def run_sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python under AddressSanitizer and UBSan, with emulated kernels that g++ has compiled for them."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    library = run(compiler, "-print-file-name=libasan.so").stdout.strip()
    if not Path(library).is_file():
        pytest.skip("needs libasan")
    flags = {FLAGS: "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined"}
    options = {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    return run(sys.executable, *arguments, **flags, **options)


@pytest.mark.cuda
@pytest.mark.slow
def test_no_emulated_kernel_reads_or_writes_outside_an_operand():
    files = [str(HERE / name) for name in ("test_cuda_emulated.py", "test_cuda_gemms.py")]
    done = run_sanitized("-m", "pytest", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "AddressSanitizer" not in done.stderr


@pytest.mark.cuda
def test_the_small_launches_for_a_gpu_run_every_source(monkeypatch, capsys):
    from cupy_stand_in import stand_in

    monkeypatch.setattr(cuda_device, "cupy_module", stand_in)
    monkeypatch.setattr(cuda_device, "device", lambda index: device())
    monkeypatch.setattr(loader, "connect", device().connect)
    monkeypatch.setitem(sys.modules, "cupy", stand_in())
    monkeypatch.delitem(sys.modules, "cuda_small_launches", raising=False)
    device().launched.clear()
    importlib.import_module("cuda_small_launches").main()
    assert "launched every kernel" in capsys.readouterr().out
    assert {*map(source_of, device().launched)} >= {path.stem for path in build.SOURCES.glob("*.cu")}


@pytest.mark.gpu
@pytest.mark.skipif(not cuda_device.available(), reason="needs a CUDA device and CuPy")
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool):
    """No time limit here: run_on_gpu.py has one, and ends what the sanitizer has started too."""
    binary = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if binary is None:
        pytest.skip("needs compute-sanitizer")
    script = str(HERE / "cuda_small_launches.py")
    done = run(binary, "--tool", tool, "--error-exitcode", "99", sys.executable, script)
    output = done.stdout + done.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this device here")
    assert done.returncode == 0, output[-4000:]
    assert "launched every kernel" in output
