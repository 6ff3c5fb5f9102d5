"""Matmuls inside higher-order ops: packed weights reach every graph that needs them, and only those that can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grids import looped

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_programs import DYNAMIC, Apply, count, export, predict, relative_l2, tensors, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402
from mxfp8_graph.torch_pass import higher_order  # noqa: E402
from mxfp8_ops import torch_ops  # noqa: E402, F401

RECIPE = Recipe(name="outputs too", output_projections=True)
W, V = values(64, 64, seed=1) / 8, values(64, 64, seed=2) / 8
X = values(6, 64, seed=3)
linear = nn.functional.linear


def branches(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: linear(x, m.w), lambda x: linear(x, m.v) + linear(x, m.w), (x,))


def branches_that_use_a_weight_outside_too(m: Any, x: Tensor) -> Tensor:
    return linear(torch.cond(x.sum() > 0, lambda x: linear(x, m.w), lambda x: x * 2.0, (x,)), m.w)


def nested_branches(m: Any, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.mean() > 1e6, lambda x: linear(x, m.v), lambda x: linear(x, m.w), (x,))

    return torch.cond(x.sum() > 0, inner, lambda x: x * 1.0, (x,))


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


PROGRAMS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "cond": (branches, 3, 2),
    "cond and outside": (branches_that_use_a_weight_outside_too, 2, 1),
    "nested cond": (nested_branches, 2, 2),
    "while_loop": (loop, 1, 1),
    "map": (mapped, 1, 1),
    "scan": (scanned, 1, 1),
    "set_grad": (without_gradients, 2, 2),
    "autocast": (in_autocast, 1, 1),
}
"""Function, matmuls in it, weights they use."""


@looped("name", PROGRAMS)
def test_subgraph(name: str, tmp_path: Path) -> None:
    function, matmuls, weights = PROGRAMS[name]
    module = Apply(function, {"w": W, "v": V})
    program = export(module, X)
    before = str(program)
    rewritten, report = mxfp8_graph.rewrite(program, RECIPE)
    assert str(program) == before
    assert len(report.rewritten) == len(report.sites) == matmuls
    assert count(rewritten, "mxfp8.gemm") == matmuls
    assert len({s.packed for s in report.sites}) == weights, "a weight that several graphs use is packed once"
    assert sum("mxfp8" in key for key in rewritten.state_dict) == 2 * weights
    assert not {"w", "v"}.intersection(rewritten.state_dict) - ({"v"} if weights == 1 else set())
    loaded = mxfp8_graph.load(mxfp8_graph.save(rewritten, tmp_path / f"{name}.pt2"))
    runnable, again = rewritten.module(), loaded.module()
    for x in (X, -X):
        with torch.no_grad():
            expected, got = module(x), runnable(x)
        assert relative_l2(got, expected) < 0.12, "two or three linears, each off by about 3.7%"
        assert all(torch.equal(a, b) for a, b in zip(tensors(again(x)), tensors(got), strict=True))


@looped("name", ["cond", "set_grad", "autocast"])
def test_decomposed(name: str) -> None:
    function, matmuls, _ = PROGRAMS[name]
    rewritten, _ = mxfp8_graph.rewrite(export(Apply(function, {"w": W, "v": V}), X).run_decompositions({}), RECIPE)
    assert count(rewritten, "mxfp8.gemm") == matmuls


def test_autocast_gives_the_dtype_it_gave() -> None:
    program = export(Apply(in_autocast, {"w": W, "v": V}), X)
    rewritten, _ = mxfp8_graph.rewrite(program, RECIPE)
    predict(X, W, dtype="bfloat16").check(rewritten.module()(X))


def test_sites_say_where_they_are() -> None:
    program = export(Apply(branches, {"w": W, "v": V}), X)
    _, report = mxfp8_graph.rewrite(program, RECIPE)
    paths = [s.decision.site.subgraph for s in report.sites]
    assert [path.split("_")[0] for path in paths] == ["true", "false", "false"]
    assert len({s.decision.site.name for s in report.sites}) == 3
    recipe = Recipe(rules=({"subgraph": "^false", "quantize": False},), output_projections=True)
    _, report = mxfp8_graph.rewrite(program, recipe)
    assert [s.decision.quantize for s in report.sites] == [True, False, False]


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


def test_dynamic_batch_inside_a_branch() -> None:
    program = export(Apply(branches, {"w": W, "v": V}), X, dynamic={"args": ({0: DYNAMIC},)})
    rewritten, _ = mxfp8_graph.rewrite(program, RECIPE)
    for rows in (2, 9):
        x = values(rows, 64, seed=rows).abs()
        predict(x, W).check(rewritten.module()(x))


def test_higher_order_ops_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(higher_order._LAYOUTS, "cond")
    program = export(Apply(lambda m, x: linear(branches(m, x), m.w), {"w": W, "v": V}), X)
    rewritten, report = mxfp8_graph.rewrite(program, RECIPE)
    assert [s.decision.quantize for s in report.sites] == [True, False, False, False]
    assert "inside cond, a higher-order op the pass cannot edit" in report.sites[1].decision.reason
    assert "w" in rewritten.state_dict
    assert relative_l2(rewritten.module()(X), program.module()(X)) < 0.12


def test_vmap_must_be_decomposed_first() -> None:
    program = export(Apply(lambda m, x: torch.vmap(lambda row: torch.relu(linear(row, m.w)))(x), {"w": W}), X)
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(program)
    assert "call run_decompositions({}) first" in caught.value.decisions[0].reason
    rewritten, _ = mxfp8_graph.rewrite(program.run_decompositions({}))
    assert relative_l2(rewritten.module()(X), program.module()(X)) < 0.12


def share_graphs(program: Any) -> None:
    """Makes the program's second cond run the graphs of its first."""
    module = program.graph_module
    for node in module.graph.nodes:
        if node.op == "get_attr" and str(node.target).endswith("graph_1"):
            node.target = str(node.target).replace("_1", "_0")
    del module.true_graph_1, module.false_graph_1
    module.recompile()


def test_graphs_that_several_calls_share(tmp_path: Path) -> None:
    def twice(m: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.cond(x.sum() > 0, lambda x: linear(x, m.w), lambda x: x @ m.v, (x,))
        return x

    module = Apply(twice, {"w": W, "v": V})
    program = export(module, X)
    apart, _ = mxfp8_graph.rewrite(program, RECIPE)
    share_graphs(program)
    before = str(program)
    rewritten, report = mxfp8_graph.rewrite(program, RECIPE)
    assert str(program) == before
    assert len(report.rewritten) == len(report.sites) == count(rewritten, "mxfp8.gemm") == 4
    assert len({s.packed for s in report.sites}) == 2
    loaded = mxfp8_graph.load(mxfp8_graph.save(rewritten, tmp_path / "program.pt2"))
    shared, copies, again = rewritten.module(), apart.module(), loaded.module()
    for x in (X, -X):
        assert torch.equal(shared(x), copies(x))
        assert torch.equal(again(x), copies(x))


def test_branches_that_are_one_graph() -> None:
    module = Apply(lambda m, x: torch.cond(x.sum() > 0, lambda x: x @ m.w, lambda x: x @ m.v, (x,)), {"w": W, "v": V})
    program = export(module, X)
    (call,) = (node for node in program.graph.nodes if node.target is torch.ops.higher_order.cond)
    call.args = (call.args[0], call.args[1], call.args[1], call.args[3])
    program.graph_module.recompile()
    rewritten, report = mxfp8_graph.rewrite(program, RECIPE)
    assert len(report.rewritten) == 2
    assert sum("mxfp8" in key for key in rewritten.state_dict) == 2
    runnable = rewritten.module()
    for x in (X, -X):
        predict(x, W.t()).check(runnable(x))
