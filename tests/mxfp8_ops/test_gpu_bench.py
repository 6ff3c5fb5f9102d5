"""The GPU benchmark without a GPU: every case on emulated CUDA threads, and sections that fail."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from cuda_emulation import device
from cupy_stand_in import sources

torch = pytest.importorskip("torch")
torch_cuda = pytest.importorskip("mxfp8_ops.torch_ops.cuda")
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch_stand_in import cupy, emulated, on_a  # noqa: E402

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZE = (70, 48, 96)
__all__ = ["cupy", "emulated"]

pytestmark = pytest.mark.tools


class OnTheProcessor(TorchFunctionMode):
    """Makes the tensors of device "cuda" on the processor, whose memory is that of the emulated device."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@pytest.fixture
def cases(monkeypatch, emulated):
    on_a(monkeypatch, (9, 0))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_cases
    import gpu_timing

    ops = types.SimpleNamespace(linear_train=torch.ops.mxfp8.linear_train)
    for name in ("quantize", "quantize_both", "dequantize", "gemm", "weight_gemm"):
        setattr(ops, name, getattr(torch_cuda, name))

    class Event:
        def __init__(self, **_: Any) -> None:
            self.record = self.synchronize = lambda: None

        def elapsed_time(self, _: Any) -> float:
            return 1.0

    def captured(calls: Any) -> Any:
        for call in dict.fromkeys(calls):  # one pass over the sets is enough here
            call()
        return types.SimpleNamespace(replay=lambda: None)

    properties = types.SimpleNamespace(L2_cache_size=1, multi_processor_count=device().processors, name="a GPU")
    for where, name, value in (
        (gpu_cases, "ops", ops),
        (gpu_timing, "captured", captured),
        (gpu_cases, "EAGER_CALLS", 2),
        (torch.cuda, "Event", Event),
        (torch.cuda, "_sleep", lambda _: None),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "get_device_properties", lambda _: properties),
        (torch.cuda, "get_device_capability", lambda: device().capability),
    ):
        monkeypatch.setattr(where, name, value)
    torch.manual_seed(0)
    with OnTheProcessor(), torch.inference_mode():
        yield gpu_cases


@pytest.mark.parametrize(
    ("case", "arguments", "launched"),
    [
        ("memory_bound", (64, 96), {"quantize_rows", "quantize_columns", "dequantize"}),
        ("few_rows", ((3, 48, 96), {"copy": (1.0, 2.0)}), {"quantize_rows", "gemm_skinny"}),
        ("many_rows", (SIZE, {}), {"matmul_bf16", "dequantize", "gemm_float32"}),
        ("cuts", ((3, 48, 96), [{"splits": 2}, {"warps": 1}]), {"gemm_skinny", "finish"}),
        ("wide_activations", (SIZE,), {"bfloat16_parts", "matmul_bf16", "finish"}),
        ("eager", ((1, 48, 96),), {"gemm_skinny"}),
        ("training", (64, 32, 32), set()),  # on the kernels of the processor
    ],
)
def test_every_case_runs_and_checks_itself(cases, case, arguments, launched):
    rows = getattr(cases, case)(1, *arguments)
    assert {name.partition(" ")[0] for name in sources(device())} >= launched
    assert all(row.microseconds > 0 and row.value >= 0 for row in rows)


def test_a_wrong_product_is_no_result(cases, monkeypatch):
    monkeypatch.setattr(cases.ops, "weight_gemm", lambda x, *_: torch_cuda.weight_gemm(x, *_) * 1.1)
    with pytest.raises(SystemExit, match=r"relative error .*e-0\d, expected below 2\^-8: the kernel is wrong"):
        cases.few_rows(1, (3, 48, 96), {})


@pytest.mark.parametrize("case", ["skinny", "columns"])
def test_what_a_profiler_watches_is_launched(cases, case):
    import gpu_once

    gpu_once.launch(cases, case, 96, times=3)
    assert sources(device()).count(gpu_once.CASES[case]) >= 3  # two are skipped


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The script, with sections that write one row each and a way to fail."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_bench

    row = {"microseconds": 1, "value": 0.9, "peer": "x", "must": 0.8, "stretch": 1, "verdict": "ok"}
    failing: dict[str, str] = {}

    def run(command: list[str], seconds: float) -> str:
        section, rows = command[command.index("--only") + 1], Path(command[command.index("--rows") + 1])
        with rows.open("a") as file:
            file.write(json.dumps({"name": section, **row}) + "\n")
            if section in failing:
                file.write('{"name": "half a li')
        return failing.get(section, "")

    def main(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gpu_bench.py", "--out", str(tmp_path), *arguments])
        with pytest.raises(SystemExit) as ended:
            gpu_bench.main()
        return int(ended.value.code), (tmp_path / "gpu.md").read_text()

    monkeypatch.setattr(gpu_bench, "prepare", lambda: ("a GPU", 200))
    monkeypatch.setattr(gpu_bench, "run", run)
    return types.SimpleNamespace(main=main, failing=failing, sections=[*gpu_bench.SECTIONS])


def test_the_table_has_every_section_and_says_what_a_section_died_of(bench, tmp_path):
    code, text = bench.main()
    assert code == 0
    assert f"{len(bench.sections)} targets: 0 stretch, {len(bench.sections)} ok, 0 MISSED" in text
    assert [row["name"] for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]] == bench.sections
    bench.failing["memory"] = "exit code -11: no message"
    code, text = bench.main("--only", "memory")
    assert (code, "| memory |" in text) == (1, True)
    assert "Section memory is incomplete: exit code -11: no message." in text
    code, text = bench.main("--seconds", "0")
    assert (code, "Section cuts is incomplete: no time was left." in text) == (1, True)
