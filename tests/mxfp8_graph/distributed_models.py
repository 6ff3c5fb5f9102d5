"""A small decoder to train in many processes, its data, and what one process computes from the same batches."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.export import ExportedProgram
from torch.nn import functional as F  # noqa: N812

import mxfp8_graph
from mxfp8_graph import distributed
from mxfp8_graph.distributed import ShardReport

VOCABULARY, LENGTH, BATCH = 32, 32, 12
WIDTH = 128
"""Rows of the smallest weight: 32 in each of 4 processes."""


REDUCED = 5e-7
"""Bound of the relative L2 error of gradients that are float32 sums of the same terms in another order."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (linear(y).unflatten(-1, (4, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Has a tensor of each kind: parameters, a buffer, a constant, and one that its graph creates."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale * torch.tensor(2.0))


def prepared(kind: Callable[[], nn.Module] = Decoder, device: str = "cpu", **recipe: Any) -> ExportedProgram:
    """Returns a program to train, by default of a decoder, with the values of seed 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned, _ = mxfp8_graph.rewrite(_exported(kind, device), mxfp8_graph.MXFP8BlockScaling(**recipe), training=True)
    # A rewritten program shares its parameters with the exported one, which is kept.
    copies = {id(tensor): tensor.detach().clone() for tensor in tuned.state_dict.values()}
    parameters = {id(p): nn.Parameter(copies[id(p)], p.requires_grad) for p in tuned.parameters()}
    tuned.state_dict.update({n: {**copies, **parameters}[id(t)] for n, t in tuned.state_dict.items()})
    return tuned


@functools.cache
def _exported(kind: Callable[[], nn.Module], device: str) -> ExportedProgram:
    torch.manual_seed(0)
    with torch.device(device):
        model, tokens = kind(), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    sizes = {"tokens": {0: torch.export.Dim("batch", max=1024)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, (tokens,), dynamic_shapes=sizes)


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields tokens and the tokens to predict."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
        yield tokens, (tokens * 5 + tokens.roll(1, 1)) % VOCABULARY


def loss_of(module: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(module(batch[0]).float().flatten(0, 1), batch[1].flatten())


def parts(batch: tuple[Tensor, Tensor], count: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(tensor.chunk(count) for tensor in batch), strict=True))


class Run:
    """A training: the losses of each step, the gradients of the first one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def step(self, micro_batches: list[tuple[Tensor, Tensor]], backward: Callable[..., None]) -> None:
        """Trains on batches whose gradients `backward(loss, index)` accumulates."""
        self.optimizer.zero_grad()
        for index, batch in enumerate(micro_batches):
            loss = loss_of(self.module, batch)
            backward(loss, index)
            self.losses.append(loss.item())
        if not self.gradients:
            self.gradients = {name: whole(p.grad).clone() for name, p in self.module.named_parameters()}
        self.optimizer.step()

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: whole(p.detach()) for name, p in self.module.named_parameters()}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@functools.cache
def one_process(processes: int, steps: int, kind: Callable[[], nn.Module] = Decoder, **recipe: Any) -> Run:
    """Returns the training of one process that takes the batches of all processes in turn, as they are added up."""
    run = Run(distributed.module(prepared(kind, **recipe)))
    for batch in batches(steps):
        run.step(parts(batch, processes), lambda loss, _: (loss / processes).backward())
    return run


def different(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Returns the names of tensors that are not bitwise equal, with their relative distance."""
    return [f"{n}: {distance(got[n], wanted[n]):.1e}" for n in wanted if not torch.equal(got[n], wanted[n])]


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-30))


def total_distance(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Returns the relative L2 distance of all tensors as one vector."""
    return distance(torch.cat([got[n].flatten() for n in wanted]), torch.cat([t.flatten() for t in wanted.values()]))


def sharded(tuned: ExportedProgram | None = None, **options: Any) -> tuple[nn.Module, ShardReport]:
    module = distributed.module(tuned or prepared())
    return module, distributed.shard(module, mesh(), **options)


def own(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the part of this process."""
    return parts(batch, dist.get_world_size())[dist.get_rank()]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def trained(module: nn.Module, steps: int, micro_batches: int = 1, *, keep: bool = False) -> Run:
    """Returns the training of this process on its parts of the batches; `keep` weights between micro-batches."""
    run = Run(module)

    def backward(loss: Tensor, index: int) -> None:
        last = index == micro_batches - 1
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
            module.set_reshard_after_backward(last or not keep)
        loss.backward()

    for batch in batches(steps):
        run.step(parts(own(batch), micro_batches), backward)
    return run


def same(run: Run, wanted: Run) -> None:
    """Asserts that this process has its losses of one process, and all gradients and parameters, bitwise."""
    each = len(wanted.losses) // len(run.losses)
    steps = [wanted.losses[i : i + each] for i in range(0, len(wanted.losses), each)]
    assert run.losses == [losses[dist.get_rank()] for losses in steps]
    assert not different(run.gradients, wanted.gradients)
    assert not different(run.parameters, wanted.parameters)


def checkpoint_blocks(module: nn.Module) -> None:
    for name in ("0", "1"):
        module.blocks.register_module(name, checkpoint_wrapper(module.get_submodule(f"blocks.{name}")))
