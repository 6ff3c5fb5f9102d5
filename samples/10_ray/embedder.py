"""A Ray Serve application: text in, embedding out, several replicas of one rewritten model.

serve run embedder:application model=/path/minilm.mxfp8.onnx tokenizer=/path/tokenizer.json
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import onnxruntime
from ray import serve
from starlette.requests import Request
from tokenizers import Tokenizer

from mxfp8_ops import ort

MAX_TOKENS = 128


class Encoder:
    """Texts to normalised embeddings, one session on one thread."""

    def __init__(self, model: str, tokenizer: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # replicas share the processors
        self.session = ort.session(model, session_options=options)
        self.inputs = {value.name for value in self.session.get_inputs()}
        self.tokenizer = Tokenizer.from_file(tokenizer)
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_TOKENS)

    def embed(self, texts: list[str]) -> list[tuple[np.ndarray, int]]:
        """Returns an embedding [hidden] per text, and how many ran together: those of one length, so none is padded."""
        encoded = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        found: dict[int, tuple[np.ndarray, int]] = {}
        for length in {len(ids) for ids in encoded}:
            rows = [row for row, ids in enumerate(encoded) if len(ids) == length]
            ids = np.array([encoded[row] for row in rows], np.int64)
            feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
            feeds = {name: array for name, array in feeds.items() if name in self.inputs}
            means = self.session.run(["last_hidden_state"], feeds)[0].mean(1)
            found |= {row: (mean / np.linalg.norm(mean), len(rows)) for row, mean in zip(rows, means, strict=True)}
        return [found[row] for row in range(len(texts))]


@serve.deployment(num_replicas=2, max_ongoing_requests=32, ray_actor_options={"num_cpus": 0.4})
class Embedder:
    """A replica. Requests that arrive together are one batch."""

    def __init__(self, model: str, tokenizer: str, batch: int) -> None:
        self.model, self.encoder = model, Encoder(model, tokenizer)
        self.embed.set_max_batch_size(batch)

    @serve.batch(batch_wait_timeout_s=0.01)
    async def embed(self, texts: list[str]) -> list[tuple[np.ndarray, int]]:
        """Returns what the encoder gives for a batch."""
        return await asyncio.to_thread(self.encoder.embed, texts)

    async def __call__(self, request: Request) -> dict[str, Any]:
        """Answers POST {"text": ...}."""
        embedding, together = await self.embed((await request.json())["text"])
        return {"embedding": embedding.tolist(), "together": together, "model": self.model, "replica": os.getpid()}


def application(arguments: dict[str, str]) -> Any:
    """Returns the application for `serve run` and `serve.run`."""
    return Embedder.bind(arguments["model"], arguments["tokenizer"], int(arguments.get("batch", "16")))
