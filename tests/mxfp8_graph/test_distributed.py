"""Training in many processes computes what one process computes, and its values come back into the program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from distributed_models import (  # noqa: E402
    BATCH,
    REDUCED,
    Run,
    batches,
    checkpoint_blocks,
    different,
    loss_of,
    mesh,
    one_process,
    own,
    parts,
    prepared,
    same,
    sharded,
    total_distance,
    trained,
)
from process_pool import ProcessPool, in_each_process  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import distributed  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402
from mxfp8_ops.torch_ops import weight_cache  # noqa: E402

pytestmark = pytest.mark.processes

IN_FOUR = pytest.mark.parametrize("pool", [pytest.param("four", marks=pytest.mark.slow)], indirect=True)


@pytest.mark.parametrize(
    ("steps", "recipe", "reshard"),
    [
        (5, {"fp8_format": "E4M3"}, True),
        (5, {"fp8_format": "HYBRID"}, True),
        (1, {"scale_rounding": "floor"}, False),
        (1, {"scale_rounding": "even", "fp8_format": "HYBRID"}, False),
    ],
)
@in_each_process
def test_training_is_bitwise_that_of_one_process(steps: int, recipe: dict[str, Any], reshard: bool) -> None:
    module, report = sharded(prepared(**recipe), reshard_after_forward=reshard)
    assert len(report.mxfp8) == 12, str(report)
    assert report.blocks == ("blocks.0", "blocks.1")
    same(trained(module, steps), one_process(dist.get_world_size(), steps, **recipe))


@IN_FOUR
@in_each_process
def test_four_processes_train_as_one() -> None:
    """The sums of gradients have another order, with either gather the same one."""
    steps = 5
    run, wanted = trained(sharded()[0], steps), one_process(dist.get_world_size(), steps)
    assert run.losses[0] == wanted.losses[dist.get_rank()]
    assert total_distance(run.gradients, wanted.gradients) < REDUCED
    module, report = sharded(gather="high_precision")
    assert not report.mxfp8
    plain = trained(module, steps)
    assert run.losses == plain.losses
    assert not different(run.gradients, plain.gradients)
    assert not different(run.parameters, plain.parameters)


def gathered_bytes(step: Callable[[], None]) -> int:
    """Returns the bytes that all-gathers bring to a process in a step, its own among them."""
    counts = []

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def gather(*args: Any, **kwargs: Any) -> Any:
            output = args[0] if args else kwargs["output_tensor"]
            counts.extend(t.nbytes for t in (output if isinstance(output, list) else [output]))
            return function(*args, **kwargs)

        return gather

    # FSDP2 calls the last one, which is new in torch 2.13.
    names = [name for name in ("all_gather", "all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]
    with mock.patch.multiple(dist, **{name: counting(getattr(dist, name)) for name in names}):
        step()
    return sum(counts)


@pytest.mark.parametrize(
    ("wrapped", "options", "most"),
    [
        pytest.param(False, {}, 2.35, id="rows, then columns"),
        pytest.param(False, {"reshard_after_forward": False}, 2.2, id="both at once"),
        pytest.param(True, {}, 3.4, id="rows, columns, and rows again for the checkpointed forward pass"),
        pytest.param(False, {"gather": "high_precision"}, 8.01, id="high precision"),
    ],
)
@in_each_process
def test_a_step_gathers_codes_instead_of_values(wrapped: bool, options: dict[str, Any], most: float) -> None:
    """Bytes for each parameter of the blocks: 1.03 for a copy of a weight, 4 for a norm or a bias."""
    module = distributed.module(prepared())
    blocks = sum(p.numel() for n, p in module.named_parameters() if n.startswith("blocks."))
    if wrapped:
        checkpoint_blocks(module)
    distributed.shard(module, mesh(), **options)
    trained(module, 1)
    gathered = gathered_bytes(lambda: loss_of(module, own(next(batches(1)))).backward())
    root = sum(p.numel() for n, p in module.named_parameters() if "blocks." not in n) * 4
    assert most - 0.35 < (gathered - root) / blocks <= most


class Checkpointed(nn.Sequential):
    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = checkpoint(self[0], tokens, use_reentrant=False)
        return result


@in_each_process
def test_checkpointing_of_blocks_and_of_the_whole_module_changes_nothing() -> None:
    wanted = one_process(dist.get_world_size(), 2)
    tuned = prepared()
    module = distributed.module(tuned)
    checkpoint_blocks(module)
    report = distributed.shard(module, mesh())
    assert report.blocks == ("blocks.0", "blocks.1")
    assert "blocks.1.up.weight" in report.mxfp8
    run = trained(module, 2)
    run.gradients = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in run.gradients.items()}
    assert not different(run.gradients, wanted.gradients)
    assert run.losses == wanted.losses[dist.get_rank() :: dist.get_world_size()]
    distributed.collect(module, tuned)
    assert not different({n: tuned.state_dict[n] for n in wanted.parameters}, wanted.parameters)

    module, _ = sharded()
    run = trained(Checkpointed(module), 2)
    assert run.losses == wanted.losses[dist.get_rank() :: dist.get_world_size()]
    assert not different({n.removeprefix("0."): p for n, p in run.parameters.items()}, wanted.parameters)


@pytest.mark.parametrize("keep", [True, False])
@in_each_process
def test_gradients_of_micro_batches_are_added_up(keep: bool) -> None:
    run, wanted = trained(sharded()[0], 2, 2, keep=keep), one_process(4, 2)
    begin = 2 * dist.get_rank()
    assert run.losses[:2] == wanted.losses[begin : begin + 2]
    # One process takes the mean of four parts, and two take the mean of two sums, in another order.
    assert total_distance(run.gradients, {name: 2 * g for name, g in wanted.gradients.items()}) < REDUCED
    assert run.losses[2:] == pytest.approx(wanted.losses[begin + 4 : begin + 6], rel=1e-3)


@pytest.mark.parametrize("reshard", [True, False])
@in_each_process
def test_weights_that_fsdp2_gathers_are_quantized_once_per_step_with_the_same_bits(reshard: bool) -> None:
    """It gathers them in high precision for each micro-batch, into the same memory as before."""
    runs = []
    for context, per_micro_batch in ((nullcontext, 2), (weight_cache, 1)):
        run = Run(sharded(gather="high_precision", reshard_after_forward=reshard)[0])
        shapes = [tuple(p.shape) for n, p in run.module.named_parameters() if "blocks" in n and p.dim() == 2]
        either = {*shapes, *(shape[::-1] for shape in shapes)}
        with context():
            for batch in batches(2):
                with torch.profiler.profile(record_shapes=True) as profile:
                    run.step(parts(own(batch), 2), lambda loss, _: loss.backward())
                quantized = [tuple(e.input_shapes[0]) for e in profile.events() if e.name == "mxfp8::quantize"]
                # Two copies of each weight; the optimizer changes them after the step.
                assert sum(shape in either for shape in quantized) == 2 * len(shapes) * per_micro_batch
        runs.append(run.parameters)
    assert not different(*runs)


@in_each_process
def test_mixed_precision_quantizes_the_master_weights() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module, report = sharded(mp_policy=policy)
    module.scale = module.scale.bfloat16()  # as in eager mode: FSDP2 casts parameters, not buffers
    batch = own(next(batches(1)))
    loss = loss_of(module, batch)
    # What one process computes with master weights in MXFP8 products and all other parameters in bfloat16.
    alone = distributed.module(prepared())
    other = {n: p.detach().bfloat16().requires_grad_() for n, p in alone.named_parameters() if n not in report.mxfp8}
    buffers = {n: b.bfloat16() for n, b in alone.named_buffers()}
    wanted = loss_of(lambda tokens: torch.func.functional_call(alone, {**other, **buffers}, (tokens,)), batch)
    assert loss.item() == wanted.item()
    run = trained(module, 3)
    assert run.losses[2] < run.losses[0]
    assert {p.dtype for p in run.gradients.values()} == {torch.float32}


@in_each_process
def test_autocast_computes_as_in_one_process() -> None:
    batch = own(next(batches(1)))
    losses = []
    for module in (sharded()[0], distributed.module(prepared())):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(loss_of(module, batch).item())
    assert losses[0] == losses[1]


@in_each_process
def test_evaluation_computes_as_in_one_process() -> None:
    module, _ = sharded()
    tokens = next(batches(1))[0]
    with torch.no_grad():
        assert torch.equal(module.eval()(tokens), distributed.module(prepared())(tokens))


def sums_have_the_codes_of_one_process(wrap: str) -> list[float]:
    """Returns the distances to one process of the gradients with sum_gradients and with means."""
    (batch,), alone = batches(1), one_process(1, 1)
    mine = own(batch)
    distances = []
    for summed in (True, False):
        module = distributed.module(prepared())
        if wrap == "ddp":
            module = DistributedDataParallel(module)
        else:
            distributed.shard(module, mesh())
        if summed:
            distributed.sum_gradients(module)
        run = Run(module)
        factor = len(mine[0]) / BATCH if summed else 1.0
        run.step([mine], lambda loss, _, factor=factor: (loss * factor).backward())
        got = {n.removeprefix("module."): g for n, g in run.gradients.items()}
        distances.append(total_distance(got, alone.gradients))
    return distances


def test_sums_of_gradients_have_the_codes_of_one_process() -> None:
    with ProcessPool(3) as three:
        for wrap in ("ddp", "fsdp"):
            for summed, mean in three(sums_have_the_codes_of_one_process, wrap):
                # The float32 sums have another order, so a few of 10^5 values get another code, up to 2^-4 away.
                assert summed < 1e-4, wrap
                assert mean > 1e-2, "without the helper the error is as large"


class Tied(nn.Module):
    """A weight in a block and in none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([nn.Linear(64, 64)]), nn.Linear(64, 64)
        self.head.weight = self.blocks[0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](nn.functional.one_hot(tokens, 64).float())
        return x + self.head(x)


class OddBlock(nn.Module):
    """Weights that cannot be gathered in MXFP8, and one whose K is no multiple of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.wide, self.down = nn.Linear(80, 128), nn.Linear(80, 128), nn.Linear(128, 80)
        self.tied, self.gate = nn.Linear(80, 128), nn.Linear(80, 64)
        self.tied.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x)) * self.wide(x) + self.tied(x)
        return x + self.down(h * self.gate(x).repeat(1, 1, 2)) + self.wide.weight.mean()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.stem, self.back = nn.Embedding(16, 80), nn.Linear(80, 128), nn.Linear(128, 80)
        self.blocks = nn.Sequential(OddBlock(), OddBlock())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embedding(tokens % 16))
        return self.back(self.stem(x)) + x


@in_each_process
def test_the_report_says_why_weights_are_in_high_precision() -> None:
    module, report = sharded(prepared(Odd))
    assert sorted(report.mxfp8) == ["blocks.0.gate.weight", "blocks.1.gate.weight", "stem.weight"]
    reasons = report.high_precision
    assert reasons["blocks.0.up.weight"].startswith("tied to blocks.0.tied.weight")
    assert reasons["blocks.0.wide.weight"] == "mean reads it, too"
    assert reasons["blocks.1.down.weight"] == "its 80 rows are no multiple of 32 rows in each of 2 processes"
    assert reasons["stem.bias"] == "not the weight of an MXFP8 product"
    run = trained(module, 2)
    same(run, one_process(dist.get_world_size(), 2, Odd))


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda module: distributed.shard(module, mesh(), blocks="layers.*"),
        r"'layers\.\*' matches no submodule .* blocks\.0",
    ),
    (lambda module: distributed.shard(module, mesh(), blocks="blocks.*.norm.x"), "matches no submodule"),
    (lambda module: distributed.shard(module, mesh(), gather="fp4"), "gather"),
    (lambda module: distributed.shard(prepared().module(), mesh()), r"GraphModule, which calls no submodules"),
    (lambda module: distributed.shard(nn.Linear(2, 2), mesh()), r"pass what mxfp8_graph\.distributed\.module"),
    (lambda module: distributed.module(mxfp8_graph.rewrite(prepared())[0]), "expected a program to train"),
    (lambda module: distributed.collect(nn.Linear(2, 2), prepared()), r"distributed\.collect: '\w+' is missing"),
    (
        lambda module: distributed.shard(distributed.module(prepared(Tied)), mesh()),
        "the root.* tied parameters in one block",
    ),
    (distributed.sum_gradients, "expected a module of DistributedDataParallel or fully_shard"),
]


@in_each_process
def test_a_wrong_call_is_an_error() -> None:
    module = distributed.module(prepared())
    for call, said in REFUSED:
        with pytest.raises(ContractError, match=said):
            call(module)
    distributed.shard(module, mesh())
    with pytest.raises(ContractError, match="sharded already"):
        distributed.shard(module, mesh())
    weight = module.get_submodule("blocks.0").up
    module.get_submodule("blocks.0").unshard()
    with pytest.raises(ContractError, match=r"aten\.mul\.Tensor reads a weight that was gathered in MXFP8"):
        weight.weight * 2


@IN_FOUR
@in_each_process
def test_two_processes_may_share_a_shard_on_a_mesh_of_two_dimensions() -> None:
    module = distributed.module(prepared())
    distributed.shard(module, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    run, wanted = trained(module, 1), one_process(4, 1)
    assert run.losses[0] == wanted.losses[dist.get_rank()]
    assert total_distance(run.gradients, wanted.gradients) < REDUCED
