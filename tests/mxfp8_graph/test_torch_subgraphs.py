"""Matmuls inside higher-order ops: kept with a reason; regions of autocast and no_grad are no ops any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grids import looped

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_programs import Apply, count, export, predict, relative_l2, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402
from mxfp8_ops import torch_ops  # noqa: E402, F401

RECIPE = Recipe(name="outputs too", output_projections=True)
W, V = values(64, 64, seed=1) / 8, values(64, 64, seed=2) / 8
X = values(6, 64, seed=3)
linear = nn.functional.linear


def branches(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: linear(x, m.w), lambda x: linear(x, m.v) + linear(x, m.w), (x,))


def loop(m: Any, x: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.tanh(linear(x, m.w))

    return while_loop(lambda i, x: i < 3, body, (torch.zeros((), dtype=torch.int64), x))[1]


def mapped(m: Any, x: Tensor) -> Tensor:
    from torch._higher_order_ops.map import map as over_rows

    return over_rows(lambda row: linear(row, m.w), x.reshape(2, 3, 64))


def scanned(m: Any, x: Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(linear(carry, m.w) + row)
        return new, new * 1.0

    return scan(step, torch.zeros(1, 64), x.reshape(6, 1, 64))[1]


def without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = linear(x, m.w)
    return linear(y, m.v)


def in_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, m.w)
    return y.float()


KEPT: dict[str, Callable[..., Any]] = {"cond": branches, "while_loop": loop, "map_impl": mapped, "scan": scanned}


@looped("name", KEPT)
def test_matmuls_in_the_graphs_of_an_op_are_kept(name: str, tmp_path: Path) -> None:
    module = Apply(lambda m, x: linear(KEPT[name](m, x).reshape(6, 64), m.w), {"w": W, "v": V})
    program = export(module, X)
    before = str(program)
    rewritten, report = mxfp8_graph.rewrite(program, RECIPE)
    assert str(program) == before
    assert [s.decision.site.subgraph != "" for s in report.sites].count(False) == len(report.rewritten) == 1
    reasons = {s.decision.reason for s in report.sites if s.decision.site.subgraph}
    assert reasons == {f"inside {name}, whose graphs stay in high precision"}
    assert count(rewritten, "mxfp8.gemm") == 1
    assert "w" in rewritten.state_dict
    loaded = mxfp8_graph.load(mxfp8_graph.save(rewritten, tmp_path / f"{name}.pt2"))
    with torch.no_grad():
        assert relative_l2(rewritten.module()(X), module(X)) < 0.12
        assert torch.equal(loaded.module()(X), rewritten.module()(X))


@looped("name, function, matmuls", [("set_grad", without_gradients, 2), ("autocast", in_autocast, 1)])
def test_regions_of_autocast_and_no_grad_are_rewritten(name: str, function: Callable[..., Any], matmuls: int) -> None:
    module = Apply(function, {"w": W, "v": V})
    rewritten, report = mxfp8_graph.rewrite(export(module, X), RECIPE)
    assert len(report.rewritten) == len(report.sites) == count(rewritten, "mxfp8.gemm") == matmuls
    with torch.no_grad():
        assert relative_l2(rewritten.module()(X), module(X)) < 0.12


def test_training_passes_no_gradient_through_a_no_grad_region() -> None:
    program = export(Apply(without_gradients, {"w": W, "v": V}), X)
    tuned, report = mxfp8_graph.rewrite(program, RECIPE, training=True)
    assert [s.decision.quantize for s in report.sites] == [False, True] or len(report.rewritten) == 1
    module = tuned.module()
    module(X).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert sorted(name for name, grad in gradients.items() if grad is not None) == ["v"]


def test_autocast_gives_the_dtype_it_gave() -> None:
    program = export(Apply(in_autocast, {"w": W, "v": V}), X)
    rewritten, _ = mxfp8_graph.rewrite(program, RECIPE)
    x, w = (t.bfloat16().float() for t in (X, W))  # what autocast multiplies
    predict(x, w, dtype="bfloat16").check(rewritten.module()(X))


def test_a_weight_that_the_loop_changes_is_not_static() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def function(m: Any, x: Tensor) -> Tensor:
        def body(i: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, torch.tanh(linear(x, w).t() @ x)

        return while_loop(lambda i, w: i < 3, body, (torch.zeros((), dtype=torch.int64), m.w))[1]

    program = export(Apply(function, {"w": W}), X)
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(program, RECIPE)
    assert {d.site.weight for d in caught.value.decisions} == {None}


def test_vmap_must_be_decomposed_first() -> None:
    program = export(Apply(lambda m, x: torch.vmap(lambda row: torch.relu(linear(row, m.w)))(x), {"w": W}), X)
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(program)
    assert "call run_decompositions({}) first" in caught.value.decisions[0].reason
    rewritten, _ = mxfp8_graph.rewrite(program.run_decompositions({}))
    assert relative_l2(rewritten.module()(X), program.module()(X)) < 0.12
