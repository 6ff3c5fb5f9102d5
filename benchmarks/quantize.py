"""Claim: quantizing runs at memory speed, on one thread and on all, and far ahead of torchao's to_mx."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from floors import copy_bandwidth
from harness import THREADS, noise_notes, publish, take_turns
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

from mxfp8_ops import cpu

BYTES = 256 << 20


def main() -> None:
    values = np.random.default_rng(0).standard_normal((BYTES // 4 // 4096, 4096), np.float32)
    tensor = torch.from_numpy(values)
    rows, notes = [], []
    for threads in sorted({1, THREADS}):
        torch.set_num_threads(threads)
        copy = copy_bandwidth(values.view(np.uint8).reshape(-1), threads)
        half = values.astype(ml_dtypes.bfloat16)
        elements, scales = cpu.quantize(values)
        cases = {
            "mxfp8 quantize f32": lambda t=threads: cpu.quantize(values, threads=t),
            "mxfp8 quantize f32, along columns": lambda t=threads: cpu.quantize(values, axis=0, threads=t),
            "mxfp8 quantize bf16": lambda t=threads, x=half: cpu.quantize(x, threads=t),
            "mxfp8 dequantize f32": lambda t=threads, e=elements, s=scales: cpu.dequantize(e, s, threads=t),
            "mxfp8 pack [K, N]": lambda t=threads: cpu.pack(values, transposed=True, threads=t),
            "torchao to_mx f32": lambda: to_mx(tensor, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL),
            "ml_dtypes cast f32 (no scales)": lambda: values.astype(ml_dtypes.float8_e4m3fn),
        }
        moved = dict.fromkeys(cases, values.nbytes * (1 + 33 / 128))
        moved["mxfp8 quantize bf16"] = values.nbytes * (0.5 + 33 / 128)
        timings = take_turns(cases, rounds=5)
        slowest = timings["torchao to_mx f32"].median
        for name, timing in timings.items():
            rate = moved[name] / timing.median
            cells = f"{timing.median * 1e3:.0f}", f"{timing.spread / timing.median:.0%}", f"{rate / 1e9:.1f}"
            rows.append([name, threads, *cells, f"{rate / copy:.0%}", f"{slowest / timing.median:.1f}x"])
        notes.append(f"{threads} threads: copy moves {copy / 1e9:.1f} GB/s (read + written).")
        notes += noise_notes(timings)
    columns = ["case", "threads", "ms", "spread", "GB/s moved", "of copy bandwidth", "faster than to_mx"]
    publish("quantize", f"Quantizing {BYTES >> 20} MB", columns, rows, notes=notes)


if __name__ == "__main__":
    main()
