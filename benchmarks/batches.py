"""Claim: with mxint8 a text has one vector, alone or in any batch; with int8 dynamic it has another in each batch.

The real all-MiniLM-L6-v2 embeds the docstrings of benchmarks/retrieval.py, each alone, and again in batches of other
texts that are padded to the longest. "moved" are texts whose two vectors differ by more than float32's own rounding
(cosine below 1 - 1e-6). Dynamic int8 has one scale for all activations of a batch, so a text's codes depend on its
neighbours (ONNX Runtime's issue 10111); a shared scale of ours belongs to 32 values of one token.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from contenders import Field, Runner
from exports import export_minilm
from harness import publish
from retrieval import TOKENS, feeds_of, functions, tokenizer
from settings import BEST, INT8

TEXTS, BATCH = 256, 16
RECIPES = ("mxint8", "mxint8-bf16", "mxfp8")
SAME = 1 - 1e-6


def vectors(runner: Runner, texts: list[str], batch: int) -> np.ndarray:
    """Returns the normalized embedding of each text, in batches padded to the longest text."""
    encoder, rows = tokenizer(), []
    for start in range(0, len(texts), batch):
        feeds = feeds_of(encoder, texts[start : start + batch])
        runner.feed(feeds)
        rows.append((runner.output() * feeds["attention_mask"][..., None]).sum(1).astype(np.float64))
    whole = np.concatenate(rows)
    return whole / np.linalg.norm(whole, axis=1, keepdims=True)


def main() -> None:
    """Embeds the texts alone and in batches with each contender, and writes results/batches."""
    texts = [text for _, text in functions()]
    texts = [texts[place] for place in np.random.default_rng(0).permutation(len(texts))[:TEXTS]]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "minilm.onnx"
        export_minilm(model, None)
        field = Field(model, {name: name for name in RECIPES})
        for name in (BEST, *RECIPES, INT8):
            runner = field.openers[name]()
            cosines = (vectors(runner, texts, 1) * vectors(runner, texts, BATCH)).sum(1)
            rows.append([name, f"{(cosines < SAME).sum()} of {TEXTS}", f"{cosines.mean():.6f}", f"{cosines.min():.6f}"])
    columns = ("contender", "texts moved", "mean cosine", "worst cosine")
    notes = [f"Each text alone against the same text in a batch of {BATCH}, of at most {TOKENS} tokens."]
    publish("batches", "One text, one vector: all-MiniLM-L6-v2", columns, rows, notes=notes, per_processor=False)


if __name__ == "__main__":
    main()
