"""fuse(): calls every fusion for every node of every graph, and inserts the fused nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.attention import fuse_attention
from mxfp8_graph.onnx_pass.fuse.gemm import fuse_activation, fuse_gate
from mxfp8_graph.onnx_pass.fuse.replacement import REPLACES, Fusion, Replacement
from mxfp8_graph.onnx_pass.graph import fresh_names, label, remove, remove_unused
from mxfp8_graph.onnx_pass.ops import READERS
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import FusionReport, UnfusedReport
from mxfp8_ops import contract


def fuse(model: ir.Model, recipe: Recipe) -> tuple[tuple[FusionReport, ...], tuple[UnfusedReport, ...]]:
    """Fuses nodes beside matmuls that `recipe` replaced, in place; returns reports of them and of what stays."""
    # Gemms read activations with no more bits than bfloat16, unless the recipe leaves activations unchanged. So
    # attention may round its operands to bfloat16 as well.
    dtype = contract.FLOAT if recipe.activations == "unchanged" else contract.BFLOAT16
    attention = partial(fuse_attention, fresh=fresh_names(model), activation_dtype=dtype)
    # The activation comes first: the gate extends the node that it makes.
    missed: dict[ir.Node, str] = {}
    fused = apply(model, (fuse_activation, fuse_gate, attention), lambda node: node.op_type in READERS, missed)
    # A node that a later fusion replaced has no graph.
    stays = ((node, reason) for node, reason in missed.items() if node.graph is not None)
    return fused, tuple(UnfusedReport(node=label(node), reason=reason) for node, reason in stays)


def apply(
    model: ir.Model,
    fusions: Sequence[Fusion],
    removable: Callable[[ir.Node], bool],
    missed: dict[ir.Node, str] | None = None,
) -> tuple[FusionReport, ...]:
    """Applies fusions in place; returns a report of each fused node.

    Args:
        model: edited in place.
        fusions: in order; each sees the results of those before it.
        removable: whether a node may go away once only replaced nodes used it.
        missed: gets the nodes that a fusion could not replace, and why.
    """
    reports: list[FusionReport] = []
    missed = {} if missed is None else missed
    loose: list[ir.Value] = []
    """Inputs of removed nodes, which perhaps nothing uses any more."""
    for graph in model.graphs():
        for fusion in fusions:
            places = {node: place for place, node in enumerate(graph)}
            if replacements := list(_replacements(fusion, places, missed)):
                for replacement in replacements:
                    reports.append(_report(replacement))
                    loose += _insert(graph, replacement, places)
                graph.sort()  # a fused node may compute what a node before it reads
    remove_unused(model, loose, removable)
    return tuple(reports)


def _replacements(fusion: Fusion, nodes: Iterable[ir.Node], missed: dict[ir.Node, str]) -> Iterator[Replacement]:
    """Yields the replacements that `fusion` returns, except those that overlap an earlier one; adds to `missed`."""
    gone: set[ir.Node] = set()
    for node in nodes:
        if (replacement := fusion(node)) is None:
            continue
        if isinstance(replacement, str):
            missed[node] = replacement
        elif gone.isdisjoint(replacement.gone):
            gone.update(replacement.gone)
            yield replacement
        else:
            for new in replacement.new:  # dropped; without inputs it no longer counts as a user of values
                for index in range(len(new.inputs)):
                    new.replace_input_with(index, None)


def _report(replacement: Replacement) -> FusionReport:
    name = label(replacement.node)
    others = tuple(other for node in replacement.gone if (other := label(node)) != name)
    return FusionReport(kind=replacement.kind, node=name, replaced=others)


def _insert(graph: ir.Graph, replacement: Replacement, places: Mapping[ir.Node, int]) -> list[ir.Value]:
    """Inserts the new nodes and removes the old ones; returns the values that the old ones read."""
    # Before the last old node: there all inputs of the pattern are computed.
    graph.insert_before(max(replacement.gone, key=places.__getitem__), replacement.new)
    for value in (output for node in replacement.new for output in node.outputs):
        if (old := value.meta.pop(REPLACES, None)) is not None:
            old.replace_all_uses_with(value, replace_graph_outputs=True)
    return [value for node in replacement.gone for value in remove(node)]
