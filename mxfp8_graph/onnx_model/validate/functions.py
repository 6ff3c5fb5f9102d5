"""Local functions: none calls itself, and what they expand to stays within bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Final

import onnx

from mxfp8_graph.onnx_model.validate.places import Place, count
from mxfp8_graph.onnx_model.walk import FunctionKey, called_function, function_key, iter_nodes

MOST_CALLS_DEEP: Final = 100
"""Functions that call functions: onnx and ONNX Runtime call themselves for each."""

MOST_NODES: Final = 100_000
MOST_GROWTH: Final = 50
"""A model may expand to the first, or to the second times the nodes it has."""


class Functions:
    """The local functions of one model, callees before callers.

    Raises:
        ContractError: two have one name, one calls itself, or together they expand to too many nodes.
    """

    def __init__(self, model: onnx.ModelProto, place: Place) -> None:
        self.by_key: dict[FunctionKey, onnx.FunctionProto] = {}
        for function in model.functions:
            key = function_key(function)
            if not all(isinstance(name, str) for name in (*key, *function.input, *function.output)):
                raise place.error(f"local function {function.name!r}: a name is not UTF-8", "text")
            if key in self.by_key:
                raise place.error(f"local function {function.name!r} is defined twice", "each once")
            self.by_key[key] = function
        self._calls = {key: list(self._called(iter_nodes(f.node))) for key, f in self.by_key.items()}
        try:
            self.order = list(TopologicalSorter(self._calls).static_order())
        except CycleError as error:
            path = " -> ".join(name for _, name, _ in reversed(error.args[1]))
            raise place.error(f"local functions call themselves: {path}", "no recursion") from None
        self._in_graph = list(self._called(iter_nodes(model.graph.node)))
        if self.by_key:
            self._check_size(model, place)

    def reached(self) -> set[FunctionKey]:
        """Returns the functions that the graph calls, directly or not."""
        found = set(self._in_graph)
        for key in reversed(self.order):
            if key in found:
                found.update(self._calls[key])
        return found

    def check_call(self, node: onnx.NodeProto, imports: Mapping[str, int], place: Place) -> None:
        """Raises ContractError if `node` calls a local function and passes or takes more values than it has.

        Calls, and the nodes of functions, must be of a domain that is among `imports`.
        """
        key = called_function(node)
        function = self.by_key.get(key)
        if (function is not None or place.in_function) and key[0] not in imports:
            raise place.node_error(node, f"its domain {key[0] or 'ai.onnx'!r} is not imported", "an opset import")
        if function is None:
            return
        for kind, names, formal in (
            ("input", node.input, function.input),
            ("output", node.output, function.output),
        ):
            if len(names) > len(formal):
                raise place.node_error(node, count(len(names), kind), f"at most {len(formal)}, as its function has")

    def _called(self, nodes: Iterable[onnx.NodeProto]) -> Iterator[FunctionKey]:
        if self.by_key:
            yield from (key for key in map(called_function, nodes) if key in self.by_key)

    def _check_size(self, model: onnx.ModelProto, place: Place) -> None:
        own = {key: sum(1 for _ in iter_nodes(f.node)) for key, f in self.by_key.items()}
        sizes = self._folded(lambda key, inner: own[key] + sum(inner))
        depths = self._folded(lambda key, inner: 1 + max(inner, default=0))
        stored = sum(own.values()) + sum(1 for _ in iter_nodes(model.graph.node))
        most = max(MOST_NODES, MOST_GROWTH * stored)
        if sum(sizes[key] for key in self._in_graph) > most or max(sizes.values()) > most:
            raise place.error("local functions expand to too many nodes", f"at most {most}")
        if max(depths.values()) > MOST_CALLS_DEEP:
            raise place.error(
                f"local functions call each other {max(depths.values())} deep", f"at most {MOST_CALLS_DEEP}"
            )

    def _folded(self, value: Callable[[FunctionKey, list[int]], int]) -> dict[FunctionKey, int]:
        """Returns a number per function, made of those of the functions it calls."""
        found: dict[FunctionKey, int] = {}
        for key in self.order:
            found[key] = value(key, [found[called] for called in self._calls[key]])
        return found
