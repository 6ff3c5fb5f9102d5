"""Embeds sentences with sentence-transformers and with optimum, on our kernels, and compares with a plain session.

python embed.py FOLDER, with onnx/model.onnx and, rewritten, onnx/model.mxfp8.onnx.
"""

from __future__ import annotations

import pydoc_data.topics
import re
import sys

import numpy as np
import onnxruntime
from optimum.onnxruntime import ORTModelForFeatureExtraction
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from mxfp8_ops import ort

CPU = "CPUExecutionProvider"
BATCH = 32


def pooled(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns normalised means over the tokens [batch, hidden], as the model's own pooling does it."""
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def same_rows(name: str, found: np.ndarray, expected: np.ndarray) -> None:
    """Ends the program if embeddings are not those of the plain session, but for rounding of means and norms."""
    furthest = float(np.abs(found - expected).max())
    print(f"{name:22} {len(found)} embeddings, furthest from those of a plain session by {furthest:.1e}")
    if not furthest < 1e-6:
        sys.exit(f"{name} gives other embeddings")


folder = sys.argv[1]
text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
texts = sorted((s for s in re.findall(r"[A-Z][a-z]+ [\w, ]{40,200}\.", text)), key=len)[:256]

tokenizer = AutoTokenizer.from_pretrained(folder)
session = ort.session(f"{folder}/onnx/model.mxfp8.onnx")
options = onnxruntime.SessionOptions()
ort.register(options)  # for one session; without it the function bodies run, slowly
named = {"file_name": "model.mxfp8.onnx", "provider": CPU, "session_options": options}
optimum = ORTModelForFeatureExtraction.from_pretrained(folder, subfolder="onnx", **named)
expected, by_optimum = [], []
for start in range(0, len(texts), BATCH):
    inputs = tokenizer(texts[start : start + BATCH], padding=True, return_tensors="np")
    feeds = {value.name: inputs[value.name] for value in session.get_inputs()}
    expected.append(pooled(session.run(None, feeds)[0], inputs["attention_mask"]))
    by_optimum.append(pooled(optimum(**inputs).last_hidden_state, inputs["attention_mask"]))

ours = SentenceTransformer(folder, backend="onnx", model_kwargs=named)
before = SentenceTransformer(folder, backend="onnx", model_kwargs={"file_name": "model.onnx", "provider": CPU})
by_sentence_transformers = ours.encode(texts, batch_size=BATCH)
same_rows("sentence-transformers", by_sentence_transformers, np.concatenate(expected))
same_rows("optimum", np.concatenate(by_optimum), np.concatenate(expected))
cosines = (by_sentence_transformers * before.encode(texts, batch_size=BATCH)).sum(1)
print(f"cosine with float32: mean {cosines.mean():.4f}, worst {cosines.min():.4f}")
