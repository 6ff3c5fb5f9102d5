"""Claim: the cost of a whole model grows smoothly with its work, and so does its memory: no cliff.

An encoder of MiniLM's shape (with a position table for 4096 tokens, so its weights are random) on one sequence of 16 to
4096 tokens, then on batches of 1 to 64 sequences of 128 tokens. Each contender runs each size in a process of its own,
which tells its peak memory; those of one size take turns. A cliff is time that grows faster than the work does from one
size to the next: multiply-adds, which for tokens means that attention's square is counted. Time per token is beside it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from exports import OPSET, export_long_minilm
from harness import RESULTS, THREADS, Timing, noise_notes, publish, results_file, take_turns
from peers import Peer

import mxfp8_graph
from mxfp8_ops import cpu

mpl.use("Agg")
import matplotlib.pyplot as plt

POSITIONS = 4096
TOKENS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
BATCHES = [1, 2, 4, 8, 16, 32, 64]
LENGTH = 128
RECIPES = ("mxfp8", "mxfp8-bf16", "mxfp8-weight-only")
LIMIT = 1.3
WIDTH, LAYERS, INNER = 384, 6, 1536

Size = tuple[int, int]
"""Sequences, and tokens in each."""
Measured = dict[str, tuple[Timing, int]]
"""Time of a run and peak bytes, by contender."""


def work(size: Size) -> int:
    """Returns the multiply-adds of a run: the projections, and both products of attention."""
    batch, tokens = size
    return LAYERS * batch * tokens * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER + 2 * tokens * WIDTH)


def openers(path: Path, openvino: str | None) -> dict[str, Callable[[], Peer]]:
    """Returns what starts each contender."""
    found = {"ORT fp32": functools.partial(Peer, "ort_peer.py", {"model": str(path), "ours": False})}
    for recipe in RECIPES:
        target = path.with_suffix(f".{recipe}.onnx")
        mxfp8_graph.rewrite(path, recipe, output=target, overwrite=True)
        found[recipe] = functools.partial(Peer, "ort_peer.py", {"model": str(target), "ours": True})
    if openvino is not None:
        settings = {"model": str(path), "precision": "bf16", "weights": "as they are", "threads": THREADS}
        found["OpenVINO bf16"] = functools.partial(Peer, "openvino_peer.py", settings, python=openvino)
    return found


def measure(contenders: dict[str, Callable[[], Peer]], size: Size, rounds: int) -> Measured:
    """Returns what one size takes."""
    ids = np.random.default_rng(0).integers(1000, 20000, size)
    peers = {name: open_it() for name, open_it in contenders.items()}
    try:
        for peer in peers.values():
            peer.feed({"input_ids": ids, "attention_mask": np.ones_like(ids)})
        timings = take_turns(peers, rounds=rounds, least_seconds=0.1)
        return {name: (timings[name], peer.memory()) for name, peer in peers.items()}
    finally:
        for peer in peers.values():
            peer.close()


def draw(series: dict[str, dict[Size, Measured]], title: str) -> None:
    """Writes the plot: time and memory over the tokens of a run, lines by contender, dashed where they are a batch."""
    figure, axes = plt.subplots(1, 2, figsize=(13, 5))
    for (label, sizes), style in zip(series.items(), ("o-", "s--"), strict=True):
        for index, name in enumerate(next(iter(sizes.values()))):
            tokens = [batch * length for batch, length in sizes]
            points = [measured[name] for measured in sizes.values()]
            kind = {"color": f"C{index}", "markersize": 4, "label": f"{name}, {label}"}
            axes[0].loglog(tokens, [1e3 * timing.median for timing, _ in points], style, **kind)
            axes[1].loglog(tokens, [memory / 1e6 for _, memory in points], style, **kind)
    for axis, what in zip(axes, ("milliseconds", "peak memory of a session, MB"), strict=True):
        axis.set(xlabel="tokens of a run", ylabel=what)
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[1].legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(results_file("growth", "png"), dpi=90)


def rows_of(label: str, sizes: dict[Size, Measured]) -> list[list[str]]:
    """Returns a row per contender and size; the steps are those from the size before."""
    rows = []
    for name in next(iter(sizes.values())):
        before = None
        for size, measured in sizes.items():
            timing, memory = measured[name]
            tokens = size[0] * size[1]
            steps = ["", ""]
            if before is not None:
                grown = timing.median / sizes[before][name][0].median
                per_token = grown * before[0] * before[1] / tokens
                steps = [f"{per_token:.2f}", f"{grown * work(before) / work(size):.2f}"]
            before = size
            shown = [f"{timing.median * 1e3:.2f}", f"{timing.spread / timing.median:.0%}"]
            shown.append(f"{timing.median * 1e6 / tokens:.1f}")
            rows.append([label, name, f"{size[0]} x {size[1]}", *shown, *steps, f"{memory / 1e6:.0f}"])
    return rows


COLUMNS = ["series", "contender", "size", "ms", "spread", "us per token", "step per token", "step per work", "peak MB"]


def cliffs(rows: list[list[str]]) -> list[str]:
    """Returns, for each contender, where its largest step is, and whether it is within the limit."""
    found = []
    for name, group in itertools.groupby(sorted(rows, key=lambda row: row[1]), key=lambda row: row[1]):
        worst = max((row for row in group if row[7]), key=lambda row: float(row[7]))
        state = "no cliff" if float(worst[7]) <= LIMIT else "A CLIFF"
        found.append(
            f"{name}: {state}; the largest step of time per work, to {worst[2]} ({worst[0]}), "
            f"is {worst[7]} (limit {LIMIT})."
        )
    return found


def main() -> None:
    """Times all sizes; prints and writes the table, the check and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--default-opset", action="store_true", help="the exporter's, in place of 23")
    parser.add_argument("--folder", type=Path, help="where the models stay for the next run; by default they do not")
    parser.add_argument("--openvino", help="an interpreter that has openvino; by default this one, if it has")
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds, nothing written")
    arguments = parser.parse_args()
    opset = None if arguments.default_opset else OPSET
    openvino = arguments.openvino or (sys.executable if importlib.util.find_spec("openvino") else None)
    tokens, batches = (TOKENS[:3], BATCHES[:2]) if arguments.quick else (TOKENS, BATCHES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"minilm-{POSITIONS}-{opset or 'default'}.onnx"
        if not path.exists():
            export_long_minilm(path, opset, POSITIONS)
        contenders = openers(path, openvino)
        wanted: dict[str, list[Size]] = {
            "one sequence": [(1, length) for length in tokens],
            f"batches of {LENGTH} tokens": [(batch, LENGTH) for batch in batches],
        }
        rounds = 3 if arguments.quick else 7
        series = {label: {size: measure(contenders, size, rounds) for size in sizes} for label, sizes in wanted.items()}
    rows = [row for label, sizes in series.items() for row in rows_of(label, sizes)]
    notes = cliffs(rows)
    for sizes in series.values():
        for size, measured in sizes.items():
            timings = {name: timing for name, (timing, _) in measured.items()}
            notes += [f"{size[0]} x {size[1]}: {note}" for note in noise_notes(timings)]
    title = f"An encoder of MiniLM's shape at opset {opset or 'of the exporter'}, {THREADS} threads, {cpu.isa()}"
    if not arguments.quick:
        draw(series, title)
    publish("growth", title, COLUMNS, rows, notes=notes, keep=not arguments.quick)


if __name__ == "__main__":
    main()
