"""Claim: beyond its kernel, an op of torch costs a few microseconds: four to five times an op that does nothing.

The operands are so small that a kernel takes a microsecond or two. It is called as the op calls it: through ctypes, on
one thread, with results that exist already. The empty op is written in Python, takes four tensors and returns a fifth.
The row te.Linear compares a layer with its op, `linear_train`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Timing, noise_notes, publish, take_turns

import mxfp8_ops.torch_ops  # noqa: F401  registers torch.ops.mxfp8
from mxfp8_graph import te
from mxfp8_ops import contract, native

Call = Callable[[], Any]

M, N, K = 1, 16, 32
NAMES = ("quantize", "dequantize", "gemm", "weight_gemm")
LAYER = "te.Linear"
EMPTY = "empty op"
MODES = {"inference_mode": torch.inference_mode, "enable_grad": torch.enable_grad}
COLUMNS = ["op", "mode", "op, us", "spread", "kernel, us", "difference, us", "empty op, us", "difference / empty op"]

x, w = torch.randn(M, K), torch.randn(N, K)
back, y = torch.empty(M, K), torch.empty(M, N)
layer = te.Linear(K, N)
a, b = torch.ops.mxfp8.quantize(x), torch.ops.mxfp8.quantize(w)
_LIBRARY = torch.library.Library("mxfp8_overhead", "DEF")
_LIBRARY.define("empty(Tensor a, Tensor b, Tensor c, Tensor d) -> Tensor")
_LIBRARY.impl("empty", lambda *_: y, "CPU")


def ops() -> dict[str, Call]:
    """Returns a call of each op's overload, which is what exported programs call, and of the empty op."""
    arguments = {"quantize": (x,), "dequantize": a, "gemm": (*a, *b), "weight_gemm": (x, *b)}
    calls: dict[str, Call] = {name: partial(getattr(torch.ops.mxfp8, name).default, *arguments[name]) for name in NAMES}
    return calls | {EMPTY: partial(torch.ops.mxfp8_overhead.empty.default, *a, *b), LAYER: partial(layer, x)}


def kernels() -> dict[str, Call]:
    """Returns a call of each kernel on the operands of its op."""
    library = native.load()
    f32, e4m3, ceil, threads = contract.FLOAT, contract.FLOAT8E4M3FN, 0, 1
    values, result = x.data_ptr(), y.data_ptr()
    a_codes, b_codes = [t.data_ptr() for t in a], [t.data_ptr() for t in b]
    product = (e4m3, *b_codes, None, M, N, K, f32, result, N, 0, threads)
    return {
        "quantize": partial(library.mxfp8_quantize, f32, values, M, K, 1, e4m3, ceil, *a_codes, threads),
        "dequantize": partial(library.mxfp8_dequantize, e4m3, *a_codes, M, K, 1, f32, back.data_ptr(), threads),
        "gemm": partial(library.mxfp8_gemm, e4m3, *a_codes, *product),
        "weight_gemm": partial(library.mxfp8_weight_gemm, f32, values, K, contract.FLOAT, *product),
        LAYER: partial(torch.ops.mxfp8.linear_train.default, x, layer.weight, layer.bias, "E4M3", "ceil"),
    }


def measure(mode: str, *, rounds: int = 61, least_seconds: float = 0.005) -> dict[str, Timing]:
    """Returns the timing of each op, of the empty one, and of each kernel as "NAME kernel", in a mode of autograd."""
    calls = ops() | {f"{name} kernel": call for name, call in kernels().items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with MODES[mode](), te.autocast():
            return take_turns(calls, rounds=rounds, least_seconds=least_seconds)
    finally:
        torch.set_num_threads(threads)


def table(mode: str, timings: dict[str, Timing]) -> list[list[Any]]:
    """Returns one row per op."""
    empty = timings[EMPTY].median
    rows = []
    for name in (*NAMES, LAYER):
        op, kernel = timings[name], timings[f"{name} kernel"]
        difference = op.median - kernel.median
        times = f"{1e6 * kernel.median:.2f}", f"{1e6 * difference:.2f}", f"{1e6 * empty:.2f}"
        spread = f"{op.spread / op.median:.0%}"
        rows.append([name, mode, f"{1e6 * op.median:.2f}", spread, *times, f"{difference / empty:.2f}x"])
    return rows


def main() -> None:
    """Times the ops in both modes of autograd, and writes results/op_overhead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=61)
    rounds = parser.parse_args().rounds
    rows, notes = [], [f"M = {M}, N = {N}, K = {K}, one thread; the ops allocate their results, the kernels do not."]
    for mode in MODES:
        timings = measure(mode, rounds=rounds)
        rows += table(mode, timings)
        notes += [f"{mode}: {note}" for note in noise_notes(timings)]
    publish("op_overhead", "What an op of torch costs beyond its kernel", COLUMNS, rows, notes=notes)


if __name__ == "__main__":
    main()
