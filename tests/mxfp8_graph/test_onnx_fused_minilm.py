"""BERT as ONNX Runtime's own optimizers fuse it: every linear of its blocks is rewritten. The slow tests: of MiniLM."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import oracle
import pytest
import structures
from releases import release

import mxfp8_graph

ERROR = 0.15
"""Of up to six blocks, each off by a few percent; the unfused MiniLM is off by 0.11."""


class Bert(NamedTuple):
    """An export of torch's older exporter, whose attention ONNX Runtime's patterns know, and the sizes of the model."""

    path: Path
    layers: int
    heads: int
    hidden: int
    intermediate: int


SIZES = {
    "sharp_bert_eager_older_14": (2, 4, 64, 96),
    f"minilm_eager_older_14{structures.EXPORTED_NOW}": (6, 12, 384, 1536),
}
SMALL, MINILM = SIZES


@pytest.fixture(scope="module", params=[SMALL, pytest.param(MINILM, marks=pytest.mark.slow)])
def bert(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Bert:
    path = tmp_path_factory.mktemp("bert") / "bert.onnx"
    small = request.param == SMALL
    onnx.save(structures.structure(SMALL, spread=0.08) if small else structures.model(MINILM), path)
    return Bert(path, *SIZES[request.param])


def check_outputs(bert: Bert, original: Path, rewritten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [value.name for value in onnx.load(bert.path, load_external_data=False).graph.input]
    ids = np.random.default_rng(0).integers(0, 500, (2, 16))
    mask = np.ones_like(ids)
    mask[1, 12:] = 0
    feeds = dict(zip(names, (ids, mask, np.zeros_like(ids)), strict=False))
    expected = oracle.run(str(original), feeds)
    for kernels in (False, True):
        monkeypatch.setattr(oracle.runtime, "kernels", kernels)
        for before, after in zip(expected, oracle.run(str(rewritten), feeds), strict=True):
            assert np.linalg.norm(after - before) < ERROR * np.linalg.norm(before), f"kernels: {kernels}"


@pytest.mark.skipif(release("onnxruntime") < (1, 24), reason="before ONNX Runtime 1.24 it makes no Attention of this")
def test_linears_that_the_transformers_optimizer_fused_are_rewritten(
    bert: Bert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts Q, K and V into one Attention per block."""
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer", exc_type=ImportError)
    optimized = tmp_path / "optimized.onnx"
    model = optimizer.optimize_model(str(bert.path), "bert", num_heads=bert.heads, hidden_size=bert.hidden)
    model.save_model_to_file(str(optimized))
    rewritten, report = mxfp8_graph.rewrite(optimized, output=tmp_path / "mxfp8.onnx")
    sites = Counter((entry.decision.site.op, entry.decision.site.n) for entry in report.rewritten)
    assert sites == {
        ("Attention", 3 * bert.hidden): bert.layers,
        ("MatMul", bert.hidden): 2 * bert.layers,
        ("MatMul", bert.intermediate): bert.layers,
        ("Gemm", bert.hidden): 1,  # the pooler
    }
    assert len(report.rewritten) == len(report.sites)
    check_outputs(bert, optimized, rewritten, monkeypatch)


def test_linears_of_a_model_that_a_session_saved_are_rewritten(
    bert: Bert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, options = tmp_path / "saved.onnx", onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(saved)
    onnxruntime.InferenceSession(bert.path, options, providers=["CPUExecutionProvider"])
    rewritten, report = mxfp8_graph.rewrite(saved, output=tmp_path / "mxfp8.onnx")
    sites = Counter((entry.decision.site.op, entry.decision.site.role) for entry in report.sites)
    assert sites == {
        ("MatMul", "linear"): 6 * bert.layers,
        ("FusedGemm", "linear"): 1,
        ("FusedMatMul", "attention_scores"): bert.layers,
        ("MatMul", "attention_values"): bert.layers,
        ("Gather", "embedding"): 3,
    }
    assert len(report.rewritten) == 6 * bert.layers + 1
    check_outputs(bert, saved, rewritten, monkeypatch)
