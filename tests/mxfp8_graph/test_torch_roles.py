"""What a matmul of a program is for, where it takes more than the models of the other tests to tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from grids import looped

torch = pytest.importorskip("torch")

from torch_programs import Apply, export, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import Recipe, Rule  # noqa: E402

ANY = Recipe(name="any", min_dim=0, rules=(Rule(name="."),))
linear = torch.nn.functional.linear


def roles(function: Callable[..., Any], *inputs: Any) -> list[str]:
    """Returns the roles of the matmuls of function(module, *inputs) with weights w [96, 64], v [64, 64] and experts."""
    weights = {"w": values(96, 64), "v": values(64, 64), "b": values(96), "experts": values(96, 64, 64)}
    _, report = mxfp8_graph.rewrite(export(Apply(function, weights), *inputs), ANY, dry_run=True)
    return [site.decision.site.role for site in report.sites]


def router(module: Any, x: Any) -> Any:
    best = torch.sigmoid(linear(x, module.w)).topk(1).indices[:, 0]
    return torch.relu(torch.bmm(x.unsqueeze(1), module.experts[best]))


def keys_of_a_cache(module: Any, x: Any) -> Any:
    keys = linear(x, module.v)
    return torch.relu(x @ keys.t()), keys


@looped(
    "function, role",
    [
        (lambda m, x: linear(x, m.w) * 2.0, "output_projection"),
        (lambda m, x: 2.0 * torch.tanh(linear(x, m.w) / 2.0), "output_projection"),
        (lambda m, x: linear(x, m.w).square(), "linear"),
        (lambda m, x: (h := linear(x, m.w)) * h, "linear"),
        (lambda m, x: (h := linear(x, m.w)) + h, "output_projection"),
        (lambda m, x: torch.tanh(linear(x, m.w)), "linear"),
        (lambda m, x: torch.tanh(linear(x, m.w)).square(), "linear"),
        (lambda m, x: (h := torch.tanh(linear(x, m.w))) * h, "linear"),
        (lambda m, x: (linear(x, m.w) + m.b).view(-1), "output_projection"),
        (lambda m, x: torch.softmax(linear(x, m.w).transpose(0, 1) * 3.0, -1), "output_projection"),
        (lambda m, x: linear(x, m.w).argmax(-1), "output_projection"),
        (lambda m, x: torch.softmax(linear(x, m.w), -1).topk(5), "output_projection"),
        (router, "router"),
        (keys_of_a_cache, "linear"),
    ],
)
def test_what_follows_a_linear_tells_its_role(function: Callable[..., Any], role: str) -> None:
    assert roles(function, values(3, 64))[0] == role


def test_a_router_is_kept_with_the_reason() -> None:
    program = export(Apply(router, {"w": values(96, 64), "experts": values(96, 64, 64)}), values(3, 64))
    _, report = mxfp8_graph.rewrite(program)
    assert [s.decision.reason for s in report.kept] == [
        "router: a TopK or ArgMax chooses by its result; set routers: true to quantize it"
    ]


def diamonds(x: Any) -> Any:
    for _ in range(60):
        x = x * (x * 2.0)
    return x


def stretched(program: Any) -> Any:
    """Returns a program with each product and activation 1,200 times, which an export would take long to trace."""
    graph = program.graph
    for node in [n for n in graph.nodes if n.target in {torch.ops.aten.mul.Tensor, torch.ops.aten.relu.default}]:
        users, last = list(node.users), node
        for _ in range(1200):
            with graph.inserting_after(last):
                last = graph.create_node("call_function", node.target, (last, *node.args[1:]))
            last.meta = dict(node.meta)
        for user in users:
            user.replace_input_with(node, last)
    program.graph_module.recompile()
    return program


@looped("between", ["deeper than the stack", "2^60 paths"])
def test_products_are_found_at_any_depth_and_each_node_is_looked_at_once(between: str) -> None:
    inner = diamonds if between == "2^60 paths" else lambda x: x * 2.0

    def attention(module: Any, q: Any, k: Any, v: Any) -> Any:
        weights = torch.softmax(inner(q @ k.transpose(-1, -2)), -1)
        return linear((inner(weights) @ v).relu(), module.v).relu()

    inputs = (values(2, 5, 64), values(2, 7, 64, seed=1), values(2, 7, 64, seed=2))
    program = export(Apply(attention, {"v": values(64, 64)}), *inputs)
    _, report = mxfp8_graph.rewrite(program if inner is diamonds else stretched(program), ANY, dry_run=True)
    assert [s.decision.site.role for s in report.sites] == ["attention_scores", "attention_values", "linear"]
