"""The GPU benchmark without a GPU: every case on emulated CUDA threads, and sections that fail."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from cuda_emulation import device
from test_cuda_fp8 import emulated, on_a

torch = pytest.importorskip("torch")
torch_cuda = pytest.importorskip("mxfp8_ops.torch_ops.cuda")
pytest.importorskip("mxfp8_ops.torch_ops")
from torch.overrides import TorchFunctionMode  # noqa: E402

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZE = (70, 48, 96)
__all__ = ["emulated"]

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

    gpu_cases.queued = []  # what the fake torch.cuda was asked for, in order

    class Event:
        def __init__(self, **_: Any) -> None:
            self.record = lambda: gpu_cases.queued.append("event")
            self.synchronize = lambda: gpu_cases.queued.append("wait")

        def elapsed_time(self, _: Any) -> float:
            return 1.0

    def captured(calls: Any) -> Any:
        for call in dict.fromkeys(calls):  # one pass over the sets is enough here
            call()
        return types.SimpleNamespace(replay=lambda: gpu_cases.queued.append(f"graph of {len(calls)}"))

    monkeypatch.setattr(gpu_cases, "ops", ops)
    monkeypatch.setattr(gpu_timing, "captured", captured)
    monkeypatch.setattr(gpu_cases, "EAGER_CALLS", 2)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: gpu_cases.queued.append("delay"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    properties = types.SimpleNamespace(L2_cache_size=1, multi_processor_count=device().processors, name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: device().capability)
    torch.manual_seed(0)
    with OnTheProcessor(), torch.inference_mode():
        yield gpu_cases


def kernels() -> set[str]:
    return {name.partition("<")[0].partition(" ")[0] for name in device().launched}


@pytest.mark.parametrize(
    ("call", "launched"),
    [
        (lambda cases: cases.memory_bound(1, 64, 96), {"quantize_rows", "quantize_columns", "dequantize"}),
        (lambda cases: cases.few_rows(1, (3, 48, 96), {"copy": (1.0, 2.0)}), {"quantize_rows", "gemm_skinny"}),
        (lambda cases: cases.many_rows(1, SIZE, {}), {"matmul_bf16", "dequantize", "gemm_float32"}),
        (lambda cases: cases.cuts(1, (3, 48, 96), [{"splits": 2}, {"warps": 1}]), {"gemm_skinny", "finish"}),
        (lambda cases: cases.wide_activations(1, SIZE), {"bfloat16_parts", "matmul_bf16", "finish"}),
        (lambda cases: cases.eager(1, (1, 48, 96)), {"gemm_skinny"}),
        (lambda cases: cases.training(1, 64, 32, 32), set()),  # on the kernels of the processor
    ],
    ids=["memory_bound", "few_rows", "many_rows", "cuts", "wide_activations", "eager", "training"],
)
def test_every_case_runs_and_checks_itself(cases, call, launched):
    rows = call(cases)
    assert kernels() >= launched
    assert all(row.microseconds > 0 and row.value >= 0 for row in rows)


def test_a_wrong_product_is_no_result(cases, monkeypatch):
    monkeypatch.setattr(cases.ops, "weight_gemm", lambda x, *_: torch_cuda.weight_gemm(x, *_) * 1.1)
    with pytest.raises(SystemExit, match=r"relative error .*e-0\d, expected below 2\^-8: the kernel is wrong"):
        cases.few_rows(1, (3, 48, 96), {})


def test_a_sample_begins_while_the_gpu_is_busy(cases):
    """Else it would count the time from the start event until the processor has launched the graph."""
    times = cases.take_turns({"a": [lambda: None] * 4, "b": [lambda: None] * 7}, 1)
    turn = [["delay", "event", f"graph of {calls}", "event", "wait"] for calls in (20, 21)]
    assert cases.queued == [*turn[0], *turn[1]] * 4
    assert times == {"a": 1e3 / 20, "b": 1e3 / 21}


def test_operands_of_one_byte_a_value_outgrow_the_cache(cases, monkeypatch):
    """Three times, as packed as they are; those of the peers are larger."""
    properties = types.SimpleNamespace(L2_cache_size=60_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert cases.sets(10_000) == 18
    assert cases.sets(1 << 20) == 4
    for dtype in (torch.bfloat16, torch.float32):
        layers = cases.Layers(1, 64, 64, dtype)
        packed = sum(elements.numel() for elements, _ in layers.packed)
        assert packed >= 3 * properties.L2_cache_size
        assert len({elements.data_ptr() for elements, _ in layers.packed}) == len(layers.cublas()) == 44


def test_wide_activations_take_turns_through_sets_of_weights(cases, monkeypatch):
    properties = types.SimpleNamespace(L2_cache_size=SIZE[1] * SIZE[2] * 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    taken = []
    monkeypatch.setattr(cases, "take_turns", lambda found, _: taken.append(found) or dict.fromkeys(found, 1.0))
    cases.wide_activations(1, SIZE)
    assert [{name: len(calls) for name, calls in found.items()} for found in taken] == [{"cublas": 9, "parts": 9}] * 2


@pytest.mark.parametrize("case", ["skinny", "columns"])
def test_what_a_profiler_watches_is_launched(cases, case):
    import gpu_once

    device().launched.clear()
    gpu_once.launch(cases, case, 96, times=3)
    names = [name.partition("<")[0] for name in device().launched]
    assert names.count(gpu_once.CASES[case]) >= 3  # two are skipped


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The script, with sections that write one row each and a way to fail."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_bench

    failing: dict[str, str] = {}

    def run(command: list[str], seconds: float) -> str:
        section, rows = command[command.index("--only") + 1], Path(command[command.index("--rows") + 1])
        row = {
            "name": section,
            "microseconds": 1,
            "value": 0.9,
            "peer": "x",
            "must": 0.8,
            "stretch": 1,
            "verdict": "ok",
        }
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
            if section in failing:
                file.write('{"name": "half a li')
        assert seconds <= gpu_bench.SECTION_SECONDS
        return failing.get(section, "")

    monkeypatch.setattr(gpu_bench, "prepare", lambda: ("a GPU", 200))
    monkeypatch.setattr(gpu_bench, "run", run)
    gpu_bench.failing = failing
    return gpu_bench


def main(bench: Any, monkeypatch: Any, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    return int(ended.value.code)


def test_the_table_has_every_section(bench, monkeypatch, tmp_path):
    assert main(bench, monkeypatch, "--out", str(tmp_path)) == 0
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["name"] for row in content["rows"]] == [*bench.SECTIONS]
    assert (
        f"{len(bench.SECTIONS)} targets: 0 stretch, {len(bench.SECTIONS)} ok, 0 MISSED"
        in (tmp_path / "gpu.md").read_text()
    )


def test_a_section_that_fails_costs_no_other(bench, monkeypatch, tmp_path):
    bench.failing["memory"] = "exit code -11: no message"
    assert main(bench, monkeypatch, "--out", str(tmp_path), "--only", "memory") == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "| memory |" in text
    assert "Section memory is incomplete: exit code -11: no message." in text


def test_without_time_nothing_more_is_started(bench, monkeypatch, tmp_path):
    assert main(bench, monkeypatch, "--out", str(tmp_path), "--seconds", "0") == 1
    assert "Section cuts is incomplete: no time was left." in (tmp_path / "gpu.md").read_text()


def test_what_a_section_dies_of_is_said(monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_bench

    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    assert gpu_bench.run([sys.executable, "-c", "raise SystemExit('no such GPU')"], 60) == "exit code 1: no such GPU"
    assert gpu_bench.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) == "took more than 0 s"
