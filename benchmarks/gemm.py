"""Claim: one MXFP8 or MXINT8 linear on the CPU against ONNX Runtime (fp32, 8-bit, int8) and torch (fp32, bf16), by M.

A few rows are bound by reading the weights, and a model's weights come from memory. So up to M = 16 every contender
runs `LAYERS` linears in turn, each with its own weight and input, so that no cache keeps a weight from one turn to the
next: in ONNX Runtime one model of `LAYERS` MatMuls, in torch a loop over the weights. The table has the time of one
linear. Reading the bytes of all packed weights takes its turn too, because the bandwidth differs from minute to minute.
From M = 64 on there is one linear: its weight is read once during milliseconds of arithmetic.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from exports import linears
from floors import Floors, measure, reader
from harness import THREADS, Timing, noise_notes, options, publish, take_turns
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from settings import BITS8, INT8, STOCK, exact_sums, int8_dynamic

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.policy import presets
from mxfp8_ops import cpu, ort

LAYERS = 8
FEW_ROWS = 16
READ = "reading the packed weight"
COLUMNS = ["contender", "M", "ms", "spread", "GFLOP/s", "mxfp8 is faster by", "of read bandwidth", "of peak FMA"]


def sessions_of(model: onnx.ModelProto, folder: Path) -> dict[str, onnxruntime.InferenceSession]:
    """Returns one session per contender, all computing what `model` does."""
    sessions = {STOCK: onnxruntime.InferenceSession(model.SerializeToString(), options())}
    recipes = {"mxfp8": Recipe(output_projections=True)}
    recipes["mxfp8 weight-only"] = Recipe(output_projections=True, activations="unchanged")
    recipes["mxint8"] = Recipe(output_projections=True, **presets.PRESETS["mxint8"])
    recipes["mxint8-bf16"] = Recipe(output_projections=True, **presets.PRESETS["mxint8-bf16"])
    recipes["mxint8 weight-only"] = Recipe(output_projections=True, **presets.PRESETS["mxint8-weight-only"])
    for name, recipe in recipes.items():
        packed = mxfp8_graph.rewrite(model, recipe)[0].SerializeToString()
        sessions[name] = ort.session(packed, session_options=options())
        if name == "mxfp8" and "avx2" in cpu.available_isas():
            with cpu.forced_isa("avx2"):
                sessions["mxfp8 at AVX2"] = ort.session(packed, session_options=options())
    onnx.save(model, folder / "float32.onnx")
    int8_dynamic(folder / "float32.onnx", folder / "int8.onnx")
    sessions[INT8] = onnxruntime.InferenceSession(folder / "int8.onnx", exact_sums(options()))
    # Last, because it writes its nodes into the model that it is given.
    bits8 = MatMulNBitsQuantizer(model, bits=8, block_size=32, is_symmetric=True, accuracy_level=4)
    bits8.process()
    sessions[BITS8] = onnxruntime.InferenceSession(bits8.model.model.SerializeToString(), options())
    return sessions


class TorchLinears:
    """A loop over linears in one dtype."""

    def __init__(self, k: int, n: int, layers: int, dtype: torch.dtype) -> None:
        self.weights = [torch.randn(n, k).to(dtype) for _ in range(layers)]

    def on(self, x: np.ndarray) -> Callable[[], None]:
        """Returns the call that multiplies `x` by every weight in turn."""
        inputs = [torch.from_numpy(x).to(weight.dtype) for weight in self.weights]

        def call() -> None:
            for values, weight in zip(inputs, self.weights, strict=True):
                torch.nn.functional.linear(values, weight)

        return call


def compare(k: int, n: int, layers: int, sizes: list[int]) -> dict[int, dict[str, Timing]]:
    """Returns, for every M, the time of one linear by contender."""
    result = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        sessions = sessions_of(linears(k, n, layers), Path(folder))
        peers = {f"torch {name}": TorchLinears(k, n, layers, dtype) for name, dtype in TORCH_DTYPES.items()}
        for m in sizes:
            x = np.random.default_rng(m).standard_normal((m, k), np.float32)
            feeds = {f"x{i}": x.copy() for i in range(layers)}
            calls: dict[str, Callable[[], Any]] = {
                name: functools.partial(session.run, None, feeds) for name, session in sessions.items()
            }
            calls |= {name: peer.on(x) for name, peer in peers.items()}
            if m <= FEW_ROWS:
                calls[READ] = reader(layers * n * k * 33 // 32)
            timings = take_turns(calls, rounds=5 if m >= 256 else 11)
            result[m] = {name: Timing(t.median / layers, t.spread / layers) for name, t in timings.items()}
    return result


TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def table(k: int, n: int, m: int, timings: dict[str, Timing], floors: Floors) -> list[list[Any]]:
    """Returns one row per contender."""
    rows = []
    for name, timing in timings.items():
        peak = m * n * k / timing.median / (floors.bf16 or floors.fp32)
        rows.append(
            [
                name,
                m,
                f"{timing.median * 1e3:.2f}",
                f"{timing.spread / timing.median:.0%}",
                "" if name == READ else f"{2 * m * n * k / timing.median / 1e9:.0f}",
                f"{timing.median / timings['mxfp8'].median:.2f}x",
                f"{timings[READ].median / timing.median:.0%}" if name.startswith("mx") and m <= FEW_ROWS else "",
                f"{peak:.0%}" if name.startswith("mx") and m > FEW_ROWS else "",
            ]
        )
    return rows


def main() -> None:
    """Times the sizes asked for; prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--m", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    arguments = parser.parse_args()
    k, n = arguments.k, arguments.n
    torch.set_num_threads(THREADS)
    floors = measure()
    few = [m for m in arguments.m if m <= FEW_ROWS]
    many = [m for m in arguments.m if m > FEW_ROWS]
    timings = compare(k, n, LAYERS, few) if few else {}
    timings |= compare(k, n, 1, many) if many else {}
    rows = [row for m, by_name in timings.items() for row in table(k, n, m, by_name, floors)]
    packed = n * k * 33 / 32 / 1e6
    notes = [
        floors.describe(),
        f"Up to M = {FEW_ROWS}, {LAYERS} linears in turn ({LAYERS} x {packed:.0f} MB packed), the time of one; "
        "above, one linear.",
    ]
    notes += [f"M = {m}: {note}" for m, by_name in timings.items() for note in noise_notes(by_name)]
    publish("gemm", f"One linear, K = {k}, N = {n}, {THREADS} threads", COLUMNS, rows, notes=notes)


if __name__ == "__main__":
    main()
