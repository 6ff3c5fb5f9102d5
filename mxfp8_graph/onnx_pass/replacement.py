"""The one way in which nodes of a model are replaced: steps return a `Replacement`, and `apply` inserts it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import label, remove, remove_unused, settings_of
from mxfp8_graph.report.data import FusionReport

REPLACES: Final = "replaces"
"""Key of `Value.meta`: the value of the graph whose place a new value takes."""

Fresh = Callable[[str], str]
"""Returns a name like its argument that nothing in the model has: see `graph.fresh_names`."""


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """New nodes in place of old ones of one graph.

    The new nodes compute all results of `gone` that other nodes use. Nodes that only `gone` uses, such as constants, go
    away by themselves.
    """

    kind: str = ""
    """The fused ops, for reports: "gemm + gelu"."""
    node: ir.Node
    gone: tuple[ir.Node, ...]
    before: tuple[ir.Node, ...] = ()
    """Further new nodes that compute what `node` reads: constants, views."""
    after: tuple[ir.Node, ...] = ()
    """Further new nodes that read what `node` computes."""
    place: ir.Node | None = None
    """The new nodes come before it; None: before the last of `gone`, and then the graph is sorted."""

    @property
    def new(self) -> tuple[ir.Node, ...]:
        """The new nodes, in order."""
        return (*self.before, self.node, *self.after)


Finder = Callable[[ir.Node], Replacement | str | None]
"""Returns the replacement of the pattern that begins or ends at a node; None if the pattern is not there, and the
reason, for reports, if it is there and cannot be replaced."""


@dataclass
class NewNodes:
    """The new nodes of a replacement, in order."""

    fresh: Fresh
    nodes: list[ir.Node] = field(default_factory=list)

    def add(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[str | ir.Value],
        *,
        name: str,
        domain: str = "",
        **attributes: Any,
    ) -> list[ir.Value]:
        """Returns the outputs of a new node."""
        values = [ir.Value(name=output) if isinstance(output, str) else output for output in outputs]
        self.nodes.append(ir.Node(domain, op, inputs, settings_of(attributes), outputs=values, name=name))
        return values

    def result(self, op: str, *inputs: ir.Value | None, wanted: str, domain: str = "", **attributes: Any) -> ir.Value:
        """Returns the one output of a new node; both have the name `wanted` or one like it."""
        name = self.fresh(wanted)
        return self.add(op, inputs, [name], name=name, domain=domain, **attributes)[0]

    def constant(self, tensor: ir.TensorProtocol, wanted: str) -> ir.Value:
        """Returns the output of a new Constant node; `tensor` gets its name."""
        value = self.result("Constant", wanted=wanted, value=tensor)
        tensor.name = value.name
        return value


def value_replacing(value: ir.Value | None) -> ir.Value:
    """Returns a new value that takes the place of `value`; for None, one without a name, which is an absent output."""
    if value is None:
        return ir.Value(name="")
    # The type is the one that the file declares, and `meta` has the inferred one: the saved model declares no more.
    new = ir.Value(name=value.name, shape=value.shape, type=value.type, doc_string=value.doc_string)
    new.metadata_props.update(value.metadata_props)
    new.meta.update(value.meta)
    new.meta[REPLACES] = value
    return new


def insert(model: ir.Model, replacements: Iterable[Replacement], removable: Callable[[ir.Node], bool]) -> None:
    """Inserts replacements in place; `removable` as for `apply`."""
    by_node = {each.gone[0]: each for each in replacements}
    apply(model, [by_node.get], removable)


def apply(
    model: ir.Model,
    finders: Sequence[Finder],
    removable: Callable[[ir.Node], bool],
    missed: dict[ir.Node, str] | None = None,
) -> tuple[FusionReport, ...]:
    """Replaces nodes in place; returns a report of each replacement.

    Args:
        model: edited in place.
        finders: called for every node of every graph, in order; each sees the results of those before it.
        removable: whether a node may go away once only replaced nodes used it.
        missed: gets the nodes that a finder could not replace, and why.
    """
    reports: list[FusionReport] = []
    missed = {} if missed is None else missed
    loose: list[ir.Value] = []
    """Inputs of removed nodes, which perhaps nothing uses any more."""
    for graph in list(model.graphs()):
        for finder in finders:
            places = {node: place for place, node in enumerate(graph)}
            # All of them before the first is inserted: a replacement may read the result of another.
            if replacements := list(_replacements(finder, places, missed)):
                for replacement in replacements:
                    reports.append(_report(replacement))
                    loose += _insert(graph, replacement, places)
                if any(replacement.place is None for replacement in replacements):
                    graph.sort()  # a new node may compute what a node before it reads
    remove_unused(model, loose, removable)
    return tuple(reports)


def _replacements(finder: Finder, nodes: Iterable[ir.Node], missed: dict[ir.Node, str]) -> Iterator[Replacement]:
    """Yields the replacements that `finder` returns, except those that overlap an earlier one; adds to `missed`."""
    gone: set[ir.Node] = set()
    for node in nodes:
        if (replacement := finder(node)) is None:
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
    # Before the last old node all inputs of the pattern are computed.
    graph.insert_before(replacement.place or max(replacement.gone, key=places.__getitem__), replacement.new)
    for value in (output for node in replacement.new for output in node.outputs):
        if (old := value.meta.pop(REPLACES, None)) is not None:
            old.replace_all_uses_with(value, replace_graph_outputs=True)
    return [value for node in replacement.gone for value in remove(node)]
