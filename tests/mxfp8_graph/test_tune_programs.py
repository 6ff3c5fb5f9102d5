"""tune on exported programs, and on a vision transformer to a share of images that keep their class."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.running.runner import open_runnable  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads gain nothing on matmuls this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def export(model: nn.Module, x: torch.Tensor) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, (x,))


def sample(program: torch.export.ExportedProgram, seed: int) -> dict[str, np.ndarray]:
    (spec,) = open_runnable(program)[0].specs
    return {spec.name: np.random.default_rng(seed).standard_normal([int(d) for d in spec.dims], np.float32)}


def test_a_program_is_tuned_and_its_recipe_makes_it_again() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64))
    program = export(net.eval(), torch.zeros(8, 64))
    path = mxfp8_graph.save(program, "net.pt2")
    inputs = sample(program, 0)
    found = mxfp8_graph.tune(path, "relative_l2<=0.03", inputs=inputs)
    assert {p.name for p in Path("net.tuned").iterdir()} == {
        "net.mxfp8.pt2",
        "recipe.yaml",
        "report.html",
        "report.json",
    }
    again, _ = mxfp8_graph.rewrite(path, "net.tuned/recipe.yaml", output="again.pt2")
    results = [open_runnable(model)[1].run(inputs) for model in (path, again, "net.tuned/net.mxfp8.pt2")]
    (name,) = results[0]
    original, rewritten, written = (result[name] for result in results)
    np.testing.assert_array_equal(rewritten, written)
    error = np.linalg.norm(rewritten - original) / np.linalg.norm(original)
    assert error <= 0.03
    assert found.chosen.scores["relative_l2"].mean == pytest.approx(error, rel=1e-5)


@pytest.mark.slow
def test_a_vision_transformer_keeps_the_class_of_99_of_100_images() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ViTConfig(
        **sizes, initializer_range=0.125, image_size=32, patch_size=8, num_labels=10, attn_implementation="eager"
    )
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config).eval()
    program = export(model, torch.zeros(64, 3, 32, 32))
    inputs = [sample(program, seed) for seed in range(2)]
    found = mxfp8_graph.tune(program, "top1>=0.99", inputs=inputs)
    assert found.steps[0].plan.treatment == "e4m3"
    assert found.steps[0].scores["top1"].mean < 0.99
    rewritten, _ = mxfp8_graph.rewrite(program, found.recipe)
    same = []
    for feeds in inputs:
        classes = [next(iter(open_runnable(m)[1].run(feeds).values())).argmax(-1) for m in (program, rewritten)]
        same.append(np.mean(classes[0] == classes[1]))
    assert np.mean(same) >= 0.99
