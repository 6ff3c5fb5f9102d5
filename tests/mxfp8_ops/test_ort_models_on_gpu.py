"""Rewritten models on an emulated GPU: every node of ours runs there, and the results are those of the processor."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import structures
from cuda_driver_emulation import machine

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_ops import ort

pytestmark = pytest.mark.cuda

IDS = np.random.default_rng(0).integers(0, 400, (2, 5), dtype=np.int64)
INPUTS = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "token_type_ids": np.zeros_like(IDS)}
NODES = {
    "quantize_rows": "MXFP8Quantize",
    "gemm_skinny": "MXFP8Gemm MXFP8FusedGemm MXFP8WeightGemm MXFP8FusedWeightGemm",
    "gemm_grouped": "MXFP8GroupedGemm MXFP8GroupedWeightGemm",
    "group_rows": "MXFP8GroupedGemm MXFP8GroupedWeightGemm",
    "embedding": "MXFP8Embedding",
}
"""What each kernel is launched for, once a node. MXFP8Attention is a body of standard ops on a GPU."""


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("mixtral", Recipe()),
        ("mixtral", "mxint8"),
        ("mixtral", "mxint8-weight-only"),
        ("minilm_1", Recipe(embeddings=True)),
        ("minilm_1", "mxint8-weight-only"),
    ],
    ids=str,
)
def test_every_node_runs_on_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, recipe: object) -> None:
    original, results = tmp_path / "m.onnx", []
    onnx.save(structures.model(name), original)
    path, _ = mxfp8_graph.rewrite(original, recipe=recipe)
    with machine(monkeypatch) as gpu:
        for model, device in ((original, "cpu"), (path, "cpu"), (path, "cuda-copies")):
            session = ort.session(model, device=device)
            results.append(session.run(None, {i.name: INPUTS[i.name] for i in session.get_inputs()})[0])
        del session  # it holds memory of the GPU
        launches = Counter(re.sub("<.*", "", launch.kernel) for launch in gpu.launches)
    nodes = Counter(node.op_type for node in onnx.load(path).graph.node if node.op_type.startswith("MXFP8"))
    assert launches == +Counter({kernel: sum(nodes[op] for op in ops.split()) for kernel, ops in NODES.items()})
    assert not nodes.keys() - {op for ops in NODES.values() for op in ops.split()} - {"MXFP8Attention"}
    exact, processor, emulated = results
    assert np.linalg.norm(emulated - exact) < 1.25 * np.linalg.norm(processor - exact)
