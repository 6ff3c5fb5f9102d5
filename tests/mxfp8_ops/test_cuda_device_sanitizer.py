"""compute-sanitizer on small launches of every kernel, on a GPU: make gpu-sanitize."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mxfp8_ops.cuda import device as cuda_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_device.available(), reason="needs a CUDA device and CuPy"),
]

HERE = Path(__file__).parent


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool):
    """No time limit here: run_on_gpu.py has one, and ends what the sanitizer has started too."""
    binary = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if binary is None:
        pytest.skip("needs compute-sanitizer")
    command = [binary, "--tool", tool, "--error-exitcode", "99", sys.executable, str(HERE / "cuda_small_launches.py")]
    path = os.pathsep.join([str(HERE.parents[1] / "custom_ops"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this device here")
    assert done.returncode == 0, output[-4000:]
    assert "launched every kernel" in output
