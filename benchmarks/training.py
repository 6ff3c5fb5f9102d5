"""Target: from 2048 tokens on a training step in MXFP8 takes no longer than in float32, and linears save a quarter.

A transformer encoder of 4 layers (d = 512, 8 heads, feed-forward 2048, exported as a program) takes one AdamW step per
call, as a float32 program, the same under bfloat16 autocast, and rewritten for training: linears alone, and with
`fp8_dpa` the attention products too. All take turns; a ratio is the median over the rounds of what float32 took in the
same round, since other processes disturb both alike. The smaller sizes are where MXFP8 loses.
"""

from __future__ import annotations

import argparse
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from floors import measure
from harness import THREADS, publish, take_turns
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import mxfp8_graph
from mxfp8_graph import Recipe

SIZES: Final = ("1x64", "2x128", "8x256")
"""Sequences x tokens."""
LARGE: Final = 2048
"""The claim is for this many tokens or more."""
SAVED: Final = 0.27
"""The share of float32's saved bytes that the linears may save: 33/32 of a byte instead of four, and padding."""
BASE, BF16, OURS, DPA = "torch fp32", "torch bf16 autocast", "mxfp8", "mxfp8, fp8_dpa"
PARTS: Final = ("forward", "backward", "optimizer")
QUANTIZE: Final = ("mxfp8::quantize", "mxfp8::quantize_both")
PRODUCTS: Final = ("mxfp8::gemm", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise")
COLUMNS: Final = [
    "batch x tokens", "contender", *(f"{part}, ms" for part in PARTS), "step, ms", "spread",
    f"step x {BASE}", *(f"{part} x" for part in PARTS),
    "quantize", "products", "rest", "linears save, MB", f"of {BASE}", "all save, MB", f"all of {BASE}",
]  # fmt: skip


@dataclass
class Step:
    """One contender: a training step that notes how long each part took."""

    program: Callable[[Tensor], Tensor]
    x: Tensor
    target: Tensor
    autocast: bool = False
    seconds: list[tuple[float, float, float]] = field(default_factory=list)
    """One row of `PARTS` per call."""

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.program.parameters(), lr=1e-4, foreach=True)  # type: ignore[attr-defined]

    def loss(self) -> Tensor:
        """Returns the loss of one forward pass."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            result = self.program(self.x)
        return nn.functional.mse_loss(result.float(), self.target)

    def __call__(self) -> float:
        """Takes the step; returns its seconds."""
        clock = [time.perf_counter()]
        loss = self.loss()
        clock.append(time.perf_counter())
        loss.backward()
        clock.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        clock.append(time.perf_counter())
        first, second, third = np.diff(clock).tolist()
        self.seconds.append((first, second, third))
        return clock[-1] - clock[0]


def encoder(width: int, layers: int) -> nn.Module:
    """Returns a transformer encoder without dropout."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, width // 64 or 1, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False).train()


def contenders(batch: int, tokens: int, width: int = 512, layers: int = 4) -> dict[str, Step]:
    """Returns what to time, each with parameters of its own."""
    x, target = torch.randn(2, batch, tokens, width, generator=torch.Generator().manual_seed(1))

    def program() -> torch.export.ExportedProgram:
        return torch.export.export(encoder(width, layers), (x,))

    def rewritten(recipe: Recipe) -> Any:
        return mxfp8_graph.rewrite(program(), recipe, training=True)[0].module()

    return {
        BASE: Step(program().module(), x, target),
        BF16: Step(program().module(), x, target, autocast=True),
        OURS: Step(rewritten(Recipe()), x, target),
        DPA: Step(rewritten(Recipe(fp8_dpa=True)), x, target),
    }


def shares(step: Step) -> tuple[float, float, float]:
    """Returns which parts of forward and backward are quantizing, products of matrices and all else, by profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        step.loss().backward()
    own = {event.key: event.self_cpu_time_total for event in record.key_averages()}
    total = sum(own.values())
    quantize, products = (sum(own.get(name, 0) for name in names) / total for names in (QUANTIZE, PRODUCTS))
    return quantize, products, 1 - quantize - products


def saved(step: Step) -> tuple[int, int]:
    """Returns the bytes that linears, and all ops, save for the backward pass; each storage once, parameters never.

    A linear saves its x: of `aten::linear` the autograd node has it as mat1 or self, of `mxfp8::linear_train` the node
    has elements and scales, blocked along the rows.
    """
    parameters = {p.untyped_storage().data_ptr() for p in step.program.parameters()}  # type: ignore[attr-defined]
    everything: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (everything.append(t), t)[1], lambda t: t):
        loss = step.loss()
    linears = [t for node in nodes_behind(loss) for t in saved_by_linear(node)]
    return unique_bytes(linears, parameters), unique_bytes(everything, parameters)


def nodes_behind(loss: Tensor) -> Iterator[Any]:
    """Yields every autograd node that `loss` is made by."""
    stack, seen = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [before for before, _ in node.next_functions]
            yield node


def saved_by_linear(node: Any) -> list[Tensor]:
    """Returns what a linear saves of its x; nothing for other nodes."""
    if "LinearTrain" in node.name():
        return [t for t in node.saved_tensors if t is not None]
    name = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}.get(node.name())
    tensor = None if name is None else getattr(node, name)
    return [] if tensor is None else [tensor]


def unique_bytes(tensors: list[Tensor], excluded: set[int]) -> int:
    """Returns the bytes of the tensors' storages, each counted once and those in `excluded` not."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for address, size in storages.items() if address not in excluded)


def judged(ratio: float, target: float | None, *, least: bool) -> str:
    """Returns a ratio, and whether it meets its target, the least or the most that it may be."""
    if target is None:
        return f"{ratio:.2f}"
    met = ratio >= target if least else ratio <= target
    sign = (">=" if met else "<") if least else ("<=" if met else ">")
    return f"{ratio:.2f} {sign} {target:g}"


def rows_of(size: str, steps: dict[str, Step], rounds: int) -> list[list[str]]:
    """Times the contenders of one size; returns a row for each."""
    take_turns(steps, rounds=rounds, least_seconds=0)
    times = {name: np.array(step.seconds[2:]) for name, step in steps.items()}  # the first two warm up
    memory = {name: saved(step) for name, step in steps.items()}
    large = math.prod(map(int, size.split("x"))) >= LARGE
    base = times[BASE]
    rows = []
    for name, each in times.items():
        whole = each.sum(1)
        low, middle, high = np.percentile(whole, [25, 50, 75])
        ratio = float(np.median(base.sum(1) / whole))
        ours = name == OURS
        linears, everything = memory[name]
        of_linears, of_all = linears / memory[BASE][0], everything / memory[BASE][1]
        rows.append([
            size, name, *(f"{1e3 * part:.0f}" for part in np.median(each, 0)), f"{1e3 * middle:.0f}",
            f"{(high - low) / middle:.0%}", judged(ratio, 1.0 if ours and large else None, least=True),
            *(f"{part:.2f}" for part in np.median(base / each, 0)), *(f"{share:.0%}" for share in shares(steps[name])),
            f"{linears / 1e6:.1f}", judged(of_linears, SAVED if ours else None, least=False),
            f"{everything / 1e6:.1f}", f"{of_all:.2f}",
        ])  # fmt: skip
    return rows


def main() -> None:
    """Times steps of each size, and writes results/training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-keep", action="store_true", help="print only")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # torch.export warns of its deprecation
    torch.set_num_threads(THREADS)
    rows = []
    for size in arguments.sizes:
        rows += rows_of(size, contenders(*map(int, size.split("x"))), arguments.rounds)
    notes = [
        measure().describe(),
        "A ratio is how many times as fast as torch fp32 in the same round, median of the rounds.",
        "quantize, products, rest: shares of the processor time of one forward and backward pass, by torch.profiler. "
        "Attention's products are in the rest where one kernel computes it, and in products with fp8_dpa.",
        "What linears save for the backward pass is counted along the autograd graph, x only; all: what saved-tensor "
        "hooks see. Each storage counts once, parameters do not. A neighbour may save what a linear saves too. "
        "With fp8_dpa the products of attention count as linears, which save both operands.",
    ]
    if policy := os.environ.get("OMP_WAIT_POLICY"):
        notes.append(f"OMP_WAIT_POLICY={policy}: torch's threads sleep while they wait, as other processes ran too.")
    publish(
        "training", f"A training step of a transformer, 4 layers, d = 512, {THREADS} threads", COLUMNS, rows,
        notes=notes, keep=not arguments.no_keep,
    )  # fmt: skip


if __name__ == "__main__":
    main()
