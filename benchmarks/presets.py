"""Claim: which preset is the faster and more accurate one, by instruction set; `mxfp8_graph.policy.presets.MEASURED`.

The real all-MiniLM-L6-v2 on 8 texts of 128 tokens, with each set of kernels that this processor has. The error is the
relative L2 error of the token vectors, against float32.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
from exports import export_minilm
from harness import noise_notes, options, publish, take_turns
from settings import BEST
from whole_models import texts

import mxfp8_graph
from mxfp8_ops import cpu, ort

PRESETS = ("mxfp8", "mxint8", "mxfp8-bf16", "mxfp8-weight-only", "mxint8-bf16", "mxint8-weight-only")
COLUMNS = ("instruction set", "preset", "ms", f"x {BEST}", "relative L2")
BATCH, TOKENS, ROUNDS = 8, 128, 15


def session(path: Path) -> onnxruntime.InferenceSession:
    """Returns a session with our kernels, and without the optimizers that slow it down."""
    return ort.session(path, session_options=options())


def main() -> None:
    """Times the presets in turns, for each set, and writes results/presets."""
    rows, notes = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "minilm.onnx"
        export_minilm(model, None)
        feeds = texts(BATCH, TOKENS)
        reference = session(model).run(None, feeds)[0].astype(np.float64)
        paths = {name: mxfp8_graph.rewrite(model, name, output=Path(folder) / f"{name}.onnx")[0] for name in PRESETS}
        for isa in cpu.available_isas():
            with cpu.forced_isa(isa):
                sessions = {BEST: session(model), **{name: session(path) for name, path in paths.items()}}
                calls = {name: functools.partial(each.run, None, feeds) for name, each in sessions.items()}
                timings = take_turns(calls, rounds=ROUNDS)
                results = {name: call()[0] for name, call in calls.items()}
            errors = {n: float(np.linalg.norm(r - reference) / np.linalg.norm(reference)) for n, r in results.items()}
            for name in PRESETS:
                ratio = timings[BEST].median / timings[name].median
                rows.append([isa, name, f"{timings[name].median * 1e3:.2f}", f"{ratio:.2f}", f"{errors[name]:.4f}"])
            notes += [f"{isa}: {note}" for note in noise_notes(timings)]
    publish("presets", f"Presets by instruction set, MiniLM {BATCH} x {TOKENS}", COLUMNS, rows, notes=notes)


if __name__ == "__main__":
    main()
