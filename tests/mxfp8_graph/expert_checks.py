"""What each process of a pool checks of experts; `test_distributed_experts.py` names the checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_programs import DYNAMIC, Apply, export, values

import mxfp8_graph
from mxfp8_graph import distributed
from mxfp8_graph.distributed import ExpertReport, routes
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops.errors import ContractError
from mxfp8_ops.torch_ops import weight_cache

SIZES = ((3, 0, 40, 5), (33, 0, 1, 0), (0, 0, 0, 0), (64, 0, 2, 7))
"""Rows of each expert in each process; two rows more belong to none."""
NAMES = ("y", "dx", "up", "down")
ops = torch.ops.mxfp8


class Experts(nn.Module):
    """A gated mixture of experts, whose activation is a module of its own."""

    def __init__(self, experts: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Parameter((values(experts, 192, 64, seed=1) / 8).to(dtype))
        self.down = nn.Parameter((values(experts, 96, 64, seed=2) / 8).to(dtype))  # stored [E, K, N]
        self.act = nn.SiLU()

    def product(self, x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, stack.mT, ends)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        gate, up = self.product(x, self.up, ends).chunk(2, dim=-1)
        return self.product(self.act(gate) * up, self.down.mT, ends)


class Written(Experts):
    """The same with the op for training itself: torch does not export grouped matmuls of float32."""

    settings: tuple[str, str] = ("E4M3", "ceil")

    def product(self, x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
        result: Tensor = ops.grouped_linear_train(x, stack, ends, *self.settings)
        return result


def rows(process: int, width: int, seed: int, *, flat: bool) -> Tensor:
    """Returns the rows of a process; flat ones have no value that is subnormal in a block."""
    x = values(sum(SIZES[process]) + 2, width, seed=10 * process + seed)
    return x.sign() * (1 + x.abs() % 1) if flat else x


def step(module: nn.Module, x: Tensor, ends: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Returns the result and the gradients."""
    x = x.clone().requires_grad_()
    y = module(x, ends)
    y.backward(dy)
    named = dict(module.named_parameters())
    return {"y": y.detach(), "dx": x.grad} | {name: named[name].grad for name in ("up", "down")}


def together(each: list[Tensor], processes: int) -> Tensor:
    """Returns the rows of all processes, sorted by expert and then by process, and those of no expert."""
    parts = [x.split([*SIZES[process], 2]) for process, x in zip(range(processes), each, strict=True)]
    return torch.cat([part[e] for e in range(5) for part in parts])


def apart(x: Tensor, process: int, processes: int) -> Tensor:
    """Returns the rows of a process out of `together`."""
    sizes = [[*each, 2][e] for e in range(5) for each in SIZES[:processes]]
    return torch.cat(x.split(sizes)[process::processes])


def in_one_process(processes: int, module: nn.Module, *, flat: bool, rounded: tuple[str, str] | None = None) -> Any:
    """Returns `step` with the rows of all processes; `rounded` also rounds x and dy along rows before."""
    x, dy = (together([rows(p, 64, seed, flat=flat) for p in range(processes)], processes) for seed in (3, 4))
    if rounded is not None:
        gradient, rounding = {"E4M3": "e4m3", "HYBRID": "e5m2"}[rounded[0]], rounded[1]
        x = ops.dequantize(*ops.quantize(x, -1, "e4m3", rounding))
        dy = ops.dequantize(*ops.quantize(dy, -1, gradient, rounding), -1, gradient)
    ends = torch.tensor(SIZES[:processes]).sum(0).cumsum(0).to(torch.int32)
    return step(module, x, ends, dy)


def same_as_one_process(settings: tuple[str, str], flat: bool, unflattened: bool) -> None:
    rank, processes = dist.get_rank(), dist.get_world_size()
    module = Written()
    module.settings = settings
    ends = torch.tensor(SIZES[rank]).cumsum(0).to(torch.int32)
    x, dy = (rows(rank, 64, seed, flat=flat) for seed in (3, 4))
    program = export(module, rows(0, 64, 3, flat=flat), ends, dynamic=({0: DYNAMIC}, None))
    sharded = torch.export.unflatten(program) if unflattened else program.module()
    held = range(rank * 4 // processes, (rank + 1) * 4 // processes)
    assert distributed.expert_parallel(sharded, mesh()) == ExpertReport(dict.fromkeys(("up", "down"), held))
    got = step(sharded, x, ends, dy)
    wanted = in_one_process(processes, module, flat=flat)
    module.zero_grad()
    twice = in_one_process(processes, module, flat=flat, rounded=settings)
    for name in NAMES:
        if name in {"y", "dx"}:
            assert_equal(name, got[name], apart(wanted[name], rank, processes))
        else:
            # Rows that were rounded along the other axis before make the gradient of a weight.
            assert_equal(name, got[name].to_local(), twice[name][held.start : held.stop])
            if flat:
                assert_equal(name, got[name].full_tensor(), wanted[name])


def assert_equal(name: str, got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
    assert torch.equal(got, wanted), f"{name}: differs by {float((got.double() - wanted.double()).abs().max())}"


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def a_rewritten_program_trains(steps: int) -> list[float]:
    """Returns the losses, which are those of one process, of a program in bfloat16 that is packed afterwards."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    ends = torch.tensor(SIZES[rank]).cumsum(0).to(torch.int32)
    x = rows(rank, 64, 3, flat=True).bfloat16()
    program = export(Experts(dtype=torch.bfloat16), x, ends, dynamic=({0: DYNAMIC}, None))
    tuned, _ = mxfp8_graph.rewrite(program, Recipe(output_projections=True), training=True)
    alone, _ = mxfp8_graph.rewrite(
        export(Experts(dtype=torch.bfloat16), x, ends, dynamic=({0: DYNAMIC}, None)),
        Recipe(output_projections=True),
        training=True,
    )
    module, reference = torch.export.unflatten(tuned), alone.module()
    distributed.expert_parallel(module, mesh())
    everything = together([rows(p, 64, 3, flat=True).bfloat16() for p in range(processes)], processes)
    all_ends = torch.tensor(SIZES[:processes]).sum(0).cumsum(0).to(torch.int32)
    losses: list[float] = []
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-4) for each in (module, reference)]
    for _ in range(steps):
        parts = [module(x, ends), reference(everything, all_ends)]
        both = [(part.float() - 1).square().sum() / len(everything) for part in parts]
        for loss, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.all_reduce(total := both[0].detach().clone())
        losses += [float(total), float(both[1])]
    trained = dict(module.named_parameters())
    for name, parameter in alone.module().named_parameters():
        distance = float((trained[name].full_tensor().float() - parameter.float()).norm() / parameter.float().norm())
        assert distance < 2.0**-8, f"{name}: {distance}, more than a rounding to bfloat16"
    return losses


def a_language_model_trains(path: Path, tokens: Tensor, steps: int) -> list[float]:
    """Returns pairs of losses, of all processes and of one, of the program in a file."""
    module, alone = torch.export.unflatten(mxfp8_graph.load(path)), mxfp8_graph.load(path).module()
    report = distributed.expert_parallel(module, mesh())
    assert len(report.weights) == 2
    graphs = [each.graph for each in module.modules() if "graph" in each.__dict__]
    targets = [node.target for graph in graphs for node in graph.nodes]
    assert (targets.count(routes.dispatch), targets.count(routes.combine)) == (1, 1), "rows travel once"
    modules, inputs = (module, alone), (tokens[dist.get_rank()], tokens.flatten(0, 1))
    losses: list[float] = []
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in modules]
    for _ in range(steps):
        for each, part, optimizer in zip(modules, inputs, optimizers, strict=True):
            logits = each(part[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum") / tokens[..., 1:].numel()
            optimizer.zero_grad()
            loss.backward()
            if each is module:
                for name, parameter in module.named_parameters():
                    if name not in report.weights:
                        dist.all_reduce(parameter.grad)
                dist.all_reduce(loss.detach_())
            optimizer.step()
            losses.append(float(loss))
    return losses


def bytes_on_the_wire() -> tuple[dict[str, list[int]], int]:
    """Returns bytes of each exchange here, forward and backward, and the rows that this process sends."""
    rank = dist.get_rank()
    ends = torch.tensor(SIZES[rank]).cumsum(0).to(torch.int32)
    x, dy = (rows(rank, 64, seed, flat=False) for seed in (3, 4))
    program = export(Written(), rows(0, 64, 3, flat=False), ends, dynamic=({0: DYNAMIC}, None))
    module = program.module()
    distributed.expert_parallel(module, mesh())
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(given.nbytes)
        return exchange(output, given, *args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counted):
        y = module(x.requires_grad_(), ends)
        forward, sent = sent, []
        y.backward(dy)
    received = sum(ends_of[e] for ends_of in SIZES[:2] for e in range(2 * rank, 2 * rank + 2))
    return {"forward": forward, "backward": sent}, received


def _experts(between: Callable[[Any, Tensor], Tensor], *, then: bool = False) -> nn.Module:
    """Returns two products with something between them; with `then`, their result is added to it."""

    def function(m: Any, x: Tensor, ends: Tensor) -> Tensor:
        h = between(m, ops.grouped_linear_train(x, m.up, ends))
        y: Tensor = ops.grouped_linear_train(h, m.down, ends)
        return y + h if then else y

    stacks = {"up": torch.ones(4, 64, 64), "down": torch.ones(4, 64, 64), "bias": torch.ones(5, 64)}
    return Apply(function, stacks)


def weights_are_quantized_once_per_step() -> None:
    ends = torch.tensor(SIZES[dist.get_rank()]).cumsum(0).to(torch.int32)
    x, dy = (rows(dist.get_rank(), 64, seed, flat=False) for seed in (3, 4))
    module = export(Written(), rows(0, 64, 3, flat=False), ends, dynamic=({0: DYNAMIC}, None)).module()
    distributed.expert_parallel(module, mesh())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    wanted = step(module, x, ends, dy)
    counts = []
    with weight_cache():
        for _ in range(3):
            optimizer.zero_grad()
            with torch.profiler.profile(record_shapes=True) as profile:
                got = step(module, x, ends, dy)
            shapes = [event.input_shapes[0] for event in profile.events() if event.name == "mxfp8::quantize"]
            counts.append(sum(len(shape) == 3 for shape in shapes))
            if len(counts) < 3:
                for name in NAMES:
                    assert_equal(name, *(whole(each[name]) for each in (got, wanted)))
            if len(counts) == 2:
                optimizer.step()
    assert counts == [4, 0, 4], "two copies of two stacks, once more after a step"


def what_cannot_be_cut_is_refused() -> None:
    x, ends = torch.ones(5, 64), torch.tensor([1, 2, 3, 5], dtype=torch.int32)
    with pytest.raises(ContractError, match="the module has no mxfp8::grouped_linear_train; expected experts to train"):
        distributed.expert_parallel(nn.Linear(2, 2), mesh())
    with pytest.raises(ContractError, match=r"a mesh of 2 dimensions; expected one dimension; pass one of its"):
        distributed.expert_parallel(nn.Linear(2, 2), init_device_mesh("cpu", (dist.get_world_size(), 1)))
    computed = Apply(lambda m, x, ends: ops.grouped_linear_train(x, m.up * 2, ends), {"up": torch.ones(4, 64, 64)})
    frozen = Apply(lambda m, x, ends: ops.grouped_linear_train(x, m.up, ends), {}, {"up": torch.ones(4, 64, 64)})
    cases = {
        "the weight of 'grouped_linear_train' is no parameter; expected a parameter": (frozen, ends),
        "3 experts in 'up'; expected a plain parameter with a multiple of 2": (Written(3), ends[:3]),
        "between experts is softmax": (_experts(lambda m, h: torch.softmax(h, 0)), ends),
        "between experts is split": (_experts(lambda m, h: torch.cat(h.split([2, 3], 0))), ends),
        "between experts reads 'bias'": (_experts(lambda m, h: h + m.bias), ends),
        "node 'relu' between experts is read by 'add": (_experts(lambda m, h: torch.relu(h), then=True), ends),
        "weight of 'grouped_linear_train' is computed, or read by another node": (computed, ends),
    }
    for message, (module, offs) in cases.items():
        sharded = export(module, x, offs).module()
        before = dict(sharded.named_parameters())
        with pytest.raises(ContractError, match=message):
            distributed.expert_parallel(sharded, mesh())
        assert all(parameter is before[name] for name, parameter in sharded.named_parameters()), message


def fsdp2_shards_the_rest_and_checkpoints_hold_all(path: Path, tokens: Tensor, folder: Path) -> None:
    rank = dist.get_rank()
    trained = []
    for sharded in (False, True):
        module = torch.export.unflatten(mxfp8_graph.load(path))
        report = distributed.expert_parallel(module, mesh())
        experts = {p for name, p in module.named_parameters() if name in report.weights}
        if sharded:
            fully_shard(module, mesh=mesh(), ignored_params=experts)
            module.set_gradient_divide_factor(1.0)  # sums, no means
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        logits = module(tokens[rank, :, :-1]).flatten(0, 1)
        targets = tokens[rank, :, 1:].flatten()
        (nn.functional.cross_entropy(logits, targets, reduction="sum") / tokens[..., 1:].numel()).backward()
        for name, parameter in module.named_parameters():
            if not sharded and name not in report.weights:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        trained.append({name: whole(p.detach()) for name, p in module.named_parameters()})
    for name, parameter in trained[0].items():
        torch.testing.assert_close(trained[1][name], parameter, rtol=2.0**-20, atol=2.0**-20, msg=name)
    dcp.save(get_model_state_dict(module), checkpoint_id=folder)
    plain = mxfp8_graph.load(path).module()
    dcp.load(state := plain.state_dict(), checkpoint_id=folder)
    for name, parameter in trained[1].items():
        assert_equal(name, state[name], parameter)
