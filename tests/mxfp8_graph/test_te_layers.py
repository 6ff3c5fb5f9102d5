"""Layers of `te`: the rewritten program's products, weights in MXFP8 only that train, export, compile, state dicts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from process_pool import in_each_process  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_programs import export, relative_l2, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import te  # noqa: E402
from mxfp8_graph.te import recipe  # noqa: E402
from mxfp8_graph.te.nexus import MXFP8Blocks, MXFP8Config, MXFP8GradientScaler, MXFP8Linear, to_mxfp8  # noqa: E402
from mxfp8_ops import ort  # noqa: E402
from mxfp8_ops.errors import ContractError, RecipeError, ShapeError  # noqa: E402

X = values(200, 96, seed=1)
TARGET = torch.tanh(X @ values(96, 64, seed=2) / 20)
E4M3, HYBRID = recipe.MXFP8BlockScaling(), recipe.MXFP8BlockScaling(fp8_format=recipe.Format.HYBRID)


def net(layer: Any = te.Linear, *, stored: bool = False, keep: bool = False) -> nn.Sequential:
    """Three linears; `stored` holds the weights in MXFP8 only, `keep` also keeps their first values."""
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=stored, preserve_high_precision_init_val=keep):
        return nn.Sequential(layer(96, 128), nn.GELU(), layer(128, 96), nn.GELU(), layer(96, 64))


def train(
    call: Callable[[Tensor], Tensor], parameters: Any, steps: int = 100, by: Any = E4M3, make: Any = torch.optim.AdamW
) -> list[float]:
    """Returns the losses of training to TARGET."""
    optimizer, losses = make(parameters, lr=1e-3 if make is torch.optim.AdamW else 0.05), []
    for _ in range(steps):
        with te.autocast(recipe=by):
            loss = (call(X) - TARGET).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(module: nn.Module, x: Tensor = X, by: Any = E4M3) -> Tensor:
    with torch.no_grad(), te.autocast(recipe=by):
        return module(x)


@pytest.mark.parametrize("by", [E4M3, HYBRID])
def test_100_steps_are_those_of_the_rewritten_program_bit_for_bit(by: Any) -> None:
    module, plain = net(), net(nn.Linear)
    rule = mxfp8_graph.load_recipe(by, output_projections=True)
    program, _ = mxfp8_graph.rewrite(torch.export.export(plain, (X,)), rule, training=True)
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    with te.autocast(recipe=by):
        module(x).sum().backward()
    rewritten = program.module()
    rewritten(other).sum().backward()
    assert torch.equal(x.grad, other.grad)
    for (name, mine), theirs in zip(module.named_parameters(), rewritten.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name
    assert train(module, module.parameters(), by=by) == train(rewritten, rewritten.parameters())


def test_loss_and_parameters_are_near_those_of_float32_after_training() -> None:
    plain, module = net(nn.Linear), net()
    sgd = torch.optim.SGD
    wanted, got = train(plain, plain.parameters(), make=sgd), train(module, module.parameters(), make=sgd)
    assert got[-1] == pytest.approx(wanted[-1], rel=0.05)
    assert got[-1] < 0.95 * got[0]
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert relative_l2(mine, theirs) < 0.03


@pytest.mark.parametrize(("by", "least", "most"), [(E4M3, 0.05, 0.075), (HYBRID, 0.05, 0.11)])
def test_gradients_at_the_first_step_differ_by_more_than_the_walkthrough_says(
    by: Any, least: float, most: float
) -> None:
    """An operand has 0.027 of error (E5M2 0.053), a product of two sqrt(2) of it; five products are on the way."""
    plain, module = net(nn.Linear), net()
    plain(X).sum().backward()
    with te.autocast(recipe=by):
        module(X).sum().backward()
    first, wanted = module[0].weight.grad, plain[0].weight.grad
    assert least < relative_l2(first, wanted) < most


def test_weights_in_mxfp8_only_train_with_masters_as_float32_weights_do() -> None:
    module, stored, kept = net(), net(stored=True), net(stored=True, keep=True)
    wanted = train(module, module.parameters())
    assert train(kept, te.master_weights(kept)) == wanted  # the same first masters, so the same bits
    assert train(stored, te.master_weights(stored))[-1] == pytest.approx(wanted[-1], rel=0.05)
    # Both directions and nothing else: the optimizer alone has the masters.
    kept[0].weight.clear_high_precision_init_val()
    weight = kept[0].weight
    assert weight.nbytes == 2 * 128 * (96 + 3)
    assert not [each for each in vars(weight).values() if isinstance(each, Tensor) and each.dtype is not torch.uint8]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_without_masters_steps_the_quantized_values_and_loses_small_steps(make: Any) -> None:
    module, stored = net(), net(stored=True)
    wanted, got = train(module, module.parameters(), make=make), train(stored, stored.parameters(), make=make)
    assert got[0] == wanted[0]
    assert got[0] > got[-1] > wanted[-1] + 0.4 * (wanted[0] - wanted[-1])


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_a_product_after_a_step_reads_the_new_weight(options: dict[str, Any]) -> None:
    """Kernels keep the panels of a weight until torch counts a change of it."""
    module = te.Linear(96, 64)
    with te.quantized_model_init():
        stored = te.Linear(96, 64)
    masters = te.master_weights(stored)
    optimizer = torch.optim.AdamW(masters, lr=0.1, **options)
    for _ in range(3):
        with te.autocast():
            stored(X).sum().backward()
        optimizer.step()
        with torch.no_grad():
            module.weight.copy_(masters[0]), module.bias.copy_(masters[1])
        assert torch.equal(run(stored), run(module))


def test_masters_and_weights_have_one_gradient() -> None:
    with te.quantized_model_init():
        module = te.Linear(96, 64)
    master = te.master_weights(module)[0]
    for _ in range(2):
        with te.autocast():
            module(X).sum().backward()
    assert master.grad is module.weight.grad
    nn.utils.clip_grad_norm_([master], 1.0)
    assert float(module.weight.grad.norm()) == pytest.approx(1.0)
    module.zero_grad()
    assert master.grad is None


def linear(**options: Any) -> te.Linear:
    """A layer with its weight in MXFP8 only."""
    with te.quantized_model_init(**options):
        return te.Linear(96, 64)


def test_masters_follow_a_weight_that_is_changed_otherwise() -> None:
    module, saved = linear(preserve_high_precision_init_val=True), linear()
    optimizer = torch.optim.SGD(te.master_weights(module), lr=0.0)
    module.load_state_dict(saved.state_dict())
    with te.autocast():
        module(X).sum().backward()
    optimizer.step()
    assert torch.equal(module.weight.dequantize(), saved.weight.dequantize())
    assert module.weight.get_high_precision_init_val() is None
    masters = te.master_weights(module)
    module.load_state_dict(saved.state_dict())
    with torch.no_grad():
        masters[0].fill_(2.0)  # masters from a checkpoint count, in any order
    optimizer.step()
    assert torch.equal(module.weight.dequantize(), torch.full((64, 96), 2.0))


def test_a_weight_has_one_master_and_copies_have_their_own() -> None:
    module = linear()
    (master, bias) = te.master_weights(module)
    assert te.master_weights(module)[0] is master
    optimizer = torch.optim.SGD([master, bias], lr=0.5)
    other, again = copy.deepcopy((module, optimizer))
    for each, step in ((module, optimizer), (other, again)):
        with te.autocast():
            each(X).sum().backward()
        step.step()
    assert torch.equal(run(other), run(module))
    with pytest.raises(ContractError, match="LBFGS evaluates the loss within a step"):
        torch.optim.LBFGS([master]).step(lambda: torch.tensor(0.0))


def test_a_moved_module_keeps_its_first_values_and_float32_gradients() -> None:
    module = linear(preserve_high_precision_init_val=True).to("cpu")
    assert module.weight.get_high_precision_init_val() is not None
    masters = te.master_weights(module)
    module.bfloat16()
    with te.autocast():
        module(X.bfloat16()).sum().backward()
    assert masters[0].quantized is module.weight
    assert masters[0].grad.dtype is torch.float32
    pickle.dumps(module)  # without the reference to the master
    with pytest.raises(ShapeError, match=r"MXFP8Tensor.data: torch.float64"):
        module.double()


def test_a_weight_of_another_format_is_a_mismatch() -> None:
    module = te.Linear(96, 64)
    for quantizer in (te.MXFP8Quantizer("e5m2"), te.MXFP8Quantizer(rowwise=False)):
        module.weight = nn.Parameter(quantizer(values(64, 96)))
        with te.autocast(), torch.no_grad(), pytest.raises(RecipeError, match="Recipe mismatch for 'weight'"):
            module(X)


@pytest.mark.parametrize("by", [E4M3, recipe.Float8CurrentScaling()])
@pytest.mark.parametrize("stored", [False, True])
def test_torch_autocast_sets_the_dtype_of_the_result(by: Any, stored: bool) -> None:
    if stored and not isinstance(by, mxfp8_graph.Recipe):
        pytest.skip("it has no stored form")
    module = linear(enabled=stored)
    with te.autocast(recipe=by):
        wanted = module(X.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            results = [module(X)]
            with torch.no_grad():
                results += [module(X)]
    assert all(torch.equal(y, wanted) for y in results)


def test_emulated_layers_take_vectors_and_no_rows_and_refuse_second_derivatives() -> None:
    module, x = te.Linear(96, 64), X.clone().requires_grad_()
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        assert module(X[0]).shape == (64,)
        assert module(X[:0]).shape == (0, 64)
        (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


def test_state_dicts_hold_the_packed_bytes_as_plain_tensors(tmp_path: Path) -> None:
    module, other = net(stored=True), net(stored=True)
    train(module, te.master_weights(module), 2)
    names = [f"0.weight_{name}" for name in ("mxfp8", "mxfp8_scales", "columns_mxfp8", "columns_mxfp8_scales")]
    assert [name for name in module.state_dict() if name.startswith("0.")] == ["0.bias", *names]
    save_file(module.state_dict(), tmp_path / "weights.safetensors")
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert torch.equal(run(other), run(module))
    with torch.device("meta"):
        empty = net(stored=True)
    empty.load_state_dict(load_file(tmp_path / "weights.safetensors"), assign=True)
    assert torch.equal(run(empty), run(module))
    other.load_state_dict(net().state_dict())  # a checkpoint in float32 is quantized
    assert torch.equal(run(other), run(net()))
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(run(again), run(module))
        assert isinstance(again[0].weight, nn.Parameter)
    file = io.BytesIO()
    torch.save({"weight": module[0].weight.detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert torch.equal(loaded.dequantize(), module[0].weight.dequantize())


def test_other_dtypes_keep_the_codes_of_a_stored_weight() -> None:
    module = net(stored=True)
    half = copy.deepcopy(module).bfloat16()
    assert torch.equal(half[0].weight.rowwise_elements, module[0].weight.rowwise_elements)
    assert run(half, X.bfloat16()).dtype is torch.bfloat16
    with te.autocast(enabled=False):
        assert torch.equal(module[0](X), F.linear(X, module[0].weight.dequantize(), module[0].bias))


@pytest.mark.parametrize("stored", [False, True])
def test_an_exported_model_is_a_rewritten_program(stored: bool, tmp_path: Path) -> None:
    module = nn.Sequential(*net(stored=stored), nn.LayerNorm(64)).eval()
    with te.autocast():
        program = torch.export.export(module, (X,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    mxfp8_graph.save(program, tmp_path / "saved.pt2")
    with torch.no_grad():
        assert torch.equal(mxfp8_graph.load(tmp_path / "saved.pt2").module()(X), run(module))
    packed, report = mxfp8_graph.rewrite(program, E4M3)
    assert report.already_rewritten == stored
    assert torch.equal(packed.module()(X), run(module))
    codes = te.MXFP8Quantizer("e4m3")(net()[0].weight.detach())
    assert torch.equal(packed.state_dict["0.weight_mxfp8"], codes.rowwise_elements)
    assert torch.equal(packed.state_dict["0.weight_mxfp8_scales"], codes.rowwise_scales)
    path = mxfp8_graph.to_onnx(program if stored else packed, tmp_path / "model.onnx")
    (y,) = ort.session(path).run(None, {"input": X[:3].numpy()})
    np.testing.assert_allclose(y, run(module, X[:3]), rtol=1e-3, atol=1e-5)  # GELU and LayerNorm differ
    assert mxfp8_graph.verify(program, packed).passed
    if stored:
        with pytest.raises(RecipeError, match="Recipe mismatch for 'gemm': packed with scale_rounding ceil"):
            mxfp8_graph.rewrite(program, "ocp")


@pytest.mark.parametrize("stored", [False, True])
def test_a_rewrite_of_an_exported_model_packs_its_layers_and_no_others(stored: bool) -> None:
    """The policy would pack the first and the third, and keep the others: a small one, and one that is an output."""
    with te.quantized_model_init(enabled=stored):
        module = nn.Sequential(nn.Linear(96, 64), te.Linear(64, 16), nn.Linear(16, 64), te.Linear(64, 64))
    with te.autocast():
        program = torch.export.export(module, (X,))
    packed, _ = mxfp8_graph.rewrite(program, E4M3)
    assert [name for name in packed.state_dict if name.endswith("_mxfp8")] == ["1.weight_mxfp8", "3.weight_mxfp8"]
    assert torch.equal(packed.module()(X), run(module))
    if not stored:
        everything, _ = mxfp8_graph.rewrite(program, mxfp8_graph.Recipe(output_projections=True, min_dim=0))
        assert [name for name in everything.state_dict if name.endswith("_mxfp8")] == [
            f"{at}.weight_mxfp8" for at in range(4)
        ]


class Tied(nn.Module):
    """Reads the weight of a layer itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = linear(), nn.LayerNorm(96)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x) @ self.layer.weight)


def test_a_program_reads_the_values_of_a_stored_weight(tmp_path: Path) -> None:
    with te.autocast():
        program = torch.export.export(Tied().eval(), (X,))
    mxfp8_graph.save(program, tmp_path / "saved.pt2")
    with torch.no_grad():
        assert torch.equal(mxfp8_graph.load(tmp_path / "saved.pt2").module()(X), program.module()(X))
    mxfp8_graph.to_onnx(program, tmp_path / "model.onnx")


def test_a_model_with_both_kinds_of_weights_goes_to_onnx(tmp_path: Path) -> None:
    module = nn.Sequential(linear(), te.Linear(64, 64), nn.LayerNorm(64)).eval()
    with te.autocast():
        program = torch.export.export(module, (X,))
    packed, _ = mxfp8_graph.rewrite(program, E4M3)
    assert torch.equal(packed.module()(X), run(module))
    mxfp8_graph.to_onnx(packed, tmp_path / "model.onnx")


@pytest.mark.parametrize("stored", [False, True])
def test_compiled_layers_have_the_same_bits(stored: bool) -> None:
    module = net(stored=stored)[0]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for by in (E4M3, HYBRID):
        with te.autocast(recipe=by):
            results = []
            for call in (compiled, module):
                x = X.clone().requires_grad_()
                call(x).square().sum().backward()
                results += [(x.grad, module.weight.grad)]
                module.zero_grad()
        assert all(map(torch.equal, *results)), by


def test_what_a_compiler_cannot_take_is_one_error() -> None:
    module = te.Linear(96, 64)
    with te.autocast(), pytest.raises(Exception, match=r"strict=True.*pass strict=False"):
        torch.export.export(module, (X,), strict=True)
    with (
        te.autocast(recipe=recipe.DelayedScaling()),
        pytest.raises(Exception, match="DelayedScaling, which is emulated"),
    ):
        export(module, X)


@pytest.mark.parametrize("by", [HYBRID, recipe.DelayedScaling()])
def test_checkpointed_layers_compute_again_by_the_same_recipe(by: Any) -> None:
    module, again = net(), net()
    for _ in range(3):
        with te.autocast(recipe=by):
            loss, other = module(X).sum(), te.checkpoint(again, X).sum()
        loss.backward()
        other.backward()  # outside of the context
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    with pytest.raises(ContractError, match="use_reentrant=True"):
        te.checkpoint(module, X, use_reentrant=True)


@pytest.mark.processes
@pytest.mark.parametrize("stored", [False, True])
@in_each_process
def test_two_processes_train_as_one(stored: bool) -> None:
    module, alone = net(stored=stored), net(stored=stored)
    # Each process makes the same weights: codes cannot be broadcast as values.
    parallel = DistributedDataParallel(module, init_sync=not stored)
    parameters, others = te.master_weights(module), te.master_weights(alone)
    optimizers = [torch.optim.AdamW(each, lr=1e-3) for each in (parameters, others)]
    halves, targets = X.chunk(2), TARGET.chunk(2)
    for _ in range(3):
        with te.autocast():
            (parallel(halves[dist.get_rank()]) - targets[dist.get_rank()]).square().mean().backward()
            for x, y in zip(halves, targets, strict=True):
                ((alone(x) - y).square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, wanted in zip(parameters, others, strict=True):
        torch.testing.assert_close(mine.detach(), wanted.detach(), rtol=1e-4, atol=1e-5)
    with te.autocast(recipe=recipe.DelayedScaling()), pytest.raises(RecipeError, match="pass reduce_amax=False"):
        net()(X)
    if stored:
        with pytest.raises(ShapeError, match="pass init_sync=False to DistributedDataParallel"):
            DistributedDataParallel(module)


def test_layers_with_a_normalization() -> None:
    mlp, rms = te.LayerNormMLP(96, 128), te.LayerNormLinear(96, 64, normalization="RMSNorm")
    norm = F.layer_norm(X, (96,), mlp.fc1.layer_norm_weight, mlp.fc1.layer_norm_bias)
    product = torch.ops.mxfp8.linear_train
    hidden = F.gelu(product(norm, mlp.fc1.weight, mlp.fc1.bias))
    assert torch.equal(run(mlp), product(hidden, mlp.fc2.weight, mlp.fc2.bias))
    assert torch.equal(run(rms), product(F.rms_norm(X, (96,), rms.layer_norm_weight, 1e-5), rms.weight, rms.bias))
    with pytest.raises(ContractError, match="'BatchNorm'; expected one of LayerNorm, RMSNorm"):
        te.LayerNormLinear(96, 64, normalization="BatchNorm")


def test_names_of_nexus() -> None:
    """The two blocks of code of its page, without a GPU."""
    assert torch.equal(to_mxfp8(X, block_size=32).dequantize(), te.MXFP8Quantizer()(X).dequantize())
    layer = MXFP8Linear(96, 64, block_size=32)
    assert torch.equal(layer(X), run(layer, by=HYBRID))
    assert layer.quantizers["scaling_bwd"][0].dtype is te.DType.kFloat8E5M2
    scaler = MXFP8GradientScaler(MXFP8Config(block_size=32, e4m3_forward=True, e5m2_backward=True))
    assert torch.equal(scaler.scale(X), X)
    with pytest.raises(ContractError, match="block_size 16, 32 or 64"):
        MXFP8Config(block_size=8).recipe()


@pytest.mark.parametrize("size", [16, 64])
def test_other_block_sizes_of_nexus_are_emulated(size: int) -> None:
    blocks = F.pad(X.double(), (0, -96 % size)).unflatten(1, (-1, size))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 448)))
    wanted = ((blocks / scale).to(torch.float8_e4m3fn).double() * scale).flatten(1)[:, :96].float()
    assert torch.equal(to_mxfp8(X, size).dequantize(), wanted)
    layer = MXFP8Linear(96, 64, bias=False, block_size=size)
    weight = te.RecipeState.create(MXFP8Blocks(block_size=size), mode="forward").make_quantizers()[0](layer.weight)
    assert torch.equal(layer(X), F.linear(wanted, weight))
