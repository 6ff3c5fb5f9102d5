"""Claim: the time of a rewrite grows with the number of matmuls: twice as many take little more than twice as long."""

from __future__ import annotations

import argparse
import itertools
import sys
from functools import partial
from pathlib import Path

from harness import noise_notes, publish, take_turns

import mxfp8_graph

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from models import matmul_stack


def main() -> None:
    """Times the rewrite of models of many small matmuls, in memory, and writes results/many_matmuls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--matmuls", type=int, nargs="+", default=[500, 1000, 2000, 4000])
    sizes: list[int] = parser.parse_args().matmuls
    timings = take_turns({str(n): partial(mxfp8_graph.rewrite, matmul_stack(n)) for n in sizes}, rounds=5)
    seconds = {n: timings[str(n)].median for n in sizes}
    growth = {b: (seconds[b] / seconds[a]) / (b / a) for a, b in itertools.pairwise(sizes)}
    rows = [
        [
            n,
            f"{seconds[n]:.2f}",
            f"{timings[str(n)].spread / seconds[n]:.0%}",
            f"{1e6 * seconds[n] / n:.0f}",
            f"{growth[n]:.2f}" if n in growth else "",
        ]
        for n in sizes
    ]
    columns = ["matmuls", "seconds", "spread", "us per matmul", "growth of time over growth of work"]
    notes = ["Each matmul has a float32 weight of 32 x 32 of its own.", *noise_notes(timings)]
    publish("many_matmuls", "Rewriting ONNX models of many matmuls", columns, rows, notes=notes)


if __name__ == "__main__":
    main()
