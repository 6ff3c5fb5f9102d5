"""Trains a small decoder in many processes: FSDP2, weights gathered in MXFP8, checkpoints from which it goes on.

Run it with torchrun. Process 0 writes the losses to FOLDER/losses.txt and the packed model to FOLDER/decoder.mxfp8.pt2.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F  # noqa: N812

import mxfp8_graph
from mxfp8_graph import distributed

VOCABULARY, WIDTH, LENGTH, BATCH = 64, 128, 32, 16


class Block(nn.Module):
    """Attention and a feed-forward network, both behind a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, width]."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns [batch, length, vocabulary]."""
        x = self.embedding(tokens) + self.position(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Returns tokens and what follows each of them."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return tokens, (5 * tokens + 3) % VOCABULARY


def main() -> None:
    """Trains, saves, and packs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("demo"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--fail-at", type=int, help="the step in which the last process ends itself, once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # "nccl" on GPUs, and device_type "cuda" below
    rank, processes = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    sizes = {"tokens": {0: torch.export.Dim("batch", max=1024)}}
    program = torch.export.export(Decoder(), (tokens,), dynamic_shapes=sizes)
    tuned, _ = mxfp8_graph.rewrite(program, training=True)
    module = distributed.module(tuned)
    report = distributed.shard(module, init_device_mesh("cpu", (processes,)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)

    # torchrun starts all processes again when one fails: they go on from the last checkpoint.
    checkpoint, losses, begin = options.folder / "checkpoint", options.folder / "losses.txt", 0
    if (checkpoint / ".metadata").exists():
        model_state, optimizer_state = get_state_dict(module, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        begin = state["step"]
    elif rank == 0:
        options.folder.mkdir(exist_ok=True)
        print(str(report).splitlines()[0])

    for step in range(begin, options.steps):
        if step == options.fail_at and rank == processes - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(1)
        inputs, targets = (part.chunk(processes)[rank] for part in batch_of(step))
        loss = F.cross_entropy(module(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            with losses.open("a") as file:
                print(f"{step} {loss.item() / processes:.6f}", file=file)
        if (step + 1) % options.save_every == 0:
            model_state, optimizer_state = get_state_dict(module, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "step": step + 1}
            dcp.save(state, checkpoint_id=checkpoint)

    distributed.collect(module, tuned, rank0_only=True)
    if rank == 0:
        packed = options.folder / "decoder.mxfp8.pt2"
        _, rewritten = mxfp8_graph.rewrite(tuned, output=packed, overwrite=True)
        print(f"{packed}: {len(rewritten.rewritten)} matmuls in MXFP8", flush=True)
    dist.destroy_process_group()
    # With FSDP2 on torch 2.13, gloo's threads outlive the group, even when the module is deleted and collected. One
    # that still frees a tensor of the last operation waits for the GIL; the interpreter's shutdown ends it there, and
    # the process aborts ("terminate called without an active exception"). So leave without that shutdown.
    os._exit(0)


if __name__ == "__main__":
    main()
