"""Measures what the machine can do at best: read and copy bandwidth, multiply-add rates. The roof of every claim."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import THREADS


@dataclass(frozen=True)
class Floors:
    """Bytes per second and multiply-adds per second, with all threads."""

    read: float
    copy: float
    """Bytes read plus bytes written."""
    fp32: float
    bf16: float
    """The faster of dot products and tiles (AMX); 0 where the machine has neither."""

    def describe(self) -> str:
        """Returns a sentence with all of them."""
        return (
            f"Floors measured in this run: read {self.read / 1e9:.1f} GB/s, "
            f"copy {self.copy / 1e9:.1f} GB/s (read + written), "
            f"fp32 {2 * self.fp32 / 1e9:.0f} GFLOP/s, bf16 {2 * self.bf16 / 1e9:.0f} GFLOP/s"
        )


@functools.cache
def _library() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    source = Path(__file__).with_name("floors.cpp")
    command = ["g++", "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", str(source)]
    subprocess.run([*command, "-o", str(folder / "floors.so")], check=True)
    library = ctypes.CDLL(str(folder / "floors.so"))
    library.read_seconds.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.fma_rate.argtypes = [ctypes.c_int, ctypes.c_int]
    library.tile_rate.argtypes = [ctypes.c_int]
    library.read_seconds.restype = library.fma_rate.restype = library.tile_rate.restype = ctypes.c_double
    return library


def measure(size: int = 512 << 20, threads: int = THREADS) -> Floors:
    """Returns the best of several runs of each."""
    library = _library()
    data = np.ones(size, np.uint8)
    read = min(library.read_seconds(data.ctypes.data, size, threads) for _ in range(7))
    return Floors(
        read=size / read,
        copy=copy_bandwidth(data, threads),
        fp32=max(library.fma_rate(0, threads) for _ in range(3)),
        bf16=max(rate for _ in range(3) for rate in (library.fma_rate(1, threads), library.tile_rate(threads))),
    )


def reader(size: int, threads: int = THREADS) -> Callable[[], float]:
    """Returns a call that reads `size` bytes once."""
    library, data = _library(), np.ones(size, np.uint8)
    return lambda: float(library.read_seconds(data.ctypes.data, size, threads))


def copy_bandwidth(data: np.ndarray, threads: int) -> float:
    """Returns bytes read plus written per second by memcpy, the array cut into one piece per thread."""
    target = np.zeros_like(data)
    pieces = list(zip(np.array_split(target, threads), np.array_split(data, threads), strict=True))
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(7):
            start = time.perf_counter()
            list(
                pool.map(lambda pair: ctypes.memmove(pair[0].ctypes.data, pair[1].ctypes.data, pair[1].nbytes), pieces)
            )
            best = min(best, time.perf_counter() - start)
    return 2 * data.nbytes / best


if __name__ == "__main__":
    print(measure().describe())
