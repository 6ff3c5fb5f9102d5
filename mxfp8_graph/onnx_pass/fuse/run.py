"""fuse(): asks every fusion about every node of every graph, and puts the fused nodes in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import onnx

from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.walk import node_label, stored_in, subgraphs
from mxfp8_graph.onnx_pass.fuse.activation import fuse_activation
from mxfp8_graph.onnx_pass.fuse.attention import fuse_attention
from mxfp8_graph.onnx_pass.fuse.gated import fuse_gate
from mxfp8_graph.onnx_pass.fuse.graph_view import GraphView, TensorType
from mxfp8_graph.onnx_pass.fuse.norm import fuse_norm
from mxfp8_graph.onnx_pass.fuse.quantized import fuse_quantize
from mxfp8_graph.onnx_pass.fuse.replacement import Fusion, Replacement
from mxfp8_graph.onnx_pass.prune import prune
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import FusionReport
from mxfp8_ops import contract

FUSIONS: Final[tuple[Fusion, ...]] = (fuse_activation, fuse_gate, fuse_norm, fuse_quantize)
"""Every fusion. Each sees the graph as those before it left it."""


def fuse(
    opened: OpenedModel, types: Mapping[str, TensorType], fresh: Callable[[str], str], recipe: Recipe
) -> tuple[FusionReport, ...]:
    """Returns what was fused in the model, whose matmuls have been replaced.

    Args:
        opened: the model; edited in place.
        types: what is known of values, by name; see `graph_view.types_of`.
        fresh: makes a name that nothing in the model has.
        recipe: by which they were replaced.
    """
    # The weights' gemms see no more of activations than bfloat16 holds, unless the recipe leaves those unchanged.
    exact = recipe.activations == "unchanged"
    attention = partial(fuse_attention, activation_dtype=contract.FLOAT if exact else contract.BFLOAT16)
    return apply(opened, types, fresh, (*FUSIONS, attention))


def apply(
    opened: OpenedModel,
    types: Mapping[str, TensorType],
    fresh: Callable[[str], str],
    fusions: Sequence[Fusion],
    *,
    any_op: bool = False,
) -> tuple[FusionReport, ...]:
    """Returns what these fusions found; arguments as of `fuse` and `prune`."""
    step = _Step(opened, types, fresh, fusions)
    step.graph(opened.proto.graph, {})
    prune(opened, step.suspects, any_op=any_op)
    return tuple(step.reports)


class _Step:
    """The fusion step of one model."""

    def __init__(
        self,
        opened: OpenedModel,
        types: Mapping[str, TensorType],
        fresh: Callable[[str], str],
        fusions: Sequence[Fusion],
    ) -> None:
        self.reports: list[FusionReport] = []
        self.suspects: set[str] = set()
        """What nodes that are gone read and made, and nothing may use any more."""
        self._types = types
        self._fresh = fresh
        self._fusions = fusions
        self._unread = opened.tensors
        self._overridable = overridable(opened)

    def graph(self, graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> None:
        """Fuses in `graph`, then in those below it; `outer`: what the graphs around it store."""
        stored = self._visible(graph, outer)
        for fusion in self._fusions:
            view = GraphView(graph, self._types, stored, unread=self._unread, fresh=self._fresh)
            if found := list(_found(fusion, view)):
                self._put(graph, view, found)
                stored = self._visible(graph, outer)
        for node in graph.node:  # after the edits, which copy what is inside nodes
            for _, inner in subgraphs(node):
                self.graph(inner, stored)

    def _visible(self, graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> Mapping[str, onnx.TensorProto]:
        """Returns the constants that nodes of `graph` can read."""
        own = {name: tensor for name, tensor in stored_in(graph).items() if name not in self._overridable}
        return {**outer, **own}

    def _put(self, graph: onnx.GraphProto, view: GraphView, replacements: Sequence[Replacement]) -> None:
        """Puts each replacement where the last of the nodes was that it stands for."""
        gone = {id(node) for found in replacements for node in found.gone}
        at = {max(map(view.place, found.gone)): found for found in replacements}
        nodes: list[onnx.NodeProto] = []
        for place, node in enumerate(view.nodes):
            if found := at.get(place):
                nodes += [*found.before, found.node, *found.after]
                self._tell(found)
            if id(node) not in gone:
                nodes.append(node)
        ordered = list(_in_order(nodes))
        del graph.node[:]
        graph.node.extend(ordered)

    def _tell(self, found: Replacement) -> None:
        for node in found.gone:
            self.suspects.update((*_read_by(node), *node.output))
        name = node_label(found.node)
        others = tuple(label for node in found.gone if (label := node_label(node)) != name)
        self.reports.append(FusionReport(kind=found.kind, node=name, replaced=others))


def _found(fusion: Fusion, view: GraphView) -> Iterator[Replacement]:
    """Yields what `fusion` finds; no node goes away twice."""
    gone: set[int] = set()
    for node in view.nodes:
        found = fusion(view, node)
        if found is not None and gone.isdisjoint(map(id, found.gone)):
            gone.update(map(id, found.gone))
            yield found


def _in_order(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yields `nodes` as they come, but each behind what it reads: a fused node may make what one before it reads."""
    makers = {output: place for place, node in enumerate(nodes) for output in node.output if output}
    done: set[int] = set()
    for place in range(len(nodes)):
        waiting = [place]
        while waiting:
            if waiting[-1] in done:
                waiting.pop()
                continue
            first = [makers[name] for name in _read_by(nodes[waiting[-1]]) if name in makers]
            if missing := [place for place in reversed(first) if place not in done]:
                waiting += missing
            else:
                done.add(waiting[-1])
                yield nodes[waiting.pop()]


def overridable(opened: OpenedModel) -> set[str]:
    """Returns the initializers that are graph inputs too: defaults a caller may replace, so not static."""
    if opened.weights_are_inputs:
        return set()
    return {i.name for i in opened.proto.graph.input} & {t.name for t in opened.proto.graph.initializer}


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Yields the names that a node reads, in its subgraphs too."""
    yield from node.input
    for _, inner in subgraphs(node):
        yield from (output.name for output in inner.output)
        for below in inner.node:
            yield from _read_by(below)
