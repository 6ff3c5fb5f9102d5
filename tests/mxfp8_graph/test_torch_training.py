"""Training: parameters stay, gradients flow, recipes can change, and afterwards the weights are packed."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import builders  # noqa: E402
import commands  # noqa: E402
from grids import looped  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import Apply, call_targets, count, decision, export, predict, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402
from mxfp8_ops.errors import RecipeError  # noqa: E402

X = values(64, 64, seed=2)


class Model(nn.Module):
    """A linear, GPT-2's Conv1D as addmm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(64, 96), nn.Linear(128, 64)
        self.weight, self.bias = nn.Parameter(values(96, 128, seed=3) / 10), nn.Parameter(torch.zeros(128))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(torch.addmm(self.bias, torch.relu(self.up(x)), self.weight))
        return self.head(x)


@pytest.fixture(scope="module")
def exported() -> ExportedProgram:
    torch.manual_seed(0)
    return export(Model(), X)


@pytest.fixture
def ep(exported: ExportedProgram) -> ExportedProgram:
    """Returns a program of its own parameters, which may be trained."""
    return copy.deepcopy(exported)


def trained(ep: ExportedProgram, steps: int = 1) -> list[float]:
    """Trains in place; returns the losses."""
    module = ep.module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = (module(X) - X).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_linears_become_linear_train_and_parameters_stay(ep: ExportedProgram) -> None:
    rewritten, report = mxfp8_graph.rewrite(ep, Recipe(fp8_format="HYBRID", scale_rounding="floor"), training=True)
    assert count(rewritten, "mxfp8.linear_train") == 2
    assert decision(report, "head").reason.startswith("output projection")
    assert rewritten.state_dict.keys() == ep.state_dict.keys()
    assert all(rewritten.state_dict[name] is tensor for name, tensor in ep.state_dict.items())
    nodes = [n for n in rewritten.graph.nodes if "linear_train" in str(n.target)]
    assert {(n.kwargs["fp8_format"], n.kwargs["scale_rounding"]) for n in nodes} == {("HYBRID", "floor")}


def test_forward_is_the_product_of_quantized_operands() -> None:
    linear = nn.Linear(64, 96)
    rewritten, _ = mxfp8_graph.rewrite(export(linear, X), Recipe(output_projections=True), training=True)
    predict(X, linear.weight, linear.bias).check(rewritten.module()(X))


@looped("fp8_format", ["E4M3", "HYBRID"])
def test_one_step_reaches_every_parameter(exported: ExportedProgram, fp8_format: Any) -> None:
    ep = copy.deepcopy(exported)
    rewritten, _ = mxfp8_graph.rewrite(copy.deepcopy(exported), Recipe(fp8_format=fp8_format), training=True)
    module, reference = rewritten.module(), ep.module()
    for each in (module, reference):
        (each(X) - X).square().mean().backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        exact = wanted[name].grad
        error = float((parameter.grad - exact).norm() / exact.norm())
        # E5M2 has 2 mantissa bits: twice E4M3's rounding error. At most three products lie behind a gradient.
        assert error < (0.3 if fp8_format == "HYBRID" else 0.15), name


def test_training_then_packing_also_by_another_name_of_the_recipe(ep: ExportedProgram) -> None:
    rewritten, _ = mxfp8_graph.rewrite(ep, training=True)
    losses = trained(rewritten, steps=20)
    assert losses[-1] < 0.8 * losses[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, report = mxfp8_graph.rewrite(rewritten, "MXFP8BlockScaling", training=True)
        assert again is rewritten
        assert report.already_rewritten
        packed, report = mxfp8_graph.rewrite(rewritten, "MXFP8BlockScaling")
    assert len(report.rewritten) == 2
    assert count(packed, "mxfp8.gemm") == 2
    assert count(packed, "mxfp8.linear_train") == 0
    assert [s.decision.site.op for s in report.sites] == ["linear"] * 3
    with torch.no_grad():
        assert torch.allclose(packed.module()(X), rewritten.module()(X), rtol=1e-4, atol=1e-4), "the same products"


def test_the_program_survives_a_file(ep: ExportedProgram, tmp_path: Any) -> None:
    rewritten, _ = mxfp8_graph.rewrite(ep, training=True)
    loaded = mxfp8_graph.load(mxfp8_graph.save(rewritten, tmp_path / "training.pt2"))
    assert trained(loaded, steps=3) == trained(rewritten, steps=3)
    again, report = mxfp8_graph.rewrite(loaded, training=True)
    assert again is loaded
    assert report.already_rewritten


def test_changing_the_recipe_replaces_the_quantizers(ep: ExportedProgram) -> None:
    first, _ = mxfp8_graph.rewrite(ep, training=True)
    other = Recipe(name="hybrid", fp8_format="HYBRID", exclude=("^up$",), output_projections=True)
    with pytest.warns(UserWarning, match="Recipe type changed") as caught:
        second, report = mxfp8_graph.rewrite(first, other, training=True)
    assert [str(warning.message) for warning in caught] == [
        "Recipe type changed from mxfp8 to hybrid: fp8_format from E4M3 to HYBRID, output_projections from False to "
        "True, exclude from [] to ['^up$']"
    ]
    assert [s.decision.quantize for s in report.sites] == [False, True, True]
    assert count(second, "mxfp8.linear_train") == 2
    assert "aten.linear.default" in call_targets(second)
    assert count(first, "mxfp8.linear_train") == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mxfp8_graph.rewrite(second, other, training=True)[0] is second


def test_packing_leaves_no_linear_train_where_a_site_is_kept(ep: ExportedProgram) -> None:
    first, _ = mxfp8_graph.rewrite(ep, training=True)
    with pytest.warns(UserWarning, match="Recipe type changed"):
        packed, _ = mxfp8_graph.rewrite(first, Recipe(name="one", include=("addmm",)))
    assert count(packed, "mxfp8.gemm") == 1
    assert count(packed, "aten.linear") == 2


def test_the_command_line_prepares_a_file_for_training(ep: ExportedProgram, own_folder: None) -> None:
    torch.export.save(ep, "model.pt2")
    result = commands.run("rewrite", "model.pt2", "--training", "-o", "tuned.pt2")
    assert result.exit_code == 0, result.output
    assert "Rewrote 2 of 3 matmuls" in result.stdout
    tuned = mxfp8_graph.load("tuned.pt2")
    assert count(tuned, "mxfp8.linear_train") == 2
    assert trained(mxfp8_graph.rewrite(ep, training=True)[0], steps=3) == trained(tuned, steps=3)
    source = commands.save(builders.chain_model())
    assert commands.refused("rewrite", source, "--training") == (
        f"error: {source}: an ONNX model, which cannot be trained; expected an exported program (.pt2); export the "
        "model with torch.export, or leave out --training"
    )


def test_the_command_line_does_so_with_a_packed_file_and_takes_it_back(ep: ExportedProgram, own_folder: None) -> None:
    mxfp8_graph.save(mxfp8_graph.rewrite(ep)[0], "packed.pt2")
    assert "packed weights stay as they are" in commands.run("rewrite", "packed.pt2", "--training").stdout
    tuned = mxfp8_graph.load("packed.mxfp8.pt2")
    before = {name: p.detach().clone() for name, p in tuned.module().named_parameters()}
    losses = trained(tuned, steps=20)
    assert losses[-1] < 0.9 * losses[0]
    assert {*before} == {"up.bias", "bias", "head.weight", "head.bias"}
    assert not any(torch.equal(p, before[name]) for name, p in tuned.module().named_parameters())
    mxfp8_graph.save(tuned, "trained.pt2")
    assert commands.run("rewrite", "trained.pt2", "-o", "final.pt2").exit_code == 0
    final = mxfp8_graph.load("final.pt2")
    assert count(final, "mxfp8.gemm") == 2
    with torch.no_grad():
        assert torch.equal(final.module()(X), tuned.module()(X))


def test_what_training_cannot_do(ep: ExportedProgram) -> None:
    for recipe, message in (
        ("mxfp8-weight-only", "activations: unchanged for 'linear'"),
        ("mxfp8-bf16", "activations: bfloat16 for 'linear'; expected activations in MXFP8 too"),
        (Recipe(weight_format="e5m2"), "set that instead"),
    ):
        with pytest.raises(RecipeError, match=message):
            mxfp8_graph.rewrite(ep, recipe, training=True)
    vector = export(Apply(lambda m, x: torch.relu(x @ m.w), {"w": values(3, 64, 96)}), X[0])
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(vector, training=True)
    assert "does not support a vector times a stack" in caught.value.decisions[0].reason


@looped("transposed", [False, True])
def test_a_stack_of_weights_trains_and_is_packed_or_put_back(transposed: bool) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(torch.bmm(x, m.w.mT if transposed else m.w))

    w, x = values(3, 64, 96, seed=4) / 8, values(3, 5, 64, seed=5)
    module = Apply(function, {"w": w.mT.contiguous() if transposed else w})
    program = export(module, x)
    rewritten, report = mxfp8_graph.rewrite(program, training=True)
    assert count(rewritten, "mxfp8.linear_train") == len(report.rewritten) == 1
    trainable = rewritten.module()
    trainable(x).square().sum().backward()
    assert all(p.grad is not None for p in trainable.parameters())
    packed, _ = mxfp8_graph.rewrite(rewritten)
    assert count(packed, "mxfp8.gemm") == 1
    assert torch.allclose(packed.module()(x), rewritten.module()(x), rtol=1e-4, atol=1e-5)
    both = export(Apply(lambda m, x: torch.relu(function(m, x)) @ m.u, {"w": module.w, "u": values(96, 32)}), x)
    first, _ = mxfp8_graph.rewrite(both, Recipe(output_projections=True), training=True)
    with pytest.warns(UserWarning, match="Recipe type changed"):
        kept, _ = mxfp8_graph.rewrite(first, Recipe(name="one", include=("^matmul$",), output_projections=True))
    assert (count(kept, "mxfp8.gemm"), count(kept, "aten.bmm"), count(kept, "mxfp8.linear_train")) == (1, 1, 0)
    predict(torch.relu(function(module, x)), values(96, 32).t()).check(kept.module()(x))
