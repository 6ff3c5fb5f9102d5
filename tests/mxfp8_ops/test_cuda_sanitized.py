"""The emulated CUDA kernels under AddressSanitizer and UBSan: no access outside an operand, on any tail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_emulation import FLAGS

from mxfp8_ops import cpu

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    library = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(library).is_file():
        pytest.skip("needs libasan")
    environment = {
        **os.environ,
        FLAGS: "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined",
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PYTHONPATH": os.pathsep.join(
            map(str, (ROOT, ROOT / "custom_ops", HERE, HERE.parent, cpu.library_path().parents[1]))
        ),
    }
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_all_emulated_kernels():
    files = [str(HERE / name) for name in ("test_cuda_emulated.py", "test_cuda_gemms.py")]
    done = run("-m", "pytest", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "AddressSanitizer" not in done.stderr


def test_the_sanitizer_would_see_one_byte_too_many():
    script = """
from cuda_emulation import aligned, queue
from mxfp8_ops.cuda import execution, planner
x, elements, scales = aligned(4 * 1000 * 32), aligned(1000 * 32 - 1), aligned(1000)
x[:] = 1
at = (array.ctypes.data for array in (elements, scales))
request = planner.Quantize(1, 17, 0x1FFFFF, planner.PLAIN, x.ctypes.data, 1000, 32, 1, *at)
execution.run(planner.plan(request), queue())
print("not seen")
"""
    done = run("-c", script)
    assert done.returncode != 0
    assert "not seen" not in done.stdout
    assert "heap-buffer-overflow" in done.stderr
