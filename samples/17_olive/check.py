"""Prints what Olive measured, and checks that its sessions of the rewritten model run our kernels."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from data import Sentences
from olive.model import ModelConfig

import mxfp8_graph.integrations.olive  # noqa: F401 - Olive knows the model's type after this import
from mxfp8_ops import cpu

for name, file in (("float32", "input_model_metrics.json"), ("mxint8", "metrics.json")):
    metrics = {key: each["value"] for key, each in json.loads(Path("out", file).read_text(encoding="utf-8")).items()}
    print(f"{name:8} accuracy {metrics['accuracy-accuracy_score']:.3f}, {metrics['latency-p50']:.1f} ms")

model = ModelConfig.parse_file_or_obj("out/model_config.json").create_model()
inputs = {name: rows[:8].numpy() for name, rows in Sentences().inputs.items()}
with cpu.profiled() as profile:
    model.run_session(model.prepare_session(), inputs)
    ops = Counter(call.op for call in profile.calls() if call.op)
print(f"calls of our kernels in a run: {dict(ops) or 'none'}")
if not ops:
    sys.exit("the function bodies ran")
