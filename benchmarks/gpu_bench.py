"""Claim: the CUDA kernels against copy bandwidth and cuBLAS bfloat16, on one GPU, with the targets beside the numbers.

Needs torch with CUDA and CuPy; no network, no CPU library: `make gpu-bench`. Every case is captured into a CUDA graph
that goes through enough sets of operands to leave nothing in the L2 cache; peers take turns, and the median of all
rounds counts. Data is random and not zero (zeros run faster), and outputs are poisoned before they are checked.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxfp8_ops import cuda, cuda_kernels, torch_cuda, torch_ops  # noqa: F401 - registers the ops
from mxfp8_ops.cuda_kernels import Operand
from mxfp8_ops.errors import BackendError
from mxfp8_ops.numerics import scale_count

RESULTS = Path(__file__).parent / "results"
ops = torch.ops.mxfp8
Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One line of the table: `value` against what it must and could reach, in units of `peer`."""

    name: str
    microseconds: float
    value: float
    peer: str
    must: float | None = None
    stretch: float | None = None

    @property
    def verdict(self) -> str:
        """What the value says about the targets; empty without any."""
        if self.must is None:
            return ""
        return (
            "stretch" if self.stretch and self.value >= self.stretch else "ok" if self.value >= self.must else "MISSED"
        )


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Returns a graph that makes all calls; each has run before, so everything is compiled and loaded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def take_turns(cases: dict[str, Sequence[Call]], rounds: int) -> dict[str, float]:
    """Returns the median microseconds of one call of each case; every round replays each case once."""
    graphs = {name: captured(calls) for name, calls in cases.items()}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 3):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 3:  # the first ones warm up
                samples[name].append(start.elapsed_time(end) * 1e3 / len(cases[name]))
    return {name: statistics.median(values) for name, values in samples.items()}


def sets(nbytes: int) -> int:
    """Returns how many sets of operands of this size outgrow the L2 cache three times over, at least 4."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(4, -(-3 * cache // nbytes))


def copy_calls(nbytes: int) -> list[Call]:
    """Copies that read and write `nbytes` in all."""
    pairs = [torch.randint(256, (2, nbytes // 2), dtype=torch.uint8, device="cuda") for _ in range(sets(nbytes))]
    return [lambda p=pair: p[1].copy_(p[0]) for pair in pairs]


def queue() -> cuda_kernels.Queue:
    with torch_cuda._queue(torch.empty(0, device="cuda")) as found:
        return found


def memory_bound(rounds: int, m: int, k: int) -> list[Row]:
    """Returns quantize and dequantize of bfloat16 [m, k] against a copy of as many bytes."""
    n = m * k
    xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(sets(3 * n))]
    packed = [ops.quantize(x) for x in xs]

    def both(x: torch.Tensor) -> Any:
        rows = torch.empty_like(x, dtype=torch.uint8), x.new_empty((m, scale_count(k)), dtype=torch.uint8)
        columns = torch.empty_like(x, dtype=torch.uint8), x.new_empty((scale_count(m), k), dtype=torch.uint8)
        cuda_kernels.quantize_both(
            queue(), Operand("bfloat16", x.data_ptr()), (m, k), (rows[0].data_ptr(), rows[1].data_ptr()),
            (columns[0].data_ptr(), columns[1].data_ptr()), element_format="e4m3", scale_rounding="ceil",
        )  # fmt: skip
        return rows, columns

    one, two = n * 3 + n // 32, n * 4 + n // 16
    cases: dict[str, Sequence[Call]] = {
        "copy 1": copy_calls(one),
        "copy 2": copy_calls(two),
        "quantize, rows": [lambda x=x: ops.quantize(x) for x in xs],
        "quantize, columns": [lambda x=x: ops.quantize(x, 0) for x in xs],
        "quantize, both in one pass": [lambda x=x: both(x) for x in xs],
        "dequantize": [lambda p=p: ops.dequantize(*p, -1, "e4m3", torch.bfloat16) for p in packed],
    }
    times = take_turns(cases, rounds)
    targets = {
        "quantize, rows": (0.90, 0.95), "quantize, columns": (0.85, 0.92),
        "quantize, both in one pass": (0.80, 0.88), "dequantize": (0.90, 0.95),
    }  # fmt: skip
    rows = [Row(f"copy of {one / 1e6:.0f} MB", times["copy 1"], one / times["copy 1"] / 1e6, "TB/s")]
    for name, (must, stretch) in targets.items():
        floor = times["copy 2" if "both" in name else "copy 1"]
        rows.append(Row(f"{name} {m}x{k}", times[name], floor / times[name], "x copy", must, stretch))
    return rows


def product(rounds: int, m: int, n: int, k: int, targets: dict[str, tuple[float, float]]) -> list[Row]:
    """Returns one linear layer with M = m in every way we have, against cuBLAS on bfloat16 weights."""
    count = sets(2 * n * k) if m <= 1024 else 4
    ws = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for _ in range(count)]
    xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    packed = [ops.quantize(w) for w in ws]
    bf16 = torch.bfloat16

    def quantized(x: torch.Tensor, p: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return ops.gemm(*ops.quantize(x), *p, None, "e4m3", "e4m3", bf16)

    pairs = list(zip(xs, packed, strict=True))
    check(xs[0], ws[0], packed[0])
    cases: dict[str, Sequence[Call]] = {
        "cublas": [lambda x=x, w=w: torch.nn.functional.linear(x, w) for x, w in zip(xs, ws, strict=True)],
        "weight-only": [lambda x=x, p=p: ops.weight_gemm(x, *p) for x, p in pairs],
        "with quantize": [lambda x=x, p=p: quantized(x, p) for x, p in pairs],
    }
    if m <= 64:
        cases["copy"] = copy_calls(n * k + n * k // 32)
    times = take_turns(cases, rounds)
    rows = [Row(f"cuBLAS bf16 M={m}", times["cublas"], 2 * m * n * k / times["cublas"] / 1e6, "TFLOP/s")]
    for name in ("weight-only", "with quantize"):
        rows.append(
            Row(f"{name} M={m}", times[name], times["cublas"] / times[name], "x cuBLAS", *targets.get(name, ()))
        )
    if m <= 64:
        # A copy moves each byte twice; reading the weight alone is bound by the same bytes a second.
        rows.append(
            Row(f"weight-only M={m}", times["weight-only"], times["copy"] / times["weight-only"], "x copy",
                *targets.get("copy", ()))
        )  # fmt: skip
    else:
        for p in packed:
            torch_cuda.keep_wide(*p)
        kept = take_turns({name: cases[name] for name in ("cublas", "with quantize")}, rounds)
        ratio = kept["cublas"] / kept["with quantize"]
        rows.append(
            Row(f"with quantize, kept M={m}", kept["with quantize"], ratio, "x cuBLAS", *targets.get("kept", ()))
        )
        torch_cuda.forget_kept()
    return rows


def check(x: torch.Tensor, w: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Fails unless the product is right: a fast wrong kernel is no result."""
    poison = torch.full((x.shape[0], w.shape[0]), float("nan"), device="cuda", dtype=x.dtype)
    del poison  # its memory is what the allocator hands out next
    got = ops.weight_gemm(x, *packed).double()
    exact = x.double() @ ops.dequantize(*packed).double().T
    error = ((got - exact).norm() / exact.norm()).item()
    if not error < 2**-8:  # one rounding to bfloat16; NaN fails too
        raise SystemExit(f"M={x.shape[0]}: relative error {error:.2e}, expected below 2^-8: the kernel is wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--size", type=int, default=8192, help="N and K of the products")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that everything runs")
    arguments = parser.parse_args()
    try:
        gpu = cuda.device(0)
    except BackendError as error:
        sys.exit(str(error))
    rounds, size = 5 if arguments.quick else arguments.rounds, arguments.size
    with torch.inference_mode():
        rows = memory_bound(rounds, 2 * size, size)
        skinny = {"copy": (0.78, 0.87), "weight-only": (1.6, 1.9)}
        for m, targets in (
            *((m, skinny) for m in (1, 4, 16)),
            (32, {"weight-only": (1.5, 1.5)}), (64, {"weight-only": (1.3, 1.3)}), (128, {"weight-only": (1.1, 1.1)}),
            *((m, {"with quantize": (0.75, 0.9)}) for m in (256, 1024)),
            (2048, {"with quantize": (0.80, 0.80)}), (8192, {"with quantize": (0.88, 0.88), "kept": (0.94, 0.96)}),
        ):  # fmt: skip
            rows += product(rounds, m, size, size, targets)
    publish(gpu.name, rows)


def publish(gpu: str, rows: Sequence[Row]) -> None:
    """Prints the table and writes it to results/gpu.json and results/gpu.md."""
    import cupy

    versions = {"torch": torch.__version__, "cupy": cupy.__version__, "driver": cupy.cuda.runtime.driverGetVersion()}
    head = f"{datetime.date.today().isoformat()}, {gpu}, " + ", ".join(f"{k} {v}" for k, v in versions.items())
    lines = [head, "", "| what | us | value | of | must | stretch | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        bounds = " | ".join("" if bound is None else f"{bound:.2f}" for bound in (row.must, row.stretch))
        lines.append(
            f"| {row.name} | {row.microseconds:.1f} | {row.value:.3f} | {row.peer} | {bounds} | {row.verdict} |"
        )
    lines += [
        "",
        "Not built yet: fold FP8 (cuBLASLt), the fused decode kernel for sm_90a, block-scaled MXFP8 on Blackwell.",
    ]
    print("\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu.md").write_text("# CUDA kernels on one GPU\n\n" + "\n".join(lines) + "\n")
    content = {"gpu": head, "rows": [vars(row) | {"verdict": row.verdict} for row in rows]}
    (RESULTS / "gpu.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
