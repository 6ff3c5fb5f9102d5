"""What a matmul of a program is for, where it takes more than the models of the other tests to tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_programs import Apply, export, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import Recipe, Rule  # noqa: E402

ANY = Recipe(name="any", min_dim=0, rules=(Rule(name="."),))
Function = Callable[[Any], Any]


def roles(function: Callable[..., Any], *inputs: Any) -> list[str]:
    """Returns the roles of the matmuls of function(module, *inputs), where module.w is a weight [96, 64]."""
    _, report = mxfp8_graph.rewrite(export(Apply(function, {"w": values(96, 64)}), *inputs), ANY, dry_run=True)
    return [site.decision.site.role for site in report.sites]


def behind(after: Function) -> str:
    """Returns the role of the linear in after(linear(x, w))."""
    (role,) = roles(lambda module, x: after(torch.nn.functional.linear(x, module.w)), values(3, 64))
    return role


@pytest.mark.parametrize(
    ("after", "role"),
    [
        (lambda h: h * 2.0, "output_projection"),
        (lambda h: 2.0 * torch.tanh(h / 2.0), "output_projection"),
        (lambda h: h * h, "linear"),
        (lambda h: h + h, "output_projection"),
        (torch.tanh, "linear"),
        (lambda h: torch.tanh(h).square(), "linear"),
        (lambda h: torch.tanh(h) * torch.tanh(h), "linear"),
    ],
    ids=["scale", "soft cap", "squared", "doubled", "tanh", "tanh, used", "tanh, squared"],
)
def test_what_only_presents_the_result_leaves_it_an_output_projection(after: Function, role: str) -> None:
    assert behind(after) == role


def deep(x: Any) -> Any:
    for _ in range(200):
        x = x * 2.0
    return x


def diamonds(x: Any) -> Any:
    for _ in range(60):
        x = x * (x * 2.0)
    return x


@pytest.mark.parametrize("between", [deep, diamonds])
def test_products_are_found_at_any_depth(between: Function) -> None:
    """Each node is looked at once: the diamonds have 2^60 paths."""

    def attention(module: Any, q: Any, k: Any, v: Any) -> Any:
        weights = torch.softmax(between(q @ k.transpose(-1, -2)), -1)
        return (between(weights) @ v).relu()

    inputs = (values(2, 5, 64), values(2, 7, 64, seed=1), values(2, 7, 64, seed=2))
    assert roles(attention, *inputs) == ["attention_scores", "attention_values"]
