"""What each process of a pool checks; `test_distributed.py` names the checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_models import (
    BATCH,
    Run,
    batches,
    different,
    loss_of,
    one_process,
    parts,
    prepared,
    total_distance,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.export import ExportedProgram
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mxfp8_graph
from mxfp8_graph import distributed
from mxfp8_graph.distributed import ShardReport
from mxfp8_ops.errors import ContractError

REDUCED = 5e-7
"""Bound of the relative L2 error of gradients that are float32 sums of the same terms in another order."""

FLIPPED = 1e-4
"""Bound of the same where matrices have another number of rows. A float32 gemm may then round its last bit otherwise,
and a value near the middle of two codes gets the other one, up to 2^-4 away: a few of 10^5 values do.
"""


def sharded(tuned: ExportedProgram | None = None, **options: Any) -> tuple[nn.Module, ShardReport]:
    module = distributed.module(tuned or prepared())
    return module, distributed.shard(module, mesh(), **options)


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def trained(module: nn.Module, steps: int, micro_batches: int = 1, *, keep: bool = False) -> Run:
    """Returns the training of this process on its parts of the batches; `keep` weights between micro-batches."""
    run, rank = Run(module), dist.get_rank()

    def backward(loss: Tensor, index: int) -> None:
        last = index == micro_batches - 1
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
            module.set_reshard_after_backward(last or not keep)
        loss.backward()

    for batch in batches(steps):
        run.step(parts(parts(batch, dist.get_world_size())[rank], micro_batches), backward)
    return run


def same(run: Run, wanted: Run) -> None:
    """Asserts that this process has its losses of one process, and all gradients and parameters, bitwise."""
    each = len(wanted.losses) // len(run.losses)
    steps = [wanted.losses[i : i + each] for i in range(0, len(wanted.losses), each)]
    assert run.losses == [losses[dist.get_rank()] for losses in steps]
    assert not different(run.gradients, wanted.gradients)
    assert not different(run.parameters, wanted.parameters)


def trains_as_one_process(steps: int, recipe: dict[str, Any], reshard: bool) -> None:
    module, report = sharded(prepared(**recipe), reshard_after_forward=reshard)
    assert len(report.mxfp8) == 8, str(report)
    assert report.blocks == ("blocks.0", "blocks.1")
    same(trained(module, steps), one_process(dist.get_world_size(), steps, **recipe))


def trains_close_to_one_process(steps: int) -> None:
    """In more processes the sums of gradients have another order, with either gather the same one."""
    run, wanted = trained(sharded()[0], steps), one_process(dist.get_world_size(), steps)
    assert run.losses[0] == wanted.losses[dist.get_rank()]
    assert total_distance(run.gradients, wanted.gradients) < REDUCED
    module, report = sharded(gather="high_precision")
    assert not report.mxfp8
    plain = trained(module, steps)
    assert run.losses == plain.losses
    assert not different(run.gradients, plain.gradients)
    assert not different(run.parameters, plain.parameters)


def the_whole_batch_gives_the_same_gradients() -> None:
    run, wanted = trained(sharded()[0], 1), one_process(1, 1)
    assert total_distance(run.gradients, wanted.gradients) < FLIPPED


class GatheredBytes:
    """Counts the bytes that all-gathers bring to a process, its own among them. A context manager."""

    names = ("all_gather", "all_gather_into_tensor", "all_gather_single")
    """The last one is new in torch 2.13, where FSDP2 calls it."""

    def __enter__(self) -> GatheredBytes:
        self.count = 0
        self.originals = {name: getattr(dist, name) for name in self.names if hasattr(dist, name)}
        for name, function in self.originals.items():
            setattr(dist, name, self.counting(function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self.originals.items():
            setattr(dist, name, function)

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def gather(*args: Any, **kwargs: Any) -> Any:
            output = args[0] if args else kwargs["output_tensor"]
            self.count += sum(t.nbytes for t in (output if isinstance(output, list) else [output]))
            return function(*args, **kwargs)

        return gather


def bytes_on_the_wire(wrapped: bool, options: dict[str, Any]) -> float:
    """Returns the bytes that a step gathers, for each parameter of the blocks."""
    module = distributed.module(prepared())
    blocks = sum(p.numel() for n, p in module.named_parameters() if n.startswith("blocks."))
    if wrapped:
        checkpoint_blocks(module)
    distributed.shard(module, mesh(), **options)
    trained(module, 1)
    with GatheredBytes() as gathered:
        loss_of(module, parts(next(batches(1)), dist.get_world_size())[dist.get_rank()]).backward()
    root = sum(p.numel() for n, p in module.named_parameters() if "blocks." not in n) * 4
    return (gathered.count - root) / blocks


def checkpoint_blocks(module: nn.Module) -> None:
    for name in ("0", "1"):
        module.blocks.register_module(name, checkpoint_wrapper(module.get_submodule(f"blocks.{name}")))


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.module, tokens, use_reentrant=False)
        return result


def checkpointing_changes_nothing() -> None:
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
    assert not different({n.removeprefix("module."): p for n, p in run.parameters.items()}, wanted.parameters)


def micro_batches_are_added_up(keep: bool) -> None:
    run = trained(sharded()[0], 2, 2, keep=keep)
    # The reference adds the batches of process 0 first, then those of process 1; two processes add two sums.
    wanted = Run(distributed.module(prepared()))
    for batch in batches(2):
        sums: dict[str, Tensor] = {}
        for part in parts(batch, dist.get_world_size()):
            wanted.optimizer.zero_grad()
            for micro in parts(part, 2):
                loss = loss_of(wanted.module, micro)
                loss.backward()
                wanted.losses.append(loss.item())
            for name, parameter in wanted.module.named_parameters():
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.clone()
        for name, parameter in wanted.module.named_parameters():
            parameter.grad = sums[name] / dist.get_world_size()
        wanted.gradients = wanted.gradients or {name: p.grad.clone() for name, p in wanted.module.named_parameters()}
        wanted.optimizer.step()
    begin = 2 * dist.get_rank()
    assert run.losses == wanted.losses[begin : begin + 2] + wanted.losses[begin + 4 : begin + 6]
    assert not different(run.gradients, wanted.gradients)
    assert not different(run.parameters, wanted.parameters)


def mixed_precision_quantizes_the_master_weights() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module, report = sharded(mp_policy=policy)
    module.scale = module.scale.bfloat16()  # as in eager mode: FSDP2 casts parameters, not buffers
    batch = parts(next(batches(1)), dist.get_world_size())[dist.get_rank()]
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


def autocast_computes_as_in_one_process() -> None:
    batch = parts(next(batches(1)), dist.get_world_size())[dist.get_rank()]
    losses = []
    for module in (sharded()[0], distributed.module(prepared())):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(loss_of(module, batch).item())
    assert losses[0] == losses[1]


def evaluation_gathers_rows_alone() -> None:
    module, _ = sharded()
    tokens = next(batches(1))[0]
    with torch.no_grad():
        assert torch.equal(module.eval()(tokens), distributed.module(prepared())(tokens))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def saves(folder: Path, steps: int) -> list[float]:
    """Saves a training after some steps; returns the mean losses of that many steps more."""
    module, _ = sharded()
    run = trained(module, steps)
    state, optimizer = get_state_dict(module, run.optimizer)
    dcp.save({"model": state, "optimizer": optimizer}, checkpoint_id=folder)
    return mean_losses(go_on(run, steps))


def resumes(folder: Path, steps: int) -> list[float]:
    """Returns the mean losses of a training that goes on from what `saves` wrote."""
    module, _ = sharded(prepared())
    run = Run(module)
    state, optimizer = get_state_dict(module, run.optimizer)
    dcp.load({"model": state, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(module, run.optimizer, model_state_dict=state, optim_state_dict=optimizer)
    return mean_losses(go_on(run, steps))


def go_on(run: Run, steps: int) -> Run:
    run.losses.clear()
    for batch in list(batches(2 * steps))[steps:]:
        run.step([parts(batch, dist.get_world_size())[dist.get_rank()]], lambda loss, _: loss.backward())
    return run


def mean_losses(run: Run) -> list[float]:
    losses = torch.tensor(run.losses)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def collects(folder: Path) -> None:
    """A sharded training is saved, and comes into a program by a checkpoint and by collect alike."""
    tuned, plain = prepared(), prepared()
    module, _ = sharded(tuned)
    run = trained(module, 1)
    dcp.save({"model": module.state_dict()}, checkpoint_id=folder)
    dcp.load({"model": plain.state_dict}, checkpoint_id=folder)
    parameters = run.parameters
    assert not different({name: plain.state_dict[name] for name in parameters}, parameters)
    for call in (mxfp8_graph.rewrite, lambda ep: mxfp8_graph.save(ep, folder.parent / f"stale{dist.get_rank()}.pt2")):
        with pytest.raises(
            ContractError, match=r"values that the program lacks.* call mxfp8_graph\.distributed\.collect"
        ):
            call(tuned)
    report = distributed.collect(module, tuned, rank0_only=True)
    assert report.here == (dist.get_rank() == 0)
    assert bool(report.tensors) == report.here
    if not report.here:
        with pytest.raises(ContractError, match=r"distributed\.collect"):
            mxfp8_graph.rewrite(tuned)
    report = distributed.collect(module, tuned)
    assert set(report.gathered) == set(parameters)
    assert set(report.tensors) == {*parameters, "scale"}
    packed, _ = mxfp8_graph.rewrite(tuned)
    again, _ = mxfp8_graph.rewrite(plain)
    assert not different(packed.state_dict, again.state_dict)
    trained(module, 1)
    with pytest.raises(ContractError, match=r"distributed\.collect"):
        mxfp8_graph.rewrite(tuned)


# --- starts, other ways and refusals ---------------------------------------------------------------------------------


def starts_on_meta(empty: bool) -> None:
    wanted = one_process(dist.get_world_size(), 2)
    tuned = prepared(device="meta")
    assert all(tensor.is_meta for tensor in tuned.state_dict.values())
    module, report = sharded(tuned)
    assert len(report.mxfp8) == 8
    if empty:
        module.to_empty(device="cpu")
    values = prepared().state_dict if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, dict(values), options=options)
    same(trained(module, 2), wanted)
    distributed.collect(module, tuned)
    packed, _ = mxfp8_graph.rewrite(tuned)
    plain = prepared()
    plain.load_state_dict({**plain.state_dict, **wanted.parameters})
    tokens = next(batches(1))[0]
    with torch.no_grad():
        assert torch.equal(packed.module()(tokens), mxfp8_graph.rewrite(plain)[0].module()(tokens))


def data_parallel_needs_no_collect() -> None:
    tuned = prepared()
    run = trained(DistributedDataParallel(distributed.module(tuned)), 2)
    wanted = one_process(dist.get_world_size(), 2)
    assert not different({n.removeprefix("module."): p for n, p in run.parameters.items()}, wanted.parameters)
    assert not different({n: tuned.state_dict[n] for n in wanted.parameters}, wanted.parameters)
    mxfp8_graph.rewrite(tuned)
    assert distributed.collect(run.module, tuned).gathered == ()


def sums_have_the_codes_of_one_process(wrap: str) -> list[float]:
    """Returns the distances to one process of the gradients with sum_gradients and with means."""
    (batch,), alone = batches(1), one_process(1, 1)
    own = parts(batch, dist.get_world_size())[dist.get_rank()]
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
        factor = len(own[0]) / BATCH if summed else 1.0
        run.step([own], lambda loss, _, factor=factor: (loss * factor).backward())
        got = {n.removeprefix("module."): g for n, g in run.gradients.items()}
        distances.append(total_distance(got, alone.gradients))
    return distances


class Odd(nn.Module):
    """Weights that cannot be gathered in MXFP8, and one whose K is no multiple of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 80)
        self.blocks = nn.ModuleList(OddBlock() for _ in "ab")
        self.stem = nn.Linear(80, 128)
        self.back = nn.Linear(128, 80)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens % 16)
        for block in self.blocks:
            x = block(x)
        return self.back(self.stem(x)) + x


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
    def __init__(self) -> None:
        super().__init__()
        self.up, self.wide, self.down = nn.Linear(80, 128), nn.Linear(80, 128), nn.Linear(128, 80)
        self.tied, self.gate = nn.Linear(80, 128), nn.Linear(80, 64)
        self.tied.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x)) * self.wide(x) + self.tied(x)
        return x + self.down(h * self.gate(x).repeat(1, 1, 2)) + self.wide.weight.mean()


def reports_why_weights_are_in_high_precision() -> None:
    module, report = sharded(prepared(Odd))
    assert sorted(report.mxfp8) == ["blocks.0.gate.weight", "blocks.1.gate.weight", "stem.weight"]
    reasons = report.high_precision
    assert reasons["blocks.0.up.weight"].startswith("tied to blocks.0.tied.weight")
    assert reasons["blocks.0.wide.weight"] == "mean reads it, too"
    assert reasons["blocks.1.down.weight"] == "its 80 rows are no multiple of 32 rows in each of 2 processes"
    assert reasons["stem.bias"] == "not the weight of an MXFP8 product"
    run = trained(module, 2)
    same(run, one_process(dist.get_world_size(), 2, Odd))


def refuses() -> None:
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


def replicated_and_sharded() -> None:
    """Two processes share a shard, on a mesh of two dimensions."""
    module = distributed.module(prepared())
    distributed.shard(module, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    run, wanted = trained(module, 1), one_process(4, 1)
    assert run.losses[0] == wanted.losses[dist.get_rank()]
    assert total_distance(run.gradients, wanted.gradients) < REDUCED
