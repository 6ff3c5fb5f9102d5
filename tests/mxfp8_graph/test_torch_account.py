"""The account of stored bytes of exported programs. conftest.py checks the sums, and that dry runs say the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch_programs import Apply, export, values

import mxfp8_graph
from mxfp8_graph.report.account import StoredTensor
from mxfp8_graph.report.data import RewriteReport


class Mixed(nn.Module):
    """An embedding tied to the output projection, a linear, a normalization, a convolution and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 64)
        self.inner = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.conv = nn.Conv1d(64, 64, 3)
        self.memory = nn.LSTM(64, 64)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.inner(self.table(ids)))
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.memory(x)[0])


def rewritten(recipe: str = "mxfp8") -> RewriteReport:
    return mxfp8_graph.rewrite(export(Mixed(), torch.zeros(2, 8, dtype=torch.long)), recipe)[1]


def tensor(report: RewriteReport, name: str) -> StoredTensor:
    (found,) = (t for t in report.account.tensors if name in (t.name, *t.also_called))
    return found


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("inner.weight", "rewritten", "linear, by recipe 'mxfp8'"),
        ("inner.bias", "small", "biases, normalization weights and other vectors"),
        ("norm.weight", "small", "biases, normalization weights and other vectors"),
        ("conv.weight", "other op", "conv1d: a convolution, no matmul"),
        ("memory.weight_ih_l0", "other op", "lstm: a recurrent layer, no matmul"),
        ("head.weight", "kept", "embedding: ids pick its rows; set embeddings: true to quantize it"),
    ],
)
def test_what_became_of_each_tensor(name: str, outcome: str, reason: str) -> None:
    found = tensor(rewritten(), name)
    assert (found.outcome, found.reason) == (outcome, reason)


def test_a_tied_table_is_counted_once() -> None:
    found = tensor(rewritten("all"), "table.weight")
    assert (found.bytes_before, found.bytes_kept, found.bytes_new) == (25600, 0, 100 * 66)
    assert found.to_dict()["used_by"] == {"embedding": 1, "linear": 1}


def test_the_account_of_a_program_in_memory_is_its_size() -> None:
    report = rewritten()
    account = report.account
    assert (account.bytes_before, account.bytes_after) == (report.bytes_before, report.bytes_after)


def test_an_embedding_alone() -> None:
    def looked_up(m: nn.Module, ids: Tensor) -> Tensor:
        return torch.relu(nn.functional.embedding(ids, m.table) @ m.w)

    program = export(Apply(looked_up, {"table": values(50, 64), "w": values(64, 64)}), torch.zeros(4, dtype=torch.long))
    found = tensor(mxfp8_graph.rewrite(program)[1], "table")
    assert (found.outcome, found.bytes_after) == ("kept", 50 * 256)
    assert found.reason == "embedding: ids pick its rows; set embeddings: true to quantize it"


def test_nothing_eligible_says_which_ops_hold_the_weights() -> None:
    program = export(nn.Conv2d(4, 8, 3, bias=False), torch.zeros(1, 4, 8, 8))
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(program)
    assert str(caught.value).endswith("nothing to rewrite: 100% of its 1.2 kB are in 1 conv2d, which is no matmul")
