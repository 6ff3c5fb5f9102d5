"""Dropout: train() and eval() switch it while a program is trained, and packing switches it off."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from grids import looped

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch_programs import values  # noqa: E402

import mxfp8_graph  # noqa: E402

X = values(8, 64, seed=2)


class Model(nn.Module):
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
    model = Model()
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


def test_a_loaded_program_in_training_mode_becomes_onnx_without_dropout(tmp_path: Any) -> None:
    packed, _ = mxfp8_graph.rewrite(program(Model(), training=False))
    for node in packed.graph.nodes:
        if node.target is torch.ops.aten.dropout.default:
            node.args = (node.args[0], 0.25, True)
    packed.graph_module.recompile()
    mxfp8_graph.save(packed, tmp_path / "packed.pt2")  # what older versions saved
    mxfp8_graph.to_onnx(tmp_path / "packed.pt2", tmp_path / "packed.onnx")
    import onnx

    assert "Dropout" not in {node.op_type for node in onnx.load(tmp_path / "packed.onnx").graph.node}
    assert mxfp8_graph.verify(tmp_path / "packed.pt2", tmp_path / "packed.pt2").passed


def test_modules_follow_train_and_eval() -> None:
    recipe = mxfp8_graph.Recipe(name="attention too", fp8_dpa=True)
    tuned, report = mxfp8_graph.rewrite(program(Model(), training=True), recipe, training=True)
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


def test_a_region_under_autocast_follows_too() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                h = F.dropout(self.linear(x), 0.5, self.training)
            return torch.relu(h)

    tuned, _ = mxfp8_graph.rewrite(program(Region(), training=True), training=True)
    module = tuned.module()
    assert (differs(module), differs(module.eval()), differs(module.train())) == (True, False, True)


def test_train_says_what_it_cannot_switch_on() -> None:
    tuned, _ = mxfp8_graph.rewrite(program(Model(), training=False), training=True)
    module = tuned.module().eval()
    with pytest.warns(
        UserWarning, match=r"train\(\) leaves batch_norm, dropout in evaluation mode, .* export the model"
    ):
        module.train()
    assert not differs(module)
