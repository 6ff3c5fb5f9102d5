"""Rewritten models on an emulated GPU: every node of ours runs there, and the results are those of the processor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import structures
from cuda_driver_emulation import Driver, machine

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_ops import ort

IDS = np.random.default_rng(0).integers(0, 400, (2, 5), dtype=np.int64)
MODELS = {
    "mixtral": (Recipe(), {"input_ids": IDS}),
    "minilm_1": (
        Recipe(embeddings=True),
        {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "token_type_ids": np.zeros_like(IDS)},
    ),
}
NODES = {
    "quantize_rows": "MXFP8Quantize",
    "gemm_skinny": "MXFP8Gemm MXFP8FusedGemm MXFP8WeightGemm MXFP8FusedWeightGemm",
    "gemm_grouped": "MXFP8GroupedGemm MXFP8GroupedWeightGemm",
    "group_rows": "MXFP8GroupedGemm MXFP8GroupedWeightGemm",
    "embedding": "MXFP8Embedding",
}
"""What each kernel is launched for, once a node. MXFP8Attention is a body of standard ops on a GPU."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    with machine(monkeypatch) as gpu:
        yield gpu


@pytest.mark.parametrize("preset", [None, "mxint8", "mxint8-weight-only"])
@pytest.mark.parametrize("name", MODELS)
def test_every_node_runs_on_the_gpu(gpu: Driver, tmp_path: Path, name: str, preset: str | None) -> None:
    recipe, inputs = MODELS[name]
    original = tmp_path / "m.onnx"
    onnx.save(structures.model(name), original)
    path, _ = mxfp8_graph.rewrite(original, recipe=preset or recipe)
    results = []
    for model, device in ((original, "cpu"), (path, "cpu"), (path, "cuda-copies")):
        session = ort.session(model, device=device)
        results.append(session.run(None, {i.name: inputs[i.name] for i in session.get_inputs()})[0])
    nodes = Counter(node.op_type for node in onnx.load(path).graph.node if node.op_type.startswith("MXFP8"))
    launches = Counter(re.sub("<.*", "", launch.kernel) for launch in gpu.launches)
    assert launches == +Counter({kernel: sum(nodes[op] for op in ops.split()) for kernel, ops in NODES.items()})
    assert not nodes.keys() - {op for ops in NODES.values() for op in ops.split()} - {"MXFP8Attention"}
    exact, processor, emulated = results
    assert np.linalg.norm(emulated - exact) < 1.25 * np.linalg.norm(processor - exact)
