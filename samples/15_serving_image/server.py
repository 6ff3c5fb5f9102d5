"""Serves a rewritten model with onnxruntime and libmxfp8_ops.so alone: POST / with JSON, GET /health."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import onnxruntime

DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}


def open_session(model: str, library: str) -> onnxruntime.InferenceSession:
    """Returns a session of `model` with the kernels of `library`: what `mxfp8_ops.ort.session` does."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("THREADS", "0"))  # 0: one for each core
    options.add_session_config_entry("optimization.disable_specified_optimizers", "SkipLayerNormFusion")
    options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Handler(BaseHTTPRequestHandler):
    """Answers one request; all share the session, which is safe."""

    session: onnxruntime.InferenceSession

    def do_GET(self) -> None:
        """Answers /health: the session is open."""
        known = self.path == "/health"
        self.answer(200 if known else 404, {"healthy": True} if known else {"error": "expected /health"})

    def do_POST(self) -> None:
        """Runs the model on an object of nested lists by input name; answers one by output name."""
        try:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            feed = {i.name: np.asarray(body[i.name], DTYPES[i.type]) for i in self.session.get_inputs()}
            outputs = self.session.run(None, feed)
        except (KeyError, TypeError, ValueError, onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument) as error:
            self.answer(400, {"error": f"{type(error).__name__}: {error}"})
            return
        names = [output.name for output in self.session.get_outputs()]
        self.answer(200, {name: y.tolist() for name, y in zip(names, outputs, strict=True)})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        """Sends `body` as JSON."""
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(model: str, library: str) -> None:
    """Serves until the process ends."""
    Handler.session = open_session(model, library)
    ThreadingHTTPServer(
        (os.environ.get("HOST", "127.0.0.1"), int(os.environ.get("PORT", "8000"))), Handler
    ).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
