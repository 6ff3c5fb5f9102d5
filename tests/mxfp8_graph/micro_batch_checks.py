"""What each process of a pool checks of `weight_cache`; `test_distributed_micro_batches.py` names the check."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_programs import export, values

import mxfp8_graph
from mxfp8_ops.torch_ops import weight_cache

WEIGHTS = {(96, 64), (64, 96)}
"""Shapes of the weights, and of their transposes."""


class Block(nn.Module):
    """Two linears behind a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def trained(context: Any, *, reshard: bool) -> tuple[list[Tensor], list[int]]:
    """Returns the shards of all parameters after two steps of two micro-batches, and how often each quantized weights.

    FSDP2 gathers weights in high precision for each micro-batch, and into the same memory as before.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(64))
    tuned, _ = mxfp8_graph.rewrite(export(model, values(8, 64)), training=True)
    module = torch.export.unflatten(tuned)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (module.get_submodule("0"), module.get_submodule("1"), module):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    counts = []
    with context():
        for step in range(2):
            for micro_batch in range(2):
                x = values(8, 64, seed=10 * step + 2 * micro_batch + dist.get_rank()).requires_grad_()
                with torch.profiler.profile(record_shapes=True) as profile:
                    module(x).square().mean().backward()
                events = [event for event in profile.events() if event.name == "mxfp8::quantize"]
                counts.append(sum(tuple(event.input_shapes[0]) in WEIGHTS for event in events))
            optimizer.step()
            optimizer.zero_grad()
    return [p.to_local().detach().clone() for p in module.parameters()], counts


def fsdp2_trains_the_same(*, reshard: bool = True) -> None:
    wanted, without = trained(nullcontext, reshard=reshard)
    got, counts = trained(weight_cache, reshard=reshard)
    assert without == [8, 8, 8, 8], "two copies of four weights"
    assert counts == [8, 0, 8, 0], "after a step of the optimizer weights are others"
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x, y), float((x - y).abs().max())


def fsdp2_that_keeps_whole_weights_trains_the_same() -> None:
    fsdp2_trains_the_same(reshard=False)
