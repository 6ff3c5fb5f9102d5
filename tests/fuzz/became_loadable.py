"""Counts broken models that ONNX Runtime refuses, and that a rewrite turns into ones that it loads.

    python -m tests.fuzz.became_loadable [--models 2000] [--seed 0] [--save FOLDER]

A rewrite must not repair: a user would then not learn that the model is damaged. Prints each such model with the
message of ONNX Runtime before the rewrite, and the models that ONNX Runtime loads and the rewrite refuses, most
frequent reasons first; exits with 1 if a model became loadable. An op without a kernel in this ONNX Runtime does not
count as damage. Each model is tried in a process of its own, as ONNX Runtime may crash on it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import mxfp8_graph
from mxfp8_ops.errors import Mxfp8Error

from . import ROOT

sys.path.insert(0, str(ROOT / "tests"))  # what builds the models

from . import onnx_models

_SECONDS = 20
_LIMITS = "timed out or crashed"
_REPAIRED = "became loadable"


def main() -> int:
    """Tries as many models as asked, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="folder for the models that became loadable")
    settings = parser.parse_args()
    seeds = onnx_models.seeds()
    outcomes: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for seed in range(settings.seed, settings.seed + settings.models):
        rng = random.Random(seed)
        data = onnx_models.mutate(rng.choice(seeds), rng)
        outcome, _, reason = _apart(data).partition("\n")
        outcomes[outcome][reason].append(seed)
        if outcome == _REPAIRED and settings.save:
            settings.save.mkdir(parents=True, exist_ok=True)
            (settings.save / f"{seed}.onnx").write_bytes(data)
    for outcome, reasons in sorted(outcomes.items()):
        print(f"{sum(map(len, reasons.values())):6} {outcome}")
        for reason, found in sorted(reasons.items(), key=lambda item: -len(item[1])):
            if reason:
                print(f"{len(found):10}  {reason}  (seeds {', '.join(map(str, found[:6]))})")
    return _REPAIRED in outcomes


def _apart(data: bytes) -> str:
    """Returns what `_outcome` does, called in a child."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        signal.alarm(_SECONDS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with tempfile.TemporaryDirectory() as folder:
            os.write(writing, _outcome(data, Path(folder)).encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        text = result.read()
    os.waitpid(child, 0)
    return text or _LIMITS


def _outcome(data: bytes, folder: Path) -> str:
    path, output = folder / "model.onnx", folder / "out.onnx"
    path.write_bytes(data)
    (folder / onnx_models.DATA).write_bytes(np.ones(onnx_models.DATA_BYTES // 4, np.float32).tobytes())
    before = _refusal(path)
    try:
        mxfp8_graph.rewrite(path, onnx_models.EVERYTHING, output=output)
    except mxfp8_graph.NothingEligibleError:
        return "nothing eligible"
    except Mxfp8Error as error:
        return "refused by both" if before else f"refused by the rewrite only\n{_kind(str(error))}"
    if not output.exists():
        return "rewritten already"
    after = _refusal(output)
    if before is None:
        return "loads before and after" if after is None else f"became unloadable\n{_kind(after)}"
    if after is not None:
        return "loads neither before nor after"
    return f"{'became supported' if 'NOT_IMPLEMENTED' in before else _REPAIRED}\n{_kind(before)}"


def _refusal(path: Path) -> str | None:
    """Returns what stock ONNX Runtime says against a model, or None if it loads it."""
    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error)
    return None


def _kind(message: str) -> str:
    """Returns a refusal without what differs from model to model."""
    return re.sub(r"/\S+\.onnx", "MODEL", " ".join(message.split()))[:200]


if __name__ == "__main__":
    sys.exit(main())
