"""Exported programs with a switch per site: all off they are the original, all on what the rewrite makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grids import looped

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_programs import Apply, export, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import Recipe  # noqa: E402
from mxfp8_graph.running.runner import open_runnable  # noqa: E402
from mxfp8_graph.running.samples import make_samples  # noqa: E402
from mxfp8_graph.tools.switched_program import _needed  # noqa: E402
from mxfp8_graph.tools.switches import open_switchable  # noqa: E402

ROLES = ("attention_scores", "attention_values", "output_projections", "embeddings", "convolutions")
RECIPE = Recipe(**dict.fromkeys(ROLES, True), min_dim=1)
W, V = values(64, 64, seed=1) / 8, values(64, 64, seed=2) / 8
X = values(6, 64, seed=3)
linear = nn.functional.linear


def chain(m: Any, x: Tensor) -> Tensor:
    return linear(torch.relu(linear(x, m.w)), m.v, m.b)


def shared_input_and_weight(m: Any, x: Tensor) -> Tensor:
    return linear(x, m.w) + linear(x, m.v) * linear(torch.tanh(x), m.w)


def add_after(m: Any, x: Tensor) -> Tensor:
    return torch.relu(x @ m.w.t() + m.b) @ m.v


def weight_first(m: Any, x: Tensor) -> Tensor:
    return m.w @ x.t()


def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (linear(x, w).view(1, 6, 2, 32).transpose(1, 2) for w in (m.w, m.v, m.w))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(6, 64)


def written_in_place(m: Any, x: Tensor) -> Tensor:
    h = linear(x, m.w)
    h.relu_()
    m.count.add_(1)
    return linear(h, m.v) * m.count


def einsum(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("mk,nk->mn", x, m.w)


def convolution(m: Any, x: Tensor) -> Tensor:
    return nn.functional.conv1d(x.t()[None], m.w[..., None]) * m.b[:, None] + 1


FORMS = [chain, shared_input_and_weight, add_after, weight_first, attention, written_in_place, einsum, convolution]


def program(function: Any) -> Any:
    return export(Apply(function, {"w": W, "v": V, "b": V[0]}, {"count": torch.ones(())}), X)


@looped("function, decomposed", [*((form, False) for form in FORMS), (attention, True), (written_in_place, True)])
def test_all_off_is_the_original_and_all_on_the_rewritten_program(function: Any, decomposed: bool) -> None:
    original = program(function)
    original = original.run_decompositions() if decomposed else original
    rewritten, report = mxfp8_graph.rewrite(original, RECIPE)
    with open_switchable(original, RECIPE) as switched:
        feeds = make_samples(switched.signature, {}).feeds[0]
        assert len(switched.switched) == len(report.rewritten) > 0
        for on, wanted in ((False, original), (True, rewritten)):
            expected = open_runnable(wanted)[1].run(feeds)
            for _ in range(2):  # what a run writes, the next one does not see
                found = switched.run(feeds, [on] * len(switched.switched))
                # An einsum is another op in the rewritten program, and its output has another name.
                for array, wanted_array in zip(found.values(), expected.values(), strict=True):
                    np.testing.assert_allclose(array, wanted_array, rtol=1e-6, atol=1e-6, err_msg=f"{on=}")


def test_the_way_not_taken_is_not_computed() -> None:
    with open_switchable(program(chain), RECIPE) as switched:
        graph = switched._program.module.graph
        taken = [_needed(graph, {list(graph.nodes)[-1]}, on) for on in ([True, False], [False, False])]
        ops = [[str(node.target) for node in nodes if node.op == "call_function"] for nodes in taken]
    assert [sum("mxfp8" in op for op in some) for some in ops] == [2, 0]  # quantize and gemm, of one site
    assert [sum("linear" in op for op in some) for some in ops] == [1, 2]


def test_sites_inside_of_higher_order_ops_have_no_switch() -> None:
    def branches(m: Any, x: Tensor) -> Tensor:
        return linear(torch.cond(x.sum() > 0, lambda x: linear(x, m.w), lambda x: linear(x, m.v), (x,)), m.w)

    with open_switchable(program(branches), RECIPE) as switched:
        assert [site.decision.site.subgraph for site in switched.switched] == [""]
        kept = [site.decision.reason for site in switched.sites if not site.decision.quantize]
        assert len(kept) == 2
        assert all(reason == "inside cond, whose graphs stay in high precision" for reason in kept)
        feeds = make_samples(switched.signature, {}).feeds[0]
        expected = open_runnable(program(branches))[1].run(feeds)
        found = switched.run(feeds, [False])
        for output, array in expected.items():
            np.testing.assert_array_equal(found[output], array)
