"""Asks the server of this sample, and compares its answer with a session of `mxfp8_ops.ort`."""

from __future__ import annotations

import json
import os
import time
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import numpy as np

from mxfp8_ops import ort

URL = f"http://127.0.0.1:{os.environ.get('PORT', '8000')}"


def wait(seconds: float = 60) -> None:
    """Returns when the server is healthy."""
    end = time.monotonic() + seconds
    while True:
        try:
            urlopen(f"{URL}/health").close()
            return
        except URLError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def main() -> None:
    """Prints both answers' difference, and the answer to a wrong input."""
    wait()
    x = np.random.default_rng(0).standard_normal((1, 4, 128), np.float32)
    with urlopen(URL, json.dumps({"x": x.tolist()}).encode()) as response:
        answer = json.load(response)
    session = ort.session("model/packed.onnx")
    for output, expected in zip(session.get_outputs(), session.run(None, {"x": x}), strict=True):
        assert np.array_equal(np.float32(answer[output.name]), expected), output.name
        print(f"{output.name}: the server and ort.session give the same {expected.shape} values")
    try:
        urlopen(URL, b'{"x": [1]}').close()
    except HTTPError as error:
        print(f"a wrong input: status {error.code}, {error.read().decode()[:90]}")


if __name__ == "__main__":
    main()
