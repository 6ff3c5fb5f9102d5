"""The account of stored bytes of exported programs. conftest.py checks the sums, and that dry runs say the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch_programs import export

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


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return export(Mixed(), torch.zeros(2, 8, dtype=torch.long))


def tensor(report: RewriteReport, name: str) -> StoredTensor:
    (entry,) = (t for t in report.account.tensors if name in (t.name, *t.also_called))
    return entry


OUTCOMES = {
    "inner.weight": ("rewritten", "linear, by recipe 'mxfp8'"),
    "inner.bias": ("small", "biases, normalization weights and other vectors"),
    "norm.weight": ("small", "biases, normalization weights and other vectors"),
    "conv.weight": ("other op", "conv1d: a convolution, no matmul"),
    "memory.weight_ih_l0": ("other op", "lstm: a recurrent layer, no matmul"),
    "head.weight": ("kept", "embedding: ids pick its rows; set embeddings: true to quantize it"),
}


def test_each_tensor_has_an_outcome_and_a_reason(program: ExportedProgram) -> None:
    report = mxfp8_graph.rewrite(program)[1]
    entries = {name: tensor(report, name) for name in OUTCOMES}
    assert {name: (entry.outcome, entry.reason) for name, entry in entries.items()} == OUTCOMES
    account = report.account
    assert (account.bytes_before, account.bytes_after) == (report.bytes_before, report.bytes_after)


def test_a_tied_table_is_counted_once(program: ExportedProgram) -> None:
    entry = tensor(mxfp8_graph.rewrite(program, "all")[1], "table.weight")
    assert (entry.bytes_before, entry.bytes_kept, entry.bytes_new) == (25600, 0, 100 * 66)
    assert entry.to_dict()["used_by"] == {"embedding": 1, "linear": 1}


def test_nothing_eligible_says_which_ops_hold_the_weights() -> None:
    program = export(nn.Conv2d(4, 8, 3, bias=False), torch.zeros(1, 4, 8, 8))
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(program)
    assert str(caught.value).endswith("nothing to rewrite: 100% of its 1.2 kB are in 1 conv2d, which is no matmul")
