"""Every kernel compiles with the oldest NVRTC 13 that PyTorch brings, out of its pip package alone.

pip installs one version of a package, so the old one comes into a folder of its own, build/nvrtc-13.0.88, once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cuda_emulation import source_of

from mxfp8_ops import native
from mxfp8_ops.cuda import build, planner

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERSION = "13.0.88"
"""That of the CUDA 13.0 that PyTorch 2.11 is built with; its libnvrtc.so.13 has no RPATH."""


@pytest.fixture(scope="module")
def old_nvrtc() -> Path:
    folder = ROOT / "build" / f"nvrtc-{VERSION}"
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / "made"
            command = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary=:all:", "--quiet"]
            command += ["--disable-pip-version-check", "--target", str(made), f"nvidia-cuda-nvrtc=={VERSION}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
                pytest.skip(f"needs nvidia-cuda-nvrtc {VERSION}, which pip cannot install: {why}")
            if not folder.is_dir():  # another process may have been faster
                made.rename(folder)
    return folder


def compile_with(nvrtc: Path, arch: str, names: list[str]) -> None:
    """Compiles and checks kernels in a process whose loader knows no CUDA, and which has not imported torch."""
    script = """
import sys
from mxfp8_ops.cuda import build
import test_cuda_build
assert build.nvrtc_version() == (13, 0), build.nvrtc_version()
for kernel in sys.argv[2:]:
    test_cuda_build.check(kernel, sys.argv[1])
assert "torch" not in sys.modules
print(len(sys.argv) - 2, "compiled")
"""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    paths = (nvrtc, ROOT, ROOT / "custom_ops", HERE, HERE.parent, native.library_path().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, "-c", script, arch, *names]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == f"{len(names)} compiled"


def test_a_kernel_of_every_source_compiles_with_the_old_nvrtc_alone(old_nvrtc):
    first: dict[str, str] = {}
    for kernel in planner.kernels():
        first.setdefault(source_of(kernel), kernel)
    assert {*first} == {path.stem for path in build.SOURCES.glob("*.cu")}
    compile_with(old_nvrtc, "sm_90a", [*first.values()])


@pytest.mark.slow
@pytest.mark.parametrize("arch", build.TARGETS)
def test_every_kernel_compiles_with_the_old_nvrtc_alone(old_nvrtc, arch):
    """Those of the newest are in test_cuda_build.py."""
    compile_with(old_nvrtc, arch, [*planner.kernels()])
