"""analyze on exported programs, and both front ends on the same models: they must find the same layer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_programs import export, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import Recipe  # noqa: E402
from mxfp8_graph.running.compare import difference  # noqa: E402
from mxfp8_graph.running.runner import open_runnable  # noqa: E402
from mxfp8_graph.tools.analyze.run import analyze  # noqa: E402

LAYERS, HIDDEN, BAD = 24, 64, 17
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "initializer_range": HIDDEN**-0.5,  # so that every layer matters; at 0.02 an MLP of this size adds next to nothing
}
GROUP = slice(5, None, 32)
"""One channel of every block."""
PLANTED = 2.0**20


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads gain nothing on matmuls this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plant(before: nn.Parameter, also: nn.Parameter | None, weight: nn.Parameter) -> None:
    """Divides a group of channels by 2^20, and multiplies their weights by it: exactly the same in float32.

    The other weights of each block are lost when the block is quantized.
    """
    with torch.no_grad():
        before[GROUP] /= PLANTED
        if also is not None:
            also[GROUP] /= PLANTED
        weight[:, GROUP] *= PLANTED


def vit() -> tuple[nn.Module, tuple[Any, ...], str]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=40, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config).eval()
    name = next(
        n for n, _ in model.named_modules() if f".{BAD}." in n and n.endswith(("intermediate.dense", "mlp.fc1"))
    )
    layer = model.get_submodule(name[: name.index(f".{BAD}.") + len(f".{BAD}")])
    plant(layer.layernorm_after.weight, layer.layernorm_after.bias, model.get_submodule(name).weight)
    return model, (values(2, 3, 32, 32),), name


def decoder() -> tuple[nn.Module, tuple[Any, ...], str]:
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": 128, "num_key_value_heads": 1, "use_cache": False, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **settings)).eval()
    name = f"model.layers.{BAD}.mlp.down_proj"
    plant(model.get_submodule(name.replace("down", "up")).weight, None, model.get_submodule(name).weight)
    return model, (torch.randint(0, 128, (2, 8), generator=torch.Generator().manual_seed(1)),), name


class Logits(nn.Module):
    """A model of one input and one output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model(x).logits


@pytest.mark.slow
@pytest.mark.parametrize("make", [vit, decoder])
def test_a_planted_bad_layer_is_found_first_by_both_front_ends(make: Any, tmp_path: Path) -> None:
    model, inputs, bad = make()
    program = export(Logits(model), *inputs)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(program, dynamo=True, verbose=False).save(path)
    rankings = []
    for source in (program, path):
        name = open_runnable(source)[0].specs[0].name
        found = analyze(source, inputs={name: inputs[0].numpy()})
        assert found.sites[0].label == f"model.{bad}"
        assert found.exclusion is not None
        assert found.exclusion.patterns[0] == "^model\\." + bad.replace(".", "\\.") + "$"
        assert len(found.sites) >= 6 * LAYERS
        rankings.append({site.label: site.alone["relative_l2"].mean for site in found.sites})
    torch_ranking, onnx_ranking = rankings
    assert torch_ranking.keys() == onnx_ranking.keys()
    shared = list(torch_ranking)
    ranks = [np.argsort(np.argsort([ranking[name] for name in shared])) for ranking in rankings]
    assert np.corrcoef(*ranks)[0, 1] > 0.95


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.h:
            x = x + torch.tanh(layer(x))
        return x


def test_damage_is_that_of_programs_rewritten_one_site_at_a_time_also_in_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    program, x = export(Mlp(), values(5, 64)), values(5, 64, seed=1).numpy()
    found = analyze(program, inputs={"x": x})
    reference = next(iter(open_runnable(program)[1].run({"x": x}).values()))

    def error(**patterns: Any) -> float:
        rewritten = mxfp8_graph.rewrite(program, Recipe(**patterns))[0]
        return difference(reference, next(iter(open_runnable(rewritten)[1].run({"x": x}).values()))).relative_l2

    for site in found.sites:
        pattern = (f"^{site.site.decision.site.name}$",)
        assert site.alone["relative_l2"].mean == pytest.approx(error(include=pattern), rel=1e-4)
        assert site.without["relative_l2"].mean == pytest.approx(error(exclude=pattern), rel=1e-4)
        assert site.input is not None
        assert site.input.amax > 0
    assert found.runs <= 2 * 4 + 10
    assert {layer.name for layer in found.layers} == {"(others)"}  # h.0 ends with its number
    path = mxfp8_graph.save(program, tmp_path / "m.pt2")
    in_a_file = analyze(path, inputs={"x": x})
    assert [s.alone for s in in_a_file.sites] == [s.alone for s in found.sites]
    assert in_a_file.source == str(path)
