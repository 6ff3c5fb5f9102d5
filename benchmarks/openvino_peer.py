"""OpenVINO as a peer, in a process of its own: its threads and ONNX Runtime's do not disturb each other.

    peer = Peer(model, precision="bf16", weights="int8", threads=2)
    peer.feed(feeds)
    seconds = peer()  # of one inference, timed over there

Needs `pip install openvino nncf`, in this environment or, with `python`, in another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS = ("as they are", "int8", "mxfp8")
"""What NNCF makes of the weights; int8 with a scale per output channel, MXFP8 with one per 32 values."""


class Peer:
    """A model compiled by OpenVINO for the processor. Calling it runs it once and returns the seconds that took.

    Args:
        model: an ONNX file.
        precision: "f32" or "bf16": what OpenVINO computes in.
        weights: one of `WEIGHTS`.
        threads: how many it may use.
        python: an interpreter that has openvino and nncf.

    Raises:
        RuntimeError: OpenVINO cannot do it; with its last line.
    """

    def __init__(
        self, model: Path, *, precision: str, weights: str = "as they are", threads: int, python: str = sys.executable
    ) -> None:
        settings = json.dumps({"model": str(model), "precision": precision, "weights": weights, "threads": threads})
        command = [python, __file__, settings]
        self._folder = tempfile.TemporaryDirectory()
        with (Path(self._folder.name) / "log").open("w") as log:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.version = self._ask()

    def feed(self, feeds: dict[str, np.ndarray]) -> None:
        """Sets the inputs of the runs that follow."""
        path = Path(self._folder.name) / "feeds.npz"
        np.savez(path, **feeds)
        self._ask(str(path))

    def __call__(self) -> float:
        """Runs the model once and returns the seconds."""
        return float(self._ask("run"))

    def close(self) -> None:
        """Ends the process."""
        self._child.kill()
        self._child.wait()
        self._folder.cleanup()

    def _ask(self, line: str | None = None) -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        if line is not None:
            self._child.stdin.write(f"{line}\n")
            self._child.stdin.flush()
        answer = self._child.stdout.readline().strip()
        if not answer:
            log = (Path(self._folder.name) / "log").read_text().strip().splitlines()
            self.close()
            raise RuntimeError(log[-1] if log else "OpenVINO's process ended without a word")
        return answer


def serve(settings: dict[str, Any]) -> None:
    """Compiles the model; then answers each line: a file of feeds, or "run" with the seconds of one inference."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import openvino

    core = openvino.Core()
    model = core.read_model(settings["model"])
    if settings["weights"] != "as they are":
        import nncf

        mode = {"int8": "INT8_SYM", "mxfp8": "MXFP8_E4M3"}[settings["weights"]]
        extra = {} if settings["weights"] == "int8" else {"group_size": 32, "all_layers": False}
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode[mode], **extra)
    wanted = {"INFERENCE_PRECISION_HINT": settings["precision"], "INFERENCE_NUM_THREADS": settings["threads"]}
    request = core.compile_model(model, "CPU", wanted).create_infer_request()
    print(openvino.__version__, file=answers, flush=True)
    feeds: dict[str, Any] = {}
    for line in map(str.strip, sys.stdin):
        if line != "run":
            feeds = dict(np.load(line))
            print("ready", file=answers, flush=True)
            continue
        start = time.perf_counter()
        request.infer(feeds, share_inputs=True, share_outputs=True)
        print(time.perf_counter() - start, file=answers, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", help=argparse.SUPPRESS)
    serve(json.loads(parser.parse_args().settings))
