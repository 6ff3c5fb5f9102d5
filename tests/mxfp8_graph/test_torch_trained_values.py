"""Packing takes the values that were trained, or refuses: modules may have lost the tensors of their program."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grids import looped

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_programs import export, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402

X = values(8, 64, seed=2)


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


def parametrized(module: nn.Module) -> None:
    class Twice(nn.Module):
        def forward(self, weight: Any) -> Any:
            return 2.0 * weight

    nn.utils.parametrize.register_parametrization(module.get_submodule("0"), "weight", Twice())


def sharded(module: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module)


REPLACED: dict[str, Callable[[Any], Any]] = {
    "fully_shard": sharded,
    "setattr": lambda module: setattr(module.get_submodule("0"), "weight", nn.Parameter(values(96, 64))),
    "assigned": lambda module: module.load_state_dict(
        {n: t.clone() for n, t in module.state_dict().items()}, assign=True
    ),
    "parametrize": parametrized,
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
        ({**own, "more": X}, "'more' has shape [8, 64]; expected no such name; pass the names of program.state_dict"),
        ({**own, "0.bias": torch.ones(3)}, "'0.bias' has shape [3]; expected shape [96]"),
    ):
        with pytest.raises(ContractError, match=f"^load_state_dict: {re.escape(said)}"):
            tuned.load_state_dict(wrong)
    assert torch.equal(before, own["0.weight"]), "nothing is taken"
