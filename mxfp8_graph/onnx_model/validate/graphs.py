"""Names in a graph: each defined once, before it is used; no node needs its own result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import onnx

from mxfp8_graph.onnx_model.validate.places import Place
from mxfp8_graph.onnx_model.walk import node_label, subgraphs

CheckNode = Callable[[onnx.NodeProto, Place], None]
Scopes = tuple[AbstractSet[str], ...]
"""The names that the graphs around a graph have defined so far, innermost last."""


def check_graph(graph: onnx.GraphProto, place: Place, check: CheckNode, around: Scopes = ()) -> None:
    """Raises ContractError if the names of `graph` or of a subgraph are not as they must be.

    Nodes of the main graph may come in any order that has no cycle; those of subgraphs come in order.

    Args:
        graph: the main graph or a subgraph.
        place: of the graph.
        check: called for each node, and raises what is wrong with it alone.
        around: see `Scopes`.
    """
    defined: set[str] = set()
    for value in graph.input:
        _define(defined, value.name, place, "an input")
    stored: set[str] = set()
    for name in (*(t.name for t in graph.initializer), *(s.values.name for s in graph.sparse_initializer)):
        _define(stored, name, place, "an initializer")
    defined |= stored
    late = _check_nodes(graph.node, place, check, around, defined)
    if late and around:
        node, name = late[0]
        raise place.node_error(node, f"uses {name!r} before it is defined", "nodes in order")
    if late:
        _check_late([node for node, _ in late], place, check, defined)
    _check_outputs((output.name for output in graph.output), defined, place)


def check_function(function: onnx.FunctionProto, place: Place, check: CheckNode) -> None:
    """Raises ContractError if the names of a local function's body are not as they must be."""
    defined: set[str] = set()
    for name in function.input:
        _define(defined, name, place, "an input")
    late = _check_nodes(function.node, place, check, (), defined)
    if late:
        node, name = late[0]
        raise place.node_error(node, f"uses {name!r} before it is defined", "nodes in order")
    _check_outputs(function.output, defined, place)


def _define(defined: set[str], name: str, place: Place, what: str) -> None:
    if not isinstance(name, str):
        raise place.error(f"the name of {what}, {name!r}, is not UTF-8", "text")
    if not name:
        raise place.error(f"{what} without a name", "a name")
    if name in defined:
        raise place.error(f"{what} called {name!r} is defined twice", "each name once")
    defined.add(name)


def _check_outputs(names: Iterable[str], defined: AbstractSet[str], place: Place) -> None:
    for name in names:
        if name not in defined:
            raise place.error(f"output {name!r} is not defined", "an input, an initializer or a node's output")


def _check_nodes(
    nodes: Sequence[onnx.NodeProto], place: Place, check: CheckNode, around: Scopes, defined: set[str]
) -> list[tuple[onnx.NodeProto, str]]:
    """Checks nodes in order, and adds what they make to `defined`.

    Returns those that use a name that only a later node makes, and that name. They are not checked.
    """
    late: list[tuple[onnx.NodeProto, str]] = []
    made: set[str] = set()
    for node in nodes:
        missing = _missing(node, defined, around)
        if missing is None:
            _check_one(node, place, check, around, defined)
            continue
        made = made or {output for other in nodes for output in other.output}
        if missing not in made:
            raise place.node_error(node, f"uses {missing!r}, which is not defined", "a name that is defined")
        late.append((node, missing))
    return late


def _missing(node: onnx.NodeProto, defined: set[str], around: Scopes) -> str | None:
    """Returns the first name that a node needs and that is not defined, or None."""
    if not node.attribute and defined.issuperset(node.input):
        return None  # as for most nodes, which are many
    return next((n for n in _needs(node) if n not in defined and not _visible(n, around)), None)


def _check_one(node: onnx.NodeProto, place: Place, check: CheckNode, around: Scopes, defined: set[str]) -> None:
    check(node, place)
    if node.attribute:
        for name, inner in subgraphs(node):
            check_graph(inner, place.within(node_label(node), name), check, (*around, defined))
    for output in node.output:
        if not output:
            continue
        if not isinstance(output, str):
            raise place.node_error(node, f"the name of output {output!r} is not UTF-8", "text")
        if output in defined or (around and _visible(output, around)):
            raise place.node_error(node, f"output {output!r} is defined twice", "each name once")
        defined.add(output)


def _check_late(nodes: Sequence[onnx.NodeProto], place: Place, check: CheckNode, defined: set[str]) -> None:
    """Checks the nodes of a main graph that is out of order, each once all it needs is there."""
    waiting: dict[str, list[int]] = {}
    missing = []
    for index, node in enumerate(nodes):
        names = {name for name in _needs(node) if name not in defined}
        missing.append(len(names))
        for name in names:
            waiting.setdefault(name, []).append(index)
    ready = [index for index, number in enumerate(missing) if not number]
    done = 0
    while ready:
        node = nodes[ready.pop()]
        _check_one(node, place, check, (), defined)
        done += 1
        for output in node.output:
            for index in waiting.pop(output, ()):
                missing[index] -= 1
                if not missing[index]:
                    ready.append(index)
    if done < len(nodes):
        node = next(node for node, number in zip(nodes, missing, strict=True) if number)
        raise place.node_error(node, "needs its own result: the graph has a cycle", "no cycle")


def _needs(node: onnx.NodeProto) -> Iterator[str]:
    """Yields the names that a node, or a subgraph in it, takes from the graph it is in."""
    for name in node.input:
        if name:
            yield name
    if node.attribute:
        for _, inner in subgraphs(node):
            yield from _free(inner)


def _free(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields the names that a subgraph uses and does not define, wherever in it."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own |= {sparse.values.name for sparse in graph.sparse_initializer}
    own |= {output for node in graph.node for output in node.output}
    for node in graph.node:
        yield from (name for name in _needs(node) if name not in own)


def _visible(name: str, around: Scopes) -> bool:
    return any(name in names for names in around)
