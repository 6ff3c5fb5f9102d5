"""Bytes of a sharded training, computed from the shapes of a program; nothing is run or allocated."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from torch.export import ExportedProgram

from mxfp8_graph.distributed import fsdp
from mxfp8_graph.distributed.modules import module
from mxfp8_graph.distributed.patterns import leading
from mxfp8_graph.torch_pass import internals
from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError

_WHERE = "distributed.bytes_per_process"
_ROOT = ""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes in the process with the largest shards; activations, buffers and the allocator's overhead are not counted.

    A pair has the bytes with weights gathered in MXFP8, then in high precision.
    """

    processes: int
    weights: tuple[str, ...]
    """The weights that are gathered in MXFP8."""
    parameters: int
    """Shards of the parameters in their own dtype; gradients need as many bytes, AdamW's states twice as many."""
    block: tuple[int, int]
    """The largest block, gathered: one copy of its weights. While the next block is gathered, there are two blocks."""
    root: tuple[int, int]
    """Parameters outside of the blocks, gathered from their first use to the end of the step."""
    received: tuple[int, int]
    """Parameters that other processes send in a step: a block's are sent twice, for forward and backward pass."""
    reduced: int
    """Gradients that other processes send in a step."""

    def __str__(self) -> str:
        """Returns a table in GB (10^9 bytes)."""
        head = f"{f'GB in each of {self.processes} processes':42}{'MXFP8':>10}{'high precision':>16}"
        rows = [f"{name:42}{a / 1e9:10.3f}{b / 1e9:16.3f}" for name, (a, b) in self.rows().items()]
        return "\n".join([head, *rows, f"{len(self.weights)} weights are gathered in MXFP8"])

    def rows(self) -> dict[str, tuple[int, int]]:
        """Returns the rows of the table, in bytes."""
        shards = self.parameters
        return {
            "parameters, shards": (shards, shards),
            "gradients, shards": (shards, shards),
            "AdamW's two states, shards": (2 * shards, 2 * shards),
            "largest block, gathered": self.block,
            "its gradients before they are reduced": (self.block[1], self.block[1]),
            "outside of the blocks, gathered": self.root,
            "their gradients before they are reduced": (self.root[1], self.root[1]),
            "parameters received in a step": self.received,
            "gradients received in a step": (self.reduced, self.reduced),
        }


def bytes_per_process(tuned: ExportedProgram, processes: int, blocks: str = "blocks.*") -> MemoryReport:
    """Returns the bytes that each process of FSDP2 holds and receives, for weights in MXFP8 and in high precision.

    Args:
        tuned: the result of `rewrite(program, training=True)`; it may be on the meta device.
        processes: number of processes.
        blocks: pattern for the names of the modules that are gathered one by one; "*" stands for one part of a name.

    Raises:
        ContractError: the program is not prepared for training, no parameter is in a module that matches `blocks`, or
            tied parameters are in different blocks.
    """
    if processes < 1:
        raise ContractError(_WHERE, f"{processes} processes", expected="1 or more", advice="correct the number")
    codes = _codes(tuned, processes, blocks)
    shards, coded, plain = 0, Counter[str](), Counter[str]()
    for name in tuned.graph_signature.parameters:
        parameter = tuned.state_dict[name]
        home = _block_of(name, blocks)
        # FSDP2 splits the first axis, and pads shards to one size.
        shard = math.ceil(parameter.shape[0] / processes) * math.prod(parameter.shape[1:]) * parameter.itemsize
        shards += shard
        plain[home] += processes * shard
        # Outside of the blocks both passes use one gather: of rows and columns.
        coded[home] += codes[name] * (1 + (home == _ROOT)) if name in codes else processes * shard
    if not plain.keys() - {_ROOT}:
        what, expected = f"blocks={blocks!r} matches no module with parameters", "such as 'model.layers.*'"
        raise ContractError(_WHERE, what, expected=expected, advice="correct the pattern")
    largest = max(plain.keys() - {_ROOT}, key=lambda home: plain[home])
    # Each pass gathers a block, the root is gathered once, and a process has its own shard.
    received = [(2 * sum(each.values()) - each[_ROOT]) * (processes - 1) // processes for each in (coded, plain)]
    return MemoryReport(
        processes=processes,
        weights=tuple(codes),
        parameters=shards,
        block=(coded[largest], plain[largest]),
        root=(coded[_ROOT], plain[_ROOT]),
        received=(received[0], received[1]),
        reduced=sum(plain.values()) * (processes - 1) // processes,
    )


def _codes(tuned: ExportedProgram, processes: int, blocks: str) -> dict[str, int]:
    """Returns the bytes of one copy of each weight that `shard` gathers in MXFP8, by name."""
    if not any(internals.op_name(node) == "mxfp8::linear_train" for node in tuned.graph.nodes):
        what, expected = "a program without products to train", "a program to train in MXFP8"
        raise ContractError(_WHERE, what, expected=expected, advice="rewrite it with training=True")
    homes = {_block_of(name, blocks) for name in tuned.graph_signature.parameters} - {_ROOT}
    coded = [name for name, how in fsdp.gathers(module(tuned), homes, processes).items() if not how.why]
    return {name: _copy(*tuned.state_dict[name].shape) for name in coded}


def _copy(rows: int, k: int) -> int:
    return rows * (k + math.ceil(k / formats.BLOCK_SIZE))


def _block_of(name: str, blocks: str) -> str:
    """Returns the block that a parameter belongs to, or the root."""
    block = leading(name, blocks)
    return _ROOT if block in {None, name} else str(block)
