"""The kernels of AMX where there is none: a library that emulates the tile instructions passes the tests of kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mxfp8_ops import cpu

ROOT = Path(__file__).parents[2]
TESTS = [f"tests/mxfp8_ops/test_{name}.py" for name in ("prepack", "cpu", "attention")]

# In a process of its own, which loads the library from the folder that is its first argument.
RUN = """
import sys
import mxfp8_ops
import pytest
mxfp8_ops.__path__.insert(0, sys.argv[1])
sys.exit(pytest.main(["-k", "amx_bf16", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif("avx512_bf16" not in cpu.available_isas(), reason="the rest of these kernels is AVX512-BF16")
def test_kernels_on_emulated_tiles(tmp_path: Path) -> None:
    def run(*command: object) -> None:
        environment = {**os.environ, "MXFP8_TEST_ISAS": "all"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    run("cmake", "-S", ROOT / "custom_ops", "-B", tmp_path, "-DMXFP8_EMULATE_AMX=ON")
    run("cmake", "--build", tmp_path, "--parallel", "2")
    run(sys.executable, "-c", RUN, tmp_path, *TESTS)
