"""The role of a matmul, by the graph around it: output projection, router, attention scores or values.

All front ends share this code. Each supplies the names of its ops (`RoleOps`) and a view of its graphs (`GraphView`),
so a model gets the same roles in every export format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mxfp8_graph.policy.plan import Role

Op = TypeVar("Op")
Value = TypeVar("Value")


class GraphView(Protocol[Op, Value]):
    """A model as nested graphs of ops and values. A value is one object, compared by identity."""

    def consumers(self, value: Value) -> Iterable[tuple[Op | None, Value]]:
        """Yields (op, result) for every op that takes `value` and each of its results.

        Where `value` crosses the border of a subgraph (in, out, or to a loop's next iteration) there is no op: it
        yields (None, the value on the other side).
        """

    def producer(self, value: Value) -> Op | None:
        """Returns the op that makes `value`, or None for an input."""

    def operands(self, op: Op) -> Sequence[Value]:
        """Returns the operands of `op`, in order; one that it takes twice is there twice."""

    def name(self, op: Op) -> str:
        """Returns the op type, as `RoleOps` spells it."""

    def is_constant(self, value: Value) -> bool:
        """Whether `value` depends on no input of the model."""

    def is_model_output(self, value: Value) -> bool:
        """Whether the model returns `value`."""


@dataclass(frozen=True, kw_only=True)
class RoleOps:
    """The op names of one front end, by their meaning for roles."""

    compute: frozenset[str]
    """Ops that compute with activations: a matmul that feeds one of these is inside the model, not at its end."""
    choices: frozenset[str]
    """Ops whose result jumps when their input changes a little."""
    softmax: frozenset[str]
    views: frozenset[str]
    """Ops that change shape, layout or dtype; they may be in all three places below."""
    to_output: frozenset[str]
    """Further ops between an output projection and the output, besides an affine op and a soft cap."""
    to_softmax: frozenset[str]
    """Further ops between Q @ K^T and its softmax: scaling, masking, soft-capping, attention sinks."""
    from_softmax: frozenset[str]
    """Further ops between a softmax and its product with V."""
    affine: frozenset[str]
    """Add, subtract, multiply, divide: two operands."""
    add: str
    multiply: str
    tanh: str


class Roles(Generic[Op, Value]):
    """Returns the roles of the matmuls of one model, each in time linear in the part of the graph around the matmul."""

    def __init__(self, graph: GraphView[Op, Value], ops: RoleOps) -> None:
        self._graph = graph
        self._ops = ops
        self._to_output = ops.views | ops.to_output | ops.choices
        self._to_softmax = ops.views | ops.to_softmax
        self._from_softmax = ops.views | ops.from_softmax

    def of_linear(self, result: Value) -> Role:
        """Returns the role of the matmul with a static operand that makes `result`.

        An output projection's result reaches a model output passively and feeds no later matmul. The second condition
        tells an LM head from the key and value projections of a decoder that returns its cache. A router's result
        decides a choice, and the model computes with that choice.
        """
        reached = list(_reached([result], self._passively))
        chooses = any(self._maker(value) in self._ops.choices for value in reached)
        # An ArgMax at the end picks a token or a label. Only a choice that the model computes with makes a router.
        if (chooses or any(map(self._graph.is_model_output, reached))) and not self._feeds_compute(result):
            return "output_projection"
        return "router" if chooses else "linear"

    def of_product(self, result: Value) -> Role:
        """Returns the role of the matmul of two values computed at run time that makes `result`."""
        # A product of an attention's results, with no projection between, is both if a softmax follows. That softmax
        # counts, because the error of the product reaches it first.
        if self._leads_to_softmax(result):
            return "attention_scores"
        if self._comes_from_softmax(self._operands(result)[:2]):
            return "attention_values"
        return "product"

    def _passively(self, value: Value) -> Iterator[Value]:
        """Yields the results of the ops that only present `value`."""
        for op, result in self._graph.consumers(value):
            if op is None or self._is_passive(op, value, result):
                yield result

    def _is_passive(self, op: Op, value: Value, result: Value) -> bool:
        name = self._graph.name(op)
        return (
            name in self._to_output or self._is_affine(op, value) or (name == self._ops.tanh and self._is_cap(result))
        )

    def _is_cap(self, result: Value) -> bool:
        """Whether a tanh is a soft cap: everything that takes its result scales it up again; else an activation."""
        users = [user for user, _ in self._graph.consumers(result)]
        # Gemma caps logits as cap * tanh(x / cap). A tanh without the multiplication is an activation inside the model.
        return bool(users) and all(
            user is not None and self._graph.name(user) == self._ops.multiply and self._is_affine(user, result)
            for user in users
        )

    def _is_affine(self, op: Op, value: Value) -> bool:
        """Whether `op` adds a constant to `value` or scales it by one: x + x does, x * x does not."""
        operands, name = self._graph.operands(op), self._graph.name(op)
        # x + x is 2x, still affine; x * x is a square. So only an add may take the value twice.
        others = [operand for operand in operands if operand is not value]
        return (
            name in self._ops.affine
            and (len(others) == len(operands) - 1 or name == self._ops.add)
            and all(map(self._graph.is_constant, others))
        )

    def _feeds_compute(self, start: Value) -> bool:
        """Whether any matmul-like op lies downstream of `start`."""
        # All of the graph, not `_passively`: a cache reaches the next product through any op.
        reached = _reached([start], lambda value: (result for _, result in self._graph.consumers(value)))
        return any(self._consumers(value) & self._ops.compute for value in reached)

    def _leads_to_softmax(self, start: Value) -> bool:
        def onward(value: Value) -> Iterator[Value]:
            for op, result in self._graph.consumers(value):
                if op is not None and self._graph.name(op) in self._to_softmax:
                    yield result

        return any(self._consumers(value) & self._ops.softmax for value in _reached([start], onward))

    def _comes_from_softmax(self, starts: Sequence[Value]) -> bool:
        def back(value: Value) -> Sequence[Value]:
            return self._operands(value) if self._maker(value) in self._from_softmax else ()

        return any(self._maker(value) in self._ops.softmax for value in _reached(starts, back))

    def _consumers(self, value: Value) -> set[str]:
        """Returns the op types that take `value`."""
        return {self._graph.name(op) for op, _ in self._graph.consumers(value) if op is not None}

    def _maker(self, value: Value) -> str:
        """Returns the op type that makes `value`; "" for an input."""
        op = self._graph.producer(value)
        return "" if op is None else self._graph.name(op)

    def _operands(self, value: Value) -> Sequence[Value]:
        """Returns the operands of the op that makes `value`."""
        op = self._graph.producer(value)
        return () if op is None else self._graph.operands(op)


def _reached(starts: Iterable[Value], onward: Callable[[Value], Iterable[Value]]) -> Iterator[Value]:
    """Yields `starts` and all values that `onward` leads to, each once."""
    # Iterative, because graphs are deeper than Python's stack.
    stack = list(starts)
    seen = {id(value) for value in stack}
    while stack:
        value = stack.pop()
        yield value
        for other in onward(value):
            if id(other) not in seen:
                seen.add(id(other))
                stack.append(other)
