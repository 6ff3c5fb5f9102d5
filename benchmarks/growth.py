"""Claim: the cost of a whole model grows smoothly with its work, and so does its memory: no cliff.

An encoder of MiniLM's shape (with a position table for 4096 tokens, so its weights are random) on one sequence of 16 to
4096 tokens, then on batches of 1 to 64 sequences of 128 tokens. Each contender runs each size in its own process,
which reports its peak memory; those of one size take turns. Time should follow a smooth curve: a constant, plus a time
for every token, plus a time for every pair of tokens in a sequence. That curve is fitted to each contender's times,
and a cliff is a step from one size to the next that is `LIMIT` times the curve's. The step of the time per token is
beside it.
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
import scipy
from exports import OPSET, export_long_minilm
from harness import THREADS, Timing, noise_notes, publish, results_file, take_turns
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
STEP = "step over the curve's"

Size = tuple[int, int]
"""Sequences, and tokens in each."""
Measured = dict[str, tuple[Timing, int]]
"""Time of a run and peak bytes, by contender."""


def curve(seconds: dict[Size, float]) -> dict[Size, float]:
    """Returns the seconds of the smooth curve that is closest to the measured ones, as ratios."""
    terms = np.array([[1.0, batch * tokens, batch * tokens**2] for batch, tokens in seconds])
    measured = np.array(list(seconds.values()))
    weights, _ = scipy.optimize.nnls(terms / measured[:, None], np.ones(len(measured)))
    return dict(zip(seconds, terms @ weights, strict=True))


def openers(path: Path, openvino: str | None) -> dict[str, Callable[[], Peer]]:
    """Returns what starts each contender."""
    peers = {"ORT fp32": functools.partial(Peer, "ort_peer.py", {"model": str(path), "ours": False})}
    for recipe in RECIPES:
        target = path.with_suffix(f".{recipe}.onnx")
        mxfp8_graph.rewrite(path, recipe, output=target, overwrite=True)
        peers[recipe] = functools.partial(Peer, "ort_peer.py", {"model": str(target), "ours": True})
    if openvino is not None:
        settings = {"model": str(path), "precision": "bf16", "weights": "as they are", "threads": THREADS}
        peers["OpenVINO bf16"] = functools.partial(Peer, "openvino_peer.py", settings, python=openvino)
    return peers


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


def draw(series: dict[str, dict[Size, Measured]], target: Path, title: str) -> None:
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
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=90)


def rows_of(label: str, sizes: dict[Size, Measured]) -> list[list[str]]:
    """Returns a row per contender and size; the steps are those from the size before."""
    rows = []
    for name in next(iter(sizes.values())):
        seconds = {size: measured[name][0].median for size, measured in sizes.items()}
        smooth, steps = curve(seconds), [("", "")]
        for before, size in itertools.pairwise(sizes):
            grown, more_tokens = seconds[size] / seconds[before], np.prod(size) / np.prod(before)
            steps.append((f"{grown / more_tokens:.2f}", f"{grown * smooth[before] / smooth[size]:.2f}"))
        for (size, measured), step in zip(sizes.items(), steps, strict=True):
            timing, memory = measured[name]
            shown = [f"{timing.median * 1e3:.4g}", f"{timing.spread / timing.median:.0%}"]
            shown.append(f"{timing.median * 1e6 / np.prod(size):.1f}")
            rows.append([label, name, f"{size[0]} x {size[1]}", *shown, *step, f"{memory / 1e6:.0f}"])
    return rows


COLUMNS = ["series", "contender", "size", "ms", "spread", "us per token", "step per token", STEP, "peak MB"]


def cliffs(rows: list[list[str]]) -> list[str]:
    """Returns, for each contender, where its largest step is, and whether it is within the limit."""
    sentences = []
    for name in dict.fromkeys(row[1] for row in rows):
        own = [dict(zip(COLUMNS, row, strict=True)) for row in rows if row[1] == name]
        worst = max((row for row in own if row[STEP]), key=lambda row: float(row[STEP]))
        state = "no cliff" if float(worst[STEP]) <= LIMIT else "A CLIFF"
        sentences.append(
            f"{name}: {state}; the largest step, to {worst['size']} ({worst['series']}), is {worst[STEP]} times the "
            f"curve's (limit {LIMIT}), {worst['step per token']} per token."
        )
    return sentences


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
    name = "growth_default_opset" if arguments.default_opset else "growth"
    title = f"An encoder of MiniLM's shape at opset {opset or 'of the exporter'}, {THREADS} threads, {cpu.isa()}"
    if not arguments.quick:
        draw(series, results_file(name, "png"), title)
    publish(name, title, COLUMNS, rows, notes=notes, keep=not arguments.quick)


if __name__ == "__main__":
    main()
