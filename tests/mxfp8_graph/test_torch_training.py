"""Training: parameters stay, gradients flow, modes switch, and packing takes the values that were trained."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from grids import looped

torch = pytest.importorskip("torch")

import commands  # noqa: E402
import models as b  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch_programs import (  # noqa: E402
    as_numpy,
    call_targets,
    count,
    decision,
    export,
    predict,
    relative_l2,
    rewrite,
    values,
)

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402
from mxfp8_ops.errors import ContractError, RecipeError  # noqa: E402

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


@looped("fp8_format", ["E4M3", "HYBRID"])
def test_one_step_reaches_every_parameter(exported: ExportedProgram, fp8_format: Any) -> None:
    ep = copy.deepcopy(exported)
    rewritten, _ = mxfp8_graph.rewrite(copy.deepcopy(exported), Recipe(fp8_format=fp8_format), training=True)
    module, reference = rewritten.module(), ep.module()
    for each in (module, reference):
        (each(X) - X).square().mean().backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in module.named_parameters():
        # E5M2 has 2 mantissa bits: twice E4M3's rounding error. At most three products lie behind a gradient.
        bound = 0.3 if fp8_format == "HYBRID" else 0.15
        assert relative_l2(parameter.grad, wanted[name].grad) < bound, name


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
    assert [count(packed, op) for op in ("mxfp8.gemm", "aten.linear", "mxfp8.linear_train")] == [1, 2, 0]


def test_a_stack_of_weights_is_put_back_where_a_recipe_keeps_it() -> None:
    weights = {"w": values(3, 96, 64, seed=4) / 8, "u": values(96, 32)}
    x, stack = values(3, 5, 64, seed=5), weights["w"].mT
    tuned, _ = rewrite(lambda m, x: torch.relu(torch.bmm(x, m.w.mT)) @ m.u, weights, x, training=True)
    with pytest.warns(UserWarning, match="Recipe type changed"):
        kept, _ = mxfp8_graph.rewrite(tuned, Recipe(name="one", include=("^matmul$",), output_projections=True))
    assert [count(kept, op) for op in ("mxfp8.gemm", "aten.bmm", "mxfp8.linear_train")] == [1, 1, 0]
    predict(torch.relu(torch.bmm(x, stack)), weights["u"].t()).check(as_numpy(kept.module()(x)))


def test_the_command_line_prepares_a_file_for_training(ep: ExportedProgram, own_folder: None) -> None:
    torch.export.save(ep, "model.pt2")
    result = commands.run("rewrite", "model.pt2", "--training", "-o", "tuned.pt2")
    assert result.exit_code == 0, result.output
    assert "Rewrote 2 of 3 matmuls" in result.stdout
    tuned = mxfp8_graph.load("tuned.pt2")
    assert count(tuned, "mxfp8.linear_train") == 2
    assert trained(mxfp8_graph.rewrite(ep, training=True)[0], steps=3) == trained(tuned, steps=3)
    source = commands.save(b.chain_model())
    assert commands.refused("rewrite", source, "--training") == (
        f"error: {source}: an ONNX model, which cannot be trained; expected an exported program (.pt2); export the "
        "model with torch.export, or leave out --training"
    )


def test_the_command_line_does_so_with_a_packed_file_and_takes_it_back(ep: ExportedProgram, own_folder: None) -> None:
    mxfp8_graph.save(mxfp8_graph.rewrite(ep)[0], "packed.pt2")
    assert "packed weights stay as they are" in commands.run("rewrite", "packed.pt2", "--training").stdout
    tuned = mxfp8_graph.load("packed.mxfp8.pt2")
    trained(tuned)
    mxfp8_graph.save(tuned, "trained.pt2")
    assert commands.run("rewrite", "trained.pt2", "-o", "final.pt2").exit_code == 0
    with torch.no_grad():
        assert torch.equal(mxfp8_graph.load("final.pt2").module()(X), tuned.module()(X))


def test_what_training_cannot_do(ep: ExportedProgram) -> None:
    for recipe, message in (
        ("mxfp8-weight-only", "activations: unchanged for 'linear'"),
        ("mxfp8-bf16", "activations: bfloat16 for 'linear'; expected activations in MXFP8 too"),
        (Recipe(weight_format="e5m2"), "set that instead"),
    ):
        with pytest.raises(RecipeError, match=message):
            mxfp8_graph.rewrite(ep, recipe, training=True)


# --- Dropout and batch normalization -----------------------------------------------------------------------------


class Switched(nn.Module):
    """One of each op that differs between the modes, and two that do not: no share to drop, no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 96), nn.Linear(96, 64), nn.LayerNorm(64)
        self.statistics, self.none = nn.BatchNorm1d(96), nn.BatchNorm1d(96, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.none(self.statistics(self.up(x)))
        h = F.dropout(F.dropout(h, 0.25, self.training), 0.0, self.training)
        h = self.norm(self.down(h)).unflatten(1, (2, 32))[None]
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.25 if self.training else 0.0)


def program(model: nn.Module, *, training: bool, decomposed: bool = False) -> Any:
    exported = torch.export.export(model.train(training), (X,))
    return exported.run_decompositions({}) if decomposed else exported


def differs(module: Any) -> bool:
    """Whether two runs give different values."""
    with torch.no_grad():
        return not torch.equal(module(X), module(X))


@looped("decomposed", [False, True])
def test_packing_switches_dropout_off(decomposed: bool) -> None:
    model = Switched()
    active = program(model, training=True, decomposed=decomposed)
    assert differs(active.module())
    packed, report = mxfp8_graph.rewrite(active)
    ops = ["_native_batch_norm_legit_functional", "native_dropout"] if decomposed else ["batch_norm", "dropout"]
    (note,) = report.notes
    assert note == (
        "the program was exported in training mode; in the result dropout is off, and batch normalization, if "
        f"any, uses its running statistics (1 {ops[0]}, 1 {ops[1]}, 1 scaled_dot_product_attention)"
    )
    assert not differs(packed.module())
    plain, _ = mxfp8_graph.rewrite(program(model, training=False))
    assert torch.equal(packed.module()(X), plain.module()(X)), "as if it was exported in evaluation mode"
    assert differs(active.module()), "the program itself stays as it was"


def test_a_packed_program_in_training_mode_runs_and_becomes_onnx_without_dropout(tmp_path: Path) -> None:
    packed, _ = mxfp8_graph.rewrite(program(Switched(), training=False))
    for node in packed.graph.nodes:
        if node.target is torch.ops.aten.dropout.default:
            node.args = (node.args[0], 0.25, True)
    packed.graph_module.recompile()
    model = onnx.load(mxfp8_graph.to_onnx(packed, tmp_path / "packed.onnx"))
    assert "Dropout" not in {node.op_type for node in model.graph.node}
    assert mxfp8_graph.verify(packed, packed).passed


def test_modules_follow_train_and_eval() -> None:
    recipe = mxfp8_graph.Recipe(name="attention too", fp8_dpa=True)
    tuned, report = mxfp8_graph.rewrite(program(Switched(), training=True), recipe, training=True)
    assert report.notes == ()
    module = tuned.module()
    assert differs(module)
    assert module.eval() is module
    assert not differs(module)
    assert not differs(copy.deepcopy(module))
    statistics = module.get_buffer("statistics.running_mean").clone()
    module(X)
    assert torch.equal(module.get_buffer("statistics.running_mean"), statistics)
    outer = nn.ModuleList([module]).train()
    assert differs(module)
    assert not torch.equal(module.get_buffer("statistics.running_mean"), statistics)
    outer.eval()
    before = module(X)
    with pytest.warns(UserWarning, match="no parameter changed"):
        packed, _ = mxfp8_graph.rewrite(tuned, recipe)
    assert torch.equal(packed.module()(X), before)


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = F.dropout(self.linear(x), 0.5, self.training)
        return torch.relu(h)


def test_a_region_under_autocast_follows_too() -> None:
    tuned, _ = mxfp8_graph.rewrite(program(Region(), training=True), training=True)
    module = tuned.module()
    assert (differs(module), differs(module.eval()), differs(module.train())) == (True, False, True)


def test_train_says_what_it_cannot_switch_on() -> None:
    tuned, _ = mxfp8_graph.rewrite(program(Switched(), training=False), training=True)
    module = tuned.module().eval()
    with pytest.warns(
        UserWarning, match=r"train\(\) leaves batch_norm, dropout in evaluation mode, .* export the model"
    ):
        module.train()
    assert not differs(module)


# --- Values that were trained ------------------------------------------------------------------------------------


def prepared() -> Any:
    """Returns a program to train: up, a batch normalization with its statistics, and a head that is not packed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 64))
    return mxfp8_graph.rewrite(export(model, X), training=True)[0]


def training(module: nn.Module, *, fused: bool = False) -> Callable[[], None]:
    """Returns one step of training."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused)

    def step() -> None:
        module(X).square().mean().backward()
        optimizer.step()

    return step


class Twice(nn.Module):
    def forward(self, weight: Any) -> Any:
        return 2.0 * weight


REPLACED: dict[str, Callable[[Any], Any]] = {
    "fully_shard": fully_shard,
    "setattr": lambda module: setattr(module.get_submodule("0"), "weight", nn.Parameter(values(96, 64))),
    "assigned": lambda module: module.load_state_dict(
        {n: t.clone() for n, t in module.state_dict().items()}, assign=True
    ),
    "parametrize": lambda module: nn.utils.parametrize.register_parametrization(
        module.get_submodule("0"), "weight", Twice()
    ),
    "a buffer": lambda module: module.get_submodule("1").register_buffer("running_mean", torch.ones(96)),
}


@pytest.fixture
def one_process() -> Any:
    """A process group of this process alone."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@looped("way", REPLACED)
def test_values_that_the_program_lacks_are_refused_until_it_takes_them(
    way: str, one_process: None, tmp_path: Path
) -> None:
    tuned = prepared()
    module = tuned.module()
    REPLACED[way](module)
    step = training(module)
    step()
    lost = (
        r"'.*' of its module\(\) is another tensor now, .* call program.load_state_dict\(module.state_dict\(\)\) first"
    )
    with pytest.raises(ContractError, match="program: " + lost):
        mxfp8_graph.rewrite(tuned)
    with pytest.raises(ContractError, match=lost):
        mxfp8_graph.save(tuned, tmp_path / "tuned.pt2")
    if way == "parametrize":
        with pytest.raises(ContractError, match=r"'0\.weight' is missing"):
            tuned.load_state_dict(module.state_dict())
        nn.utils.parametrize.remove_parametrizations(module.get_submodule("0"), "weight")
    tuned.load_state_dict(module.state_dict())
    for name, value in module.state_dict().items():
        assert torch.equal(tuned.state_dict[name], getattr(value, "full_tensor", lambda v=value: v)()), name
    mxfp8_graph.rewrite(tuned)
    step()
    if way not in {"a buffer", "parametrize"}:  # which share all that is trained with the program again
        with pytest.raises(ContractError, match=lost):
            mxfp8_graph.rewrite(tuned)


def test_a_packed_program_is_checked_too(tmp_path: Path) -> None:
    tuned = prepared()
    training(tuned.module())()
    packed, _ = mxfp8_graph.rewrite(tuned)
    module = packed.module()
    module.get_submodule("3").bias = nn.Parameter(torch.ones(64))
    with pytest.raises(ContractError, match=r"to_onnx: '3\.bias' of its module"):
        mxfp8_graph.to_onnx(packed, tmp_path / "packed.onnx")


def test_modules_that_share_their_tensors_or_have_the_same_values_pass(recwarn: Any) -> None:
    tuned = prepared()
    module = tuned.module().to(torch.float64).to(torch.float32)  # which replaces buffers
    training(module, fused=True)()
    nn.Module.__setattr__(module, "note", "not a tensor")
    packed, report = mxfp8_graph.rewrite(tuned)
    with torch.no_grad():
        assert torch.equal(packed.module()(X), module(X))
    assert report.notes == ()
    assert not [w for w in recwarn if "parameter" in str(w.message)]


def test_a_dtype_that_the_program_does_not_compute_in_is_refused(tmp_path: Path) -> None:
    tuned = prepared()
    module = tuned.module().bfloat16()  # which changes the program's parameters, too
    other = r"tensor '0\.weight' is torch\.bfloat16 .*; expected torch\.float32 .*; undo what changed it"
    with pytest.raises(ContractError, match=other):
        mxfp8_graph.rewrite(tuned)
    with pytest.raises(ContractError, match=other):
        mxfp8_graph.save(tuned, tmp_path / "tuned.pt2")
    module.float()
    mxfp8_graph.rewrite(tuned)


def test_training_a_copy_is_noticed() -> None:
    tuned = prepared()
    copy = torch.export.unflatten(tuned)
    training(copy)()
    unchanged = "no parameter changed since training was prepared; if a copy was trained"
    with pytest.warns(UserWarning, match=unchanged):
        assert unchanged in mxfp8_graph.rewrite(tuned)[1].notes[0]
    tuned.load_state_dict(copy.state_dict())
    packed, report = mxfp8_graph.rewrite(tuned)
    assert report.notes == ()
    with torch.no_grad():
        assert torch.equal(packed.module()(X), copy(X))


def test_values_of_another_model_are_refused() -> None:
    tuned = prepared()
    own = dict(tuned.state_dict)
    before = own["0.weight"].clone()
    for wrong, said in (
        ({n: t + 1 for n, t in own.items() if n != "3.bias"}, "'3.bias' is missing; expected shape [64]; pass"),
        ({**own, "more": X}, "'more' has shape [64, 64]; expected no such name; pass the names of program.state_dict"),
        ({**own, "0.bias": torch.ones(3)}, "'0.bias' has shape [3]; expected shape [96]"),
    ):
        with pytest.raises(ContractError, match=f"^load_state_dict: {re.escape(said)}"):
            tuned.load_state_dict(wrong)
    assert torch.equal(before, own["0.weight"]), "nothing is taken"
