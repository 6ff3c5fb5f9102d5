"""Claim: sessions share one copy of equal weights, and hold no other where those are in an external data file.

Resident memory of a process with sessions of one model, 8 linears of 4096 x 4096 in `mxint8`: after they are made,
after a run with 16 rows, and after one with a single row, by the setting `prepack`. Floor: the bytes of the packed
weights.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from exports import linears
from harness import options, publish

import mxfp8_graph
from mxfp8_graph import load_recipe
from mxfp8_ops import native, ort

LAYERS = 8
SIZE = 4096
COLUMNS = ["weights", "sessions", "prepack", "made, MB", "16 rows, MB", "1 row, MB", "16 rows / packed weights"]
FORMS = {"in the model's file": False, "in an external data file": True}


def resident() -> float:
    """Returns the megabytes of this process that are in memory."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(found[1]) * 1024 / 1e6 if found else float("nan")


def measure(path: str, prepack: str, sessions: int) -> list[float]:
    """Returns what sessions of a model add to this process: made, after 16 rows, after one."""
    before = resident()
    made = [ort.session(path, session_options=options(), prepack=prepack) for _ in range(sessions)]
    held = [resident() - before]
    for rows in (16, 1):
        feeds = {port.name: np.ones((rows, SIZE), np.float32) for port in made[0].get_inputs()}
        for session in made:
            session.run(None, feeds)
        held.append(resident() - before)
    return held


def main() -> None:
    """Measures each setting in a process of its own, and writes the table to results/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--one", nargs=3, metavar=("MODEL", "PREPACK", "SESSIONS"), help="measures one, in this process"
    )
    one = parser.parse_args().one
    if one is not None:
        print(*measure(one[0], one[1], int(one[2])))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        packed, _ = mxfp8_graph.rewrite(linears(SIZE, SIZE, LAYERS), load_recipe("mxint8", output_projections=True))
        floor = sum(len(tensor.raw_data) for tensor in packed.graph.initializer) / 1e6
        for form, external in FORMS.items():
            path = str(Path(folder) / f"external-{external}.onnx")
            onnx.save(packed, path, save_as_external_data=external, location="weights.data")
            for sessions, prepack in itertools.product((1, 2), native.PREPACK):
                command = [sys.executable, __file__, "--one", path, prepack, str(sessions)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                held = [float(word) for word in done.stdout.split()]
                rows.append([form, sessions, prepack, *(f"{each:.0f}" for each in held), f"{held[1] / floor:.2f}"])
    title = f"Resident memory of sessions: {floor:.0f} MB of packed weights"
    publish("session_memory", title, COLUMNS, rows)


if __name__ == "__main__":
    main()
