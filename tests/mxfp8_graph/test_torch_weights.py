"""Weights of exported programs: which are static, packed once, pruned; reasons for those that are not rewritten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grids import looped

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import Apply, as_numpy, count, export, predict, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402
from mxfp8_graph.weights import NonFiniteError  # noqa: E402
from mxfp8_ops import numpy_nodes  # noqa: E402
from mxfp8_ops.errors import ContractError, RecipeError  # noqa: E402

RECIPE = Recipe(name="outputs too", output_projections=True)
W, X = values(96, 64, seed=1), values(5, 64, seed=2)
linear = nn.functional.linear


def kept_reason(function: Any, *inputs: Tensor, w: Tensor = W, buffers: Any = None) -> str:
    """Returns why the one matmul of a function is kept."""
    program = export(Apply(function, {"w": w}, buffers), *inputs)
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(program, RECIPE)
    (only,) = caught.value.decisions
    assert only.rule == "structure"
    return only.reason


def test_packed_bytes_are_those_of_numpy() -> None:
    module = nn.Linear(70, 96)
    rewritten, report = mxfp8_graph.rewrite(export(module, values(5, 70)), RECIPE)
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
    program = export(Apply(lambda m, x: linear(torch.relu(linear(x, m.w)), m.w) + (x @ m.w), {"w": values(64, 64)}), X)
    rewritten, report = mxfp8_graph.rewrite(program, RECIPE)
    assert [s.decision.site.shared_with for s in report.sites] == [2, 2, 2]
    assert len({s.packed for s in report.sites}) == 2, "[N, K] and [K, N] of the same values cannot share scales"
    assert count(rewritten, "mxfp8.quantize") == 2, "two of the three see the same activation"
    assert "w" not in rewritten.state_dict


def test_two_views_of_a_weight_are_packed_apart() -> None:
    program = export(Apply(lambda m, x: (linear(x, m.w[:32]), linear(x, m.w[32:])), {"w": W}), X)
    rewritten, report = mxfp8_graph.rewrite(program, RECIPE)
    assert [s.packed for s in report.sites] == ["w_mxfp8", "w_mxfp8_2"]
    first, second = rewritten.module()(X)
    predict(X, W[:32]).check(first)
    predict(X, W[32:]).check(second)


def test_tied_parameters_are_one_weight() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    rewritten, report = mxfp8_graph.rewrite(export(Tied(), X), RECIPE)
    assert [s.decision.site.shared_with for s in report.sites] == [1, 1]
    assert len({s.packed for s in report.sites}) == 1
    assert not {"first.weight", "second.weight"}.intersection(rewritten.state_dict)


def test_what_else_reads_weights_stays() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        torch.ops.aten.t.default(m.other)  # dead code
        return linear(x, m.w) + m.w.sum()

    program = export(Apply(function, {"w": W, "other": values(3, 4)}), X)
    rewritten, _ = mxfp8_graph.rewrite(program, RECIPE)
    assert set(rewritten.state_dict) == {"w", "other", "w_mxfp8", "w_mxfp8_scales"}


def test_bfloat16_bias_becomes_float32_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.relu(self.inner(x)))

    module = Twice()
    rewritten, _ = mxfp8_graph.rewrite(export(module, X.bfloat16()), RECIPE)
    names = {"inner.weight_mxfp8", "inner.weight_mxfp8_scales", "inner.bias_f32"}
    assert set(rewritten.state_dict) == names
    assert torch.equal(rewritten.state_dict["inner.bias_f32"], module.inner.bias.detach().float())


@looped("value, shown", [(float("nan"), "nan"), (float("inf"), "inf")])
def test_non_finite_weight(value: float, shown: str) -> None:
    w = W.clone()
    w[70, 33] = value
    program = export(Apply(lambda m, x: x @ m.w[64:].t(), {"w": w}), X)
    with pytest.raises(NonFiniteError, match=rf"weight 'w': {shown} at index \[70, 33\]"):
        mxfp8_graph.rewrite(program, RECIPE)
    rewritten, report = mxfp8_graph.rewrite(program, RECIPE, allow_nonfinite=True)
    result = rewritten.module()(X)
    assert torch.isnan(result[:, 6]).all()
    assert torch.isfinite(result[:, :6]).all()
    assert len(report.rewritten) == 1


def test_mutated_buffer_is_not_static() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y = linear(x, m.buffer)
        m.buffer.mul_(0.5)
        return y

    reason = kept_reason(function, X, buffers={"buffer": W})
    assert reason == "weight 'buffer' is changed by mul_ while the program runs; expected it fixed"
    program = export(Apply(function, {}, {"buffer": W}), X).run_decompositions({})
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(program, RECIPE)
    assert "weight 'buffer' is changed by the program" in caught.value.decisions[0].reason


def test_computed_weight() -> None:
    reason = kept_reason(lambda m, x: linear(x, (m.w * 2.0).view(96, 64)), X)
    assert "is computed by mul; expected a stored tensor behind views" in reason


def test_vector_and_double_and_empty() -> None:
    assert "a vector" in kept_reason(lambda m, x: x @ m.w, X, w=values(64))
    assert "dtype float64" in kept_reason(lambda m, x: linear(x, m.w), X.double(), w=W.double())
    assert "empty" in kept_reason(lambda m, x: linear(x, m.w), X[:, :0], w=W[:, :0])
    assert "both operands are constant" in kept_reason(lambda m, x: x + linear(m.w, m.w).sum(), X)


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
    with pytest.raises(mxfp8_graph.NothingEligibleError, match="none of its 1 matmul is eligible") as caught:
        mxfp8_graph.rewrite(export(nn.Sequential(nn.Linear(64, 8), nn.ReLU()), X))
    assert caught.value.decisions[0].reason.startswith("tiny: N = 8 is below min_dim = 32")


def test_already_rewritten() -> None:
    module = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU())
    rewritten, _ = mxfp8_graph.rewrite(export(module, X))
    assert not rewritten.module()(X).requires_grad
    assert all(p.requires_grad for p in module.parameters())
    again, report = mxfp8_graph.rewrite(rewritten)
    assert again is rewritten
    assert report.already_rewritten
    mismatch = "Recipe mismatch for '(linear|gemm)': packed with scale_rounding ceil, asked for floor"
    for other in (rewritten, rewritten.run_decompositions(), torch.export.export(rewritten.module(), (X,))):
        with pytest.raises(RecipeError, match=mismatch):
            mxfp8_graph.rewrite(other, "ocp")


def test_weights_of_a_program_without_values() -> None:
    with torch.device("meta"):
        module = nn.Linear(64, 64)
    program: ExportedProgram = torch.export.export(module, (torch.empty(5, 64, device="meta"),))
    with pytest.raises(ContractError, match="has a shape but no values"):
        mxfp8_graph.rewrite(program, RECIPE)
