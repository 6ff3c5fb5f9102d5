"""Claim: a linear of a rewritten exported program against torch's own, by M, with weights that come from memory.

Every contender has several modules of the same size and runs them in turn, so that no weight is still in a cache. torch
calls its linear directly. A program is called through `ep.module()`, whose checks and pytrees cost the same for every
program, once per call; the rows without it call the two ops on the same weights.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from floors import measure
from harness import THREADS, noise_notes, publish, take_turns
from settings import TORCH_INT8
from torch import nn

import mxfp8_graph
from mxfp8_graph import Recipe

Call = Callable[[], Any]
OPS = torch.ops.mxfp8
BASE = "torch bf16"


def in_turn(calls: Sequence[Call]) -> Call:
    """Returns a function that makes the next of `calls`, over and over."""
    turn = itertools.cycle(calls)

    def call() -> None:
        next(turn)()

    return call


def contenders(modules: Sequence[nn.Linear], x: torch.Tensor) -> dict[str, Call]:
    """Returns what to time: each runs the linears of `modules` (bfloat16) in turn."""
    programs = [torch.export.export(module, (x,)) for module in modules]
    calls: dict[str, Sequence[Call]] = {}
    for name, activations in (("mxfp8", "e4m3"), ("mxfp8 weight-only", "unchanged")):
        recipe = Recipe(output_projections=True, activations=activations)
        rewritten = [mxfp8_graph.rewrite(program, recipe)[0] for program in programs]
        called = [program.module() for program in rewritten]
        calls[f"{name}, ep.module()"] = [lambda m=m: m(x) for m in called]
        if activations == "e4m3":
            packed = [tuple(program.state_dict.values()) for program in rewritten]
            assert all(len(pair) == 2 for pair in packed)
            calls["mxfp8, the two ops alone"] = [
                lambda p=p: OPS.gemm.default(*OPS.quantize.default(x), *p, dtype=x.dtype) for p in packed
            ]
    calls["torch bf16, ep.module()"] = [lambda m=m: m(x) for m in [program.module() for program in programs]]
    calls[BASE] = [lambda m=m: m(x) for m in modules]
    wide, values = [nn.Linear(m.in_features, m.out_features, bias=False) for m in modules], x.float()
    calls["torch fp32"] = [lambda m=m: m(values) for m in wide]
    per_channel = {nn.Linear: torch.ao.quantization.per_channel_dynamic_qconfig}
    narrow = [torch.ao.quantization.quantize_dynamic(nn.Sequential(m), per_channel) for m in wide]
    calls[TORCH_INT8] = [lambda m=m: m(values) for m in narrow]
    return {name: in_turn(each) for name, each in calls.items()}


def main() -> None:
    """Times linears of M rows, weights in turn, and writes results/torch_linear."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--m", type=int, nargs="+", default=[1, 4, 16, 256])
    parser.add_argument("--weights", type=int, default=6, help="modules that take turns")
    arguments = parser.parse_args()
    k, n = arguments.k, arguments.n
    warnings.simplefilter("ignore")  # torch.export and torch.ao warn of their deprecation
    torch.set_num_threads(THREADS)
    floors = measure()
    packed = n * k * 33 / 32
    modules = [nn.Linear(k, n, bias=False).bfloat16() for _ in range(arguments.weights)]
    rows, notes = [], [floors.describe()]
    notes.append(
        f"{arguments.weights} weights in turn: {arguments.weights * packed / 1e6:.0f} MB of MXFP8, twice that of bf16."
    )
    notes.append(
        "A rate above 100% says that the floor was measured in a slower moment, or that a cache beyond this machine's "
        "serves."
    )
    for m in arguments.m:
        calls = contenders(modules, torch.randn(m, k).bfloat16())  # weights made in inference mode are not kept
        with torch.inference_mode():
            timings = take_turns(calls, rounds=15, least_seconds=0.05)
        notes += [f"M = {m}: {note}" for note in noise_notes(timings)]
        for name, timing in timings.items():
            rate = packed / timing.median / floors.read
            rows.append(
                [
                    name,
                    m,
                    f"{timing.median * 1e3:.3f}",
                    f"{timing.spread / timing.median:.0%}",
                    f"{timings[BASE].median / timing.median:.2f}x",
                    f"{rate:.0%}" if name.startswith("mxfp8") and m <= 16 else "",
                ]
            )
            if m == 1:
                extra = [
                    f"{1e6 * (timings[f'{name}, ep.module()'].median - timings[bare].median):.0f} us ({name})"
                    for name, bare in (("mxfp8", "mxfp8, the two ops alone"), (BASE, BASE))
                ]
                notes.append(f"ep.module() itself, once per call of a model, takes {' and '.join(extra)} at M = 1.")
    columns = ["contender", "M", "ms", "spread", f"vs {BASE}", "of read bandwidth"]
    publish("torch_linear", f"One linear in PyTorch, K = {k}, N = {n}, {THREADS} threads", columns, rows, notes=notes)


if __name__ == "__main__":
    main()
