"""Repeats the third layer of a graph of three layers, for models whose layers are alike.

torch takes seconds to export a layer, and a decoder has dozens that differ in the values of their parameters only. So
three are exported and the third is repeated. Why that is right is checked, not assumed: the modules of all layers are
alike (`architecture.repeated`), and the nodes of the third layer are those of the second, node by node, where what they
read is the same for both, belongs to the layer (its parameters and its cache), or is what the layer before computed.
A graph that is not like this is not repeated; the caller exports every layer then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import onnx
from onnx import NodeProto, ValueInfoProto

from mxfp8_graph.tools.from_hf.graph import layer_of

EXPORTED: Final = 3
"""Number of exported layers: the first may differ in values that it shares with others, so two more are compared."""

_Graph = onnx.GraphProto


class _IrregularError(Exception):
    """The layers of a graph are not alike."""


def repeat(graph: _Graph, path: str, count: int) -> bool:
    """Repeats the last of the three layers at `path` until there are `count`, in place.

    Returns whether it was done; otherwise the graph is as it was.
    """
    try:
        plan = _Repetition(graph, path)
    except _IrregularError:
        return False
    plan.apply(count)
    return True


class _Repetition:
    """The layers of a graph, compared; `apply` repeats the last one."""

    def __init__(self, graph: _Graph, path: str) -> None:
        self._graph = graph
        self._path = re.escape(path)
        blocks: list[list[NodeProto]] = [[] for _ in range(EXPORTED)]
        of_block: dict[str, int] = {}
        for node in graph.node:
            layer = layer_of(node, path)
            if layer is None:
                continue
            # A node with subgraphs would need the renaming inside of them too.
            if layer >= EXPORTED or any(a.type in {onnx.AttributeProto.GRAPH} for a in node.attribute):
                raise _IrregularError
            blocks[layer].append(node)
            of_block |= dict.fromkeys(filter(None, node.output), layer)
        _, second, self._third = blocks
        self._same: dict[str, str] = {}
        """Output of the second layer -> that of the third."""
        self._carried: dict[str, str] = {}
        """Value of the second layer that the third reads -> value of the third that the next layer reads instead."""
        self._compare(second, self._third, of_block)
        self._outside = [node for node in graph.node if layer_of(node, path) is None]
        inner = {name for name in of_block if of_block[name] == EXPORTED - 1}
        results = {value.name for value in graph.output}
        read = {name for node in self._outside for name in node.input} & inner
        # Nodes after the layers may read only what every layer passes on: the last layer computes it under another
        # name.
        if not read <= set(self._carried.values()):
            raise _IrregularError
        self._last = results & set(self._carried.values())
        """Outputs of the graph that the last layer computes and the one before does not: an encoder's hidden state."""

    def _compare(self, second: Sequence[NodeProto], third: Sequence[NodeProto], of_block: dict[str, int]) -> None:
        """Raises _IrregularError unless the third layer is the second again."""
        if not third or len(second) != len(third):
            raise _IrregularError
        pairs: dict[str, str] = {}
        for a, b in zip(second, third, strict=True):
            alike = (a.op_type, a.domain, list(a.attribute)) == (b.op_type, b.domain, list(b.attribute))
            if not alike or len(a.input) != len(b.input) or len(a.output) != len(b.output):
                raise _IrregularError
            for x, y in zip(a.input, b.input, strict=True):
                if x in self._same:
                    if self._same[x] != y:
                        raise _IrregularError
                elif x == y:
                    if of_block.get(x, 0) != 0:
                        raise _IrregularError
                # What the second layer reads of the first, the third has to read of the second.
                elif of_block.get(x) == 0 and of_block.get(y) == 1:
                    if pairs.setdefault(x, y) != y:
                        raise _IrregularError
                # A parameter or a cache of the layer itself, by its name.
                elif self._renamed(x, 1, 2) != y:
                    raise _IrregularError
            self._same |= dict(zip(a.output, b.output, strict=True))
        for y in pairs.values():
            if y not in self._same:
                raise _IrregularError
            self._carried[y] = self._same[y]
        own_results = [value.name for value in self._graph.output if value.name in self._same]
        renamed = {self._same[name] for name in own_results}
        carried = set(self._carried.values())
        of_third = {v.name for v in self._graph.output if of_block.get(v.name) == EXPORTED - 1}
        if renamed != of_third - carried:
            raise _IrregularError

    def apply(self, count: int) -> None:
        """Adds the layers after the third."""
        last = EXPORTED - 1
        inputs = {value.name: value for value in self._graph.input}
        results = {value.name: value for value in self._graph.output}
        own = [name for name in inputs if self._renamed(name, last, last + 1) != name]
        shapes = {value.name: value for value in self._graph.value_info}
        names: dict[str, str] = {name: name for node in self._third for name in node.output}
        nodes: list[NodeProto] = []
        for layer in range(EXPORTED, count):
            before = names
            names = {name: self._fresh(name, layer) for name in before}
            for node in self._third:
                copy = _append(nodes, node)
                copy.name = self._fresh(node.name, layer)
                copy.input[:] = [self._read(name, names, before, layer) for name in node.input]
                copy.output[:] = [names[name] for name in node.output]
                for entry in copy.metadata_props:
                    entry.value = self._renamed(entry.value, last, layer)
            for name in own:
                _copy(self._graph.input.add(), inputs[name], self._renamed(name, last, layer))
            for name in names:
                if name in self._last:
                    _copy(self._graph.value_info.add(), results[name], names[name])
                elif name in results:
                    _copy(self._graph.output.add(), results[name], names[name])
                elif name in shapes:
                    _copy(self._graph.value_info.add(), shapes[name], names[name])
        final = {name: names[name] for name in self._carried.values()}
        # The copies go after the third layer and before the nodes that read the last one.
        head, tail = self._split()
        for node in tail:
            node.input[:] = [final.get(name, name) for name in node.input]
        del self._graph.node[:]
        self._graph.node.extend([*head, *nodes, *tail])
        self._exchange({name: final[name] for name in self._last})

    def _exchange(self, names: dict[str, str]) -> None:
        """Exchanges names of the third and the last layer's results, since the last layer now computes the outputs."""
        both = names | {new: old for old, new in names.items()}
        for node in self._graph.node:
            node.input[:] = [both.get(name, name) for name in node.input]
            node.output[:] = [both.get(name, name) for name in node.output]

    def _read(self, name: str, names: dict[str, str], before: dict[str, str], layer: int) -> str:
        """Returns the input of a copy of the third layer's node that replaces `name`."""
        if name in names:
            return names[name]
        if name in self._carried:
            return before[self._carried[name]]
        return self._renamed(name, EXPORTED - 1, layer)

    def _fresh(self, name: str, layer: int) -> str:
        """Returns the name of a value or node of the third layer in another layer."""
        renamed = self._renamed(name, EXPORTED - 1, layer)
        return renamed if renamed != name else f"{name}_layer_{layer}"

    def _renamed(self, name: str, layer: int, wanted: int) -> str:
        """Returns `name` with the number of layer `wanted` in place of that of `layer`."""
        name = re.sub(rf"(?<![\w.]){self._path}\.{layer}(?=[.'])", self._numbered(wanted), name)
        return re.sub(rf"^(past_key_values|present)\.{layer}\.", rf"\g<1>.{wanted}.", name)

    def _numbered(self, layer: int) -> Callable[[re.Match[str]], str]:
        return lambda match: f"{match[0].rpartition('.')[0]}.{layer}"

    def _split(self) -> tuple[list[NodeProto], list[NodeProto]]:
        """Returns copies of the nodes up to the end of the third layer, and of those after it."""
        last = max(i for i, node in enumerate(self._graph.node) if any(node is third for third in self._third))
        copies: list[NodeProto] = []
        for node in self._graph.node:
            _append(copies, node)
        return copies[: last + 1], copies[last + 1 :]


def _append(nodes: list[NodeProto], node: NodeProto) -> NodeProto:
    """Returns a copy of `node`, appended to `nodes`."""
    copy = NodeProto()
    copy.CopyFrom(node)
    nodes.append(copy)
    return copy


def _copy(target: ValueInfoProto, source: ValueInfoProto, name: str) -> None:
    target.CopyFrom(source)
    target.name = name
