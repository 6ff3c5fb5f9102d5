"""Lookups in tables of exported programs: which become mxfp8::embedding, what they give, why the others are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from grids import looped  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import DYNAMIC, Apply, as_numpy, call_targets, count, export, reasons, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import Recipe  # noqa: E402
from mxfp8_graph.policy.plan import NothingEligibleError  # noqa: E402
from mxfp8_ops import numpy_nodes  # noqa: E402

TABLES = Recipe(name="tables", embeddings=True)
TABLE = values(96, 70, seed=1)
IDS = torch.tensor([[3, 95], [0, 7]])


def rows(table: Tensor, ids: Tensor) -> np.ndarray:
    """Returns the rows that quantizing the table leaves."""
    return numpy_nodes.dequantize(*numpy_nodes.quantize(as_numpy(table)))[ids.numpy()]


def kept_reason(program: ExportedProgram, recipe: Recipe = TABLES) -> str:
    """Returns why the one lookup of a program is kept."""
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(program, recipe)
    (only,) = caught.value.decisions
    assert only.site.role == "embedding"
    return only.reason


@looped("dtype, decomposed", [(torch.float32, True), (torch.float16, False), (torch.bfloat16, False)])
def test_an_embedding_becomes_a_lookup_in_the_packed_table(dtype: Any, decomposed: bool) -> None:
    module = nn.Embedding(96, 70, padding_idx=3).to(dtype)
    program = export(module, IDS, dynamic=({0: DYNAMIC, 1: DYNAMIC},))
    program = program.run_decompositions() if decomposed else program
    rewritten, report = mxfp8_graph.rewrite(program, TABLES)
    assert call_targets(rewritten) == ["mxfp8.embedding.default"]
    assert set(rewritten.state_dict) == {"weight_mxfp8", "weight_mxfp8_scales"}
    assert reasons(report) == ["embedding, by recipe 'tables'"]
    (site,) = report.sites
    seen = site.decision.site
    assert (seen.role, seen.op, seen.n, seen.k, seen.weight) == ("embedding", "embedding", 96, 70, "weight")
    assert (site.bytes_before, site.bytes_after) == (96 * 70 * dtype.itemsize, 96 * (70 + 3))
    result = rewritten.module()(IDS)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result.float().numpy(), torch.from_numpy(rows(module.weight, IDS)).to(dtype).float())


@looped(
    "function, ids, table",
    [
        (lambda m, ids: m.w[ids], IDS, TABLE),
        (lambda m, ids: m.w[ids], torch.tensor([-1, 2]), TABLE),
        (lambda m, ids: m.w.index_select(0, ids), IDS[0], TABLE),
        (lambda m, ids: m.w.view(70, 96).t()[ids], IDS, TABLE.view(70, 96).t()),
        (lambda m, ids: nn.functional.embedding(ids.int(), m.w), IDS, TABLE),
    ],
)
def test_other_ways_to_pick_rows(function: Any, ids: Tensor, table: Tensor) -> None:
    rewritten, report = mxfp8_graph.rewrite(export(Apply(function, {"w": TABLE}), ids), TABLES)
    assert count(rewritten, "mxfp8.embedding") == 1
    assert report.sites[0].decision.site.m == ids.numel()
    np.testing.assert_array_equal(rewritten.module()(ids).numpy(), rows(table, ids))


@looped(
    "module, inputs, reason",
    [
        (
            nn.EmbeddingBag(96, 70),
            (IDS,),
            "an EmbeddingBag adds up the rows it picks; expected an Embedding, and a sum after it",
        ),
        (
            nn.Embedding(96, 70, max_norm=1.0),
            (IDS,),
            "weight 'weight' is changed by embedding_renorm_ while the program runs; expected it fixed",
        ),
        (
            Apply(lambda m, x: x + m.w[m.ids], {"w": TABLE}, {"ids": IDS}),
            (values(2, 2, 70),),
            "its ids are constant; fold the constants of the model first",
        ),
        (
            Apply(lambda m, ids: nn.functional.embedding(ids, m.w + 1), {"w": TABLE}),
            (IDS,),
            "weight 'add' is computed by add; expected a stored tensor behind views; fold it first",
        ),
    ],
)
def test_what_cannot_be_one_is_kept_with_the_reason(module: Any, inputs: Any, reason: str) -> None:
    assert kept_reason(export(module, *inputs)) == reason


def test_once_decomposed_it_is_kept_too() -> None:
    bag, normed = nn.EmbeddingBag(96, 70), nn.Embedding(96, 70, max_norm=1.0)
    assert kept_reason(export(bag, IDS).run_decompositions()).startswith("an EmbeddingBag adds up")
    reason = kept_reason(export(normed, IDS).run_decompositions())
    assert reason.startswith("its table is changed by embedding_renorm (max_norm)")


def test_in_training_it_is_kept_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the check around every rewrite, which would be taken for the caller
    module = nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 64))
    reason = "embeddings stay in high precision in training, which quantizes matmuls only"
    with pytest.warns(UserWarning, match="training keeps 1 of the sites that the recipe asks for") as caught:
        _, report = mxfp8_graph.rewrite(export(module, IDS), "all", training=True)
    assert reasons(report)[0] == reason
    assert reason in str(caught[0].message) in report.notes
    assert caught[0].filename == __file__
    assert report.sites[1].decision.quantize


class Tied(nn.Module):
    """An embedding and an output projection on one parameter, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(96, 64)
        self.lm_head = nn.Linear(64, 96, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.wte(ids))
        return logits


def test_a_tied_table_goes_to_a_program_onnx_and_a_checkpoint_once(tmp_path: Any) -> None:
    program = export(Tied(), IDS)
    for source in (program.run_decompositions(), program):
        rewritten, report = mxfp8_graph.rewrite(source, "all")
        assert len(rewritten.state_dict) == 2, list(rewritten.state_dict)
        assert {site.packed for site in report.sites} == {report.sites[0].packed}
        assert report.bytes_after == 96 * (64 + 2)
    model = onnx.load(mxfp8_graph.to_onnx(rewritten, tmp_path / "m.onnx"))
    assert sorted(n.op_type for n in model.graph.node) == ["MXFP8Embedding", "MXFP8Gemm", "MXFP8Quantize"]
    assert len(model.graph.initializer) == 2
    assert len(mxfp8_graph.unpack(rewritten)) == 1
    path = mxfp8_graph.export_safetensors(rewritten, tmp_path / "m.safetensors")
    assert len(mxfp8_graph.import_safetensors(path)) == 1
    with pytest.raises(NothingEligibleError) as raised:
        mxfp8_graph.rewrite(program, TABLES)
    assert raised.value.decisions[0].reason == (
        "embedding: its table is also the weight of 'lm_head', which is kept: packed alone it would make the file "
        "larger; set output_projections: true to share one"
    )
