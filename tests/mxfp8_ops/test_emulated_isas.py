"""The kernels of AMX and of VNNI on other processors: a library that emulates their instructions passes the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mxfp8_ops import cpu

ROOT = Path(__file__).parents[2]
TESTS = {"amx_bf16": ("prepack", "cpu", "attention"), "avx2_vnni": ("prepack", "cpu", "conv", "gemm_integers")}
REST = {"amx_bf16": "avx512_bf16", "avx2_vnni": "avx2"}
"""The instruction set of the other instructions of a kernel."""

# In a process of its own, which loads the library from the folder that is its first argument.
RUN = """
import sys
import mxfp8_ops
import pytest
mxfp8_ops.__path__.insert(0, sys.argv[1])
sys.exit(pytest.main(["-k", sys.argv[2], *sys.argv[3:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "option"), [("amx_bf16", "AMX"), ("avx2_vnni", "VNNI")])
def test_kernels_on_emulated_instructions(isa: str, option: str, tmp_path: Path) -> None:
    if REST[isa] not in cpu.available_isas():
        pytest.skip(f"the rest of these kernels is {REST[isa]}")

    def run(*command: object) -> None:
        environment = {**os.environ, "MXFP8_TEST_ISAS": "all"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    run("cmake", "-S", ROOT / "custom_ops", "-B", tmp_path, f"-DMXFP8_EMULATE_{option}=ON")
    run("cmake", "--build", tmp_path, "--parallel", "2")
    run(sys.executable, "-c", RUN, tmp_path, isa, *[f"tests/mxfp8_ops/test_{name}.py" for name in TESTS[isa]])
