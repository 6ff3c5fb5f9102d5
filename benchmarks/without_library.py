"""Claim: rewritten files are usable in ONNX Runtime without our library: they open soon, run and fit in memory.

The time to open a session, of a run of 8 x 128 and of 1 x 16 tokens, and the memory that both take, for the real
MiniLM and for an encoder of 85 million parameters. Each session has a process of its own, which measures nothing else;
processes of all files take turns. A floor is not known: float32 in the same ONNX Runtime is the measure.

`--together` measures the throughput of calls that come at once. production.py measures the memory of several sessions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import psutil
from harness import publish

import mxfp8_graph

ROUNDS = 3
COLUMNS = ["file", "open, s", "8 x 128, ms", "1 x 16, ms", "resident, MB", "open", "8 x 128", "1 x 16", "resident"]
LIMITS = ("4.0", "2.6 (mxint8 1.8)", "2.5", "2.0")
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "mxfp8": ("mxfp8", {}),
    "mxfp8, bodies small": ("mxfp8", {"bodies": "small"}),
    "mxfp8, standard": ("mxfp8", {"to": "standard"}),
    "mxfp8, memory given back": ("mxfp8", {"environment": {"MALLOC_MMAP_THRESHOLD_": "1048576"}}),
    "mxint8": ("mxint8", {}),
    "mxint8, bodies small": ("mxint8", {"bodies": "small"}),
    "mxint8, standard": ("mxint8", {"to": "standard"}),
    "mxint8-weight-only": ("mxint8-weight-only", {}),
}


def session_of(path: str, threads: int = 0) -> onnxruntime.InferenceSession:
    """Returns a session of a file, without our library."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def feeds(session: onnxruntime.InferenceSession, rows: int, tokens: int) -> dict[str, np.ndarray]:
    """Returns random tokens, all of them seen."""
    ids = np.random.default_rng(0).integers(1000, 8000, (rows, tokens))
    fixed = {"attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return {value.name: fixed.get(value.name, ids) for value in session.get_inputs()}


def median_ms(session: onnxruntime.InferenceSession, rows: int, tokens: int, runs: int) -> float:
    """Returns the median time of a run, behind two that warm up."""
    inputs, times = feeds(session, rows, tokens), []
    for _ in range(runs + 2):
        start = time.perf_counter()
        session.run(None, inputs)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) * 1e3


def measure(path: str) -> list[float]:
    """Returns seconds to open, milliseconds of a large and a small run, and the megabytes that this process gained."""
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    session = session_of(path)
    opened = time.perf_counter() - start
    small, large = median_ms(session, 1, 16, 20), median_ms(session, 8, 128, 5)
    return [opened, large, small, (psutil.Process().memory_info().rss - before) / 1e6]


def together(path: str) -> dict[str, float]:
    """Returns the batches per second of 4 callers, by the sessions that they have."""
    return {
        "of 4 sessions with one thread each:": _throughput([session_of(path, threads=1) for _ in range(4)]),
        "of one session that 4 callers share:": _throughput([session_of(path)] * 4),
        "of 4 sessions with all threads:": _throughput([session_of(path) for _ in range(4)]),
    }


def _throughput(sessions: list[onnxruntime.InferenceSession], seconds: float = 4) -> float:
    """Returns the batches of 4 x 64 tokens per second of callers that each have one of `sessions`."""
    counts, end = [0] * len(sessions), time.perf_counter() + seconds

    def call(caller: int) -> None:
        inputs = feeds(sessions[caller], 4, 64)
        while time.perf_counter() < end:
            sessions[caller].run(None, inputs)
            counts[caller] += 1

    threads = [threading.Thread(target=call, args=(caller,)) for caller in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def child(*arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """Returns what this script prints in another process."""
    command, variables = [sys.executable, __file__, *arguments], {**os.environ, **(environment or {})}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    return json.loads(done.stdout)


def export_encoder(path: Path) -> None:
    """Writes an encoder of BERT-base's layers: 85 million parameters, and few words."""
    import torch
    from exports import export_module
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    names = ("input_ids", "attention_mask")
    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    export_module(
        path,
        BertModel(BertConfig(vocab_size=8000), add_pooling_layer=False).eval(),
        kwargs={name: torch.ones(2, 8, dtype=torch.int64) for name in names},
        dynamic_shapes=dict.fromkeys(names, dynamic),
        input_names=list(names),
        output_names=["last_hidden_state"],
    )


def written(source: Path, name: str, folder: Path) -> Path:
    """Returns the file of one of `FORMS` made from a float32 file."""
    recipe, options = FORMS[name]
    path, to = folder / f"{name.replace(' ', '_')}.onnx", options.get("to")
    if to is None:
        bodies = options.get("bodies", "folded")
        mxfp8_graph.rewrite(source, recipe, output=path, overwrite=True, bodies=bodies)
    else:
        rewritten, _ = mxfp8_graph.rewrite(onnx.load(source), recipe)
        mxfp8_graph.convert(rewritten, to, output=path, overwrite=True)
    return path


def main() -> None:
    """Measures each file, and writes results/without_library."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--measure-together", help=argparse.SUPPRESS)
    parser.add_argument(
        "--together", action="store_true", help="measure the throughput of several sessions on one file too"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each file is measured")
    chosen = parser.parse_args()
    if chosen.measure or chosen.measure_together:
        print(json.dumps(measure(chosen.measure) if chosen.measure else together(chosen.measure_together)))
        return
    from exports import export_minilm

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, export in (("MiniLM", lambda path: export_minilm(path, None)), ("85M encoder", export_encoder)):
            source = folder / f"{title.split()[0]}.onnx"
            export(source)
            files = {"float32": source} | {form: written(source, form, folder) for form in FORMS}
            samples: dict[str, list[list[float]]] = {form: [] for form in files}
            for _ in range(chosen.rounds):
                for form, path in files.items():
                    environment = FORMS[form][1].get("environment") if form in FORMS else None
                    samples[form].append(child("--measure", str(path), environment=environment))
            medians = {
                form: [statistics.median(values) for values in zip(*s, strict=True)] for form, s in samples.items()
            }
            for form, values in medians.items():
                ratios = [f"{value / base:.2f}" for value, base in zip(values, medians["float32"], strict=True)]
                cells = (f"{value:.{digits}f}" for value, digits in zip(values, (2, 0, 1, 0), strict=True))
                rows.append([f"{title}: {form}", *cells, *ratios])
        notes = [
            "The last four columns are times float32's; less is better. Limits that we set: " + ", ".join(LIMITS) + ".",
            "Weights stay in 8 bits with bodies small; else ONNX Runtime holds them in float32.",
            "With MALLOC_MMAP_THRESHOLD_=1048576 the C library gives back the memory that opening a session needs.",
        ]
        if chosen.together:
            external = folder / "together.onnx"
            mxfp8_graph.rewrite(folder / "85M.onnx", "mxint8", output=external, bodies="small", external_data="always")
            shared = child("--measure-together", str(external))
            said = ", ".join(f"{what} {value:.1f}" for what, value in shared.items())
            notes.append(
                f"The 85M encoder as `mxint8` with bodies small and external data, batches per second: {said}."
            )
    title = "Rewritten files in ONNX Runtime without our library"
    publish("without_library", title, COLUMNS, rows, notes=notes)


if __name__ == "__main__":
    main()
