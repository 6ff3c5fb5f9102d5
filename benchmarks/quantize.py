"""Claim: quantizing runs at memory speed, on one thread and on all, and far ahead of torchao's to_mx.

The kernels write into arrays that exist already, as memcpy does: a fresh result costs page faults, which a row of its
own shows. The peers allocate their results; all but ml_dtypes' cast give elements and scales.
"""

from __future__ import annotations

import argparse
import ctypes
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import torch
from harness import THREADS, noise_notes, publish, take_turns
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

from mxfp8_ops import contract, cpu

BYTES = 256 << 20
ROWS, K = BYTES // 4 // 4096, 4096
E4M3, INT8, CEIL = 17, 3, 0

Case = tuple[Callable[[], object], float]
"""A call, and the bytes it moves."""


class Library:
    """The C ABI on arrays of [ROWS, K], with results allocated once."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(cpu.library_path()))
        i, p, n = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
        self.library.mxfp8_quantize.argtypes = (i, p, n, n, n, i, i, p, p, i)
        self.library.mxfp8_dequantize.argtypes = (i, p, p, n, n, n, i, p, i)
        self.library.mxfp8_pack.argtypes = (i, p, n, i, n, n, i, i, p, p, p, i)
        self.elements = np.ones((ROWS, K), np.uint8)
        self.scales = np.full((ROWS, K // 32), 127, np.uint8)
        self.y = np.ones((ROWS, K), np.float32)
        self.stats = np.zeros(3)

    def quantize(self, x: np.ndarray, threads: int, *, columns: bool = False, element_format: int = E4M3) -> Case:
        """Returns the case of quantizing `x` along rows or columns."""
        sizes = (1, ROWS, K) if columns else (ROWS, K, 1)
        results = self.elements.ctypes.data, self.scales.ctypes.data
        arguments = (code(x), x.ctypes.data, *sizes, element_format, CEIL, *results, threads)
        return lambda: self.library.mxfp8_quantize(*arguments), x.nbytes + self.packed

    def dequantize(
        self, dtype: int, size: int, threads: int, *, columns: bool = False, element_format: int = E4M3
    ) -> Case:
        """Returns the case of dequantizing to a dtype of `size` bytes."""
        sizes = (1, ROWS, K) if columns else (ROWS, K, 1)
        sources = self.elements.ctypes.data, self.scales.ctypes.data
        arguments = (element_format, *sources, *sizes, dtype, self.y.ctypes.data, threads)
        return lambda: self.library.mxfp8_dequantize(*arguments), size * ROWS * K + self.packed

    def pack(self, x: np.ndarray, threads: int, *, transposed: bool) -> Case:
        """Returns the case of packing a weight stored as [N, K], or as [K, N] if `transposed`."""
        sizes = (K, ROWS) if transposed else (ROWS, K)
        results = self.elements.ctypes.data, self.scales.ctypes.data, self.stats.ctypes.data
        arguments = (code(x), x.ctypes.data, K, int(transposed), *sizes, E4M3, CEIL, *results, threads)
        return lambda: self.library.mxfp8_pack(*arguments), x.nbytes + self.packed

    @property
    def packed(self) -> int:
        """Bytes of the quantized matrix."""
        return self.elements.nbytes + self.scales.nbytes


def code(x: np.ndarray) -> int:
    """Returns the C ABI's number of a dtype."""
    return {name: number for number, name in contract.VALUE_NAMES.items()}[x.dtype.name]


def copy_piece(pair: tuple[np.ndarray, np.ndarray]) -> None:
    """Copies the second array onto the first: the floor."""
    target, source = pair
    ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


def peer_quantize(x: torch.Tensor) -> object:
    """Returns what torchao makes of `x`, with the scales that are our default."""
    return to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)


def main() -> None:
    """Times each case on one thread and on all, and writes results/quantize."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    warnings.simplefilter("ignore")  # torch.compile warns of torchao's enums
    compiled = torch.compile(peer_quantize)
    x = np.random.default_rng(0).standard_normal((ROWS, K), np.float32)
    brain, half, tensor = x.astype(ml_dtypes.bfloat16), x.astype(np.float16), torch.from_numpy(x)
    brain_tensor = tensor.bfloat16()
    library = Library()
    target = np.ones_like(x)
    whole = x.nbytes + library.packed
    notes = ['Column "of memcpy": bytes read and written per second, over those of memcpy with equally many threads.']
    rows = []
    pool = ThreadPoolExecutor(THREADS)
    for threads in sorted({1, THREADS}):
        torch.set_num_threads(threads)
        halves = list(zip(np.array_split(target, threads), np.array_split(x, threads), strict=True))
        cases: dict[str, Case] = {
            "memcpy f32": (lambda h=halves: list(pool.map(copy_piece, h)), 2 * x.nbytes),
            "mxfp8 quantize f32": library.quantize(x, threads),
            "mxfp8 quantize f16": library.quantize(half, threads),
            "mxfp8 quantize bf16": library.quantize(brain, threads),
            "mxfp8 quantize f32, along columns": library.quantize(x, threads, columns=True),
            "mxfp8 quantize bf16, along columns": library.quantize(brain, threads, columns=True),
            "mxint8 quantize f32": library.quantize(x, threads, element_format=INT8),
            "mxint8 quantize bf16": library.quantize(brain, threads, element_format=INT8),
            "mxint8 quantize f32, along columns": library.quantize(x, threads, columns=True, element_format=INT8),
            "mxint8 dequantize f32": library.dequantize(1, 4, threads, element_format=INT8),
            "mxfp8 dequantize f32": library.dequantize(1, 4, threads),
            "mxfp8 dequantize bf16": library.dequantize(16, 2, threads),
            "mxfp8 dequantize f32, along columns": library.dequantize(1, 4, threads, columns=True),
            "mxfp8 pack [N, K], with its error": library.pack(x, threads, transposed=False),
            "mxfp8 pack [K, N], with its error": library.pack(x, threads, transposed=True),
            "mxfp8 quantize f32, result allocated": (lambda t=threads: cpu.quantize(x, threads=t), whole),
            "torchao to_mx f32": (lambda: peer_quantize(tensor), whole),
            "torchao to_mx f32, torch.compile": (lambda: compiled(tensor), whole),
            "torchao to_mx bf16": (lambda: peer_quantize(brain_tensor), brain.nbytes + library.packed),
            "torchao to_mx bf16, torch.compile": (lambda: compiled(brain_tensor), brain.nbytes + library.packed),
            "ml_dtypes cast f32 (no scales)": (lambda: x.astype(ml_dtypes.float8_e4m3fn), whole),
        }
        timings = take_turns({name: call for name, (call, _) in cases.items()}, rounds=9)
        copy = 2 * x.nbytes / timings["memcpy f32"].median
        for name, timing in timings.items():
            peer = "torchao to_mx bf16" if "bf16" in name else "torchao to_mx f32"
            rate = cases[name][1] / timing.median
            cells = f"{timing.median * 1e3:.1f}", f"{timing.spread / timing.median:.0%}", f"{rate / 1e9:.1f}"
            rows.append([name, threads, *cells, f"{rate / copy:.0%}", f"{timings[peer].median / timing.median:.1f}x"])
        notes += noise_notes(timings)
    columns = ["case", "threads", "ms", "spread", "GB/s moved", "of memcpy", "faster than to_mx of that dtype"]
    publish("quantize", f"Quantizing {ROWS} x {K} values ({BYTES >> 20} MB in float32)", columns, rows, notes=notes)


if __name__ == "__main__":
    main()
