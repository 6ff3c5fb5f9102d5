"""Claim: the cost of a linear grows smoothly with M, N and K, and a K that is not whole blocks costs little more."""

from __future__ import annotations

import itertools

import matplotlib as mpl
import numpy as np
from harness import RESULTS, THREADS, noise_notes, publish, take_turns

from mxfp8_ops import cpu

mpl.use("Agg")
import matplotlib.pyplot as plt

M_SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 48, 64, 65, 96, 128, 192, 256, 384, 512, 768, 1024, 2048]
SIZES = [256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
RAGGED = [(4096, 4097), (4096, 4112), (1024, 1009), (96, 70)]


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
    for whole, ragged in RAGGED:
        timings = take_turns({str(k): product(16, 2048, k) for k in (whole, ragged)}, rounds=11)
        per_value = timings[str(ragged)].median / ragged / (timings[str(whole)].median / whole)
        row = ["ragged K (M = 16, N = 2048)", f"{whole} -> {ragged}", f"{timings[str(ragged)].median * 1e3:.3f}"]
        rows.append([*row, f"{per_value:.2f}"])
        notes += [f"ragged K: {note}" for note in noise_notes(timings)]
    RESULTS.mkdir(exist_ok=True)
    figure.suptitle(f"Quantize and multiply, {THREADS} threads, {cpu.isa()}")
    figure.tight_layout()
    figure.savefig(RESULTS / "scaling.png", dpi=90)
    columns = ["series", "sizes", "ms at the larger", "growth of time over growth of work"]
    publish("scaling", f"How the cost grows, {THREADS} threads", columns, rows, notes=notes)


if __name__ == "__main__":
    main()
