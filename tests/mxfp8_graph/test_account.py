"""The account of a report: the bytes of all tensors before and after, and the largest in high precision."""

from __future__ import annotations

from dataclasses import replace

import models as b
import numpy as np
import onnx
import pytest
from commands import run, save
from models import steps, weight

import mxfp8_graph
from mxfp8_graph.policy.plan import Decision, MatMulSite
from mxfp8_graph.report.data import Account, StoredTensor, account

NO_MATMUL = "no weight of a matmul"
EMBEDDING = "embedding: ids pick its rows; set embeddings: true to quantize it"
HEAD = "output projection: its result is a graph output; set output_projections: true to quantize it"


def kept(account: Account) -> list[tuple[str, int, str]]:
    return [(tensor.name, tensor.byte_size, tensor.reason) for tensor in account.largest_kept]


def test_the_three_largest_tensors_without_a_rewritten_site_are_listed() -> None:
    rewritten = Decision(site=MatMulSite(name="up", op="MatMul", weight="w"), kind="quantized", reason="linear")
    tiny = replace(rewritten, site=replace(rewritten.site, weight="small"), kind="tiny", reason="too small")
    stored = [
        StoredTensor(("w",), (64, 64), "float32", 16384),
        StoredTensor(("packed",), (64, 64), "float8_e4m3fn", 4096),
        StoredTensor(("bias",), (64,), "float32", 256),
        StoredTensor(("alias", "small"), (4, 8), "bfloat16", 64),
        StoredTensor(("one",), (), "float16", 2),
        StoredTensor(("table",), (100, 64), "float32", 25600),
    ]
    result = account([rewritten, tiny], 100_000, stored)
    assert (result.bytes_before, result.bytes_after) == (100_000, 16384 + 4096 + 256 + 64 + 2 + 25600)
    assert kept(result) == [("table", 25600, NO_MATMUL), ("bias", 256, NO_MATMUL), ("alias", 64, "too small")]
    # A weight that is packed for one site and stays for another.
    shared = replace(tiny, site=rewritten.site, reason="excluded")
    assert kept(account([rewritten, shared], 0, stored))[1] == ("w", 16384, "excluded")
    alias = {"name": "alias", "shape": [4, 8], "dtype": "bfloat16", "byte_size": 64, "reason": "too small"}
    assert result.to_dict()["largest_kept"][2] == alias


def bytes_of(proto: onnx.ModelProto) -> int:
    constants = [a.t for node in proto.graph.node for a in node.attribute if a.HasField("t")]
    return sum(onnx.numpy_helper.to_array(t).nbytes for t in [*proto.graph.initializer, *constants])


def test_the_account_of_an_onnx_model() -> None:
    proto = b.language_model()
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert mxfp8_graph.rewrite(proto, dry_run=True)[1].account == report.account
    found = report.account
    assert found.bytes_before == bytes_of(proto)
    assert found.bytes_after == bytes_of(rewritten)
    assert set(kept(found)) == {
        ("lm_head.weight", 25600, HEAD), ("wte", 25600, EMBEDDING), ("wpe", 8192, EMBEDDING)
    }  # fmt: skip


def test_a_tied_table_is_kept_until_a_recipe_packs_all_its_uses() -> None:
    nodes = steps(
        "Gather table ids>e; Transpose table>head|perm=[1,0]; MatMul e w>h; Relu h>r; lm_head:MatMul r head>y"
    )
    weights = {"table": weight(100, 64), "w": weight(64, 64)}
    proto = b.model(nodes, {"ids": (np.int64, ["m"])}, {"y": (np.float32, ["m", 100])}, weights)
    assert kept(mxfp8_graph.rewrite(proto)[1].account)[0][0] == "table"
    report = mxfp8_graph.rewrite(proto, mxfp8_graph.Recipe(output_projections=True))[1]
    assert kept(report.account) == [("table", 25600, EMBEDDING)]
    assert mxfp8_graph.rewrite(proto, "all")[1].account.largest_kept == ()


def test_the_account_of_a_program() -> None:
    torch = pytest.importorskip("torch")
    from torch_programs import export

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 64)
            self.conv, self.head = torch.nn.Conv1d(64, 64, 3), torch.nn.Linear(64, 100, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            x = self.conv(self.inner(self.table(ids)).transpose(1, 2)).transpose(1, 2)
            return self.head(x)

    report = mxfp8_graph.rewrite(export(Tied(), torch.zeros(2, 8, dtype=torch.long)))[1]
    found = report.account
    assert (found.bytes_before, found.bytes_after) == (report.bytes_before, report.bytes_after)
    assert found.bytes_before - found.bytes_after == 64 * 64 * 4 - 64 * 66
    name, size, reason = kept(found)[0]
    assert (name, size) == ("conv.weight", 64 * 64 * 3 * 4)
    assert reason.endswith("set convolutions: true to quantize it")
    name, size, reason = kept(found)[1]
    assert (size, reason) in {(25600, EMBEDDING), (25600, HEAD)}
    assert name in {"table.weight", "head.weight"}


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("option", ["--dry-run", "--verbose"])
def test_a_terminal_shows_the_largest_kept_tensors(option: str) -> None:
    printed = run("rewrite", save(b.language_model()), option).stdout
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert any(line.startswith("wpe 32 x 64 float32 8.2 kB embedding: ids pick its rows;") for line in lines)
