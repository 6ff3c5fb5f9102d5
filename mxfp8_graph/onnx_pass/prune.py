"""Removes what a rewrite left without a user: weights, biases and the views in front of them. Nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

import onnx

from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.walk import iter_graphs
from mxfp8_graph.onnx_pass.picked import GATHERS
from mxfp8_graph.onnx_pass.static_operands import REPEATS, VIEW_OPS

_READERS: Final = frozenset({*VIEW_OPS, *REPEATS, *GATHERS, "Constant", "Shape", "Concat"})
"""What may stand between a weight and the product that used it; and what computes the sizes of views."""


def prune(opened: OpenedModel, suspects: Iterable[str]) -> None:
    """Removes the tensors named in `suspects` that nothing uses, and in turn what only they used.

    Dead code that was in the model before stays: only `suspects` and their producers are looked at.
    """
    graphs = list(iter_graphs(opened.proto.graph))
    uses = Counter(name for graph in graphs for node in graph.node for name in node.input)
    uses.update(output.name for graph in graphs for output in graph.output)
    producers = {output: node for graph in graphs for node in graph.node for output in node.output}
    dead: set[str] = set()
    stack = list(suspects)
    while stack:
        name = stack.pop()
        if not name or uses[name] or name in dead:
            continue
        node = producers.get(name)
        if node is not None:
            if node.op_type not in _READERS or any(uses[output] for output in node.output):
                continue
            uses.subtract(node.input)
            stack.extend(node.input)
            dead.update(node.output)
        dead.add(name)
    for graph in graphs:
        _remove(graph, dead, drop_inputs=opened.weights_are_inputs)
    for name in dead:
        opened.tensors.pop(name, None)


def _remove(graph: onnx.GraphProto, dead: set[str], *, drop_inputs: bool) -> None:
    initializers = {tensor.name for tensor in graph.initializer} & dead
    _keep(graph.initializer, lambda tensor: tensor.name not in dead)
    _keep(graph.value_info, lambda value: value.name not in dead)
    _keep(graph.node, lambda node: not node.output or not all(output in dead for output in node.output))
    if drop_inputs:
        _keep(graph.input, lambda value: value.name not in initializers)


def _keep(items: Any, wanted: Callable[[Any], bool]) -> None:
    """Deletes from a repeated field what is not wanted: last to first, and what stands side by side at once."""
    stop = len(items)
    while stop:
        start = stop
        while start and not wanted(items[start - 1]):
            start -= 1
        if start < stop:
            del items[start:stop]
        stop = start - 1 if start else 0
