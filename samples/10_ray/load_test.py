"""Serves embeddings on loopback and loads it: a replica is killed, then the model is replaced, under way.

python load_test.py OLD.onnx NEW.onnx TOKENIZER.json BATCH

Every request has to be answered, with the embedding that a session in this process gives the text alone: the same bits
if it ran alone, and a cosine of 0.999 if texts ran together, since kernels for more rows sum in another order, which
moves some activations to the next value of MXFP8. A request that a dying replica takes with it fails; clients send it
again, which does no harm.
"""

from __future__ import annotations

import collections
import json
import os
import pydoc_data.topics
import re
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
from embedder import Encoder, application
from ray import serve

REQUESTS, AT_ONCE, PATIENCE = 200, 16, 60
CLOSE = 0.999
"""Cosine of embeddings of texts that ran together with those of texts that ran alone."""


def texts() -> list[str]:
    """Returns sentences that every Python carries."""
    topics = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return (re.findall(r"[A-Z][a-z]+ [\w, ]{40,200}\.", topics) * 2)[:REQUESTS]


def ask(text: str, port: int) -> tuple[dict[str, Any], int, float]:
    """Returns the answer, how often the request was sent, and the seconds it took in all."""
    start = time.monotonic()
    body = json.dumps({"text": text}).encode()
    for attempt in range(1, 100):
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return json.load(response), attempt, time.monotonic() - start
        except (urllib.error.URLError, ConnectionError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise
            time.sleep(0.1)
    raise TimeoutError(text)


def load(port: int, answered: Callable[[int, dict[str, Any]], None]) -> list[tuple[dict[str, Any], int, float]]:
    """Sends all requests, so many at once, and calls `answered` with how many are answered, and the latest."""
    count, lock = 0, threading.Lock()

    def one(text: str) -> tuple[dict[str, Any], int, float]:
        nonlocal count
        found = ask(text, port)
        with lock:
            count += 1
            answered(count, found[0])
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, texts()))


def check(name: str, found: list[tuple[dict[str, Any], int, float]], expected: dict[str, np.ndarray]) -> None:
    """Prints what happened; ends the program if a request has no answer or another embedding."""
    alone, equal, cosines = 0, 0, [1.0]
    for row, (answer, _, _) in enumerate(found):
        embedding, right = np.array(answer["embedding"], np.float32), expected[answer["model"]][row]
        if answer["together"] == 1:
            alone += 1
            equal += np.array_equal(embedding, right)
        else:
            cosines.append(float(embedding @ right))
    seconds = sorted(took for _, _, took in found)
    models = collections.Counter(Path(answer["model"]).name for answer, _, _ in found)
    print(
        f"{name}: {len(found)} of {REQUESTS} answered, {dict(models)}, "
        f"{len({answer['replica'] for answer, _, _ in found})} processes, {sum(sent - 1 for _, sent, _ in found)} sent "
        f"again, {seconds[len(seconds) // 2] * 1e3:.0f} ms in the median, {seconds[-1] * 1e3:.0f} at most; "
        f"{equal} of {alone} that ran alone have the same bits, the others a cosine of {min(cosines):.5f} at least"
    )
    if len(found) != REQUESTS or equal < alone or min(cosines) < CLOSE:
        sys.exit("requests without an answer, or other embeddings")


def main() -> None:
    """Runs the three loads."""
    old, new, tokenizer = (os.path.abspath(path) for path in sys.argv[1:4])  # noqa: PTH100
    arguments = {"tokenizer": tokenizer, "batch": sys.argv[4]}
    encoders = {model: Encoder(model, tokenizer) for model in (old, new)}
    expected = {model: np.stack([each.embed([t])[0][0] for t in texts()]) for model, each in encoders.items()}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    port = int(os.environ.get("PORT", "8123"))
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(application({"model": old, **arguments}))
    try:
        check("two replicas", load(port, lambda count, _: None), expected)

        def kill(count: int, answer: dict[str, Any]) -> None:
            if count == REQUESTS // 4:
                os.kill(answer["replica"], signal.SIGKILL)

        check("one killed", load(port, kill), expected)

        # A rolling update starts new replicas before it stops old ones.
        updating = threading.Thread(target=serve.run, args=[application({"model": new, **arguments})], daemon=True)

        def update(count: int, _: dict[str, Any]) -> None:
            if count == REQUESTS // 4:
                updating.start()

        check("being replaced", load(port, update), expected)
        updating.join(PATIENCE)
        found = load(port, lambda count, _: None)
        check("replaced", found, expected)
        if any(answer["model"] != new for answer, _, _ in found):
            sys.exit("the old model still answers")
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
