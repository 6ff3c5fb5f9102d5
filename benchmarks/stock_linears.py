"""Claim: MXINT8 weights that `convert` writes for ONNX Runtime without our library run faster there than float32.

Each case is a model of `LAYERS` linears, each with its own weight and input, in a session of stock ONNX Runtime.
A ratio is the median over repetitions of all turns: a shared machine changes more between them than within one.
Rows that lose stay: `qdq` of E4M3 weights, which ONNX Runtime decodes at every run, and levels of 0.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from contenders import compared
from exports import linears
from floors import Floors, measure
from harness import THREADS, Timing, noise_notes, options, publish, take_turns

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.policy import presets

LAYERS = 4
FLOAT32 = "float32"
TARGETS = {1: 2.0, 16: 1.4, 256: 1.4}
"""By M: how many times as fast as float32 the cases of `AIMED` should be."""
AIMED = ("qdq", "nbits")
COLUMNS = ["case", "M", "ms", "spread", "x float32", "least", "most", "MB read", "of read bandwidth", "op", "error"]


@dataclass(frozen=True)
class Case:
    """A session, the op that multiplies in it, and the values [N, K] of its first weight."""

    session: onnxruntime.InferenceSession
    op: str
    values: np.ndarray
    bits: float
    """The bytes of one weight with its scales, as the op reads it."""

    def error(self, x: np.ndarray) -> float:
        """Returns the relative L2 error of the first linear, against float64."""
        y = self.session.run(["y0"], feeds(x))[0]
        exact = x.astype(np.float64) @ self.values.astype(np.float64).T
        return float(np.linalg.norm(y - exact) / np.linalg.norm(exact))


def feeds(x: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the inputs of all linears."""
    return {f"x{i}": x for i in range(LAYERS)}


def opened(model: onnx.ModelProto, values: np.ndarray, bits: float, level: int | None = None) -> Case:
    """Opens a model in stock ONNX Runtime; `level` is the accuracy_level of Q/DQ that it fuses."""
    chosen = options()
    if level is not None:
        chosen.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(level))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        chosen.optimized_model_filepath = str(path)
        session = onnxruntime.InferenceSession(model.SerializeToString(), chosen)
        nodes = onnx.load(path).graph.node
    op = next(node.op_type for node in nodes if "y0" in node.output)
    return Case(session, op, values, bits)


def cases(k: int, n: int) -> dict[str, Case]:
    """Returns each case by its name."""
    original = linears(k, n, LAYERS)
    packed = {
        name: mxfp8_graph.rewrite(original, Recipe(output_projections=True, **presets.PRESETS[name]))[0]
        for name in ("mxint8-weight-only", "mxfp8-weight-only")
    }
    int8, e4m3 = (
        {name: weight.dequantize() for name, weight in mxfp8_graph.unpack(m).items()} for m in packed.values()
    )
    integers, floats = packed.values()
    qdq, _ = mxfp8_graph.convert(integers, "qdq")
    exact, _ = mxfp8_graph.convert(integers, "nbits", accuracy_level=0)
    as_stored = onnx.numpy_helper.to_array(original.graph.initializer[0]).T
    bits = 8 + 32 / 32  # a float32 scale for 32 elements
    return {
        FLOAT32: opened(original, as_stored, 32),
        "qdq": opened(qdq, int8["w0"], bits),
        "nbits": opened(mxfp8_graph.convert(integers, "nbits")[0], int8["w0"], bits),
        "qdq, level 0": opened(qdq, int8["w0"], bits, level=0),
        "nbits, level 0": opened(exact, int8["w0"], bits),
        "qdq, E4M3": opened(mxfp8_graph.convert(floats, "qdq")[0], e4m3["w0"], bits),
    }


def repeated(calls: dict[str, Callable[[], Any]], repeats: int) -> list[dict[str, Timing]]:
    """Returns the timings of each repetition of all turns."""
    return [take_turns(calls, rounds=5) for _ in range(repeats)]


def table(x: np.ndarray, done: dict[str, Case], timings: list[dict[str, Timing]], floors: Floors) -> list[list[Any]]:
    """Returns one row per case, for inputs x [M, K]."""
    rows, m = [], len(x)
    for name, case in done.items():
        seconds = statistics.median(each[name].median for each in timings)
        spread = statistics.median(each[name].spread for each in timings)
        ratios = [each[FLOAT32].median / each[name].median for each in timings]
        read = LAYERS * case.values.size * case.bits / 8
        rows.append(
            [
                name,
                m,
                f"{seconds * 1e3:.3g}",
                f"{spread / seconds:.0%}",
                compared(statistics.median(ratios), TARGETS.get(m) if name in AIMED else None),
                f"{min(ratios):.2f}",
                f"{max(ratios):.2f}",
                f"{read / 1e6:.0f}",
                f"{read / floors.read / seconds:.0%}",
                case.op,
                f"{case.error(x):.1e}",
            ]
        )
    return rows


def main() -> None:
    """Times each number of rows, and writes results/stock_linears."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--n", type=int, default=2048)
    parser.add_argument("--m", type=int, nargs="+", default=[*TARGETS])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    k, n = arguments.k, arguments.n
    done, floors, rows = cases(k, n), measure(), []
    notes = [
        floors.describe(),
        f"Ratios: median, least and most of {arguments.repeats} repetitions, all cases in turns in each. "
        '"a < b" is slower than float32 or than its target b, "a >= b" meets the target.',
        "Error: relative L2 of one linear with normal data against float64, on the values of the stored weights. "
        "Level: accuracy_level of MatMulNBits; at 4, the default, activations are rounded to int8.",
        '"of read bandwidth": the time to read the weights once, as the op stores them, over that of the case; '
        "above 100% where caches keep a part of them.",
    ]
    for m in arguments.m:
        x = np.random.default_rng(m).standard_normal((m, k), np.float32)
        timings = repeated(
            {name: functools.partial(c.session.run, None, feeds(x)) for name, c in done.items()}, arguments.repeats
        )
        rows += table(x, done, timings, floors)
        middle = sorted(timings, key=lambda each: each[FLOAT32].median)[len(timings) // 2]
        notes += [f"M = {m}, repetition of the median float32: {note}" for note in noise_notes(middle)]
    title = f"{LAYERS} linears of {k} x {n} in ONNX Runtime without our library, {THREADS} threads"
    publish("stock_linears", title, COLUMNS, rows, notes=notes)


if __name__ == "__main__":
    main()
