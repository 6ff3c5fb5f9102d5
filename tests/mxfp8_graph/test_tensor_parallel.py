"""Rewritten programs with their weights split among processes compute what one process computes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from distributed_models import (  # noqa: E402
    LENGTH,
    VOCABULARY,
    WIDTH,
    Decoder,
    mesh,
    total_distance,
    whole,
)
from process_pool import in_each_process  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: E402
from torch.export import Dim, ExportedProgram  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import mxfp8_graph  # noqa: E402
from mxfp8_graph.distributed import parallelize  # noqa: E402
from mxfp8_ops import numpy_nodes  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402

pytestmark = pytest.mark.processes

PRESETS = ["mxfp8", "mxfp8-weight-only", "mxint8"]
BOTH = pytest.mark.parametrize(
    "pool", ["two", pytest.param("four", marks=pytest.mark.slow)], ids=["in two processes", "in four"], indirect=True
)

BATCH = 8
PLAN = {f"blocks.*.{name}": "column" for name in ("q", "k", "v", "up")}
PLAN |= {"blocks.*.proj": "row", "blocks.*.down.weight*": "row"}

REDUCED = 1e-6
"""Bound of the relative L2 error of float32 sums of the same terms in another order."""

FLIPPED = 1e-4
"""Bound of the same where such sums are quantized again: a value near the middle of two codes may get the other one,
up to 2^-4 away; a few of 10^5 values do."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


MLP_PLAN = {"up": "column", "down": "row"}


def program(kind: Callable[[], nn.Module], recipe: Any = "mxfp8", *, training: bool = False) -> ExportedProgram:
    """Returns a rewritten program of a model with the values of seed 0."""
    torch.manual_seed(0)
    model, x = kind(), inputs(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ep = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("batch", max=64)},))
        return mxfp8_graph.rewrite(ep, recipe, training=training)[0]


def inputs(kind: Callable[[], nn.Module]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind is Decoder:
        return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return torch.randn(BATCH, LENGTH, WIDTH, generator=generator)


def loss_of(module: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(module(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in module.named_parameters()}


@functools.cache
def one_process(kind: Callable[[], nn.Module] = Decoder) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss and the gradients of one process."""
    module = program(kind, training=True).module()
    loss = loss_of(module, inputs(kind))
    loss.backward()
    return loss.item(), gradients(module)


@BOTH
@pytest.mark.parametrize("unflatten", [False, True])
@in_each_process
def test_a_decoder_trains(unflatten: bool) -> None:
    tuned = program(Decoder, training=True)
    module = torch.export.unflatten(tuned) if unflatten else tuned.module()
    report = parallelize(module, mesh(), PLAN)
    assert len(report.split) == 2 * (6 + 4), str(report)  # weights, and biases of columns
    assert not report.replicated
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    loss = loss_of(module, inputs(Decoder))
    loss.backward()
    wanted, gradients_wanted = one_process()
    assert loss.item() == pytest.approx(wanted, abs=REDUCED)
    assert total_distance(gradients(module), gradients_wanted) < FLIPPED
    for name, parameter in module.named_parameters():
        assert parameter.grad.placements == parameter.placements or not parameter.placements[0].is_shard(), name
    optimizer.step()
    assert loss_of(module, inputs(Decoder)).item() < wanted


@in_each_process
def test_gradients_of_a_column_and_a_row_are_those_of_one_process() -> None:
    """No sum is quantized again here: that of the row is the result, that of the column the gradient of x."""
    x, grad = inputs(Mlp), torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))
    results = []
    for plan in (None, MLP_PLAN):
        module, leaf = program(Mlp, training=True).module(), x.clone().requires_grad_()
        if plan:
            parallelize(module, mesh(), plan)
        y = module(leaf)
        y.backward(grad)
        results.append({"y": y.detach(), "dx": leaf.grad, **gradients(module)})
    one, split = results
    far = {name: float((split[name] - wanted).norm() / wanted.norm()) for name, wanted in one.items()}
    assert max(far.values()) < REDUCED, far
    assert far["down.weight"] == far["down.bias"] == 0, far


@pytest.mark.parametrize("training", [True, False])
@in_each_process
def test_columns_give_the_bits_of_one_process(training: bool) -> None:
    rewritten, x = program(Decoder, training=training), inputs(Decoder)
    wanted = rewritten.module()(x)
    module = rewritten.module()
    parallelize(module, mesh(), {pattern: word for pattern, word in PLAN.items() if word == "column"})
    assert torch.equal(module(x), wanted)


@BOTH
@pytest.mark.parametrize("recipe", PRESETS)
@in_each_process
def test_a_packed_decoder_runs_with_its_planned_bytes(recipe: str) -> None:
    packed, x = program(Decoder, recipe), inputs(Decoder)
    with torch.inference_mode():
        wanted = packed.module()(x)
        module = packed.module()
        report = parallelize(module, mesh(), PLAN)
        got = module(x)
    assert (got - wanted).norm() < FLIPPED * wanted.norm()
    constants = [value for each in module.modules() for value in vars(each).values() if isinstance(value, DTensor)]
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers(), *constants)}.values()
    held = {t.to_local().untyped_storage().data_ptr(): t.to_local().untyped_storage().nbytes() for t in tensors}
    assert sum(held.values()) == report.bytes_here, "the storages of this process have other tensors too"
    world = dist.get_world_size()
    in_parts = sum(t.nbytes for t in tensors if t.placements[0].is_shard())
    assert report.bytes_of_all - report.bytes_here == in_parts - in_parts // world


@pytest.mark.parametrize("recipe", PRESETS)
@in_each_process
def test_a_packed_row_is_within_its_bound(recipe: str) -> None:
    packed, x = program(Mlp, recipe), inputs(Mlp)
    with torch.inference_mode():
        interpreter = torch.fx.Interpreter(packed.module(), garbage_collect_values=False)
        wanted = interpreter.run(x)
        row = [node for node in interpreter.graph.nodes if "gemm" in str(node.target)][-1]
        *operands, bias = (interpreter.env[node] for node in row.all_input_nodes)
        module = packed.module()
        parallelize(module, mesh(), MLP_PLAN)
        got = module(x)
    element_format = row.kwargs.get("b_format", "e4m3")
    decode = functools.partial(torch.ops.mxfp8.dequantize, element_format=element_format)
    a = operands[0] if len(operands) == 3 else decode(*operands[:2])
    bound = numpy_nodes.gemm_error_bound(a.numpy(), decode(*operands[-2:]).numpy(), bias=bias.numpy())
    # Both are within the bound of the exact product, and adding x rounds once more.
    assert ((got - wanted).abs() <= 2 * torch.from_numpy(bound) + 2**-23 * wanted.abs()).all()


@in_each_process
def test_a_sequence_that_is_sharded_stays_so() -> None:
    """A DTensor as input gives a DTensor: only the products of columns and rows move it."""
    on, x = mesh(), inputs(Mlp)
    module = program(Mlp, training=True).module()
    wanted = module(x)
    parallelize(module, on, MLP_PLAN)
    y = module(distribute_tensor(x, on, [Shard(1)]))
    assert isinstance(y, DTensor)
    assert (whole(y) - wanted).norm() < REDUCED * wanted.norm()


@in_each_process
def test_packed_weights_pass_gradients_on() -> None:
    """To the norms and biases around them."""
    packed = mxfp8_graph.rewrite(program(Decoder), training=True)[0]
    results = []
    for plan in (None, PLAN):
        module = packed.module()
        if plan:
            parallelize(module, mesh(), plan)
        loss_of(module, inputs(Decoder)).backward()
        results.append(gradients(module))
    assert total_distance(results[1], results[0]) < FLIPPED


@in_each_process
def test_trained_values_go_back_into_the_program() -> None:
    tuned = program(Decoder, training=True)
    module = tuned.module()
    parallelize(module, mesh(), PLAN)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    tuned.load_state_dict(module.state_dict())
    weight = program(Decoder, training=True).state_dict["blocks.0.up.weight"]
    assert torch.equal(whole(tuned.state_dict["blocks.0.up.weight"]), 2 * weight)
    packed = mxfp8_graph.rewrite(tuned)[0]
    elements = packed.state_dict["blocks.0.up.weight_mxfp8"]
    assert torch.equal(elements, torch.ops.mxfp8.quantize(2 * weight.detach())[0])


@in_each_process
def test_a_module_without_values_gets_them_from_one_process() -> None:
    """No process needs memory for the whole: the module is made on the meta device."""
    with torch.device("meta"):
        ep = torch.export.export(Mlp(), (torch.empty(BATCH, LENGTH, WIDTH),))
    module = mxfp8_graph.rewrite(ep, training=True)[0].module()
    parallelize(module, mesh(), MLP_PLAN)
    module.to_empty(device="cpu")
    one = program(Mlp, training=True).module()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, one.state_dict() if dist.get_rank() == 0 else {}, options=options)
    wanted = one(inputs(Mlp))
    assert (module(inputs(Mlp)) - wanted).norm() < REDUCED * wanted.norm()


class Odd(nn.Module):
    """Weights that cannot be split in two, for one reason each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.pair = nn.Linear(64, 3 * 64), nn.Linear(64, 128)
        self.wide, self.narrow = nn.Linear(64, 96), nn.Linear(96, 64)
        self.tied, self.odd = nn.Linear(64, 64), nn.Linear(64, 33)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).unbind(2)
        gate, up = self.pair(x).chunk(2, -1)
        y = (q * k * v).flatten(-2) + gate * up + self.narrow(self.wide(x).relu())
        return self.odd(y + self.tied(y) * self.tied.weight.mean()).relu() * 2


@pytest.mark.parametrize("unflatten", [False, True])
@in_each_process
def test_the_report_says_what_cannot_be_split_and_why(unflatten: bool) -> None:
    torch.manual_seed(0)
    ep = torch.export.export(Odd(), (torch.randn(2, 32, 64),))
    recipe = mxfp8_graph.Recipe(name="all", output_projections=True, min_dim=32)
    tuned = mxfp8_graph.rewrite(ep, recipe, training=True)[0]
    module, x = torch.export.unflatten(tuned) if unflatten else tuned.module(), torch.randn(2, 32, 64)
    wanted = module(x)
    report = parallelize(module, mesh(), {"narrow": "row", "*": "column"})
    said = {name.removesuffix(".weight"): why for name, why in report.replicated.items()}
    assert "views its result as (2, 32, 3, 4, 16), and 3 is not divisible by 2; export q, k and v" in said["qkv"]
    assert "cuts its result along N; export the parts as linears of their own" in said["pair"]
    assert said["wide"] == "N = 96 is not 2 equal parts of whole blocks of 32"
    assert said["narrow"] == "K = 96 is not 2 equal parts of whole blocks of 32"
    assert said["tied"] == "mean reads it too"
    assert said["odd"].startswith("N = 33 is not 2 equal parts")
    assert not report.split
    assert "narrow.weight: replicated, K = 96" in str(report)
    assert torch.equal(module(x), wanted)


@in_each_process
def test_a_wrong_call_is_an_error() -> None:
    tuned = program(Decoder, training=True)
    for pattern, word, said in (
        ("blocks.*.up", "colum", r"plan 'blocks\.\*\.up': 'colum'; expected one of column, row"),
        ("blocks.*.gate", "column", r"'blocks\.\*\.gate': matches no weight of a product; .* blocks\.0\.down, "),
        ("up", "column", "matches no weight"),
        ("blocks.*.norm", "column", "matches no weight"),
    ):
        with pytest.raises(ContractError, match=said):
            parallelize(tuned.module(), mesh(), {pattern: word})
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    with pytest.raises(ContractError, match=r"a mesh of 2 dimensions; .* pass one of them: mesh\['tensor'\]"):
        parallelize(tuned.module(), two, PLAN)
    module = tuned.module()
    parallelize(module, mesh(), PLAN)
    with pytest.raises(ContractError, match=r"is a DTensor already; .* call parallelize once, before fully_shard"):
        parallelize(module, mesh(), PLAN)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["four"], indirect=True)
@in_each_process
def test_data_and_tensors_are_split_at_once() -> None:
    on = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    module = torch.export.unflatten(program(Decoder, training=True))
    parallelize(module, on["tensor"], PLAN)
    for block in ("blocks.0", "blocks.1"):
        fully_shard(module.get_submodule(block), mesh=on["data"])
    fully_shard(module, mesh=on["data"])
    loss = loss_of(module, inputs(Decoder).chunk(2)[on["data"].get_local_rank()])
    loss.backward()
    assert total_distance(gradients(module), one_process()[1]) < FLIPPED
    assert module.get_parameter("blocks.0.up.weight").to_local().shape == (WIDTH // 2, WIDTH)
