"""Claim: the processes and sessions that serve one file share its weights, and open it in less time than float32 takes.

The encoder of 85 million parameters of without_library.py, with external data. Each of 1, 2 and 4 processes has a
session of one thread, or one process has as many sessions; each session ran once, with 16 tokens. "MB" is the
proportional set size of all processes, in which a page that several of them map counts once. Python and ONNX Runtime
are part of it. "open" and "first run" are seconds of one process alone. Floor of the weights: 344 MB in float32, 87 MB
packed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import psutil
from harness import publish
from without_library import export_encoder, feeds

import mxfp8_graph
from mxfp8_ops import ort

STOCK = "stock"
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "float32, stock ONNX Runtime": ({}, STOCK),
    "mxint8, our library": ({"external_data": "always"}, "auto"),
    "mxint8, our library, prepack never": ({"external_data": "always"}, "never"),
    "mxint8, our library, weights in the .onnx": ({"external_data": "never"}, "auto"),
    "mxint8, stock ONNX Runtime": ({"external_data": "always"}, STOCK),
    "mxint8, stock ONNX Runtime, bodies small": ({"external_data": "always", "bodies": "small"}, STOCK),
}
"""Per row the options of the rewrite, and `prepack` of our sessions."""
COUNTS = (1, 2, 4)
COLUMNS = [
    "file",
    "open, s",
    "first run, s",
    *(f"{n} processes, MB" for n in COUNTS),
    *(f"{n} sessions, MB" for n in COUNTS),
]
ROUNDS = 3


def hold(path: str, prepack: str, count: int) -> None:
    """Opens sessions, runs each, prints the seconds of both, and waits for the end of the input."""
    sessions, opened, ran = [], 0.0, 0.0
    for _ in range(count):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        start = time.perf_counter()
        if prepack == STOCK:
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        else:
            session = ort.session(path, session_options=options, prepack=prepack)
        opened, start = opened + time.perf_counter() - start, time.perf_counter()
        session.run(None, feeds(session, 1, 16))
        ran += time.perf_counter() - start
        sessions.append(session)
    print(json.dumps([opened, ran]), flush=True)
    sys.stdin.read()


def measure(path: Path, prepack: str, processes: int, sessions: int) -> tuple[float, float, float]:
    """Returns the seconds to open and to run of the first process, and the megabytes of all."""
    command = [sys.executable, __file__, "--hold", str(path), prepack, str(sessions)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    said = [json.loads(child.stdout.readline()) for child in children if child.stdout]
    size = sum(psutil.Process(child.pid).memory_full_info().pss for child in children) / 1e6
    for child in children:
        child.communicate()
    return *said[0], size


def main() -> None:
    """Measures each file, and writes results/production."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hold", nargs=3, metavar=("MODEL", "PREPACK", "SESSIONS"), help=argparse.SUPPRESS)
    held = parser.parse_args().hold
    if held:
        hold(held[0], held[1], int(held[2]))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "encoder.onnx"
        export_encoder(source)
        onnx.save(onnx.load(source), source, save_as_external_data=True, location="encoder.onnx.data")
        for form, (options, prepack) in FORMS.items():
            path = source
            if options:
                path = source.with_name("rewritten.onnx")
                mxfp8_graph.rewrite(source, "mxint8", output=path, overwrite=True, **options)
            alone = [measure(path, prepack, 1, 1) for _ in range(ROUNDS)]
            opened, ran, _ = map(statistics.median, zip(*alone, strict=True))
            sizes = [measure(path, prepack, count, 1)[2] for count in COUNTS]
            sizes += [measure(path, prepack, 1, count)[2] for count in COUNTS]
            rows.append([form, f"{opened:.2f}", f"{ran:.2f}", *(f"{size:.0f}" for size in sizes)])
    title = "Processes and sessions that serve one file: an encoder of 85 million parameters"
    publish("production", title, COLUMNS, rows, own=max(COUNTS))


if __name__ == "__main__":
    main()
