"""benchmarks/sass.py: the counts of the committed table, compiled again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxfp8_ops.cuda import build
from mxfp8_ops.errors import BackendError

pytestmark = pytest.mark.cuda

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def sass(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sass

    return sass


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
    counted = {}
    for row in sass.KERNELS:
        instructions, registers, spills = sass.counted(row, arch, nvdisasm)
        counted[row.kernel] = (round(instructions), registers, spills)
    assert counted == committed
