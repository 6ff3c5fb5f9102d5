"""Roles of matmuls in toy graphs, and the number of steps that it takes to find one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from mxfp8_graph.policy.roles import RoleOps, Roles

OPS = RoleOps(
    compute=frozenset({"matmul"}),
    choices=frozenset({"topk"}),
    softmax=frozenset({"softmax"}),
    views=frozenset({"view"}),
    to_output=frozenset({"slice"}),
    to_softmax=frozenset({"where"}),
    from_softmax=frozenset({"dropout"}),
    affine=frozenset({"add", "mul"}),
    add="add",
    tanh="tanh",
    multiply="mul",
)


class ToyGraph:
    """The graph of steps such as "y = add x C; z = tanh y". A capital letter is a constant."""

    def __init__(self, text: str, output: str = "") -> None:
        steps = ([*map(sys.intern, step.split())] for step in text.split("; "))  # a walk compares values by identity
        self._makers = {result: (op, operands) for result, _, op, *operands in steps}
        self._output = output
        self.looks: Counter[str] = Counter()

    def consumers(self, value: str) -> Iterator[tuple[str, str]]:
        self.looks[value] += 1
        return ((result, result) for result, (_, operands) in self._makers.items() if value in operands)

    def producer(self, value: str) -> str | None:
        return value if value in self._makers else None

    def operands(self, op: str) -> Sequence[str]:
        self.looks[op] += 1
        return self._makers[op][1]

    def name(self, op: str) -> str:
        return self._makers[op][0]

    def is_constant(self, value: str) -> bool:
        return value.isupper()

    def is_model_output(self, value: str) -> bool:
        return value == self._output


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ("h = matmul x W", "output_projection"),
        ("h = matmul x W; y = add h B", "output_projection"),
        ("h = matmul x W; y = mul h h", "linear"),
        ("h = matmul x W; y = add h x", "linear"),
        ("h = matmul x W; t = tanh h; y = mul t S", "output_projection"),
        ("h = matmul x W; t = tanh h; y = mul t t", "linear"),
        ("h = matmul x W; t = tanh h; y = mul t x", "linear"),
        ("h = matmul x W; y = view h; z = matmul y W", "linear"),
        ("h = matmul x W; s = slice h; i = topk s; d = dropout i; y = matmul d W", "router"),
        ("h = matmul x W; s = slice h; i = topk s; y = dropout i", "output_projection"),
    ],
)
def test_the_role_of_a_linear(text: str, role: str) -> None:
    output = "h" if text == "h = matmul x W" else "y"
    assert Roles(ToyGraph(text, output), OPS).of_linear("h") == role


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ("h = matmul q k; s = where h m; p = softmax s", "attention_scores"),
        ("h = matmul q k; s = dropout h; p = softmax s", "product"),
        ("p = softmax s; d = dropout p; h = matmul d v", "attention_values"),
        ("p = softmax s; d = dropout p; h = matmul v d", "attention_values"),
        ("p = softmax s; d = where p; h = matmul d v", "product"),
        ("h = matmul q k", "product"),
    ],
)
def test_the_role_of_a_product(text: str, role: str) -> None:
    assert Roles(ToyGraph(text), OPS).of_product("h") == role


@pytest.mark.parametrize("levels", [10, 100])
def test_every_value_is_looked_at_a_few_times_at_most(levels: int) -> None:
    """A chain of diamonds has 2^levels paths; twice as deep is twice the work."""
    rungs = [f"v{i}_ = view v{i}; v{i + 1} = where v{i} v{i}_" for i in range(levels)]
    toy = ToyGraph("; ".join(["v0 = matmul q k", *rungs]))
    assert Roles(toy, OPS).of_product("v0") == "product"
    assert max(toy.looks.values()) <= 3
    assert len(toy.looks) == 2 * levels + 1
