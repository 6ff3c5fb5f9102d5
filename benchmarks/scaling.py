"""Claim: the cost of a linear grows smoothly with M, N and K; a ragged size costs what the next whole one costs."""

from __future__ import annotations

import argparse
import itertools

import matplotlib as mpl
import numpy as np
from harness import RESULTS, THREADS, noise_notes, publish, results_file, take_turns

from mxfp8_ops import cpu

mpl.use("Agg")
import matplotlib.pyplot as plt

M_SIZES = [
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    12,
    14,
    16,
    17,
    20,
    24,
    32,
    48,
    64,
    65,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    2048,
]
SIZES = [256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
RAGGED_K = [(4097, 4128), (4112, 4128), (1009, 1024), (70, 96)]
RAGGED_N = [(2047, 2048), (2049, 2064)]
"""Pairs of a size and the next whole one: a multiple of the block (K), or of what one task handles (N)."""


def product(m: int, n: int, k: int) -> object:
    """Returns a call that quantizes x [m, k] and multiplies it by a packed [n, k] weight."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k), np.float32)
    packed = cpu.pack(rng.standard_normal((n, k), np.float32))

    def call() -> None:
        a, a_scales = cpu.quantize(x)
        cpu.gemm(a, a_scales, packed.elements, packed.scales)

    return call


def main() -> None:
    """Times products of growing M, N and K, and writes results/scaling with a plot and the steps between neighbours."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    series = {
        "M (N = K = 2048)": {m: (m, 2048, 2048) for m in M_SIZES},
        "N (M = 16, K = 2048)": {n: (16, n, 2048) for n in SIZES},
        "K (M = 16, N = 2048)": {k: (16, 2048, k) for k in SIZES},
    }
    rows, notes = [], []
    figure, axes = plt.subplots(1, len(series), figsize=(15, 4.5))
    for axis, (label, shapes) in zip(axes, series.items(), strict=True):
        timings = take_turns({str(size): product(*shape) for size, shape in shapes.items()}, rounds=7)
        medians = {size: timings[str(size)].median for size in shapes}
        axis.loglog(list(medians), [1e3 * t for t in medians.values()], "o-")
        axis.set(xlabel=label, ylabel="milliseconds")
        axis.grid(visible=True, which="both", alpha=0.3)
        for (small, t_small), (large, t_large) in itertools.pairwise(medians.items()):
            # A cliff is time that grows faster than the work does.
            cliff = (t_large / t_small) / max(1.0, large / small)
            rows.append([label, f"{small} -> {large}", f"{t_large * 1e3:.3f}", f"{cliff:.2f}"])
        notes += [f"{label}: {note}" for note in noise_notes(timings)]
    for label, shapes in (("ragged K (M = 16, N = 2048)", RAGGED_K), ("ragged N (M = 16, K = 2048)", RAGGED_N)):
        for ragged, whole in shapes:
            sizes = {str(s): (16, 2048, s) if "K (" in label else (16, s, 2048) for s in (ragged, whole)}
            timings = take_turns({name: product(*shape) for name, shape in sizes.items()}, rounds=11)
            ratio = timings[str(ragged)].median / timings[str(whole)].median
            rows.append(
                [label, f"{whole} -> {ragged}", f"{timings[str(ragged)].median * 1e3:.3f}", f"{ratio:.2f} (time)"]
            )
            notes += [f"{label}: {note}" for note in noise_notes(timings)]
    RESULTS.mkdir(exist_ok=True)
    figure.suptitle(f"Quantize and multiply, {THREADS} threads, {cpu.isa()}")
    figure.tight_layout()
    figure.savefig(results_file("scaling", "png"), dpi=90)
    columns = ["series", "sizes", "ms at the second", "growth of time over growth of work"]
    publish("scaling", f"How the cost grows, {THREADS} threads", columns, rows, notes=notes)


if __name__ == "__main__":
    main()
