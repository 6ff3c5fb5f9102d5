"""Weights of exported programs: which are static, packed once, pruned; reasons for those that are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from grids import looped

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import (  # noqa: E402
    DYNAMIC,
    OUTPUTS_TOO,
    Apply,
    as_numpy,
    call_targets,
    count,
    export,
    kept,
    predict,
    reasons,
    rewrite,
    values,
)

import mxfp8_graph  # noqa: E402
from mxfp8_graph import Recipe  # noqa: E402
from mxfp8_graph.packing import NonFiniteError  # noqa: E402
from mxfp8_ops import numpy_nodes  # noqa: E402
from mxfp8_ops.errors import ContractError, RecipeError  # noqa: E402

W, X = values(96, 64, seed=1), values(5, 64, seed=2)
linear = nn.functional.linear


def test_packed_bytes_are_those_of_numpy() -> None:
    module = nn.Linear(70, 96)
    rewritten, report = mxfp8_graph.rewrite(export(module, values(5, 70)), OUTPUTS_TOO)
    (only,) = report.sites
    assert only.nodes == ("input_mxfp8", "input_mxfp8_elements", "input_mxfp8_scales", "linear")
    assert set(only.nodes) <= {node.name for node in rewritten.graph.nodes}
    elements, scales = numpy_nodes.quantize(as_numpy(module.weight))
    assert only.packed == "weight_mxfp8"
    np.testing.assert_array_equal(rewritten.state_dict["weight_mxfp8"].numpy(), elements)
    np.testing.assert_array_equal(rewritten.state_dict["weight_mxfp8_scales"].numpy(), scales)
    assert set(rewritten.state_dict) == {"bias", "weight_mxfp8", "weight_mxfp8_scales"}
    exact = as_numpy(module.weight).astype(np.float64)
    error = np.linalg.norm(numpy_nodes.dequantize(elements, scales) - exact) / np.linalg.norm(exact)
    assert only.relative_l2 == pytest.approx(error, rel=1e-6)
    assert (only.bytes_before, only.bytes_after) == (96 * 70 * 4, 96 * (70 + 3))
    assert (report.bytes_before, report.bytes_after) == (96 * 71 * 4, 96 * (70 + 3) + 96 * 4)


def test_shared_weight_is_packed_once() -> None:
    rewritten, report = rewrite(
        lambda m, x: linear(torch.relu(linear(x, m.w)), m.w) + (x @ m.w), {"w": values(64, 64)}, X
    )
    assert [s.decision.site.shared_with for s in report.sites] == [2, 2, 2]
    assert len({s.packed for s in report.sites}) == 2, "[N, K] and [K, N] of the same values cannot share scales"
    assert count(rewritten, "mxfp8.quantize") == 2, "two of the three see the same activation"
    assert "w" not in rewritten.state_dict


def test_two_views_of_a_weight_are_packed_apart() -> None:
    rewritten, report = rewrite(lambda m, x: (linear(x, m.w[:32]), linear(x, m.w[32:])), {"w": W}, X)
    assert [s.packed for s in report.sites] == ["w_mxfp8", "w_mxfp8_2"]
    first, second = rewritten.module()(X)
    predict(X, W[:32]).check(as_numpy(first))
    predict(X, W[32:]).check(as_numpy(second))


def test_tied_parameters_are_one_weight() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    rewritten, report = mxfp8_graph.rewrite(export(model, X), OUTPUTS_TOO)
    assert [s.decision.site.shared_with for s in report.sites] == [1, 1]
    assert len({s.packed for s in report.sites}) == 1
    assert not {"0.weight", "2.weight"}.intersection(rewritten.state_dict)


def test_a_weight_that_something_else_reads_stays() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        torch.ops.aten.t.default(m.other)  # dead code
        return linear(x, m.w) + m.w.sum()

    rewritten, _ = rewrite(function, {"w": W, "other": values(3, 4)}, X)
    assert set(rewritten.state_dict) == {"w", "other", "w_mxfp8", "w_mxfp8_scales"}


def test_bfloat16_bias_becomes_float32_once() -> None:
    weights = {"w": values(64, 64).bfloat16(), "b": values(64, seed=1).bfloat16()}
    rewritten, _ = rewrite(lambda m, x: linear(torch.relu(linear(x, m.w, m.b)), m.w, m.b), weights, X.bfloat16())
    assert set(rewritten.state_dict) == {"w_mxfp8", "w_mxfp8_scales", "b_f32"}
    assert torch.equal(rewritten.state_dict["b_f32"], weights["b"].float())


@looped("value, shown", [(float("nan"), "nan"), (float("inf"), "inf")])
def test_non_finite_weight(value: float, shown: str) -> None:
    w = W.clone()
    w[70, 33] = value
    program = export(Apply(lambda m, x: x @ m.w[64:].t(), {"w": w}), X)
    with pytest.raises(NonFiniteError, match=rf"weight 'w': {shown} at index \[70, 33\]"):
        mxfp8_graph.rewrite(program, OUTPUTS_TOO)
    rewritten, _ = mxfp8_graph.rewrite(program, OUTPUTS_TOO, allow_nonfinite=True)
    assert torch.isnan(rewritten.module()(X)).all(0).tolist() == [column == 6 for column in range(32)]


@looped(
    "decomposed, reason",
    [
        (False, "weight 'buffer' is changed by mul_ while the program runs; expected it fixed"),
        (True, "weight 'buffer' is changed by the program"),
    ],
)
def test_a_buffer_that_the_program_changes_is_not_static(decomposed: bool, reason: str) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y = linear(x, m.buffer)
        m.buffer.mul_(0.5)
        return y

    program = export(Apply(function, {}, {"buffer": W}), X)
    assert reason in kept(program.run_decompositions({}) if decomposed else program)[0]


@looped(
    "reason, function, x, w",
    [
        ("is computed by mul; expected a stored tensor behind views", lambda m, x: linear(x, m.w * 2.0), X, W),
        ("a vector", lambda m, x: x @ m.w, X, values(64)),
        ("dtype float64", lambda m, x: linear(x, m.w), X.double(), W.double()),
        ("empty", lambda m, x: linear(x, m.w), X[:, :0], W[:, :0]),
        ("both operands are constant", lambda m, x: x + linear(m.w, m.w).sum(), X, W),
    ],
)
def test_a_weight_that_cannot_be_packed_is_kept_with_the_reason(reason: str, function: Any, x: Tensor, w: Any) -> None:
    assert reason in kept(export(Apply(function, {"w": w}), x))[0]


def test_mutation_of_an_input_or_buffer_is_not_a_user_output() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        m.state.copy_(linear(x, m.w))
        return torch.relu(x)

    program = export(Apply(function, {"w": W}, {"state": values(5, 96)}), X).run_decompositions({})
    rewritten, report = mxfp8_graph.rewrite(program)
    assert report.sites[0].decision.site.role == "linear"
    assert rewritten.graph_signature.buffers_to_mutate == program.graph_signature.buffers_to_mutate


def test_progress_counts_bytes_and_a_dry_run_makes_no_program() -> None:
    calls: list[tuple[str, int, int]] = []
    program = export(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()), X)
    mxfp8_graph.rewrite(program, progress=lambda *call: calls.append(call))
    assert calls == [("linear", 32768, 65536), ("linear_1", 65536, 65536)]
    result, report = mxfp8_graph.rewrite(program, dry_run=True)
    assert (result, report.dry_run, report.bytes_after, len(report.rewritten)) == (None, True, None, 2)


def test_nothing_to_rewrite() -> None:
    with pytest.raises(mxfp8_graph.NothingEligibleError, match="no matmul in the program"):
        mxfp8_graph.rewrite(export(Apply(lambda m, x: x + 1, {}), X))
    with pytest.raises(mxfp8_graph.NothingEligibleError, match="none of its 1 matmul is eligible"):
        mxfp8_graph.rewrite(export(nn.Linear(64, 8), X))
    assert kept(export(nn.Linear(64, 8), X))[0].startswith("tiny: N = 8 is below min_dim = 32")


def test_already_rewritten() -> None:
    module = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU())
    rewritten, _ = mxfp8_graph.rewrite(export(module, X))
    assert not rewritten.module()(X).requires_grad
    assert all(p.requires_grad for p in module.parameters())
    again, report = mxfp8_graph.rewrite(rewritten)
    assert again is rewritten
    assert report.already_rewritten
    assert mxfp8_graph.rewrite(rewritten, dry_run=True)[0] is None
    mismatch = "Recipe mismatch for '(linear|gemm)': packed with scale_rounding ceil, asked for floor"
    for other in (rewritten, rewritten.run_decompositions(), torch.export.export(rewritten.module(), (X,))):
        with pytest.raises(RecipeError, match=mismatch):
            mxfp8_graph.rewrite(other, "ocp")


def test_weights_of_a_program_without_values() -> None:
    with torch.device("meta"):
        module = nn.Linear(64, 64)
    program: ExportedProgram = torch.export.export(module, (torch.empty(5, 64, device="meta"),))
    with pytest.raises(ContractError, match="has a shape but no values"):
        mxfp8_graph.rewrite(program, OUTPUTS_TOO)


# --- Tables of embeddings ----------------------------------------------------------------------------------------

TABLES = Recipe(name="tables", embeddings=True)
TABLE = values(96, 70, seed=1)
IDS = torch.tensor([[3, 95], [0, 7]])


def rows(table: Tensor, ids: Tensor) -> np.ndarray:
    """Returns the rows that quantizing the table leaves."""
    return numpy_nodes.dequantize(*numpy_nodes.quantize(as_numpy(table)))[ids.numpy()]


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


BAG, NORMED = nn.EmbeddingBag(96, 70), nn.Embedding(96, 70, max_norm=1.0)


@looped(
    "module, x, decomposed, reason",
    [
        (BAG, IDS, False, "an EmbeddingBag adds up the rows it picks; expected an Embedding, and a sum after it"),
        (BAG, IDS, True, "an EmbeddingBag adds up"),
        (NORMED, IDS, False, "weight 'weight' is changed by embedding_renorm_ while the program runs"),
        (NORMED, IDS, True, "its table is changed by embedding_renorm (max_norm)"),
        (
            Apply(lambda m, x: x + m.w[m.ids], {"w": TABLE}, {"ids": IDS}),
            values(2, 2, 70),
            False,
            "its ids are constant; fold the constants of the model first",
        ),
        (
            Apply(lambda m, ids: nn.functional.embedding(ids, m.w + 1), {"w": TABLE}),
            IDS,
            False,
            "weight 'add' is computed by add; expected a stored tensor behind views; fold it first",
        ),
    ],
)
def test_a_lookup_that_cannot_be_packed_is_kept_with_the_reason(
    module: Any, x: Tensor, decomposed: bool, reason: str
) -> None:
    program = export(module, x)
    assert kept(program.run_decompositions() if decomposed else program, TABLES)[0].startswith(reason)


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


def test_a_tied_table_goes_to_a_program_onnx_and_a_checkpoint_once(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 96, bias=False))
    model[1].weight = model[0].weight
    program = export(model, IDS)
    for source in (program.run_decompositions(), program):
        rewritten, report = mxfp8_graph.rewrite(source, "all")
        assert len(rewritten.state_dict) == 2, list(rewritten.state_dict)
        assert {site.packed for site in report.sites} == {report.sites[0].packed}
        assert report.bytes_after == 96 * (64 + 2)
    graph = onnx.load(mxfp8_graph.to_onnx(rewritten, tmp_path / "m.onnx")).graph
    assert sorted(n.op_type for n in graph.node) == ["MXFP8Embedding", "MXFP8Gemm", "MXFP8Quantize"]
    assert len(graph.initializer) == 2
    assert len(mxfp8_graph.unpack(rewritten)) == 1
    path = mxfp8_graph.export_safetensors(rewritten, tmp_path / "m.safetensors")
    assert len(mxfp8_graph.import_safetensors(path)) == 1
    assert kept(program, TABLES)[0] == (
        "embedding: its table is also the weight of '1', which is kept: packed alone it would make the file "
        "larger; set output_projections: true to share one"
    )
