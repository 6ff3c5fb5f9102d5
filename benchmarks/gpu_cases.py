"""The cases of gpu_bench.py: each function returns rows of its table. gpu_timing.py takes the times.

Data is random and not zero (zeros run faster), and outputs are poisoned before they are checked. `eager` alone counts
the processor's time.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_timing import Call, Row, copy_calls, sets, take_turns

from mxfp8_ops import (
    torch_ops,  # noqa: F401 - registers
)
from mxfp8_ops.cuda import dispatch
from mxfp8_ops.torch_ops import cuda as torch_cuda

ops = torch.ops.mxfp8

EAGER_CALLS = 200
"""Calls that `eager` queues one after the other."""


def memory_bound(rounds: int, m: int, k: int) -> list[Row]:
    """Returns quantize and dequantize of bfloat16 [m, k] against a copy of as many bytes."""
    n = m * k
    xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(sets(3 * n))]
    packed = [ops.quantize(x) for x in xs]

    traffic = {"copy 1": n * 3 + n // 32, "copy 2": n * 4 + n // 16, "copy 3": n * 2 + n // 32}
    cases: dict[str, Sequence[Call]] = {
        **{name: copy_calls(size) for name, size in traffic.items()},
        "quantize, rows": [lambda x=x: ops.quantize(x) for x in xs],
        "quantize, columns": [lambda x=x: ops.quantize(x, 0) for x in xs],
        "quantize, columns transposed": [lambda x=x: ops.quantize(x.t()) for x in xs],
        "quantize, both, columns transposed": [lambda x=x: ops.quantize_both(x) for x in xs],
        "dequantize": [lambda p=p: ops.dequantize(*p, -1, "e4m3", torch.bfloat16) for p in packed],
    }
    times = take_turns(cases, rounds)
    targets = {
        "quantize, rows": ("copy 1", 0.90, 0.95), "quantize, columns": ("copy 1", 0.85, 0.92),
        "quantize, columns transposed": ("copy 1", None, None),
        "quantize, both, columns transposed": ("copy 2", None, None),
        "dequantize": ("copy 1", 0.90, 0.95),
    }  # fmt: skip
    one = traffic["copy 1"]
    rows = [Row(f"copy of {one / 1e6:.0f} MB", times["copy 1"], one / times["copy 1"] / 1e6, "TB/s")]
    for name, (copy, must, stretch) in targets.items():
        rows.append(Row(f"{name} {m}x{k}", times[name], times[copy] / times[name], "x copy", must, stretch))
    return rows


class Layers:
    """Linear layers [n, k] in enough sets to outgrow the cache, packed ones too, with activations [m, k]."""

    def __init__(self, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> None:
        count = sets(n * k) if m <= 1024 else 4
        self.ws = [torch.randn(n, k, device="cuda", dtype=dtype) / k**0.5 for _ in range(count)]
        self.xs = [torch.randn(m, k, device="cuda", dtype=dtype) for _ in range(count)]
        self.packed = [ops.quantize(w) for w in self.ws]
        check(self.xs[0], self.packed[0])

    def cublas(self) -> Sequence[Call]:
        """Returns calls of the peer, one per set."""
        return [lambda x=x, w=w: torch.nn.functional.linear(x, w) for x, w in zip(self.xs, self.ws, strict=True)]

    def weight_only(self, route: str | None = None) -> Sequence[Call]:
        """Returns calls of weight_gemm, by a row of the dispatch table, if one is named."""

        def call(x: torch.Tensor, p: tuple[torch.Tensor, torch.Tensor]) -> Any:
            with dispatch.forced_route(route) if route else contextlib.nullcontext():
                return ops.weight_gemm(x, *p)

        return [lambda x=x, p=p: call(x, p) for x, p in zip(self.xs, self.packed, strict=True)]

    def quantized(self, route: str | None = None) -> Sequence[Call]:
        """Returns calls of quantize and gemm, by a row of the dispatch table, if one is named."""

        def call(x: torch.Tensor, p: tuple[torch.Tensor, torch.Tensor]) -> Any:
            with dispatch.forced_route(route) if route else contextlib.nullcontext():
                return ops.gemm(*ops.quantize(x), *p, None, "e4m3", "e4m3", torch.bfloat16)

        return [lambda x=x, p=p: call(x, p) for x, p in zip(self.xs, self.packed, strict=True)]


def few_rows(rounds: int, size: tuple[int, int, int], targets: dict[str, tuple[float, ...]]) -> list[Row]:
    """Returns a linear layer with M <= 64 against cuBLAS on bfloat16 weights, and against copying its weight."""
    m, n, k = size
    layers, label = Layers(*size), f"M={m} N={n} K={k}"
    cases = {
        "cublas": layers.cublas(),
        "weight-only": layers.weight_only(),
        "with quantize": layers.quantized(),
        "copy": copy_calls(n * k + n * k // 32),
    }
    times = take_turns(cases, rounds)
    rows = [Row(f"cuBLAS bf16 {label}", times["cublas"], 2 * m * n * k / times["cublas"] / 1e6, "TFLOP/s")]
    for name in ("weight-only", "with quantize"):
        ratio = times["cublas"] / times[name]
        rows.append(Row(f"{name} {label}", times[name], ratio, "x cuBLAS", *targets.get(name, ())))
    # A copy moves each byte twice; reading the weight alone is bound by the same bytes a second.
    ratio = times["copy"] / times["weight-only"]
    rows.append(Row(f"weight-only {label}", times["weight-only"], ratio, "x copy", *targets.get("copy", ())))
    return rows


def eager(rounds: int, size: tuple[int, int, int]) -> list[Row]:
    """Returns what a call costs the processor without a graph: a product too small for the GPU to be what is slow."""
    layers = Layers(*size)
    cases = {"cublas": layers.cublas(), "weight-only": layers.weight_only()}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(max(2, rounds // 5)):
        for name, calls in cases.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for call in itertools.islice(itertools.cycle(calls), EAGER_CALLS):
                call()
            torch.cuda.synchronize()
            if turn:  # the first one warms up
                samples[name].append((time.perf_counter() - start) * 1e6 / EAGER_CALLS)
    m, n, k = size
    times = {name: statistics.median(values) for name, values in samples.items()}
    ratio = times["cublas"] / times["weight-only"]
    return [Row(f"eager, weight-only M={m} N={n} K={k}", times["weight-only"], ratio, "x eager cuBLAS")]


def cuts(rounds: int, size: tuple[int, int, int], changes: Sequence[dict[str, int]]) -> list[Row]:
    """Returns gemm_skinny cut up in other ways, against the way that is chosen."""
    m, n, k = size

    def call(x: torch.Tensor, p: tuple[torch.Tensor, torch.Tensor], change: dict[str, int]) -> Any:
        with dispatch.fixed_cut(**change):
            return ops.weight_gemm(x, *p)

    layers = Layers(m, n, k)
    pairs = list(zip(layers.xs, layers.packed, strict=True))
    cases = {
        ", ".join(f"{name} {count}" for name, count in change.items()): [
            lambda x=x, p=p, change=change: call(x, p, change) for x, p in pairs
        ]
        for change in changes
    }
    times = take_turns({"chosen": layers.weight_only(), **cases}, rounds)
    return [
        Row(f"gemm_skinny, {name}, M={m} N={n} K={k}", times[name], times["chosen"] / times[name], "x chosen")
        for name in cases
    ]


def many_rows(rounds: int, size: tuple[int, int, int], targets: dict[str, tuple[float, ...]]) -> list[Row]:
    """Returns a linear layer with M > 64 in every way there is, against cuBLAS on bfloat16 weights."""
    m, n, k = size
    layers, label = Layers(*size), f"M={m} N={n} K={k}"
    capability = torch.cuda.get_device_capability()
    cases = {"cublas": layers.cublas(), "weight-only": layers.weight_only(), "with quantize": layers.quantized()}
    if m <= 256:  # a few passes of gemm_skinny, which may beat one that dequantizes the weight
        cases["slices, weight-only"] = layers.weight_only("slices")
    if capability >= (10, 0):
        cases["large, with quantize"] = layers.quantized("large")
    times = take_turns(cases, rounds)
    for p in layers.packed:
        torch_cuda.keep_wide(*p)
    times_kept = take_turns({name: cases[name] for name in cases if not name.endswith("weight-only")}, rounds)
    torch_cuda.forget_kept()
    rows = [Row(f"cuBLAS bf16 {label}", times["cublas"], 2 * m * n * k / times["cublas"] / 1e6, "TFLOP/s")]
    for medians, suffix in ((times, ""), (times_kept, ", weight kept")):
        for name in [*medians][1:]:
            ratio, key = medians["cublas"] / medians[name], name + suffix
            rows.append(Row(f"{key} {label}", medians[name], ratio, "x cuBLAS", *targets.get(key, ())))
    return rows


def wide_activations(rounds: int, size: tuple[int, int, int]) -> list[Row]:
    """Returns weight_gemm of float32 and float16 activations against cuBLAS in the same dtype (no TF32)."""
    m, n, k = size
    rows = []
    for dtype, label in ((torch.float32, "float32"), (torch.float16, "float16")):
        layers = Layers(m, n, k, dtype)
        times = take_turns({"cublas": layers.cublas(), "parts": layers.weight_only()}, rounds)
        ratio = times["cublas"] / times["parts"]
        rows.append(Row(f"weight-only, {label} M={m} N={n} K={k}", times["parts"], ratio, f"x cuBLAS {label}"))
    return rows


def training(rounds: int, m: int, n: int, k: int) -> list[Row]:
    """Returns forward and backward of a linear layer against torch's in bfloat16."""
    with torch.inference_mode(False):
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)

        def step(forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
            return torch.autograd.grad(forward(x, w), (x, w), dy)

        cases: dict[str, Sequence[Call]] = {
            "torch": [lambda: step(torch.nn.functional.linear)],
            "linear_train": [lambda: step(ops.linear_train)],
        }
        times = take_turns(cases, rounds)
    label = f"M={m} N={n} K={k}"
    rows = [
        Row(f"torch bf16 linear, trained, {label}", times["torch"], 6 * m * n * k / times["torch"] / 1e6, "TFLOP/s")
    ]
    rows += [Row(f"{name}, {label}", times[name], times["torch"] / times[name], "x torch") for name in [*cases][1:]]
    return rows


PRODUCT_ERROR = 2.0**-8
"""One rounding to bfloat16."""


def relative_error(x: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Returns ||got - exact|| / ||exact|| of weight_gemm."""
    poison = torch.full((x.shape[0], packed[0].shape[0]), float("nan"), device="cuda", dtype=x.dtype)
    del poison  # its memory is what the allocator hands out next
    got = ops.weight_gemm(x, *packed).double()
    exact = x.double() @ ops.dequantize(*packed).double().T
    return ((got - exact).norm() / exact.norm()).item()


def check(x: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Fails unless the product is right: a fast kernel with wrong results does not count."""
    error = relative_error(x, packed)
    if not error < PRODUCT_ERROR:  # NaN fails too
        raise SystemExit(f"M={x.shape[0]}: relative error {error:.2e}, expected below 2^-8: the kernel is wrong")
