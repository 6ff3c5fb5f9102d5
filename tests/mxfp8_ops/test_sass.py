"""benchmarks/sass.py: the fast path of a listing, and the counts of the committed table, compiled again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxfp8_ops.cuda import build
from mxfp8_ops.errors import BackendError

pytestmark = pytest.mark.cuda

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @P0  BRA `(.L_x_2) ;
        /*0020*/                   HMMA.16816 R0, R1, R2, R0 ;
        /*0030*/              @P1  BRA `(.L_x_3) ;
.L_x_4:
        /*0040*/                   FFMA R3, R3, R3, R3 ;
        /*0050*/              @P2  BRA `(.L_x_4) ;
.L_x_3:
        /*0060*/                   HMMA.16816 R0, R1, R2, R0 ;
.L_x_2:
        /*0070*/              @P3  BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
"""
"""A loop with two tensor core instructions, a branch around both, and a slow loop between them."""


@pytest.fixture
def sass(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sass

    return sass


def test_the_fast_path_has_all_tensor_core_instructions_and_no_slow_loop(sass):
    assert sass.fast_path(LISTING, "HMMA", loop=True) == (2, 5)


@pytest.mark.parametrize("arch", ["sm_90a", *(pytest.param(a, marks=pytest.mark.slow) for a in ("sm_100a", "sm_120a"))])
def test_the_committed_counts_are_those_of_the_kernels(sass, arch):
    """With the NVRTC of the table: another one makes other code."""
    table = json.loads((BENCHMARKS / "results/sass.json").read_text())
    try:
        version = ".".join(map(str, build.nvrtc_version()))
    except BackendError as error:
        pytest.skip(str(error))
    nvdisasm = sass.disassembler()
    if nvdisasm is None or f"NVRTC {version}." not in table["notes"][0]:
        pytest.skip("needs nvdisasm and the NVRTC of benchmarks/results/sass.md")
    committed = {row[0]: (float(row[2]), row[4], row[5]) for row in table["rows"] if row[1] == arch}
    found = {}
    for row in sass.KERNELS:
        instructions, registers, spills = sass.counted(row, arch, nvdisasm)
        found[row.kernel] = (round(instructions), registers, spills)
    assert found == committed
