"""Removes what edits left without a user: weights, biases and the views in front of them, or whatever made them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import onnx

from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.walk import subgraphs
from mxfp8_graph.onnx_pass.ops import READERS

_Value = tuple[int, str]
"""A value: the graph it belongs to, by number, and its name. Branches may use one name for two values."""


def prune(opened: OpenedModel, suspects: Iterable[str], *, any_op: bool = False) -> None:
    """Removes the tensors named in `suspects` that nothing uses, and in turn what only they used.

    Dead code that was in the model before stays: only `suspects` and their producers are looked at.

    Args:
        opened: the model; edited in place.
        suspects: names of values, in whichever graph.
        any_op: remove producers of every op, not only views of weights.
    """
    values = _Values(opened.proto.graph)
    dead: set[_Value] = set()
    stack = [value for name in suspects for value in values.called.get(name, ())]
    while stack:
        value = stack.pop()
        if values.uses[value] or value in dead:
            continue
        node = values.makers.get(value)
        if node is not None:
            outputs = values.made[id(node)]
            if not (any_op or node.op_type in READERS) or any(values.uses[output] for output in outputs):
                continue
            read = list(values.read_by(node))
            values.uses.subtract(read)
            stack.extend(read)
            dead.update(outputs)
        dead.add(value)
    for number, graph in enumerate(values.graphs):
        names = {name for place, name in dead if place == number}
        if names:
            _remove(graph, names, drop_inputs=opened.weights_are_inputs)
    for number, name in dead:
        if number == 0:
            opened.tensors.pop(name, None)


class _Values:
    """Every value of a model: who makes it, and how often it is used."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graphs: list[onnx.GraphProto] = []
        """The model's graph first."""
        self.uses: Counter[_Value] = Counter()
        self.makers: dict[_Value, onnx.NodeProto] = {}
        self.made: dict[int, list[_Value]] = {}
        """What a node makes, by its id."""
        self.called: dict[str, list[_Value]] = {}
        """Values by name."""
        self._read: dict[int, list[_Value]] = {}
        self._nodes: list[onnx.NodeProto] = []  # so that no id is used again
        self._add(graph, [])

    def read_by(self, node: onnx.NodeProto) -> Iterator[_Value]:
        """Yields what a node reads, and what its subgraphs do."""
        yield from self._read[id(node)]
        for _, inner in subgraphs(node):
            for below in inner.node:
                yield from self.read_by(below)

    def _add(self, graph: onnx.GraphProto, outer: list[tuple[int, set[str]]]) -> list[_Value]:
        """Adds a graph and those below it; returns its outputs. `outer`: the graphs around it, the nearest first."""
        number = len(self.graphs)
        self.graphs.append(graph)
        names = {each.name for part in (graph.input, graph.initializer) for each in part}
        scopes = [(number, names), *outer]
        nodes = list(graph.node)
        self._nodes += nodes
        for node in nodes:
            names.update(node.output)
        names.discard("")
        for name in names:
            self.called.setdefault(name, []).append((number, name))
        for node in nodes:
            self.made[id(node)] = [(number, name) for name in node.output if name]
            self.makers.update(dict.fromkeys(self.made[id(node)], node))
            read = [_seen(name, scopes) for name in node.input if name]
            for _, inner in subgraphs(node):
                read += self._add(inner, scopes)
            self._read[id(node)] = read
            self.uses.update(read)
        outputs = [_seen(value.name, scopes) for value in graph.output]
        if not outer:
            self.uses.update(outputs)
        return outputs


def _seen(name: str, scopes: list[tuple[int, set[str]]]) -> _Value:
    """Returns the value that a name stands for in the first of these graphs, which are inside each other."""
    return next(((number, name) for number, names in scopes if name in names), (scopes[-1][0], name))


def _remove(graph: onnx.GraphProto, dead: set[str], *, drop_inputs: bool) -> None:
    initializers = {tensor.name for tensor in graph.initializer} & dead
    keep(graph.initializer, lambda tensor: tensor.name not in dead)
    keep(graph.value_info, lambda value: value.name not in dead)
    keep(graph.node, lambda node: not any(node.output) or not all(name in dead or not name for name in node.output))
    if drop_inputs:
        keep(graph.input, lambda value: value.name not in initializers)


def keep(items: Any, wanted: Callable[[Any], bool]) -> None:
    """Deletes from a repeated field what is not wanted: last to first, and what stands side by side at once."""
    stop = len(items)
    while stop:
        start = stop
        while start and not wanted(items[start - 1]):
            start -= 1
        if start < stop:
            del items[start:stop]
        stop = start - 1 if start else 0
