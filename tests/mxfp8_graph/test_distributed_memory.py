"""bytes_per_process: what it computes from shapes is what FSDP2 shards and what quantized weights take."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.distributed import bytes_per_process  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(96, size), nn.Linear(size, 96, bias=False), nn.LayerNorm(96)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 96), nn.Linear(96, 50)
        self.blocks = nn.Sequential(Block(128), Block(192))

    def forward(self, ids: Any) -> Any:
        return self.head(self.blocks(self.embed(ids)))


@pytest.fixture(scope="module")
def tuned() -> Any:
    program = torch.export.export(Net(), (torch.zeros(4, 8, dtype=torch.int64),))
    return mxfp8_graph.rewrite(program, training=True)[0]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_shards_have_the_bytes_of_those_of_fsdp2(tuned: Any, processes: int) -> None:
    # This process is the first of a group, in which no other one exists.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    net = Net()
    for part in (*net.blocks, net):
        fully_shard(part)
    shards = sum(p.to_local().nbytes for p in net.parameters())
    dist.destroy_process_group()
    assert bytes_per_process(tuned, processes).parameters == shards


def test_a_gathered_block_has_the_bytes_of_its_codes_and_of_what_is_not_quantized(tuned: Any) -> None:
    block = Net().blocks[1]
    weights = {p for p in block.parameters() if p.dim() == 2}
    coded = sum(codes.nbytes for w in weights for codes in torch.ops.mxfp8.quantize(w.detach()))
    plain = sum(p.nbytes for p in block.parameters())
    rest = plain - sum(w.nbytes for w in weights)
    assert bytes_per_process(tuned, 1).block == (coded + rest, plain)


def test_a_weight_whose_rows_are_not_whole_blocks_in_each_process_is_gathered_in_high_precision(tuned: Any) -> None:
    # 96 rows are whole blocks in 1 and 3 processes, 128 rows in 1, 2 and 4, 192 in 1, 2 and 3.
    assert [len(bytes_per_process(tuned, n).weights) for n in (1, 2, 3, 4, 5)] == [4, 2, 3, 1, 0]
    assert bytes_per_process(tuned, 4).weights == ("blocks.0.up.weight",)
    report = bytes_per_process(tuned, 5)
    assert report.block[0] == report.block[1]
    assert report.received[0] == report.received[1]


def test_blocks_are_received_twice_and_the_rest_once_without_the_part_of_this_process(tuned: Any) -> None:
    net, report = Net(), bytes_per_process(tuned, 2)
    blocks = sum(p.nbytes for p in net.blocks.parameters())
    root = sum(p.nbytes for part in (net.embed, net.head) for p in part.parameters())
    assert report.root == (root, root)
    assert report.received[1] == (2 * blocks + root) // 2
    up = sum(sum(c.nbytes for c in torch.ops.mxfp8.quantize(b.up.weight.detach())) for b in net.blocks)
    saved = sum(b.up.weight.nbytes for b in net.blocks) - up
    assert report.received[0] == report.received[1] - saved
    assert report.reduced == (blocks + root) // 2
    alone = bytes_per_process(tuned, 1)
    assert (alone.received, alone.reduced) == ((0, 0), 0)


def test_other_programs_blocks_and_numbers_are_refused(tuned: Any) -> None:
    program = torch.export.export(Net(), (torch.zeros(4, 8, dtype=torch.int64),))
    for source, processes, said, *blocks in (
        (program, 2, r"rewrite it with training=True$"),
        (tuned, 2, r"blocks='model.layers.\*' matches no module with parameters", "model.layers.*"),
        (tuned, 0, "0 processes; expected 1 or more"),
    ):
        with pytest.raises(ContractError, match=said):
            bytes_per_process(source, processes, *blocks)
