"""Architectures as torch exports them: rewritten from a file with no manual step, checked, run both ways, compared.

The bound on the outputs: rounding to E4M3 with a power-of-two scale per 32 values is off by 2.6% in root mean square,
in weights and in activations, so one linear by 3.7%. Errors of a few linears in a row, in residual streams that keep
most of the signal, add up in squares: 12% is ten linears' worth.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import structures
from oracle import kinds, run
from releases import release

import mxfp8_graph
from mxfp8_ops import ort

OUTPUT_ERROR = 0.12


@dataclass(frozen=True)
class Case:
    """What the rewrite must make of a model."""

    gemms: int
    quantizes: int
    kept: dict[str, int]
    """Kept sites by role."""
    grouped: int = 0
    """Gemms of experts."""
    fused: dict[str, int] = field(default_factory=dict)
    """Fused nodes by kind, as each fusion reports."""


def products(layers: int, **more: int) -> dict[str, int]:
    return {"attention_scores": layers, "attention_values": layers, **more}


DECODER = products(2, output_projection=1, embedding=1)
GATED = {"gemm + silu": 2, "gemm + silu + gate": 2}
LLAMA = Case(14, 8, DECODER, fused=GATED)
"""q, k, v share a Quantize, gate and up share one: 7 linears per block, 4 Quantize nodes."""
MIXTURE = Case(8, 8, {**DECODER, "router": 2}, grouped=4)
"""Experts are gathered for every row: 2 products per block. The routers have 4 columns, and are kept."""

CASES = {
    # GPT-2's q, k and v are one weight: four linears per block, each with an activation of its own. Reshapes stand
    # between them and their neighbours, so nothing is fused.
    "gpt2": Case(8, 8, products(2, output_projection=1, embedding=2)),
    "llama": LLAMA,
    "llama_with_cache": LLAMA,
    # Encoder blocks have 6 linears and 4 activations, decoder blocks 10 and 7; all cross-attention keys and values
    # share the encoder's output: 2 * 4 + 2 * 6 + 1. Both sides look up words, and distances for their scores.
    "t5": Case(32, 21, products(6, output_projection=1, embedding=4), fused={"gemm + relu": 4}),
    "vit": Case(12, 8, products(2, output_projection=1, convolution=1), fused={"gemm + gelu": 2}),
    "mixtral": MIXTURE,
    "qwen_moe": MIXTURE,
    "granite_moe": MIXTURE,
    "whisper": Case(32, 21, products(6, output_projection=1, embedding=2, convolution=2), fused={"gemm + gelu": 4}),
}


@dataclass(frozen=True)
class Exported:
    case: Case
    path: Path
    rewritten: Path
    report: mxfp8_graph.RewriteReport


@pytest.fixture(scope="module", params=structures.and_exported_now(CASES))
def exported(request: Any, tmp_path_factory: Any) -> Exported:
    path = tmp_path_factory.mktemp("real") / "model.onnx"
    onnx.save(structures.model(request.param), path)
    rewritten, report = mxfp8_graph.rewrite(path)
    return Exported(CASES[request.param.partition(",")[0]], path, rewritten, report)


def test_every_linear_is_rewritten_and_every_other_site_has_its_reason(exported: Exported) -> None:
    kept: Counter[str] = Counter()
    for site in exported.report.kept:
        if release("transformers") < (5, 20) and "rotary" in site.decision.site.module:
            continue  # positions times frequencies are a product of matrices there
        kept[site.decision.site.role] += 1
        assert len(site.decision.reason) > 20
    assert kept == exported.case.kept
    found = kinds(onnx.load(exported.rewritten))
    names = {"MXFP8Gemm", "MXFP8FusedGemm", "MXFP8GatedGemm"}
    gemms = sum(count for op, count in found.items() if op in names)
    assert (gemms, found["MXFP8Quantize"]) == (exported.case.gemms, exported.case.quantizes)
    assert found.get("MXFP8GroupedGemm", 0) == exported.case.grouped
    assert exported.case.gemms + exported.case.grouped == len(exported.report.rewritten)
    assert found["MXFP8Attention"] == kept["attention_scores"]  # what is kept is fused
    modules = {site.decision.site.module for site in exported.report.rewritten}
    assert all(module.startswith("model.") for module in modules), modules


def test_activations_gates_and_norms_are_fused(exported: Exported) -> None:
    fused = Counter(fusion.kind for fusion in exported.report.fusions if fusion.kind != "attention")
    assert fused == exported.case.fused


def test_the_result_is_valid_and_by_kernels_and_bodies_near_the_original(exported: Exported) -> None:
    onnx.checker.check_model(exported.rewritten, full_check=True)
    onnx.shape_inference.infer_shapes(onnx.load(exported.rewritten), strict_mode=True, data_prop=True)
    before, after = (onnx.load(path).graph for path in (exported.path, exported.rewritten))
    assert list(before.input) == list(after.input)
    assert list(before.output) == list(after.output)
    report = mxfp8_graph.verify(exported.path, exported.rewritten, max_rel_l2=OUTPUT_ERROR)
    assert report.failures == ()
    assert report.worst_relative_l2 > 1e-4  # it is the quantized model that ran


def test_weights_are_a_quarter_of_their_size_and_of_experts_all_but_routers_are_packed(exported: Exported) -> None:
    packed, after = (sum(getattr(s, key) for s in exported.report.rewritten) for key in ("bytes_before", "bytes_after"))
    assert after == packed * 33 // 32 // 4
    if not exported.case.grouped:
        return
    stored = {tensor.name: tensor for tensor in onnx.load(exported.path).graph.initializer}
    total = sum(len(t.raw_data) for t in stored.values() if t.data_type == onnx.TensorProto.FLOAT)
    embeddings = len(stored["model.model.embed_tokens.weight"].raw_data)
    head = sum(s.bytes_before for s in exported.report.kept if s.decision.site.role == "output_projection")
    assert packed >= 0.99 * (total - embeddings - head), f"{packed} of {total - embeddings - head} bytes"


def test_the_older_exporter(tmp_path: Path) -> None:
    onnx.save(structures.structure("sharp_vit_older_17", spread=0.08), tmp_path / "m.onnx")
    rewritten, report = mxfp8_graph.rewrite(tmp_path / "m.onnx")
    assert len(report.rewritten) == CASES["vit"].gemms
    checked = mxfp8_graph.verify(tmp_path / "m.onnx", rewritten, max_rel_l2=OUTPUT_ERROR)
    assert checked.failures == ()


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: Any) -> tuple[Path, Path, mxfp8_graph.RewriteReport]:
    """The real all-MiniLM-L6-v2: six BERT blocks of six linears, and a pooler behind a Tanh."""
    path = tmp_path_factory.mktemp("minilm") / "minilm.onnx"
    onnx.save(structures.minilm(), path)
    return path, *mxfp8_graph.rewrite(path)


def test_all_36_block_linears_of_minilm_and_its_pooler_share_24_activations(minilm):
    _, rewritten, report = minilm
    ops = kinds(onnx.load(rewritten))
    pooler = [s for s in report.rewritten if "pooler" in s.decision.site.module]
    assert (ops["MXFP8Gemm"] + ops["MXFP8FusedGemm"], len(pooler)) == (37, 1)
    assert ops["MXFP8Quantize"] - 1 <= 24
    assert Counter(fusion.kind for fusion in report.fusions) == {"gemm + gelu": 6, "attention": 6}
    assert {s.decision.site.role for s in report.kept} == {"attention_scores", "attention_values", "embedding"}
    assert report.weight_error is not None
    assert report.weight_error.worst < 0.03


def test_minilm_with_its_embeddings_is_a_quarter_of_its_size(minilm):
    recipe = mxfp8_graph.Recipe(name="embeddings", embeddings=True)
    _, report = mxfp8_graph.rewrite(minilm[0], recipe, output=minilm[0].with_name("e.onnx"))
    tables = {s.decision.site.module.rpartition(".")[2]: s.decision for s in report.sites if s.decision.site.n}
    assert tables["word_embeddings"].quantize
    assert tables["position_embeddings"].quantize
    assert tables["token_type_embeddings"].reason.startswith("tiny: N = 2")
    assert report.bytes_after is not None
    assert report.bytes_after <= 25.5e6


def test_minilm_computes_the_same_with_and_without_the_library(minilm):
    path, rewritten, _ = minilm
    tokens = np.random.default_rng(0).integers(1000, 30000, (3, 12))
    feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
    kernels, bodies = ort.session(rewritten).run(None, feeds), run(str(rewritten), feeds)
    for kernel, body, exact in zip(kernels, bodies, run(str(path), feeds), strict=True):
        error = np.linalg.norm(kernel - exact) / np.linalg.norm(exact)
        assert 1e-3 < error < OUTPUT_ERROR
        # Sums in another order move values across rounding boundaries of the next Quantize: less than its error.
        assert np.linalg.norm(kernel - body) / np.linalg.norm(exact) < error
