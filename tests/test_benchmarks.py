"""The benchmarks as scripts: make runs each of them, and what an op is compared with is the kernel it calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
SHARED = {"contenders", "exports", "floors", "harness", "llama_peer", "openvino_peer", "ort_peer", "peers"}


def test_make_runs_every_benchmark():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if not path.stem.startswith("gpu_")} - SHARED
    (listed,) = re.findall(r"for script in ([a-z_ ]+);", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert set(listed.split()) == scripts


@pytest.mark.parametrize("mode", ["inference_mode", "enable_grad"])
def test_overhead_is_that_of_an_op_over_its_own_kernel(monkeypatch, mode):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import op_overhead

    ops, kernels = op_overhead.ops(), op_overhead.kernels()
    for name in ("gemm", "weight_gemm"):
        op_overhead.y.zero_()
        assert kernels[name]() == 0
        assert torch.equal(op_overhead.y, ops[name]())
    elements, scales = op_overhead.a
    expected = elements.clone(), scales.clone()
    elements.zero_()
    assert kernels["quantize"]() == 0
    assert torch.equal(elements, expected[0])
    assert kernels["dequantize"]() == 0
    assert torch.equal(op_overhead.back, ops["dequantize"]())
    rows = op_overhead.table(mode, op_overhead.measure(mode, rounds=1, least_seconds=0))
    assert [row[:2] for row in rows] == [[name, mode] for name in kernels]
    assert all(len(row) == len(op_overhead.COLUMNS) for row in rows)
