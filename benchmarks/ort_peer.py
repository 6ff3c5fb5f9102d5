"""ONNX Runtime, with our library or without, in a process of its own; see peers.py.

Settings: "model", an ONNX file; "ours", whether `mxfp8_ops.ort.session` makes the session, with "prepack" ("auto" by
default).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
from harness import options
from peers import Feeds, serve

from mxfp8_ops import ort


class OnnxRuntime:
    """A session on the processor."""

    version = onnxruntime.__version__

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings["ours"]:
            self._session = ort.session(
                settings["model"], session_options=options(), prepack=settings.get("prepack", "auto")
            )
        else:
            self._session = onnxruntime.InferenceSession(settings["model"], options())
        self._feeds: Feeds = {}
        self._outputs: list[np.ndarray] = []

    def feed(self, feeds: Feeds) -> None:
        """Takes the inputs."""
        self._feeds = {port.name: feeds[port.name] for port in self._session.get_inputs()}

    def run(self) -> None:
        """Runs once."""
        self._outputs = self._session.run(None, self._feeds)

    def output(self) -> np.ndarray:
        """Returns the first output."""
        return self._outputs[0]


if __name__ == "__main__":
    serve(OnnxRuntime)
